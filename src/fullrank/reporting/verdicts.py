"""Verdicts on the claims of a paper, from the ledger: two rows compared seed by seed, with an interval over seeds."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullrank.config.claims import Arm, Claim
from fullrank.config.load import flatten, lay, undotted
from fullrank.config.recipe import resolve_any
from fullrank.evaluation.statistics import Interval, deviation_change, deviation_interval, paired_interval
from fullrank.reporting.ledger import Row, differences, protocol_of
from fullrank.reporting.runs import mapping, number

CONFIRMED, NOT_CONFIRMED, NOT_DECIDED = "confirmed", "not confirmed", "not decided"
NOT_MEASURED, NOT_TESTABLE = "not measured", "not testable here"
VERDICTS = (CONFIRMED, NOT_CONFIRMED, NOT_DECIDED, NOT_MEASURED, NOT_TESTABLE)
_FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its runs that have the figure, by seed, and the command that trains them."""

    row: str
    runs: Mapping[int, Row]
    figures: Mapping[int, float]
    command: str


@dataclass(frozen=True)
class Verdict:
    """Verdict of the ledger on a claim. difference: better minus than, over `seeds`; of deviations in percent."""

    claim: Claim
    word: str
    sides: tuple[Side, ...] = ()  # than, better
    seeds: tuple[int, ...] = ()
    difference: float | None = None
    interval: Interval | None = None


def judge(claim: Claim, rows: Sequence[Row]) -> Verdict:
    """The verdict on a claim. Seeds count that both sides have, measured on one text by one protocol."""
    if claim.why:
        return Verdict(claim, NOT_TESTABLE)
    than, better = sides = _side(claim, claim.than, rows), _side(claim, claim.better, rows)
    seeds = tuple(
        seed
        for seed in sorted(than.runs.keys() & better.runs.keys())
        if _measured_on(than.runs[seed], claim) == _measured_on(better.runs[seed], claim)
    )
    if len(seeds) < _FEWEST_SEEDS:
        return Verdict(claim, NOT_MEASURED, sides, seeds)
    a, b = ([side.figures[seed] for seed in seeds] for side in sides)
    if claim.statistic == "deviation":
        difference, interval = deviation_change(a, b), deviation_interval(a, b)
    else:
        difference, interval = statistics.fmean(b) - statistics.fmean(a), paired_interval(a, b)
    low, high = interval or (0.0, 0.0)
    if claim.direction == "lower":
        low, high = -high, -low
    word = CONFIRMED if low > 0 else NOT_CONFIRMED if high < 0 else NOT_DECIDED
    return Verdict(claim, word, sides, seeds, difference, interval)


def _side(claim: Claim, arm: Arm, rows: Sequence[Row]) -> Side:
    """The runs of one side; of two with one seed the later one."""
    recipe, settings = arm.recipe or claim.recipe, flatten(lay(undotted(claim.set or {}), arm.set or {}))
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    config = resolve_any(recipe, arm.row, claim.scale, overrides).config
    wanted = recipe, arm.row, claim.scale, differences(config, recipe, arm.row, claim.scale)
    runs, figures = dict[int, Row](), dict[int, float]()
    for row in sorted(rows, key=lambda row: row["seed"]):
        figure = number(flatten(row).get(claim.figure))
        if (row["recipe"], row["row"], row["scale"], row["set"]) == wanted and figure is not None:
            runs[row["seed"]], figures[row["seed"]] = row, figure
    seeds = ",".join(map(str, runs)) or "3"
    words = ["fullrank", "reproduce", recipe, "--rows", arm.row, "--scale", claim.scale, "--seeds", seeds, *overrides]
    return Side(arm.row, runs, figures, shlex.join(words))


def _measured_on(row: Row, claim: Claim) -> tuple[Any, ...]:
    """Text of the split, vocabulary, protocol and signature: figures compare where these are equal."""
    split = claim.figure.split(".")[1]
    text, protocol = mapping(row.get("sha256")).get(split), protocol_of(row, split)
    return text, row["corpus"].get("fingerprint"), protocol.get("words"), protocol.get("signature")
