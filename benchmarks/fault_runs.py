"""Small runs of every kind, for the campaign of faults (`faults.py`) and its tests: settings, processes, outcome."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from tests.tiny_encoder import tiny_encoder, write_cola

import forked
from fullrank.seal import DamagedError, read_record

Settings = dict[str, Any]
WAITS = "30"  # seconds that one of several processes waits for the others

MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": {"residual": 0.1}}
MIXED = {"mix": "position_wise", "cross_head": 0.2}
SMALL_DATA = {"train.optimizer": "muon", "train.weight_decay": 1.0, "train.past_decode": 0.1, "train.input_mask": 0.2}
TIED_MIXTURE = {"kind": "mixture_of_softmaxes", "mixtures": 2, "tied": True}
TRAIN = {"batch_size": 4, "segment_length": 8, "learning_rate": 0.01, "threads": 1, "device": "cpu"}


def write_text(folder: Path, letters: str = "abcdefgh") -> Settings:
    """Random letters, each in lower case and then in upper case."""
    draw = random.Random(0)
    for split, size in (("train", 6000), ("valid", 300), ("test", 300)):
        drawn = draw.choices(letters, k=size)
        (folder / f"{split}.txt").write_text("".join(c + c.upper() for c in drawn), encoding="utf-8")
    files = {split: str(folder / f"{split}.txt") for split in ("train", "valid", "test")}
    return {"name": "text", "tokens": "byte", "cache": str(folder / "cache"), **files}


def plain(folder: Path) -> Settings:
    """A language model with nothing special."""
    return {
        "model": MODEL,
        "data": write_text(folder),
        "train": {**TRAIN, "steps": 40, "save_every_steps": 4, "log_every_steps": 5},
        "eval": {"every_steps": 10, "batch_size": 4, "max_tokens": 100},
    }


def memory(folder: Path) -> Settings:
    """Memory and its ages, two phases, skipped layers and permuted heads."""
    phases = [
        {"name": "skipping", "skip": "linear", "steps": 20, "plateau": {"ppl": 0.05, "steps": 15}},
        {"name": "all", "steps": 15},
    ]
    attention = {"score": "relative", **MIXED}
    return {
        "model": {**MODEL, "position": "relative", "memory_length": 12, "attention": attention},
        "data": write_text(folder),
        "train": {**TRAIN, "phases": phases, "save_every_steps": 7, "max_grad_norm": 0.25, "log_every_steps": 5},
        "eval": {"every_steps": 5, "batch_size": 4, "max_tokens": 100},
    }


def masked(folder: Path) -> Settings:
    """Masks of every epoch, shuffled blocks, several batches of an update, averaged weights."""
    options = {"objective": "masked", "steps": 30, "gradient_accumulation_steps": 2, "averaging": "ema"}
    return {
        "model": {**MODEL, "position": "learned", "attention": MIXED, "output": {"tied": True}},
        "data": write_text(folder),
        "train": {**TRAIN, **options, "save_every_steps": 4, "log_every_steps": 5},
        "eval": {"every_steps": 10, "max_tokens": 100},
    }


def translation(folder: Path) -> Settings:
    """The best checkpoint by BLEU, and kept weights."""
    words = {"ein": "a", "der": "the", "hund": "dog", "mann": "man", "sieht": "sees", "ruft": "calls"}
    draw = random.Random(1)
    for split, count in (("train", 200), ("valid", 12), ("test", 6)):
        lines = [" ".join(draw.choices(list(words), k=5)) for _ in range(count)]
        for suffix, text in (("de", lines), ("en", [" ".join(words[w] for w in line.split()) for line in lines])):
            (folder / f"{split}.{suffix}").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    files = {"dir": str(folder), "train": "train", "valid": "valid", "test": "test", "source": "de", "target": "en"}
    return {
        "model": {**MODEL, "intermediate_size": 32, "attention": {"mix": "position_wise"}},
        "data": {"name": "parallel", **files, "tokens": "word", "cache": str(folder / "cache")},
        "train": {**TRAIN, "steps": 30, "batch_tokens": 200, "keep_checkpoints": 3, "log_every_steps": 5},
        "eval": {"every_steps": 5, "metric": "bleu", "max_sentences": 4},
    }


def finetuning(folder: Path) -> Settings:
    """Injected attention, and the best checkpoint."""
    tiny_encoder(folder / "encoder")
    write_cola(folder / "glue")
    attention = {"mix": "position_independent", "cross_head": 0.5}
    return {
        "model": {"pretrained": str(folder / "encoder"), "attention": attention},
        "data": {"name": "glue/cola", "dir": str(folder / "glue"), "max_length": 20},
        "train": {"batch_size": 8, "steps": 60, "learning_rate": 1e-3, "save_every_steps": 3, "log_every_steps": 5},
        "eval": {"every_steps": 5, "checkpoint": "best"},
    }


@dataclass(frozen=True)
class Kind:
    """A kind of run: the settings of its task, the keys that differ from them, and the number of its processes.

    launched: each start is that of the command, with `--procs`. share: of the kills, where another kind has 1.
    """

    task: Callable[[Path], Settings]
    keys: Settings = field(default_factory=dict)
    procs: int = 1
    launched: bool = False
    share: float = 1.0

    def write(self, folder: Path) -> Path:
        """The data of the run and its configuration, in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = self.task(folder)
        for name, value in self.keys.items():
            section, _, rest = name.partition(".")
            settings[section] = {**settings[section], rest: value}
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return file


