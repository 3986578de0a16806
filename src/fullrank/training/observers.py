"""Those who look on while a model trains: a live line, lines now and then, TensorBoard, Weights & Biases.

The loop calls them and does not know them (`values.Observer`). What they need is imported when they are made.
"""

from __future__ import annotations

import math
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from fullrank.core.errors import InputError
from fullrank.training.records import scores_of
from fullrank.training.values import Observer

# scores whose names are not written as they are called
_WRITTEN = {"bleu": "BLEU", "chrf": "chrF", "accuracy_percent": "accuracy in %"}


def make_observers(
    folder: Path,
    *,
    track: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    label: str = "training",
    quiet: bool = False,
) -> list[Observer]:
    """The usual observers of a run: a live line where stderr is a terminal, else lines now and then, and `train.track`.

    InputError if a tracker's package is not installed. Everything is written to stderr: stdout is for results.
    """
    observers: list[Observer] = []
    if not quiet:
        observers.append(LiveLine(label) if sys.stderr.isatty() else PlainLines(label))
    for name in track:
        match name:
            case "tensorboard":
                observers.append(TensorBoard(folder))
            case "wandb":
                observers.append(WandB(folder, config or {}))
            case _:
                raise InputError(f"train.track: '{name}' is not available; known: tensorboard, wandb")
    return observers


class Status:
    """Where training stands, in words: `step 120/2000  loss 5.100  ppl 164.0  valid ppl 171.2  2,500 tok/s  ETA 1:20`."""

    def __init__(self) -> None:
        self.step = self.total = self.first = self.tokens = self.first_tokens = 0
        self.nll: float | None = None
        self.valid: float | None = None
        self.scores: dict[str, float] = {}
        self.phase: str | None = None
        self.ppl = "ppl"
        self.began = time.monotonic()

    def start(self, step: int, total: int) -> None:
        self.step = self.first = step
        self.total = total
        self.first_tokens = -1
        self.began = time.monotonic()

    def advance(self, step: int, tokens: int) -> None:
        if self.first_tokens < 0:  # the first step of a part is slow (compiling, first touch): counted from its end
            self.first, self.first_tokens, self.began = step, tokens, time.monotonic()
        self.step, self.tokens = step, tokens
        self.total = max(self.total, step)  # a budget in tokens is reached when it is reached

    def record(self, line: Mapping[str, Any]) -> None:
        self.phase = line.get("phase", self.phase)
        self.ppl = f"{line['objective']} ppl" if "objective" in line else self.ppl
        match line.get("split"):
            case "train":
                self.nll = line["nll"]
            case "valid":
                self.valid, self.scores = line["ppl"], scores_of(line)

    def words(self) -> str:
        """The line, with what is not known yet left out."""
        parts = [f"step {self.step}/{self.total}"]
        if self.phase is not None:
            parts.append(f"phase {self.phase}")
        if self.nll is not None:
            parts += [f"loss {self.nll:.3f}", f"{self.ppl} {math.exp(min(self.nll, 700)):.1f}"]
        if self.valid is not None:
            parts.append(f"valid {self.ppl} {self.valid:.1f}")
            parts += [f"{_WRITTEN.get(name, name)} {score:.1f}" for name, score in self.scores.items()]
        seconds, steps = time.monotonic() - self.began, self.step - self.first
        if steps > 0 and seconds > 0:
            left = max(0, self.total - self.step) * seconds / steps
            parts += [f"{(self.tokens - self.first_tokens) / seconds:,.0f} tok/s", f"ETA {_clock(left)}"]
        return "  ".join(parts)


class LiveLine:
    """One line with a bar that stays in its place; for terminals."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.status = Status()
        self.console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[words]}"),
        )
        self.progress = Progress(*columns, console=self.console, refresh_per_second=4)
        self.label = label

    def start(self, *, step: int, total_steps: int) -> None:
        self.status.start(step, total_steps)
        self.task = self.progress.add_task(self.label, total=total_steps, completed=step, words=self.status.words())
        self.progress.start()

    def advance(self, step: int, tokens: int) -> None:
        self.status.advance(step, tokens)
        self.progress.update(self.task, completed=step, words=self.status.words())

    def record(self, line: Mapping[str, Any]) -> None:
        self.status.record(line)

    def notice(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def finish(self) -> None:
        self.progress.stop()


class PlainLines:
    """The same in plain lines, one every `every` seconds and one after every evaluation; for log files."""

    def __init__(self, label: str, every: float = 30.0, stream: TextIO | None = None) -> None:
        self.status = Status()
        self.label, self.every = label, every
        self.stream = stream or sys.stderr
        self.last = time.monotonic()

    def start(self, *, step: int, total_steps: int) -> None:
        self.status.start(step, total_steps)

    def advance(self, step: int, tokens: int) -> None:
        self.status.advance(step, tokens)
        if time.monotonic() - self.last >= self.every:
            self._print()

    def record(self, line: Mapping[str, Any]) -> None:
        self.status.record(line)
        if line.get("split") == "valid":
            self._print()

    def notice(self, text: str) -> None:
        print(f"{self.label}: {text}", file=self.stream, flush=True)

    def finish(self) -> None:
        """Nothing is open."""

    def _print(self) -> None:
        self.last = time.monotonic()
        print(f"{self.label}: {self.status.words()}", file=self.stream, flush=True)


class TensorBoard:
    """Scalars in the run's folder `tensorboard`; a resumed run replaces what a killed one wrote beyond its checkpoint."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(_missing("tensorboard")) from error
        self.make = SummaryWriter
        self.folder = folder / "tensorboard"
        self.writer: Any = None

    def start(self, *, step: int, total_steps: int) -> None:
        self.writer = self.make(str(self.folder), purge_step=step + 1)

    def advance(self, step: int, tokens: int) -> None:
        """Nothing: only recorded lines are drawn."""

    def record(self, line: Mapping[str, Any]) -> None:
        for name, value in _scalars(line).items():
            self.writer.add_scalar(name, value, line["step"])

    def notice(self, text: str) -> None:
        """Nothing: not a place for messages."""

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandB:
    """A Weights & Biases run, offline with WANDB_MODE=offline; its id is kept in the run folder, so that it resumes."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise InputError(_missing("wandb")) from error
        self.wandb: Any = wandb
        self.folder, self.config = folder, dict(config)
        self.run: Any = None

    def start(self, *, step: int, total_steps: int) -> None:
        note = self.folder / "wandb-id.txt"
        identity = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
        if not identity:
            identity = uuid.uuid4().hex
            self.folder.mkdir(parents=True, exist_ok=True)
            note.write_text(identity + "\n", encoding="utf-8")
        self.run = self.wandb.init(
            project="fullrank",
            name=self.folder.name,
            dir=str(self.folder),
            id=identity,
            resume="allow",
            config=self.config,
        )

    def advance(self, step: int, tokens: int) -> None:
        """Nothing: only recorded lines are drawn."""

    def record(self, line: Mapping[str, Any]) -> None:
        self.run.log(_scalars(line), step=line["step"])

    def notice(self, text: str) -> None:
        """Nothing: not a place for messages."""

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """`train/nll`, `valid/ppl`, `timing/tokens_per_second` ... of a recorded line."""
    prefix = line.get("split", "timing")
    other = ("step", "split", "tokens", "phase", "objective")
    names = {"ppl": f"{line['objective']}_ppl"} if "objective" in line else {}
    return {f"{prefix}/{names.get(name, name)}": value for name, value in line.items() if name not in other}


def _missing(package: str) -> str:
    return f"train.track: {package} is not installed; pip install {package}, or take it out of train.track"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
