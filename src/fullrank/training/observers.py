"""Records and progress of a training: metrics.jsonl, timing.jsonl, progress lines, TensorBoard, Weights & Biases.

The two files have one JSON object per line, appended; a torn line is cut off. Lines of metrics are functions of
configuration and seed only; `tokens` are the training tokens seen so far, for every split. A checkpoint notes how long the
file was, and a resumed run cuts it there: a killed run may have written more.
"""

from __future__ import annotations

import errno
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from fullrank.core.errors import InputError, RunError, pip_install
from fullrank.files import write_text
from fullrank.training.values import Observer

_LINE_SECONDS = 30.0  # between lines where there is no terminal
_LABELS = ("step", "split", "tokens", "phase", "objective")
_FIXED = (*_LABELS, "nll", "ppl", "lr")


def metrics_line(
    step: int, tokens: int, phase: str | None = None, *, split: str, nll: float, lr: float | None = None,
    scores: Mapping[str, float] | None = None, objective: str = "causal",
) -> dict[str, Any]:  # fmt: skip
    """Make a line of metrics.jsonl; its numbers have nine significant digits.

    Args:
        step: updates made.
        tokens: tokens trained on.
        phase: that of update `step`; a line about training never covers more than one. None without phases.
        split: `train` or `valid`.
        nll: mean in nats per token.
        lr: learning rate; None in a line about an evaluation.
        scores: other figures of an evaluation, by name.
        objective: written where figures are not of next tokens, for such figures cannot be compared.

    Returns:
        The line, without what is None.
    """
    figures = {"step": step, "split": split, "nll": nll, "ppl": perplexity(nll), "tokens": tokens, **(scores or {})}
    figures |= {"lr": lr, "objective": None if objective == "causal" else objective, "phase": phase}
    line = {}
    for name, value in figures.items():
        if value is not None:
            line[name] = float(f"{value:.9g}") if isinstance(value, float) else value
    return line


def perplexity(nll: float) -> float:
    """Compute exp of nats per token, limited to a finite float."""
    return math.exp(min(nll, 700.0))


class JsonLines:
    """An append-only file of JSON lines. Errors of the disk are RunErrors."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """Open `path`, cut after the last whole line of its first `keep` bytes, or of all."""
        self.path = path
        with self._explain_errors():
            path.touch()
            content = path.read_bytes()
            os.truncate(path, content[:keep].rfind(b"\n") + 1)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot be written ({error.strerror}); the last checkpoint is intact: make room and run the "
                "same command again to go on from there"
            ) from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line, in one write."""
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        with self._explain_errors():
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> int:
        """Force the file to the disk and return its length in bytes."""
        with self._explain_errors():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def make_observers(
    folder: Path, *, track: Sequence[str] = (), config: Mapping[str, Any] | None = None, label: str = "training",
    bits: str | None = None, quiet: bool = False,
) -> list[Observer]:  # fmt: skip
    """Make the usual observers of a run: `Progress`, and those of `train.track`.

    Args:
        folder: the run.
        track: names of trackers, `tensorboard` or `wandb`.
        config: settings of the run, for Weights & Biases.
        label: word that stands before the progress.
        bits: unit of a run whose tokens are bytes or characters; None for other tokens.
        quiet: leave `Progress` out.

    Returns:
        The observers.

    Raises:
        InputError: a tracker's package is not installed.
    """
    observers: list[Observer] = [] if quiet else [Progress(label, bits)]
    for name in track:
        try:
            observers.append(TensorBoard(folder) if name == "tensorboard" else WandB(folder, config or {}))
        except ImportError as error:
            raise InputError(
                f"train.track: {name} is not installed: {pip_install('track')}, or take it out of train.track"
            ) from error
    return observers


