"""Small runs of every kind of task, for the campaigns `faults.py` and `fuzz.py`: settings, processes, outcome."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from tests.tiny_encoder import tiny_encoder, write_cola

import fullrank
from fullrank.cli import main as run_fullrank
from fullrank.experiments.run import environment
from fullrank.kernels.native.build import library
from fullrank.seal import DamagedError, read_record
from fullrank.training.device import choose_device
from research import read_json

Settings = dict[str, Any]
PRELOADED = (
    *("torch._dynamo", "transformers.models.bert.modeling_bert", "datasets", "peft", "sacrebleu", "lxml.etree"),
    *("matplotlib.pyplot", "torch.profiler._cupti_monitor", "typer._click.decorators"),
)
WAITS = "30"  # seconds that one of several processes waits for the others

MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": {"residual": 0.1}}
MIXED = {"mix": "position_wise", "cross_head": 0.2}
SMALL_DATA = {"train.optimizer": "muon", "train.weight_decay": 1.0}
TRAIN = {
    "batch_size": 4,
    "segment_length": 8,
    "learning_rate": 0.01,
    "threads": 1,
    "device": "cpu",
    "log_every_steps": 5,
}
EVAL = {"every_steps": 10, "batch_size": 4, "max_tokens": 100}


def write_text(folder: Path) -> Settings:
    """Write random letters, each in lower case and then in upper case."""
    draw = random.Random(0)
    files = {}
    for split, size in (("train", 6000), ("valid", 300), ("test", 300)):
        file = folder / f"{split}.txt"
        file.write_text(
            "".join(letter + letter.upper() for letter in draw.choices("abcdefgh", k=size)), encoding="utf-8"
        )
        files[split] = str(file)
    return {"name": "text", "tokens": "byte", "cache": str(folder / "cache"), **files}


def plain(folder: Path) -> Settings:
    """A language model with nothing special."""
    train = {**TRAIN, "steps": 40, "save_every_steps": 4}
    return {"model": MODEL, "data": write_text(folder), "train": train, "eval": EVAL}


def memory(folder: Path) -> Settings:
    """Memory and its ages, two phases, skipped layers and permuted heads."""
    skipping = {"name": "skipping", "skip": "linear", "steps": 20, "plateau": {"ppl": 0.05, "steps": 15}}
    phases = [skipping, {"name": "all", "steps": 15}]
    model = {**MODEL, "position": "relative", "memory_length": 12, "attention": {"score": "relative", **MIXED}}
    train = {**TRAIN, "phases": phases, "save_every_steps": 7, "max_grad_norm": 0.25}
    return {"model": model, "data": write_text(folder), "train": train, "eval": {**EVAL, "every_steps": 5}}


def masked(folder: Path) -> Settings:
    """Masks of every epoch, shuffled blocks, several batches of an update, averaged weights."""
    model = {**MODEL, "position": "learned", "attention": MIXED, "output": {"tied": True}}
    options = {"objective": "masked", "steps": 30, "gradient_accumulation_steps": 2, "averaging": "swa"}
    train = {**TRAIN, **options, "save_every_steps": 4}
    return {"model": model, "data": write_text(folder), "train": train, "eval": {"every_steps": 10, "max_tokens": 100}}


def translation(folder: Path) -> Settings:
    """The best checkpoint by BLEU, and kept weights."""
    words = {"ein": "a", "der": "the", "hund": "dog", "mann": "man", "sieht": "sees", "ruft": "calls"}
    draw = random.Random(1)
    for split, count in (("train", 200), ("valid", 12), ("test", 6)):
        lines = [draw.choices(list(words), k=5) for _ in range(count)]
        translated = [[words[word] for word in line] for line in lines]
        for suffix, sentences in (("de", lines), ("en", translated)):
            text = "".join(f"{' '.join(sentence)}\n" for sentence in sentences)
            (folder / f"{split}.{suffix}").write_text(text, encoding="utf-8")
    files = {"dir": str(folder), "train": "train", "valid": "valid", "test": "test", "source": "de", "target": "en"}
    return {
        "model": {**MODEL, "intermediate_size": 32, "attention": {"mix": "position_wise"}},
        "data": {"name": "parallel", **files, "tokens": "word", "cache": str(folder / "cache")},
        "train": {**TRAIN, "steps": 30, "batch_tokens": 200, "keep_checkpoints": 3},
        "eval": {"every_steps": 5, "metric": "bleu", "max_sentences": 4},
    }


def finetuning(folder: Path) -> Settings:
    """Injected attention, and the best checkpoint."""
    tiny_encoder(folder / "encoder")
    write_cola(folder / "glue")
    attention = {"mix": "position_independent", "cross_head": 0.5}
    train = {"batch_size": 8, "steps": 60, "learning_rate": 1e-3, "save_every_steps": 3, "log_every_steps": 5}
    return {
        "model": {"pretrained": str(folder / "encoder"), "attention": attention},
        "data": {"name": "glue/cola", "dir": str(folder / "glue"), "max_length": 20},
        "train": train,
        "eval": {"every_steps": 5, "checkpoint": "best"},
    }


@dataclass(frozen=True)
class Kind:
    """A kind of run: the settings of its task, the keys that differ from them, and the number of its processes."""

    task: Callable[[Path], Settings]
    keys: Settings = field(default_factory=dict)
    procs: int = 1

    def write(self, folder: Path) -> Path:
        """Write the data of the run and its configuration into the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = self.task(folder)
        for name, value in self.keys.items():
            section, _, key = name.partition(".")
            settings[section] = {**settings[section], key: value}
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return file


