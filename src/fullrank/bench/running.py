"""One benchmark, length by length: candidates made and compared, timed in the same rounds, their memory measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullrank.bench.candidates import Candidate, Comparison, Measured, Settings, Suite
from fullrank.bench.growth import FEWEST, exponent
from fullrank.bench.harness import Ratio, clock_for, times_of
from fullrank.bench.machine import free_bytes
from fullrank.bench.memory import Place, memory_mib
from fullrank.core.errors import InputError, RunError
from fullrank.kernels import chosen

SHORTEST = 0.01  # seconds; a candidate that takes less runs several times in a row
LEAST_MIB = 1.0  # of both; below, pages and what the allocator has left decide
# Largest difference of two candidates, as a share of the largest value
TOLERANCE = {"fp32": 1e-3, "bf16": 6e-2, "fp16": 1e-2}


@dataclass(frozen=True)
class Figure:
    """Median seconds and peak MiB of one candidate; of ours, the attention kernels that were chosen, if any were."""

    name: str
    ours: bool
    seconds: float
    memory_mib: float | None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Against:
    """One of ours over one peer: time, and peak memory (None where either is not known or less than a MiB)."""

    mechanism: str
    peer: str
    time: Ratio
    memory: float | None


@dataclass(frozen=True)
class Row:
    """What was found for one shape and pass."""

    shape: str
    length: int
    what: str
    figures: tuple[Figure, ...]
    against: tuple[Against, ...]


@dataclass(frozen=True)
class Growth:
    """Exponents of time and memory over length, of one candidate; None where they cannot be told."""

    name: str
    ours: bool
    what: str
    lengths: tuple[int, ...]
    time: float | None
    memory: float | None


@dataclass
class Outcome:
    """All rows of one benchmark, and the peers that were left out, by name with the reason."""

    suite: Suite
    settings: Settings
    rounds: int
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[tuple[str, bool, str, list[tuple[int, Figure]]]]:
        """Candidate, whether it is ours, pass, and its figures by length."""
        found: dict[tuple[str, bool, str], list[tuple[int, Figure]]] = {}
        for row in self.rows:
            for figure in row.figures:
                # the same peer may stand in several shapes of a length: the first counts
                points = found.setdefault((figure.name, figure.ours, row.what), [])
                if row.length not in (length for length, _ in points):
                    points.append((row.length, figure))
        return [(*key, points) for key, points in found.items()]

    def growth(self) -> list[Growth]:
        """Of what was measured at three lengths or more."""
        found = []
        for name, ours, what, points in self.lines():
            if len(points) >= FEWEST:
                lengths = tuple(length for length, _ in points)
                time = exponent(lengths, [figure.seconds for _, figure in points])
                memory = exponent(lengths, [figure.memory_mib for _, figure in points])
                found.append(Growth(name, ours, what, lengths, time, memory))
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.suite.name,
            "about": self.suite.about,
            "settings": dataclasses.asdict(self.settings),
            "rounds": self.rounds,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "growth": [dataclasses.asdict(one) for one in self.growth()],
            "skipped": self.skipped,
        }


def run(suite: Suite, settings: Settings, lengths: Iterable[int], rounds: int, say: Callable[[str], None]) -> Outcome:
    """Measure `suite` at every length. Raises RunError if ours fails, or if candidates that compute the same disagree."""
    outcome = Outcome(suite, settings, rounds)
    for length in sorted(set(lengths)):
        try:
            found = suite.comparisons(settings, length)
        except ValueError as error:
            raise InputError(f"{suite.name}, length {length:,}: {error}") from error
        for number, comparison in enumerate(found):
            say(f"{suite.name}: {comparison.shape}, {comparison.what}")
            place = Place(suite.name, length, number, "")
            outcome.rows.append(_row(comparison, place, settings, rounds, outcome.skipped))
            if any(candidate.compiled for candidate in comparison.candidates):
                torch.compiler.reset()  # else its limit of sizes is reached, and later ones run uncompiled
    return outcome


def _row(comparison: Comparison, place: Place, settings: Settings, rounds: int, skipped: dict[str, str]) -> Row:
    made, kernels = _made(comparison, settings, skipped)
    times = times_of(made, rounds=rounds, clock=clock_for(settings.where), warm_up=1, at_least=SHORTEST)
    figures = {}
    for candidate in comparison.candidates:
        if candidate.name in made:
            mib = memory_mib(dataclasses.replace(place, name=candidate.name), settings, made[candidate.name])
            seconds = statistics.median(times[candidate.name])
            figures[candidate.name] = Figure(candidate.name, candidate.ours, seconds, mib, kernels[candidate.name])
    against = [
        Against(
            one.name, peer, Ratio.of(times[one.name], times[peer]),
            _share(figures[one.name].memory_mib, figures[peer].memory_mib),
        )
        for one in comparison.candidates for peer in one.against if peer in figures
    ]  # fmt: skip
    return Row(comparison.shape, comparison.length, comparison.what, tuple(figures.values()), tuple(against))


def _share(own: float | None, other: float | None) -> float | None:
    if own is None or other is None or min(own, other) < LEAST_MIB:
        return None
    return own / other


def _made(
    comparison: Comparison, settings: Settings, skipped: dict[str, str]
) -> tuple[dict[str, Measured], dict[str, tuple[str, ...]]]:
    """The candidates that can run, each called once, and the kernels that it took; those that compute the same agree."""
    made: dict[str, Measured] = {}
    kernels: dict[str, tuple[str, ...]] = {}
    first: dict[str, tuple[str, dict[str, Tensor]]] = {}
    for candidate in comparison.candidates:
        reason = candidate.absent or _too_large(candidate, settings)
        values: dict[str, Tensor] = {}
        if not reason:
            try:
                made[candidate.name] = candidate.make()
                with chosen() as taken:
                    values = made[candidate.name].values()
                kernels[candidate.name] = tuple(sorted(taken))
            except Exception as error:
                made.pop(candidate.name, None)
                reason = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if candidate.ours:
                    raise RunError(f"{candidate.name} at {comparison.shape}, {comparison.what}: {reason}") from error
        if reason:
            skipped.setdefault(candidate.name, reason)
            continue
        other, expected = first.setdefault(candidate.computes, (candidate.name, values))
        _agree(f"{candidate.name} and {other}, {comparison.shape}, {comparison.what}", values, expected, settings.dtype)
    for measured in made.values():
        measured.clear()
    return made, kernels


def _too_large(candidate: Candidate, settings: Settings) -> str:
    free = free_bytes(settings.where)
    if free is None or candidate.takes < 0.8 * free:
        return ""
    return f"needs at least {candidate.takes / 2**30:,.1f} GiB, {free / 2**30:,.1f} are free"


def _agree(who: str, values: dict[str, Tensor], expected: dict[str, Tensor], dtype: str) -> None:
    """RunError if values of the same name differ by more than rounding: a benchmark of different functions says nothing."""
    for name in values.keys() & expected.keys():
        own, other = values[name].float(), expected[name].float()
        off = float((own - other).abs().max() / other.abs().max().clamp_min(1e-30))
        if not off <= TOLERANCE[dtype]:
            raise RunError(f"{who}: {name} differs by {off:.1e} of its largest value; they should compute the same")
