"""Each kind of task killed and resumed, one of them twice: a kill at any moment changes nothing of the result."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.tiny_encoder import tiny_encoder, write_cola

import forked
from fullrank.config.recipe import resolve_any
from fullrank.experiments.run import resume, train

MODEL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": {"residual": 0.1}}
MIXED = {"mix": "position_wise", "cross_head": 0.2}
TRAIN = {"batch_size": 4, "segment_length": 8, "learning_rate": 0.01, "threads": 1, "device": "cpu"}


def write_text(folder: Path) -> dict[str, Any]:
    """Random letters, each in lower case and then in upper case."""
    draw = random.Random(0)
    for split, size in (("train", 6000), ("valid", 300), ("test", 300)):
        letters = draw.choices("abcdefgh", k=size)
        (folder / f"{split}.txt").write_text("".join(c + c.upper() for c in letters), encoding="utf-8")
    files = {split: str(folder / f"{split}.txt") for split in ("train", "valid", "test")}
    return {"name": "text", "tokens": "byte", "cache": str(folder / "cache"), **files}


def language_model(folder: Path) -> dict[str, Any]:
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


def masked_model(folder: Path) -> dict[str, Any]:
    """Masks of every epoch, shuffled blocks, several batches of an update, averaged weights."""
    options = {"objective": "masked", "steps": 30, "gradient_accumulation_steps": 2, "averaging": "ema"}
    return {
        "model": {**MODEL, "position": "learned", "attention": MIXED, "output": {"tied": True}},
        "data": write_text(folder),
        "train": {**TRAIN, **options, "save_every_steps": 4, "log_every_steps": 5},
        "eval": {"every_steps": 10, "max_tokens": 100},
    }


def translation(folder: Path) -> dict[str, Any]:
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


def finetuning(folder: Path) -> dict[str, Any]:
    """Injected attention, and the best checkpoint."""
    tiny_encoder(folder / "encoder")
    write_cola(folder / "glue")
    return {
        "model": {
            "pretrained": str(folder / "encoder"),
            "attention": {"mix": "position_independent", "cross_head": 0.5},
        },
        "data": {"name": "glue/cola", "dir": str(folder / "glue"), "max_length": 20},
        "train": {"batch_size": 8, "steps": 60, "learning_rate": 1e-3, "save_every_steps": 3, "log_every_steps": 5},
        "eval": {"every_steps": 5, "checkpoint": "best"},
    }


def outcome(folder: Path) -> dict[str, Any]:
    """Everything of a finished run that is a function of its configuration."""
    names = ("metrics.jsonl", "checkpoints/last/*.safetensors", "checkpoints/best/model.safetensors")
    names += ("checkpoints/kept/*/model.safetensors", "predictions-*.tsv", "translations/*")
    files = {str(p.relative_to(folder)): p.read_bytes() for name in names for p in folder.glob(name)}
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return files | {key: result.get(key) for key in ("final", "last", "best", "parameters", "tokens_seen")}


def kill_when(folder: Path, lines: int, *words: object) -> None:
    """Start a training, and kill it when so many lines of metrics and a checkpoint are there."""
    process = forked.start("train", *words, "--quiet")
    end, metrics = time.monotonic() + 200, folder / "metrics.jsonl"
    while process.is_alive() and time.monotonic() < end:
        written = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if written >= lines and (folder / "checkpoints" / "last").exists():
            break
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -9
    assert not (folder / "result.json").exists()


@pytest.mark.parametrize("settings", [language_model, masked_model, translation, finetuning])
def test_a_killed_run_ends_as_one_never_killed(settings: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    if settings is finetuning:
        pytest.importorskip("transformers")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings(tmp_path)), encoding="utf-8")
    train(resolve_any(str(file)), tmp_path / "whole", quiet=True, say=lambda _: None)
    killed = tmp_path / "killed"
    kill_when(killed, 5, file, "--out", killed)
    if settings is language_model:
        kill_when(killed, 9, killed)
    resume(killed, quiet=True, say=lambda _: None)
    assert outcome(killed) == outcome(tmp_path / "whole")
    if settings is finetuning:
        one, other = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("whole", "killed"))
        assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