TIED_MIXTURE = {"kind": "mixture_of_softmaxes", "mixtures": 2, "tied": True}
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
    "muon, averaging": Kind(plain, {"model.output": TIED_MIXTURE, **SMALL_DATA, "train.averaging": "swa"}),
    "bf16": Kind(plain, {"model.attention": MIXED, "train.precision": "bf16"}),
    "accumulation, averaging": Kind(plain, {"train.gradient_accumulation_steps": 3, "train.averaging": "swa"}),
    "fine-tuning": Kind(finetuning),
    "two processes, DDP": Kind(memory, procs=2),
    "two processes, FSDP2": Kind(plain, {"model.attention": MIXED, "train.sharding": "fsdp"}, procs=2),
}


def preload() -> None:
    """Import what any command imports, so that no forked process has to."""
    for module in pkgutil.walk_packages(fullrank.__path__, "fullrank."):
        if not any(part in module.name for part in ("__main__", "triton", "portable", "lm_eval")):
            importlib.import_module(module.name)
    for name in PRELOADED:
        importlib.import_module(name)
    library()  # compiled once, here, and not under the limits of a case
    gc.freeze()  # so that no process copies all that was imported


def fork(
    words: Sequence[str], out: Path, err: Path, before: Callable[[], object] = int, within: Sequence[str] = ()
) -> int:
    """Fork a process that runs `fullrank WORDS` in a group of its own, and never returns. Returns its number.

    before: is called first. within: words in front of the command, which is then `python -m fullrank`.
    """
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 70
    try:
        os.setsid()
        for stream, path in enumerate((Path(os.devnull), out, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
        before()
        if within:
            os.execvp(within[0], [*within, sys.executable, "-m", "fullrank", *words])
        run_fullrank(list(words))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Training:
    """`fullrank train WORDS`, started in processes as torchrun would start them, or within another command."""

    def __init__(
        self,
        kind: Kind,
        words: Sequence[object],
        log: Path,
        before: Callable[[], object] = int,
        within: Sequence[str] = (),
    ) -> None:
        self.log = log
        self.codes: dict[int, int] = {}
        log.unlink(missing_ok=True)
        command, places = ["train", *map(str, words), "--quiet"], [Settings()]
        if within and kind.procs > 1:
            command += ["--procs", str(kind.procs)]
        elif kind.procs > 1:
            with socket.create_server(("localhost", 0)) as free:
                port = str(free.getsockname()[1])
            shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(kind.procs)}
            places = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(kind.procs)]

        def begin(place: Settings) -> None:
            os.environ.update({"FULLRANK_TIMEOUT": WAITS, **place})
            before()

        self.pids = [fork(command, log, log, partial(begin, place), within) for place in places]

    def poll(self) -> int | None:
        """The exit status, negative after a signal; of several processes the highest. None while one goes on."""
        for pid in self.pids:
            ended, status = (0, 0) if pid in self.codes else os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        codes = list(self.codes.values())
        return None if len(codes) < len(self.pids) else max(codes) or min(codes)

    def wait(self, seconds: float = 600.0) -> int | None:
        """The exit status, once it has ended; None if it goes on after so many seconds."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        return self.poll()

    def send(self, number: int, pids: Sequence[int] = ()) -> None:
        """Send a signal to all processes that go on, or to some of them."""
        for pid in pids or self.pids:
            if pid not in self.codes:
                os.kill(pid, number)

    def output(self) -> str:
        """Everything it wrote to stdout and stderr."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""


def last_step(folder: Path) -> int:
    """The step of a run's last checkpoint, 0 without one."""
    try:
        return int(read_record(folder / "checkpoints" / "last").state["step"])
    except DamagedError:
        return 0


def outcome(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that is a function of its configuration."""
    patterns = (
        *("metrics.jsonl", "checkpoints/last/*.safetensors", "checkpoints/best/model.safetensors"),
        *("checkpoints/kept/*/model.safetensors", "predictions-*.tsv", "translations/*"),
    )
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    files: Settings = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    for path in folder.glob("model/model.safetensors"):  # Hugging Face writes remarks into it, in any order
        with safe_open(path, "pt") as tensors:
            files[path.name] = {name: tensors.get_tensor(name).numpy().tobytes() for name in tensors.keys()}  # noqa: SIM118
    result = read_json(folder / "result.json")
    return files | {key: result.get(key) for key in ("final", "last", "best", "parameters", "tokens_seen")}


def write_campaign(file: Path | None, seed: int, figures: Settings, protocol: str) -> None:
    """Add the figures of a campaign to a file. They replace those of the same seed and commit."""
    if file is None:
        return
    campaign = {"seed": seed, **environment(choose_device("cpu"), "fp32"), **figures}
    others = read_json(file)["campaigns"] if file.exists() else []
    others = [other for other in others if (other["seed"], other["commit"]) != (seed, campaign["commit"])]
    content = {"campaigns": [*others, campaign], "protocol": " ".join(protocol.split())}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
