"""More of a finished run, and a training that begins with the weights of one."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fullrank.config.load import build, read_yaml
from fullrank.config.recipe import Resolved
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.data.tokenizers import load_tokenizer
from fullrank.experiments import run
from fullrank.experiments.run import resume, train
from fullrank.experiments.run_folder import continuation, started, training_of
from fullrank.files import digest

TEXT = "the cat sat on a mat and saw one dog run to an old red hat while birds sang in tall green trees"
WORDS = TEXT.split()
DROPOUT = {"dropout": {"residual": 0.1}}


def write_words(path: Path, words: list[str], lines: int = 300) -> str:
    drawn = random.Random(1)
    path.write_text("\n".join(" ".join(drawn.choices(words, k=9)) for _ in range(lines)) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    train(Resolved(build(raw), "mine", stated=raw), folder, quiet=True, say=lambda _: None)
    return folder


@pytest.fixture(scope="module")
def short(home: Path) -> Path:
    """A finished run of 10 updates."""
    return trained(home / "short", settings(home, steps=10))


def go_on(
    source: Path, folder: Path, *overrides: str, more: str | None = None, until: int | None = None
) -> dict[str, Any]:
    resolved, _ = continuation(source, list(overrides), more)
    return train(resolved, folder, quiet=True, say=lambda _: None, after=source, until=until)


def assert_same_training(one: Path, other: Path) -> None:
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    for name in ("model", "training"):
        a, b = (load_file(folder / f"checkpoints/last/{name}.safetensors") for folder in (one, other))
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]), (name, key)


def state_of(folder: Path) -> str:
    return digest({str(p): p.read_bytes().hex() for p in sorted(folder.rglob("*")) if p.is_file()})


@pytest.mark.parametrize(
    ("kind", "end", "later"),
    [
        ({}, {"steps": 10}, "train.steps=20"),
        pytest.param({}, {"tokens": 320}, "train.tokens=640", marks=pytest.mark.full),
        ({"order": "shuffled", "gradient_accumulation_steps": 2, "optimizer": "adam"}, {"steps": 10}, "train.steps=20"),
        ({"averaging": "ema", "schedule": "cosine", "decay_steps": 20}, {"steps": 10}, "train.steps=20"),
        pytest.param(
            {"schedule": "inverse_sqrt", "warmup_steps": 4, "max_grad_norm": 0.5},
            {"steps": 10},
            "train.steps=20",
            marks=pytest.mark.full,
        ),
    ],
)
def test_n_updates_and_n_more_are_2n_bit_for_bit(
    home: Path, tmp_path: Path, kind: dict[str, Any], end: dict[str, int], later: str
) -> None:
    """Schedules whose learning rate of an update does not depend on the length of training."""
    first = trained(tmp_path / "first", settings(home, **kind, **end))
    before = state_of(first)
    result = go_on(first, tmp_path / "more", later)
    name, _, value = later.removeprefix("train.").partition("=")
    whole = trained(tmp_path / "whole", settings(home, **kind, **{name: int(value)}))
    assert_same_training(tmp_path / "more", whole)
    assert state_of(first) == before, "the original is left as it was"
    assert result["steps"] == 20
    assert result["continues"] == {"folder": str(first.resolve()), "steps": 10}
    assert result["final"] == json.loads((whole / "result.json").read_text())["final"]


def test_epochs_go_on(home: Path, tmp_path: Path) -> None:
    def of(epochs: int) -> dict[str, Any]:
        raw = settings(home, batch_size=20, segment_length=20, epochs=epochs, log_every_steps=1)
        return {**raw, "eval": {"every_epochs": 1}}

    go_on(trained(tmp_path / "first", of(1)), tmp_path / "more", "train.epochs=2")
    assert_same_training(tmp_path / "more", trained(tmp_path / "whole", of(2)))


def test_a_stopped_continuation_goes_on_exactly(home: Path, short: Path, tmp_path: Path) -> None:
    go_on(short, tmp_path / "more", "train.steps=20", until=13)
    resume(tmp_path / "more", quiet=True, say=lambda _: None)
    assert_same_training(tmp_path / "more", trained(tmp_path / "whole", settings(home, steps=20)))


def test_a_continuation_that_dies_before_its_checkpoints_are_there(
    home: Path, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder has a name and a configuration, but no checkpoint: it never begins with fresh weights."""

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "take_over", dies)
        with pytest.raises(KeyboardInterrupt):
            go_on(short, tmp_path / "more", "train.steps=20")
    moved = short.rename(short.with_name("moved"))
    with pytest.raises(InputError, match=r"goes on with .*short, which is not there"):
        resume(tmp_path / "more", quiet=True, say=lambda _: None)
    moved.rename(short)
    resume(tmp_path / "more", quiet=True, say=lambda _: None)
    assert_same_training(tmp_path / "more", trained(tmp_path / "whole", settings(home, steps=20)))


def test_a_training_that_had_lost_its_patience_goes_on(home: Path, tmp_path: Path) -> None:
    first = trained(tmp_path / "first", settings(home, steps=40, patience=1, learning_rate=1e-12))
    done = json.loads((first / "result.json").read_text())
    assert done["stopped_early"]
    result = go_on(first, tmp_path / "more", "train.patience=9", more="5 steps")
    assert result["steps"] == done["steps"] + 5


