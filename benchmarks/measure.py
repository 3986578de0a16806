"""One benchmark, size by size: make and compare the candidates, time them in the same rounds, measure their memory."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from candidates import DTYPES, Candidate, Comparison, Settings, Suite
from fullrank.core.errors import InputError, RunError
from fullrank.kernels import chosen
from machine import counts_resident_memory, measure_cuda_growth_mib, measure_growth_mib, read_free_bytes
from timing import MIN_LENGTHS, PEAK_GFLOP, Ratio, choose_clock, exponent, make_product, measure_times

logger = logging.getLogger("fullrank.bench")

MEMORY_PROTOCOL = (
    "memory = MiB over inputs and parameters, gradients included; on a CPU the growth of the resident high-water mark in a "
    "fresh process (Linux only), after a small first call, of compiled code after a call of the same size; on a GPU the most "
    "that tensors take"
)
LEAST_MIB = 1.0  # of both; below, pages and what the allocator has left decide
# Largest difference of two candidates, as a share of the largest value
TOLERANCE = {"fp32": 1e-3, "bf16": 6e-2, "fp16": 1e-2}
_MMAP_THRESHOLD = -3  # mallopt's name for it
_LIMIT = 128 * 1024  # glibc's default: larger blocks go back when freed
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
    tokens_per_second: float | None = None
    gflop_per_second: float | None = None
    share_of_peak: float | None = None


@dataclass(frozen=True)
class Against:
    """Ratio of one of ours to one peer: time, and peak memory (None where either is unknown or less than a MiB)."""

    mechanism: str
    peer: str
    time: Ratio
    memory: float | None


@dataclass(frozen=True)
class Row:
    """Results of one shape and pass; the speed of large matrix products by dtype, where it was measured."""

    shape: str
    length: int
    what: str
    figures: tuple[Figure, ...]
    against: tuple[Against, ...]
    peak_gflop_per_second: Mapping[str, float]


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
    """All rows of one benchmark, and what was left out, by name with the reason."""

    suite: Suite
    settings: Settings
    dtypes: Sequence[str]
    rounds: int
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def list_growth(self) -> list[Growth]:
        """List the growth of every candidate and pass that was measured at three lengths or more."""
        lines = {}
        for row in self.rows if self.suite.lengths else ():
            for figure in row.figures:
                # the same peer may stand in several shapes of a length: the first counts
                lines.setdefault((figure.name, figure.ours, row.what), {}).setdefault(row.length, figure)
        growths = []
        for line, figures in lines.items():
            if len(figures) >= MIN_LENGTHS:
                lengths = tuple(figures)
                time = exponent(lengths, [figure.seconds for figure in figures.values()])
                memory = exponent(lengths, [figure.memory_mib for figure in figures.values()])
                growths.append(Growth(*line, lengths, time, memory))
        return growths

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.suite.name,
            "about": self.suite.about,
            "settings": {**dataclasses.asdict(self.settings), "dtype": ",".join(self.dtypes)},
            "rounds": self.rounds,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "growth": [dataclasses.asdict(growth) for growth in self.list_growth()],
            "skipped": self.skipped,
        }


def measure(
    suite: Suite,
    settings: Settings,
    dtypes: Sequence[str],
    lengths: Sequence[int],
    rounds: int,
) -> Outcome:
    """Measure a suite at every length.

    Args:
        suite: the benchmark.
        settings: sizes and device.
        dtypes: of which all candidates are made; timed in the same rounds.
        lengths: tokens; not used by a suite that has sizes of its own.
        rounds: timings of every candidate.

    Raises:
        InputError: a candidate refuses the sizes.
        RunError: ours fails, or candidates that compute the same disagree.
    """
    outcome = Outcome(suite, settings, dtypes, rounds)
    for comparison in list_comparisons(suite, settings, dtypes, lengths):
        for what in comparison.passes:
            logger.info(f"{suite.name}: {comparison.size}, {what}")
            outcome.rows.append(_measure_row(comparison, what, outcome))
            if any(candidate.compiled for candidate in comparison.candidates):
                torch.compiler.reset()  # else its limit of sizes is reached, and later ones run uncompiled
    return outcome


def list_comparisons(
    suite: Suite, settings: Settings, dtypes: Sequence[str], lengths: Sequence[int]
) -> Iterator[Comparison]:
    """Yield the comparisons of a benchmark, each with the candidates of all dtypes.

    Args:
        suite: the benchmark.
        settings: sizes and device.
        dtypes: of which all candidates are made.
        lengths: tokens; not used by a suite that has sizes of its own.

    Raises:
        InputError: the suite refuses the sizes.
    """
    narrowed = [dataclasses.replace(settings, dtype=dtype) for dtype in dtypes]
    calls = [(length,) for length in sorted(set(lengths))] if suite.lengths else [()]
    for words in calls:
        try:
            made = [suite.comparisons(of_dtype, *words) for of_dtype in narrowed]
        except ValueError as error:
            place = f"{suite.name}, length {words[0]:,}" if words else suite.name
            raise InputError(f"{place}: {error}") from error
        for of_each_dtype in zip(*made, strict=True):
            yield combine(of_each_dtype, narrowed)


def combine(comparisons: Sequence[Comparison], narrowed: Sequence[Settings]) -> Comparison:
    """Combine the candidates of several dtypes; ours is then also measured against itself in the first."""
    candidates = []
    first = narrowed[0].dtype
    for settings, comparison in zip(narrowed, comparisons, strict=True):
        dtype = settings.dtype
        for candidate in comparison.candidates:
            named = dataclasses.replace(candidate, settings=settings)
            if len(narrowed) > 1:
                against = [f"{peer} {dtype}" for peer in candidate.against]
                if candidate.ours and dtype != first:
                    against.append(f"{candidate.name} {first}")
                words = {"name": f"{candidate.name} {dtype}", "computes": f"{candidate.computes} {dtype}"}
                named = dataclasses.replace(named, against=tuple(against), **words)
            candidates.append(named)
    return dataclasses.replace(comparisons[0], candidates=candidates)


def _measure_row(comparison: Comparison, what: str, outcome: Outcome) -> Row:
    device = outcome.settings.torch_device
    made, kernels = make_and_compare(comparison, what, outcome.skipped)
    runs = dict(made)
    has_work = any(candidate.gflop for candidate in comparison.candidates)
    peaks = {dtype: f"peak {dtype}" for dtype in outcome.dtypes} if has_work and device.type == "cpu" else {}
    for dtype, name in peaks.items():
        runs[name] = make_product(DTYPES[dtype])
    shortest = outcome.suite.shortest
    times = measure_times(runs, rounds=outcome.rounds, clock=choose_clock(device), warm_up=1, at_least=shortest)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    peak = {dtype: PEAK_GFLOP / seconds[name] for dtype, name in peaks.items()}
    figures = {}
    for candidate in comparison.candidates:
        name = candidate.name
        if name not in made:
            continue
        mib = measure_memory(candidate, comparison, what, made[name])
        speed = candidate.gflop / seconds[name] if candidate.gflop else None
        figures[name] = Figure(
            name,
            candidate.ours,
            seconds[name],
            mib,
            kernels[name],
            comparison.tokens / seconds[name] if comparison.tokens else None,
            speed,
            speed / peak[candidate.settings.dtype] if speed and peak else None,
        )
    against = []
    for candidate in comparison.candidates:
        for peer in candidate.against:
            if peer in figures:
                ratio = Ratio.of(times[candidate.name], times[peer])
                memory = _divide(figures[candidate.name].memory_mib, figures[peer].memory_mib)
                against.append(Against(candidate.name, peer, ratio, memory))
    return Row(str(comparison.size), comparison.length, what, tuple(figures.values()), tuple(against), peak)


def _divide(ours: float | None, peers: float | None) -> float | None:
    if ours is None or peers is None or min(ours, peers) < LEAST_MIB:
        return None
    return ours / peers


def make_and_compare(
    comparison: Comparison, what: str, skipped: dict[str, str]
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Make the candidates that can run, call each once, and compare those that compute the same.

    The reasons of those that cannot run are added to `skipped`. Returns the calls, and the kernels that each took, by name.
    """
    made = {}
    kernels: dict[str, tuple[str, ...]] = {}
    first = {}
    for candidate in comparison.candidates:
        reason = candidate.absent or _explain_too_large(candidate)
        values = {}
        if not reason:
            try:
                measured = candidate.make_pass(what, comparison.size)
                with chosen() as names:
                    values = measured.values()
                made[candidate.name] = measured
                kernels[candidate.name] = tuple(sorted(names))
            except Exception as error:
                reason = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if candidate.ours:
                    place = f"{candidate.name} at {comparison.size}, {what}"
                    raise RunError(f"{place}: {reason}") from error
        if reason:
            skipped.setdefault(candidate.name, reason)
            continue
        other, expected = first.setdefault(candidate.computes, (candidate.name, values))
        who = f"{candidate.name} and {other}, {comparison.size}, {what}"
        check_agreement(who, values, expected, candidate.settings.dtype)
    for measured in made.values():
        measured.clear()
    return made, kernels


