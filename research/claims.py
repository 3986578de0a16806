"""Claims of papers, and verdicts on them: two rows of the ledger compared seed by seed, with an interval over seeds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fullrank.config.load import flatten, lay, read_yaml, undotted
from fullrank.config.recipe import resolve_any
from fullrank.evaluation.statistics import Interval, deviation_change, deviation_interval, paired_interval
from research import build
from research.ledger import Row, differences

VERDICTS = ("confirmed", "not confirmed", "not decided", "not measured", "not testable here")
FEWEST_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper. The keys are explained at the head of claims/mixhead.yaml."""

    table: str
    claim: str
    why: str | None = None
    remark: str | None = None
    recipe: str = ""
    scale: str = "small"
    set: Mapping[str, Any] = field(default_factory=dict)
    better: Mapping[str, Any] = field(default_factory=lambda: {"row": "plain"})
    than: Mapping[str, Any] = field(default_factory=lambda: {"row": "plain"})
    figure: str = "final.test.perplexity"
    direction: str = "lower"
    statistic: str = "mean"

    def __post_init__(self) -> None:
        if self.direction not in ("lower", "higher") or self.statistic not in ("mean", "deviation"):
            raise TypeError("direction is lower or higher, statistic is mean or deviation")
        if (self.better.keys() | self.than.keys()) - {"row", "recipe", "set"}:
            raise TypeError("a side of a claim has a row, a recipe and a set")
        if not self.why and (not self.recipe or self.better == self.than):
            raise TypeError("a claim has a recipe and a row `better`, or `why` it is not testable here")

    @property
    def split(self) -> str:
        return self.figure.split(".")[1]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its runs that have the figure, by seed, and the command that trains them."""

    row: str
    runs: Mapping[int, Row]
    figures: Mapping[int, float]
    command: str


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim. difference: `better` minus `than` over `seeds`; of deviations in percent."""

    claim: Claim
    word: str
    sides: tuple[Side, ...] = ()  # than, better
    seeds: tuple[int, ...] = ()
    difference: float | None = None
    interval: Interval | None = None


def read_claims(path: Path) -> tuple[str, list[Claim]]:
    """Read the title of a paper and its claims. Raises InputError with the file."""
    content = read_yaml(path)
    return content["paper"], [build(Claim, claim, str(path)) for claim in content["claims"]]


def judge(claim: Claim, rows: Sequence[Row]) -> Verdict:
    """Compare the seeds that both sides have, if they were measured on one text by one protocol.

    The word is `confirmed` or `not confirmed` if the 95 % interval lies wholly on one side of zero.
    """
    if claim.why:
        return Verdict(claim, "not testable here")
    than, better = sides = find_side(claim, claim.than, rows), find_side(claim, claim.better, rows)
    common = sorted(than.runs.keys() & better.runs.keys())
    seeds = tuple(
        seed for seed in common if measured_on(than.runs[seed], claim) == measured_on(better.runs[seed], claim)
    )
    if len(seeds) < FEWEST_SEEDS:
        return Verdict(claim, "not measured", sides, seeds)
    figures = [[side.figures[seed] for seed in seeds] for side in sides]
    if claim.statistic == "deviation":
        difference, interval = deviation_change(*figures), deviation_interval(*figures)
    else:
        difference, interval = fmean(figures[1]) - fmean(figures[0]), paired_interval(*figures)
    low, high = interval or (0.0, 0.0)
    if claim.direction == "lower":
        low, high = -high, -low
    word = "confirmed" if low > 0 else "not confirmed" if high < 0 else "not decided"
    return Verdict(claim, word, sides, seeds, difference, interval)


def find_side(claim: Claim, arm: Mapping[str, Any], rows: Sequence[Row]) -> Side:
    """Find the runs of one side. Of two with one seed the later one counts."""
    recipe, name = arm.get("recipe") or claim.recipe, arm.get("row", "plain")
    settings = flatten(lay(undotted(claim.set), arm.get("set") or {}))
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    config = resolve_any(recipe, name, claim.scale, overrides).config
    key = [recipe, name, claim.scale, differences(config, recipe, name, claim.scale)]
    chosen = [row for row in rows if [row["recipe"], row["row"], row["scale"], row["settings"]] == key]
    runs = {
        row["seed"]: row for row in sorted(chosen, key=lambda row: row["seed"]) if row.get(claim.figure) is not None
    }
    figures = {seed: row[claim.figure] for seed, row in runs.items()}
    seeds = ",".join(map(str, runs)) or "3"
    words = ["fullrank", "reproduce", recipe, "--rows", name, "--scale", claim.scale, "--seeds", seeds, *overrides]
    return Side(name, runs, figures, shlex.join(words))


def measured_on(row: Row, claim: Claim) -> list[str]:
    """Text of the split, vocabulary, protocol and signature. Figures compare where these are equal."""
    return [
        row.get(column, "") for column in (f"text.{claim.split}", "vocabulary", f"protocol.{claim.split}", "signature")
    ]
