"""A training that begins with the weights of a finished run."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fullrank.config.load import Resolved, build, read_yaml
from fullrank.data import load_tokenizer
from fullrank.experiments.run_folder import start_from_run
from run_files import read_result, resume, train_quietly
from small_runs import outcome

TEXT = "the cat sat on a mat and saw one dog run to an old red hat while birds sang in tall green trees"
WORDS = TEXT.split()
DROPOUT = {"dropout": {"residual": 0.1}}


def write_words(path: Path, words: list[str], lines: int = 300) -> str:
    drawn = random.Random(1)
    path.write_text("\n".join(" ".join(drawn.choices(words, k=9)) for _ in range(lines)) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("continuing")
    write_words(folder / "one.txt", WORDS)
    return folder


def settings(home: Path, **train: Any) -> dict[str, Any]:
    return {
        "data": {"name": "text", "train": str(home / "one.txt"), "tokens": "word", "cache": str(home / "cache")},
        "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, **DROPOUT},
        "train": {"batch_size": 4, "segment_length": 8, "log_every_steps": 5, **train},
        "eval": {"every_steps": 5, "batch_size": 4},
    }


def trained(folder: Path, raw: dict[str, Any]) -> Path:
    train_quietly(raw, folder)
    return folder


@pytest.fixture(scope="module")
def short(home) -> Path:
    """A finished run of 10 updates."""
    return trained(home / "short", settings(home, steps=10))


def started_from(home: Path, source: Path, tmp_path: Path, **train: Any) -> dict[str, Any]:
    text = write_words(tmp_path / "two.txt", [*WORDS[:12], "ship", "sea"])
    raw = settings(home, start=os.path.relpath(source), **train)
    return {**raw, "data": {"name": "text", "train": text, "cache": str(home / "cache")}, "model": {}}


def test_weights_and_vocabulary_of_a_run_on_another_text(home, short, tmp_path):
    folder = trained(tmp_path / "other", started_from(home, short, tmp_path, steps=1, learning_rate=1e-30))
    best, new = (load_file(run / "checkpoints/best/model.safetensors") for run in (short, folder))
    assert best.keys() == new.keys()
    assert all(torch.equal(best[key], new[key]) for key in best)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.fingerprint == load_tokenizer(short).fingerprint
    assert tokenizer.decode(tokenizer.encode("the ship sat")) == "the <unk> sat"
    assert read_result(folder)["start"]["folder"] == str(short.resolve())


def test_it_resumes_exactly_and_without_the_first_run(home, tmp_path):
    first = trained(tmp_path / "first", settings(home, steps=5))
    raw = started_from(home, first, tmp_path, steps=10)
    unbroken = trained(tmp_path / "whole", raw)
    train_quietly(raw, tmp_path / "part", until=5)
    first.rename(tmp_path / "away")
    resume(tmp_path / "part", quiet=True)
    assert outcome(tmp_path / "part") == outcome(unbroken)


def test_what_is_stated_is_laid_on_the_model_of_the_run(home, short, tmp_path):
    raw = {**started_from(home, short, tmp_path, steps=3), "model": {"dropout": {"residual": 0.2}}}
    config = start_from_run(Resolved(build(raw), "mine", settings=raw)).config
    assert (config.model.dropout.residual, config.model.hidden_size, config.data.tokens) == (0.2, 8, "word")


def test_a_run_goes_on_by_its_own_configuration(short):
    raw = read_yaml(short / "config.yaml")
    raw["train"] |= {"start": str(short), "steps": 20}
    config = start_from_run(Resolved(build(raw), "mine", settings=raw)).config
    assert (config.model, config.train.steps) == (build(read_yaml(short / "config.yaml")).model, 20)