def _explain_too_large(candidate: Candidate) -> str:
    free = read_free_bytes(candidate.settings.torch_device)
    if free is None or candidate.takes < 0.8 * free:
        return ""
    return f"needs at least {candidate.takes / 2**30:,.1f} GiB, {free / 2**30:,.1f} are free"


def check_agreement(who: str, values: dict[str, Tensor], expected: dict[str, Tensor], dtype: str) -> None:
    """Raise RunError if values of the same name differ by more than rounding.

    A benchmark of different functions says nothing.
    """
    for name in values.keys() & expected.keys():
        value = values[name].float()
        other = expected[name].float()
        largest = other.abs().max().clamp_min(1e-30)
        off = float((value - other).abs().max() / largest)
        if not off <= TOLERANCE[dtype]:
            raise RunError(f"{who}: {name} differs by {off:.1e} of its largest value; they should compute the same")


# -- peak memory of a candidate: each in a process of its own, so that nothing is left over from another ----------------


def measure_memory(candidate: Candidate, comparison: Comparison, what: str, made: Any) -> float | None:
    """Measure the peak memory of one call, in MiB; on a GPU, of `made` itself.

    Returns None where the system does not say, or the process was killed.
    """
    device = candidate.settings.torch_device
    if device.type == "cuda":
        made.clear()
        return measure_cuda_growth_mib(made, device)
    if not counts_resident_memory():
        return None
    context = multiprocessing.get_context("forkserver")  # imports are made once
    context.set_forkserver_preload(_PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        running = pool.submit(_measure_here, candidate, comparison, what, torch.get_num_threads())
        try:
            return running.result()
        except (RuntimeError, MemoryError):  # a process that was killed is a RuntimeError, too
            return None


def _measure_here(candidate: Candidate, comparison: Comparison, what: str, threads: int) -> float:
    """Measure the MiB of one call; runs in a fresh process."""
    torch.set_num_threads(threads)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LIMIT)
    first = candidate.make_pass(what, comparison.size if candidate.compiled else comparison.tiny)
    first()
    first.clear()
    made = first if candidate.compiled else candidate.make_pass(what, comparison.size)
    return measure_growth_mib(made)