class Progress(Observer):
    """The progress of training in words: `step 120/2000  ETA 1:20  loss 5.100  ppl 164.0  valid ppl 171.2  2,500 tok/s`.

    On stderr: a bar and a line that is cut at the width of a terminal and taken away in the end; where it is no terminal,
    a line every half minute and after every evaluation.
    """

    def __init__(self, label: str, bits: str | None = None, console: Console | None = None) -> None:
        self.label = label
        self.bits = bits
        self.console = console or Console(stderr=True)
        width = max(self.console.width // 3, 1)
        place = Column(no_wrap=True, overflow="ellipsis", max_width=width)
        name = TextColumn("{task.description}", markup=False, table_column=place)
        words = TextColumn("{task.fields[words]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        self.bar = Bar(
            name, BarColumn(bar_width=12), words, console=self.console, refresh_per_second=4, transient=True,
            disable=not self.console.is_terminal, speed_estimate_period=3600,
        )  # fmt: skip
        self.lines: dict[str, Mapping[str, Any]] = {}  # the last one of each split, the newest at the end
        self.printed_at = self.console.get_time()

    def start(self, *, step: int, total_steps: int) -> None:
        self.bar.add_task(self.label, total=total_steps, completed=step, words="")
        if self.console.is_terminal:
            self.console.file.write("\r\x1b[2K")  # over what was said before in a line that changes
        self.bar.start()

    def advance(self, step: int) -> None:
        task = self.bar.tasks[0]
        total = max(task.total or 0, step)  # a budget in tokens is reached when it is reached
        self.bar.update(task.id, completed=step, total=total)
        self.bar.update(task.id, words=self.describe())
        if self.console.get_time() - self.printed_at >= _LINE_SECONDS:
            self._print()

    def record(self, line: Mapping[str, Any]) -> None:
        split = line.get("split", "timing")
        self.lines.pop(split, None)
        self.lines[split] = line
        if split == "valid":
            self._print()

    def notice(self, text: str) -> None:
        if self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False)
        else:
            print(f"{self.label}: {text}", file=self.console.file, flush=True)

    def finish(self) -> None:
        self.bar.stop()

    def _print(self) -> None:
        if not self.console.is_terminal:
            self.printed_at = self.console.get_time()
            self.notice(self.describe())

    def describe(self) -> str:
        """Describe the figures in one line; those that are not known yet are left out."""
        task = self.bar.tasks[0]
        parts = [f"step {task.completed}/{task.total}"]
        if task.time_remaining is not None:
            parts.append(f"ETA {timedelta(seconds=round(task.time_remaining))}")
        parts += [f"phase {line['phase']}" for line in self.lines.values() if "phase" in line][-1:]
        if "train" in self.lines:
            parts += describe_loss(self.lines["train"], self.bits)
        if "valid" in self.lines:
            line = self.lines["valid"]
            parts.append(f"valid {describe_loss(line, self.bits)[-1]}")
            digits = 3 if line.get("objective") == "labels" else 1  # scores of labels are fractions
            scores = {name: score for name, score in line.items() if name not in _FIXED}
            parts += [f"{name} {score:.{digits}f}" for name, score in scores.items()]
        if speed := self.lines.get("timing", {}).get("tokens_per_second"):
            parts.append(f"{speed:,.0f} tok/s")
        return "  ".join(parts)


def describe_loss(line: Mapping[str, Any], bits: str | None) -> list[str]:
    """Describe the loss of a line of metrics: its value, then bits or a perplexity; the loss of labels has no perplexity."""
    nll = line["nll"]
    objective = line.get("objective", "causal")
    loss = f"loss {nll:.3f}"
    if bits is not None:
        return [loss, f"{bits} {nll / math.log(2):.3f}"]
    if objective == "labels":
        return [loss]
    name = "ppl" if objective == "causal" else f"{objective} ppl"
    return [loss, f"{name} {perplexity(nll):.1f}"]


def _list_scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """List `train/nll`, `valid/ppl`, `timing/tokens_per_second` ... of a recorded line."""
    prefix = line.get("split", "timing")
    objective = line.get("objective")
    names = {"ppl": f"{objective}_ppl"} if objective else {}
    return {f"{prefix}/{names.get(name, name)}": value for name, value in line.items() if name not in _LABELS}


class TensorBoard(Observer):
    """Scalars in the run's folder `tensorboard`; a resumed run replaces lines that lie beyond its checkpoint."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.make = SummaryWriter
        self.folder = folder / "tensorboard"

    def start(self, *, step: int, total_steps: int) -> None:
        self.writer: Any = self.make(str(self.folder), purge_step=step + 1)

    def record(self, line: Mapping[str, Any]) -> None:
        for name, value in _list_scalars(line).items():
            self.writer.add_scalar(name, value, line["step"])

    def finish(self) -> None:
        self.writer.close()


class WandB(Observer):
    """A Weights & Biases run, offline with WANDB_MODE=offline; its id is kept in the run folder, so that it resumes."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self.wandb: Any = wandb
        self.folder = folder
        self.config = dict(config)

    def start(self, *, step: int, total_steps: int) -> None:
        file = self.folder / "wandb-id.txt"
        if not file.is_file():
            write_text(file, uuid.uuid4().hex + "\n")
        self.run: Any = self.wandb.init(
            project="fullrank", name=self.folder.name, dir=str(self.folder), id=file.read_text().strip(), resume="allow",
            config=self.config,
        )  # fmt: skip

    def record(self, line: Mapping[str, Any]) -> None:
        self.run.log(_list_scalars(line), step=line["step"])

    def finish(self) -> None:
        self.run.finish()
