"""Verdicts on the claims of a paper, from the ledger: two rows compared seed by seed, with an interval over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullrank.config.claims import Claim
from fullrank.config.load import flatten, lay, undotted
from fullrank.config.recipe import resolve_any
from fullrank.evaluation.statistics import deviation_change, deviation_interval, paired_interval
from fullrank.reporting.ledger import Row, differences
from fullrank.reporting.runs import mapping, number

CONFIRMED, NOT_CONFIRMED, NOT_DECIDED = "confirmed", "not confirmed", "not decided"
NOT_MEASURED, NOT_TESTABLE = "not measured", "not testable here"
VERDICTS = (CONFIRMED, NOT_CONFIRMED, NOT_DECIDED, NOT_MEASURED, NOT_TESTABLE)
_FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: a recipe's row with settings, and its runs by seed."""

    recipe: str
    row: str
    overrides: tuple[str, ...]
    runs: Mapping[int, Row]


@dataclass(frozen=True)
class Verdict:
    """Verdict of the ledger on a claim with one recipe (None where it is not testable).

    difference: better minus than, of deviations in percent; figures: those of `than` and of `better`, by common seed.
    """

    claim: Claim
    word: str
    recipe: str | None = None
    than: Arm | None = None
    better: Arm | None = None
    seeds: tuple[int, ...] = ()
    figures: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    difference: float | None = None
    interval: tuple[float, float] | None = None


def verdicts(claims: Sequence[Claim], rows: Sequence[Row]) -> list[Verdict]:
    """A verdict for every claim and each of its recipes."""
    return [
        verdict
        for claim in claims
        for verdict in (
            [_judge(claim, recipe, rows) for recipe in claim.recipes]
            if claim.testable
            else [Verdict(claim, NOT_TESTABLE)]
        )
    ]


def _judge(claim: Claim, recipe: str, rows: Sequence[Row]) -> Verdict:
    than = _arm(claim, claim.than_recipe or recipe, claim.than, claim.than_set or {}, rows)
    better = _arm(claim, recipe, claim.better, claim.better_set or {}, rows)
    pairs = {
        seed: (than.runs[seed], better.runs[seed])
        for seed in sorted(than.runs.keys() & better.runs.keys())
        if _measured_as(than.runs[seed], claim) == _measured_as(better.runs[seed], claim)
    }
    a, b = (tuple(_figure(pair[side], claim) or 0.0 for pair in pairs.values()) for side in (0, 1))
    compared = Verdict(claim, NOT_MEASURED, recipe, than, better, tuple(pairs), (a, b))
    if len(pairs) < _FEWEST_SEEDS:
        return compared
    if claim.statistic == "deviation":
        difference, interval = deviation_change(a, b), deviation_interval(a, b)
    else:
        difference, interval = statistics.fmean(b) - statistics.fmean(a), paired_interval(a, b)
    word = NOT_DECIDED
    if interval is not None:
        sign = -1 if claim.direction == "lower" else 1
        low, high = sorted(sign * end for end in interval)
        word = CONFIRMED if low > 0 else NOT_CONFIRMED if high < 0 else NOT_DECIDED
    return Verdict(claim, word, recipe, than, better, tuple(pairs), (a, b), difference, interval)


def _arm(claim: Claim, recipe: str, row: str, own: Mapping[str, Any], rows: Sequence[Row]) -> Arm:
    """The runs of one side that have the figure; of two with one seed the later one."""
    settings = flatten(lay(undotted(claim.set or {}), own))
    overrides = tuple(f"{name}={json.dumps(value)}" for name, value in settings.items())
    config = resolve_any(recipe, row, claim.scale, overrides).config
    wanted = (recipe, row, claim.scale, differences(config, recipe, row, claim.scale))
    runs = {
        one["seed"]: one
        for one in rows
        if (one["recipe"], one["row"], one["scale"], one["set"]) == wanted and _figure(one, claim) is not None
    }
    return Arm(recipe, row, overrides, runs)


def _figure(row: Row, claim: Claim) -> float | None:
    return number(mapping(mapping(row[claim.checkpoint] or row["final"]).get(claim.split)).get(claim.measure))


def _measured_as(row: Row, claim: Claim) -> tuple[Any, ...]:
    """Text of the split, vocabulary and protocol: figures compare where these are equal."""
    data = mapping(row["data"])
    text = mapping(data.get("sha256")).get(claim.split)
    return text, data.get("fingerprint"), protocol_of(row, claim.split).get("words")


def protocol_of(row: Row, split: str) -> Mapping[str, Any]:
    """The protocol of a split's figures: `words`, and `settings` where they are recorded."""
    return mapping(mapping(row["protocol"]).get(split))
