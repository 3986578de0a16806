"""Small runs of every kind of task: their settings and data, and all that a finished run holds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from safetensors.numpy import load_file

from tiny_encoder import tiny_encoder, write_cola

Settings = dict[str, Any]
MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": {"residual": 0.1}}
MIXED = {"mix": "position_wise", "cross_head": 0.2}
TRAIN = {
    "batch_size": 4, "segment_length": 8, "learning_rate": 0.01, "threads": 1, "device": "cpu", "log_every_steps": 5,
}  # fmt: skip
EVAL = {"every_steps": 10, "batch_size": 4, "max_tokens": 100}
MUON = {"train.optimizer": "muon", "train.weight_decay": 1.0}


def write_text(folder: Path) -> Settings:
    """Write random letters, each in lower case and then in upper case."""
    draw = random.Random(0)
    files = {}
    for split, size in (("train", 6000), ("valid", 300), ("test", 300)):
        file = folder / f"{split}.txt"
        file.write_text("".join(letter + letter.upper() for letter in draw.choices("abcdefgh", k=size)))
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
        translated = [list(map(words.get, line)) for line in lines]
        for suffix, sentences in (("de", lines), ("en", translated)):
            (folder / f"{split}.{suffix}").write_text("".join(f"{' '.join(sentence)}\n" for sentence in sentences))
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
    """A kind of run: the settings of its task, and the keys that differ from them."""

    task: Callable[[Path], Settings]
    keys: Settings = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the data of the run and its configuration into the folder."""
        settings = self.task(folder)
        for name, value in self.keys.items():
            section, _, key = name.partition(".")
            settings[section] = {**settings[section], key: value}
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return file


TIED_MIXTURE = {"kind": "mixture_of_softmaxes", "mixtures": 2, "tied": True}
KINDS = {
    "memory, Skip-Retain, cross-head": Kind(memory),
    "masked": Kind(masked),
    "translation": Kind(translation),
    "muon": Kind(plain, {"model.output": {"tied": True}, **MUON}),
    "muon, averaging": Kind(plain, {"model.output": TIED_MIXTURE, **MUON, "train.averaging": "swa"}),
    "fine-tuning": Kind(finetuning),
}


def outcome(folder: Path) -> Settings:
    """Everything of a finished run that is a function of its configuration."""
    patterns = (
        "metrics.jsonl", "checkpoints/last/*.safetensors", "checkpoints/best/model.safetensors",
        "checkpoints/kept/*/model.safetensors", "predictions-*.tsv", "translations/*",
    )  # fmt: skip
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    files: Settings = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    for path in folder.glob("model/model.safetensors"):  # Hugging Face writes remarks into it, in any order
        files[path.name] = {name: tensor.tobytes() for name, tensor in load_file(path).items()}
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return files | {key: result.get(key) for key in ("final", "last", "best", "parameters", "tokens_seen")}
