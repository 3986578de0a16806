"""Wall clock and the time of training alone."""

from __future__ import annotations

import time

import torch

from fullrank.training.device import wait_for
from fullrank.training.state import Counters


class Clock:
    """Adds up seconds: all of them, and those of training alone; the first step of a part is not typical and left out."""

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self.device, self.counters = device, counters
        self.mark = time.perf_counter()
        self.first = True
        self.seconds, self.steps, self.tokens = 0.0, 0, 0  # since the last lap

    def step(self, tokens: int) -> None:
        """A step on `tokens` tokens was made."""
        if self.first:
            self._add()
            self.first = False
            return
        self.steps += 1
        self.tokens += tokens

    def pause(self) -> None:
        """Training rests."""
        self.seconds += self._add()

    def resume(self) -> None:
        """Training goes on; what lay between counts as wall clock only."""
        self._add()

    def lap(self) -> float:
        """Tokens per second since the last lap, 0 if unknown."""
        self.pause()
        speed = self.tokens / self.seconds if self.seconds > 0 else 0.0
        self.counters.timed_seconds += self.seconds
        self.counters.timed_steps += self.steps
        self.counters.timed_tokens += self.tokens
        self.seconds, self.steps, self.tokens = 0.0, 0, 0
        return speed

    def _add(self) -> float:
        wait_for(self.device)
        now = time.perf_counter()
        passed, self.mark = now - self.mark, now
        self.counters.seconds += passed
        return passed
