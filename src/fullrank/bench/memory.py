"""Peak memory of candidates: each in a process of its own, so that nothing is left over from another."""

from __future__ import annotations

import ctypes
import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from fullrank.bench.candidates import Candidate, Measured, Settings
from fullrank.bench.machine import counts_resident_memory, cuda_growth_mib, peak_growth_mib

PROTOCOL = (
    "memory = MiB over inputs and parameters, gradients included; on a CPU the growth of the resident high-water mark in a "
    "fresh process (Linux only), after a small first call, of compiled code after a call of the same size; on a GPU the most "
    "that tensors take"
)

_MMAP_THRESHOLD, _LIMIT = -3, 128 * 1024  # mallopt's name for it, and glibc's default: larger blocks go back when freed
_PRELOADED = ["fullrank.bench.suites", "fullrank.bench.memory", "fullrank.bench.preloaded"]


@dataclass(frozen=True)
class Place:
    """Where a candidate is found again in another process."""

    suite: str
    length: int
    comparison: int  # its number among those of this length
    name: str

    def candidate(self, settings: Settings, length: int | None = None) -> Candidate:
        from fullrank.bench.suites import suite_of

        found = suite_of(self.suite).comparisons(settings, length or self.length)[self.comparison]
        return next(candidate for candidate in found.candidates if candidate.name == self.name)


def memory_mib(place: Place, settings: Settings, made: Measured) -> float | None:
    """Of one call; `made` is measured itself on a GPU. None where this system does not tell, or the process was killed."""
    if settings.where.type == "cuda":
        made.clear()
        return cuda_growth_mib(made, settings.where)
    if not counts_resident_memory():
        return None
    context: Any = multiprocessing.get_context("forkserver")  # what it has imported need not be imported again
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, place, settings, torch.get_num_threads()), daemon=False)
    process.start()
    sender.close()
    try:
        found: float | None = receiver.recv()
    except EOFError:
        found = None
    process.join()
    receiver.close()
    return found


def _report(sender: Connection, place: Place, settings: Settings, threads: int) -> None:
    """In a fresh process: send the MiB of one call."""
    from fullrank.bench.suites import suite_of

    torch.set_num_threads(threads)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LIMIT)
    candidate = place.candidate(settings)
    first = candidate if candidate.compiled else place.candidate(settings, suite_of(place.suite).tiny)
    warm = first.make()
    warm()
    warm.clear()
    made = warm if candidate.compiled else candidate.make()
    sender.send(peak_growth_mib(made))
    sender.close()