KINDS = {
    "plain": Kind(plain),
    "Mixhead B": Kind(plain, {"model.attention": {"mix": "position_wise"}}),
    "memory, Skip-Retain, cross-head": Kind(memory),
    "adaptive": Kind(plain, {"model.output": {"kind": "adaptive", "cutoffs": [70, 100]}}),
    "mixture of softmaxes": Kind(plain, {"model.output": {"kind": "mixture_of_softmaxes", "mixtures": 3}}),
    "masked": Kind(masked),
    "translation": Kind(translation),
    "multi-linear": Kind(plain, {"model.attention": {"kind": "multilinear", "rank": 4, "output_map": "decayed"}}),
    "muon": Kind(plain, {"model.output": {"tied": True}, **SMALL_DATA}),
    "muon, averaging": Kind(plain, {"model.output": TIED_MIXTURE, **SMALL_DATA, "train.averaging": "ema"}),
    "bf16": Kind(plain, {"model.attention": MIXED, "train.precision": "bf16"}),
    "accumulation, averaging": Kind(plain, {"train.gradient_accumulation_steps": 3, "train.averaging": "swa"}),
    "fine-tuning": Kind(finetuning),
    "two processes, DDP": Kind(memory, procs=2),
    "two processes, FSDP2": Kind(plain, {"model.attention": MIXED, "train.sharding": "fsdp"}, procs=2),
    "two processes by --procs": Kind(memory, procs=2, launched=True, share=0.2),
}


class Training:
    """`fullrank train WORDS`, started: processes forked from one that has imported torch, or `python -m fullrank`.

    Several forked processes find each other as those of torchrun do. before: called first in a forked process.
    within: words in front of the command of a new process.
    """

    def __init__(
        self,
        kind: Kind,
        words: Sequence[object],
        log: Path,
        *,
        before: Callable[[], object] = int,
        within: Sequence[str] = (),
    ) -> None:
        self.log, self.words = log, ["train", *map(str, words), "--quiet"]
        log.unlink(missing_ok=True)
        self.started: list[BaseProcess] | subprocess.Popen[bytes]
        if not (kind.launched or within):
            places = _places(kind.procs) if kind.procs > 1 else [{}]
            self.started = [forked.start(*self.words, log=log, before=partial(_begin, at, before)) for at in places]
            return
        together = ["--procs", str(kind.procs)] if kind.procs > 1 else []
        command = [*within, sys.executable, "-m", "fullrank", *self.words, *together]
        with open(log, "ab") as file:
            patience = {**os.environ, "FULLRANK_TIMEOUT": WAITS}
            self.started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=patience)

    def processes(self) -> list[int]:
        """All its processes; the one that started the others stands first, if any did."""
        return (
            processes_of(self.started.pid)
            if isinstance(self.started, subprocess.Popen)
            else [process.pid for process in self.started if process.pid is not None]
        )

    def poll(self) -> int | None:
        """The exit status, negative after a signal, of several processes the highest; None while one goes on."""
        if isinstance(self.started, subprocess.Popen):
            return self.started.poll()
        codes = [process.exitcode for process in self.started]
        known = [code for code in codes if code is not None]
        return None if len(known) < len(codes) else max(known) or min(known)

    def wait(self, seconds: float = 600.0) -> int | None:
        """The exit status, once it has ended; None if it goes on after so many seconds."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        return self.poll()

    def said(self) -> str:
        """Everything it wrote to stdout and stderr."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""


def _places(processes: int) -> list[dict[str, str]]:
    """The environment that torchrun gives to each of so many processes on this machine."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(processes), "FULLRANK_TIMEOUT": WAITS}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _begin(place: dict[str, str], before: Callable[[], object]) -> None:
    os.environ.update(place)
    before()


def processes_of(pid: int) -> list[int]:
    """A process and all that it has started, directly or not; the first stands first."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # gone since
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for parent in found:
        found += parents.get(parent, [])
    return found


def alive(pid: int) -> bool:
    """The process is there, and not only its exit status."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def ended(pids: Sequence[int], seconds: float) -> bool:
    """Wait for the end of all these processes; those that still go on after so many seconds are killed."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def last_step(folder: Path) -> int:
    """The step of a run's last checkpoint, 0 without one."""
    try:
        return int(read_record(folder / "checkpoints" / "last").state["step"])
    except DamagedError:
        return 0


def outcome(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that is a function of its configuration."""
    patterns = ("metrics.jsonl", "checkpoints/last/*.safetensors", "checkpoints/best/model.safetensors")
    patterns += ("checkpoints/kept/*/model.safetensors", "predictions-*.tsv", "translations/*")
    files: Settings = {str(p.relative_to(folder)): p.read_bytes() for name in patterns for p in folder.glob(name)}
    for path in folder.glob("model/model.safetensors"):  # Hugging Face writes remarks into it, in any order
        with safe_open(path, "pt") as tensors:
            names = tensors.keys()
            files[path.name] = {name: tensors.get_tensor(name).numpy().tobytes() for name in names}
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return files | {key: result.get(key) for key in ("final", "last", "best", "parameters", "tokens_seen")}