def test_it_is_another_training_than_one_of_the_same_settings(home: Path, short: Path, tmp_path: Path) -> None:
    """A schedule may have been planned otherwise, so no row of a table takes it over."""
    go_on(short, tmp_path / "more", "train.steps=20")
    identity = json.loads((tmp_path / "more" / "run.json").read_text())
    config = build(read_yaml(tmp_path / "more" / "config.yaml"))
    without = {key: value for key, value in identity.items() if key != "continues"}
    assert training_of(config, identity) != training_of(config, without)


@pytest.mark.parametrize(
    ("overrides", "more", "named"),
    [
        ([], None, "train.steps"),
        (["train.steps=10"], None, "train.steps"),
        (["train.steps=20", "model.hidden_size=16"], None, "model.hidden_size"),
        (["train.steps=20", "data.lowercase=true"], None, "data.lowercase"),
        (["train.steps=20", "train.batch_size=8"], None, "train.batch_size"),
        (["train.steps=20", "train.optimizer=adam"], None, "train.optimizer"),
        ([], "soon", "--more"),
    ],
)
def test_what_cannot_go_on(short: Path, overrides: list[str], more: str | None, named: str) -> None:
    with pytest.raises(InputError, match=named):
        continuation(short, overrides, more)


def test_an_unfinished_run_is_finished_first(short: Path, tmp_path: Path) -> None:
    go_on(short, tmp_path / "paused", "train.steps=20", until=12)
    with pytest.raises(InputError, match="not finished"):
        continuation(tmp_path / "paused", ["train.steps=30"], None)


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ("7 steps", 17),
        ("1 update", 11),
        ("96 tokens", 13),
        ("1 second", 20),
        ("0.5 minutes", 310),
        ("2 epochs", 10 + 2 * 100),
    ],
)
def test_amounts(short: Path, more: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 updates of 32 tokens, a tenth of an epoch, took a second."""
    known = {"steps": 10, "epochs": 0.1, "tokens_seen": 320, "wall_seconds": 1.0}
    monkeypatch.setattr("fullrank.experiments.run_folder.read_result", lambda _: known)
    resolved, folder = continuation(short, [], more)
    assert resolved.config.train.steps == steps
    assert folder == short.with_name(f"short-steps{steps}")


# -- from the weights of a run ----------------------------------------------------------------------------------------


def begun_from(home: Path, source: Path, tmp_path: Path, **train: Any) -> dict[str, Any]:
    other = write_words(tmp_path / "two.txt", [*WORDS[:12], "ship", "sea"])
    raw = settings(home, start=os.path.relpath(source), **train)
    return {**raw, "data": {"name": "text", "train": other, "cache": str(home / "cache")}, "model": {}}


def test_weights_and_vocabulary_of_a_run_on_another_text(home: Path, short: Path, tmp_path: Path) -> None:
    folder = trained(tmp_path / "other", begun_from(home, short, tmp_path, steps=1, learning_rate=1e-30))
    best, new = (load_file(one / "checkpoints/best/model.safetensors") for one in (short, folder))
    assert best.keys() == new.keys()
    assert all(torch.equal(best[key], new[key]) for key in best)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.fingerprint == load_tokenizer(short).fingerprint
    assert tokenizer.decode(tokenizer.encode("the ship sat")) == "the <unk> sat"
    assert json.loads((folder / "result.json").read_text())["start"]["folder"] == str(short.resolve())


def test_it_resumes_exactly_and_without_the_first_run(home: Path, tmp_path: Path) -> None:
    first = trained(tmp_path / "first", settings(home, steps=5))
    raw = begun_from(home, first, tmp_path, steps=10)
    whole = trained(tmp_path / "whole", raw)
    train(Resolved(build(raw), "mine", stated=raw), tmp_path / "part", quiet=True, say=lambda _: None, until=5)
    first.rename(tmp_path / "away")
    resume(tmp_path / "part", quiet=True, say=lambda _: None)
    assert_same_training(tmp_path / "part", whole)


def test_the_rules_of_a_budget_keep_the_model(home: Path, short: Path, tmp_path: Path) -> None:
    raw = begun_from(home, short, tmp_path)
    raw["train"] = {"start": str(short), "budget": "2k tokens"}
    config = build(read_yaml(trained(tmp_path / "other", raw) / "config.yaml"))
    assert config.model.hidden_size == 8
    assert config.data.tokens == "word"
    assert config.train.schedule == "cosine"  # by the rules


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": {"hidden_size": 16}}, "model.hidden_size"),
        ({"model": {"attention": {"mix": "position_wise"}}}, "model.attention.mix"),
        ({"data": {"tokens": "character"}}, "data.tokens"),
        ({"data": {"lowercase": True}}, "data.lowercase"),
        ({"train": {"objective": "masked"}}, "train.start"),
    ],
)
def test_what_the_weights_do_not_fit(
    home: Path, short: Path, tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    raw = begun_from(home, short, tmp_path, steps=3)
    raw = {section: {**raw[section], **changes.get(section, {})} for section in raw}
    with pytest.raises(InputError, match=f"^{key}"):
        started(Resolved(build(raw), "mine", stated=raw))


def test_dropout_may_differ(home: Path, short: Path, tmp_path: Path) -> None:
    raw = {**begun_from(home, short, tmp_path, steps=3), "model": {"dropout": {"residual": 0.3}}}
    config = started(Resolved(build(raw), "mine", stated=raw)).config
    assert isinstance(config, RunConfig)
    assert config.model.dropout.residual == 0.3
    assert config.model.hidden_size == 8
