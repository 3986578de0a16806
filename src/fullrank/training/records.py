"""metrics.jsonl and timing.jsonl: one JSON object per line, appended; a line is on disk whole or will be cut.

Lines of metrics are functions of configuration and seed only; `tokens` are the training tokens seen so far, for every
split. A checkpoint notes how long the file was, and a resumed run cuts it there: a killed run may have written more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullrank.core.errors import RunError

_ALWAYS = ("step", "split", "nll", "ppl", "tokens", "lr", "phase", "objective")


def metrics_line(
    *,
    step: int,
    split: str,
    nll: float,
    tokens: int,
    lr: float | None = None,
    phase: str | None = None,
    scores: Mapping[str, float] | None = None,
    objective: str = "causal",
) -> dict[str, Any]:
    """A line of metrics.jsonl; `nll` is a mean in nats per token, rounded to nine digits like everything else.

    `objective`: stands in the line where the figures are not of next tokens, for they do not compare with such.

    `phase`: the phase of update `step`; a line about training never covers more than one.
    `scores`: what else an evaluation gave, by name; ValueError if one is called as something that is there anyway.
    """
    scores = scores or {}
    if taken := sorted(scores.keys() & set(_ALWAYS)):
        raise ValueError(f"a score may not be called {taken[0]}: every line of metrics has one")
    line = {"step": step, "split": split, "nll": _short(nll), "ppl": _short(perplexity(nll)), "tokens": tokens}
    line |= {name: _short(score) for name, score in scores.items()}
    line |= {} if lr is None else {"lr": _short(lr)}
    line |= {} if objective == "causal" else {"objective": objective}
    return line if phase is None else line | {"phase": phase}


def scores_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The scores in a line of metrics about an evaluation."""
    return {name: value for name, value in line.items() if name not in _ALWAYS}


def timing_line(*, step: int, seconds: float, tokens_per_second: float, peak_memory_mib: float) -> dict[str, Any]:
    """A line of timing.jsonl; `seconds` since the start of training, summed over the parts of a resumed run."""
    return {
        "step": step,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens_per_second, 1),
        "peak_memory_mib": round(peak_memory_mib, 1),
    }


def perplexity(nll: float) -> float:
    """exp of nats per token, held below what a float can carry."""
    return math.exp(min(nll, 700.0))


def _short(value: float) -> float:
    return float(f"{value:.9g}")


class JsonLines:
    """An append-only file of JSON lines. Errors of the disk are RunErrors."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """Open `path`, cut to its first `keep` bytes, or, if `keep` is None, after its last whole line."""
        self.path = path
        try:
            path.touch()
            size = path.stat().st_size
            self.missing = max(0, (keep or 0) - size)  # bytes a checkpoint speaks of that are not there
            end = _end_of_last_line(path) if keep is None or self.missing else keep
            if end < size:
                os.truncate(path, end)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror})") from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line, in one write."""
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            written = self._file.write(data)
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot be written ({error.strerror}); the last checkpoint is intact: make room and run "
                "the same command again to go on from there"
            ) from error
        if written != len(data):
            raise RunError(f"{self.path}: no space left on the disk; make room and run the same command again to go on")

    def sync(self) -> int:
        """Make sure that what was written is on the disk; returns the length of the file in bytes."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror})") from error
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def _end_of_last_line(path: Path) -> int:
    """The number of bytes up to and including the last newline."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0
