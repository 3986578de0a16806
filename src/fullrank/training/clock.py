"""Wall clock and the time of training alone."""

from __future__ import annotations

import time

import torch

from fullrank.training.device import wait_for
from fullrank.training.state import Counters


class Clock:
    """Adds up seconds: all of them, and those of training alone, by phase.

    The first step of a part and of a phase is not typical (compiling, first touch) and left out.
    """

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self.device, self.counters = device, counters
        self.mark = time.perf_counter()
        self.first = True
        self.steps, self.tokens = 0, 0  # since the last pause
        self.told = (counters.timed_seconds, counters.timed_tokens)  # at the last lap

    def step(self, tokens: int) -> None:
        """A step on `tokens` tokens was made."""
        if self.first:
            self._add()
            self.first = False
            return
        self.steps += 1
        self.tokens += tokens

    def pause(self) -> None:
        """Training rests; the counters now hold all its time, so a checkpoint may be written."""
        seconds = self._add()
        if not self.first:
            self.counters.took(seconds, self.steps, self.tokens)
        self.steps, self.tokens = 0, 0

    def resume(self) -> None:
        """Training goes on; what lay between counts as wall clock only."""
        self._add()

    def new_phase(self) -> None:
        """The next step is the first of another phase; call it before the counters speak of that phase."""
        self.pause()
        self.first = True

    def lap(self) -> float:
        """Tokens per second since the last lap, 0 if unknown."""
        self.pause()
        seconds, tokens = (self.counters.timed_seconds, self.counters.timed_tokens)
        before, self.told = self.told, (seconds, tokens)
        return (tokens - before[1]) / (seconds - before[0]) if seconds > before[0] else 0.0

    def _add(self) -> float:
        wait_for(self.device)
        now = time.perf_counter()
        passed, self.mark = now - self.mark, now
        self.counters.seconds += passed
        return passed
