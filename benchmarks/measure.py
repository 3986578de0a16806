"""One benchmark, length by length: make and compare the candidates, time them in the same rounds, measure their memory."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from candidates import Candidate, Comparison, Measured, Settings, Suite
from fullrank.core.errors import InputError, RunError
from fullrank.kernels import chosen
from machine import counts_resident_memory, cuda_growth_mib, free_bytes, peak_growth_mib
from suites import suite_of
from timing import MIN_LENGTHS, Ratio, clock_for, exponent, times_of

MEMORY_PROTOCOL = (
    "memory = MiB over inputs and parameters, gradients included; on a CPU the growth of the resident high-water mark in a "
    "fresh process (Linux only), after a small first call, of compiled code after a call of the same size; on a GPU the most "
    "that tensors take"
)
SHORTEST = 0.01  # seconds; a shorter candidate runs several times in a row
LEAST_MIB = 1.0  # of both; below, pages and what the allocator has left decide
# Largest difference of two candidates, as a share of the largest value
TOLERANCE = {"fp32": 1e-3, "bf16": 6e-2, "fp16": 1e-2}
_MMAP_THRESHOLD, _LIMIT = -3, 128 * 1024  # mallopt's name for it, and glibc's default: larger blocks go back when freed
# imported once, in the process from which those that measure memory are forked; absent peers are passed over
_PRELOADED = ["fullrank.core.decoder", "fullrank.kernels", "x_transformers", "transformers.models.llama.modeling_llama"]


@dataclass(frozen=True)
class Figure:
    """Median seconds and peak MiB of one candidate; for ours, the kernels that were chosen, if any were."""

    name: str
    ours: bool
    seconds: float
    memory_mib: float | None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Against:
    """Ratio of one of ours to one peer: time, and peak memory (None where either is unknown or less than a MiB)."""

    mechanism: str
    peer: str
    time: Ratio
    memory: float | None


@dataclass(frozen=True)
class Row:
    """Results of one shape and pass."""

    shape: str
    length: int
    what: str
    figures: tuple[Figure, ...]
    against: tuple[Against, ...]


@dataclass(frozen=True)
class Line:
    """Figures of one candidate and pass, by length."""

    name: str
    ours: bool
    what: str
    points: tuple[tuple[int, Figure], ...]


@dataclass(frozen=True)
class Growth:
    """Exponents of time and memory of one candidate over length; None where there are too few figures."""

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

    def lines(self) -> list[Line]:
        points: dict[tuple[str, bool, str], dict[int, Figure]] = {}
        for row in self.rows:
            for figure in row.figures:
                # the same peer may stand in several shapes of a length: the first counts
                points.setdefault((figure.name, figure.ours, row.what), {}).setdefault(row.length, figure)
        return [Line(*key, tuple(by_length.items())) for key, by_length in points.items()]

    def growth(self) -> list[Growth]:
        """Growth of every candidate that was measured at three lengths or more."""
        growths = []
        for line in self.lines():
            if len(line.points) >= MIN_LENGTHS:
                lengths = tuple(length for length, _ in line.points)
                time = exponent(lengths, [figure.seconds for _, figure in line.points])
                memory = exponent(lengths, [figure.memory_mib for _, figure in line.points])
                growths.append(Growth(line.name, line.ours, line.what, lengths, time, memory))
        return growths

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


def measure(
    suite: Suite, settings: Settings, lengths: Iterable[int], rounds: int, say: Callable[[str], None]
) -> Outcome:
    """Measure `suite` at every length. Raises RunError if ours fails, or if candidates that compute the same disagree."""
    outcome = Outcome(suite, settings, rounds)
    for length in sorted(set(lengths)):
        try:
            comparisons = suite.comparisons(settings, length)
        except ValueError as error:
            raise InputError(f"{suite.name}, length {length:,}: {error}") from error
        for number, comparison in enumerate(comparisons):
            say(f"{suite.name}: {comparison.shape}, {comparison.what}")
            outcome.rows.append(_row(comparison, Address(suite.name, length, number), outcome))
            if any(candidate.compiled for candidate in comparison.candidates):
                torch.compiler.reset()  # else its limit of sizes is reached, and later ones run uncompiled
    return outcome


def _row(comparison: Comparison, address: Address, outcome: Outcome) -> Row:
    settings = outcome.settings
    made, kernels = make_and_compare(comparison, settings, outcome.skipped)
    clock = clock_for(settings.torch_device)
    times = times_of(made, rounds=outcome.rounds, clock=clock, warm_up=1, at_least=SHORTEST)
    figures = {}
    for candidate in comparison.candidates:
        name = candidate.name
        if name in made:
            mib = memory_mib(address, name, settings, made[name])
            figures[name] = Figure(name, candidate.ours, statistics.median(times[name]), mib, kernels[name])
    against = []
    for candidate in comparison.candidates:
        for peer in candidate.against:
            if peer in figures:
                time = Ratio.of(times[candidate.name], times[peer])
                memory = _share(figures[candidate.name].memory_mib, figures[peer].memory_mib)
                against.append(Against(candidate.name, peer, time, memory))
    return Row(comparison.shape, comparison.length, comparison.what, tuple(figures.values()), tuple(against))


def _share(own: float | None, other: float | None) -> float | None:
    if own is None or other is None or min(own, other) < LEAST_MIB:
        return None
    return own / other


def make_and_compare(
    comparison: Comparison, settings: Settings, skipped: dict[str, str]
) -> tuple[dict[str, Measured], dict[str, tuple[str, ...]]]:
    """The candidates that can run, each called once, and the kernels that each took.

    Candidates that compute the same are compared. The reasons of those that cannot run are added to `skipped`.
    """
    made: dict[str, Measured] = {}
    kernels: dict[str, tuple[str, ...]] = {}
    first: dict[str, tuple[str, dict[str, Tensor]]] = {}
    for candidate in comparison.candidates:
        reason = candidate.absent or _too_large(candidate, settings)
        values: dict[str, Tensor] = {}
        if not reason:
            try:
                made[candidate.name] = candidate.make()
                with chosen() as names:
                    values = made[candidate.name].values()
                kernels[candidate.name] = tuple(sorted(names))
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
    free = free_bytes(settings.torch_device)
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


# Peak memory of a candidate: each in a process of its own, so that nothing is left over from another.


@dataclass(frozen=True)
class Address:
    """The place of a comparison, for another process. `number`: its index among the comparisons of this length."""

    suite: str
    length: int
    number: int

    def candidate(self, name: str, settings: Settings, length: int | None = None) -> Candidate:
        comparison = suite_of(self.suite).comparisons(settings, length or self.length)[self.number]
        return next(candidate for candidate in comparison.candidates if candidate.name == name)


def memory_mib(address: Address, name: str, settings: Settings, made: Measured) -> float | None:
    """Peak memory of one call; on a GPU, of `made` itself. None where the system does not say, or the process was killed."""
    if settings.torch_device.type == "cuda":
        made.clear()
        return cuda_growth_mib(made, settings.torch_device)
    if not counts_resident_memory():
        return None
    context: Any = multiprocessing.get_context("forkserver")  # imports are made once
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, address, name, settings, torch.get_num_threads())
    process = context.Process(target=_send_memory, args=arguments, daemon=False)
    process.start()
    sender.close()
    try:
        mib: float | None = receiver.recv()
    except EOFError:
        mib = None
    process.join()
    receiver.close()
    return mib


def _send_memory(sender: Connection, address: Address, name: str, settings: Settings, threads: int) -> None:
    """Send the MiB of one call; runs in a fresh process."""
    torch.set_num_threads(threads)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LIMIT)
    candidate = address.candidate(name, settings)
    first = candidate if candidate.compiled else address.candidate(name, settings, suite_of(address.suite).tiny)
    warm = first.make()
    warm()
    warm.clear()
    made = warm if candidate.compiled else candidate.make()
    sender.send(peak_growth_mib(made))
    sender.close()
