"""`train.budget`: what the rules make of a text, a size and a budget, what wins over them, and that a run keeps it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fullrank.config.load import lay, read_yaml
from fullrank.config.recipe import resolve
from fullrank.config.training import SIZES, Budget, read_budget
from fullrank.core.errors import InputError
from fullrank.experiments import rules, run
from fullrank.experiments.rules import Settled, choose_data, choose_reach, settle
from fullrank.experiments.run import TEXT_TASKS, resume, train
from fullrank.experiments.speed import Speed

pytestmark = pytest.mark.usefixtures("own_cache")


def silent(line: str) -> None:
    pass


def write_text(path: Path, lines: int, seed: int = 0) -> str:
    """Lines of 40 letters and an end."""
    drawn = torch.randint(10, (lines, 40), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text("".join("".join("abcdefghi "[i] for i in line) + "\n" for line in drawn), encoding="utf-8")
    return str(path)


@pytest.fixture
def book(tmp_path: Path) -> str:
    """41 characters x 1,000 lines, of which 900 are for training: 36,900 tokens."""
    return write_text(tmp_path / "book.txt", 1000)


def settled(tokens: int, **stated: Any) -> Settled:
    return settle(stated, Budget(tokens), TEXT_TASKS, silent)


@pytest.mark.parametrize(
    ("tokens", "per_step", "dropout"),
    [
        (100, 512, 0.0),  # 20 updates at least
        (147_600, 512, 0.0),  # 4 times through the text
        (147_601, 512, 0.1),
        (442_801, 512, 0.2),
        (2000 * 1024, 1024, 0.2),  # 2,000 updates of twice as many tokens
        (10**9, 8192, 0.2),
    ],
)
def test_batch_steps_and_dropout_follow_the_tokens(tokens: int, per_step: int, dropout: float, book: str) -> None:
    config = settled(tokens, data={"train": book}, model=SIZES["tiny"]).config
    have = 36_900
    batches = math.ceil(math.ceil(have / 128) / (per_step // 128))  # the last of an epoch may be smaller
    assert config.train.batch_size * config.train.segment_length == per_step
    assert config.train.steps == max(20, round(tokens / (have / batches)))
    assert config.train.warmup_steps == max(1, config.train.steps // 20)
    assert config.eval.every_steps == math.ceil(config.train.steps / 5)
    assert (config.model.dropout.embedding, config.model.dropout.residual) == (dropout, dropout)
    assert config.train.budget is None


def test_the_size_follows_the_tokens(book: str) -> None:
    """The largest that reads two tokens for each of its own parameters, and has at most 4 of them for each token."""
    assert settled(10**4, data={"train": book}).config.model.hidden_size == 64
    assert settled(10**9, data={"train": book}).config.model.hidden_size == 64
    write_text(Path(book), 6000)
    assert settled(10**6, data={"train": book}).config.model.hidden_size == 64
    made = settled(10**9, data={"train": book, "tokens": "character"})
    assert (made.config.model.hidden_size, made.have) == (128, 221_400)


def test_what_is_stated_wins_and_the_rest_follows_it(book: str) -> None:
    stated: dict[str, Any] = {
        "data": {"train": book, "tokens": "byte"},
        "model": {"hidden_size": 96, "num_hidden_layers": 1, "dropout": {"residual": 0.3}, "output": {"tied": False}},
        "train": {"segment_length": 32, "seed": 7, "betas": [0.8, 0.9], "budget": 10**5},
        "eval": {"every_epochs": 1.0},
    }
    made = settled(10**5, **stated)
    config = made.config
    assert (config.model.hidden_size, config.model.num_hidden_layers, config.model.num_attention_heads) == (96, 1, 1)
    assert (config.model.hidden_act, config.model.intermediate_size) == ("swiglu", 256)
    relu = settled(10**5, data={"train": book}, model={**SIZES["tiny"], "hidden_act": "relu"}).config.model
    assert (relu.hidden_act, relu.intermediate_size) == ("relu", 256)
    assert (config.model.dropout.residual, config.model.dropout.embedding) == (0.3, 0.0)
    assert (config.model.output.tied, config.model.output.bias) == (False, True)
    assert (config.train.segment_length, config.train.batch_size, config.train.seed) == (32, 16, 7)
    assert config.train.betas == (0.8, 0.9)
    assert config.train.learning_rate == pytest.approx(0.5 / 96, rel=1e-2)
    assert (config.eval.every_steps, config.eval.every_epochs) == (None, 1.0)
    shown = yaml.safe_load("\n".join(made.table()))
    assert shown["train"]["seed"] == 7
    assert made.values["train"]["seed"] == 7
    assert "train.seed" not in made.reasons
    assert "train.schedule" in made.reasons
    assert {"train", "tokens", "name"} == shown["data"].keys()


@pytest.mark.parametrize(
    ("more", "task", "states"),
    [
        ({"model": {"memory_length": 96}}, "language_model", {"order": "contiguous", "segment_length": 32}),
        ({"train": {"objective": "masked"}}, "masked_model", {"order": "shuffled", "segment_length": 128}),
        ({"train": {"context": 16}}, "language_model", {"order": "contiguous", "segment_length": 128}),
        ({"train": {"gradient_accumulation_steps": 2}}, "language_model", {"batch_size": 4, "steps": 101}),
    ],
)
def test_other_ways_to_train(more: dict[str, Any], task: str, states: dict[str, Any], book: str) -> None:
    """With two batches an update, 100,352 tokens are 101 updates: 37 of them read the 36,900 tokens of the text."""
    config = settled(100_352, **{"data": {"train": book}, **more}).config
    assert config.task == task
    assert {key: getattr(config.train, key) for key in states} == states


def test_sentence_pairs(tmp_path: Path) -> None:
    write_text(tmp_path / "a.de", 600, 1)
    write_text(tmp_path / "a.en", 600, 2)
    data = {"name": "parallel", "train": str(tmp_path / "a"), "source": "de", "target": "en"}
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"data": data, "train": {"budget": 10**5}}))
    config = settled(10**5, **dict(resolve(str(path)).stated or {})).config
    assert (config.data.tokens, config.data.vocabulary, config.train.label_smoothing) == ("bpe", "joint", 0.1)
    assert config.model.encoder is not None
    assert config.model.encoder.share_embedding
    apart = settled(10**5, data={**data, "vocabulary": "separate"}).config
    assert apart.model.encoder is None or not apart.model.encoder.share_embedding


def test_units_and_vocabularies(tmp_path: Path) -> None:
    """A small text, a large one, and a corpus with a name."""
    for size, tokens, entries in ((99_999, "character", None), (100_000, "bpe", 500), (10**9, "bpe", 16_000)):
        with open(tmp_path / "t", "wb") as file:
            file.truncate(size)
        keys = choose_data({"train": str(tmp_path / "t")})
        assert (keys["tokens"], keys.get("max_vocabulary")) == (tokens, entries)
    assert choose_data({"train": ["t", "t"], "dir": str(tmp_path)})["max_vocabulary"] == 16_000
    assert choose_data({"train": str(tmp_path / "t"), "tokens": "word"})["min_count"] == 2
    assert choose_data({"name": "ptb", "dir": "somewhere"}) == {}
    assert (choose_reach("byte"), choose_reach("word"), choose_reach(None)) == (128, 64, 64)


def test_a_batch_is_no_larger_than_the_text(tmp_path: Path) -> None:
    """2,460 tokens to train on: the 8,192 tokens of a large budget would be more than the text."""
    short = write_text(tmp_path / "short.txt", 66)
    train = settled(10**7, data={"train": short}, model=SIZES["tiny"]).config.train
    assert train.batch_size * train.segment_length == 2048


def test_a_pattern_has_the_size_of_all_its_files(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"chapter{number}.txt").write_text("a line\n" * 6_000, encoding="utf-8")  # 42 kB
    keys = choose_data({"train": "chapter*.txt", "dir": str(tmp_path)})
    assert (keys["name"], keys["tokens"]) == ("text", "bpe")
    both = choose_data({"train": ["chapter[01].txt"], "dir": str(tmp_path)})
    assert both["tokens"] == "character"


@pytest.mark.parametrize(
    ("end", "steps"), [({"steps": 7}, 7), ({"steps": 30}, 30), ({"epochs": 2}, None), ({"tokens": 20_480}, 40)]
)
def test_another_amount_leaves_the_other_rules(end: dict[str, int], steps: int | None, book: str) -> None:
    """On a budget, steps, epochs or tokens say how much, and all else is by the rules as before."""
    raw = lay({"data": {"train": book}, "model": SIZES["tiny"], "train": {"budget": "5 minutes"}}, {"train": end})
    ((name, amount),) = end.items()
    assert raw["train"] == {"budget": f"{amount} {name}"}
    budget = read_budget(raw["train"]["budget"])
    assert budget is not None
    config = settle(raw, budget, TEXT_TASKS, silent).config
    batches = math.ceil(math.ceil(36_900 / 128) / config.train.batch_size)
    assert config.train.steps == pytest.approx(steps or 2 * batches, abs=0 if name != "tokens" else 1)
    assert (config.data.name, config.model.hidden_act, config.train.schedule) == ("text", "swiglu", "cosine")


def test_time_is_spent_on_preparation_too(book: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1 ms a token, of 100 s: 6 for the start, what was spent before, 6 evaluations and those of the final figures."""
    monkeypatch.setattr(rules, "measure_speed", lambda parts, clock: Speed(0.512, 1.0))
    monkeypatch.setattr(rules.time, "process_time", lambda: 10.0)
    stated = {"data": {"train": book}, "model": SIZES["tiny"]}
    final = 2 * 2050 / 2048  # validation and test; an evaluation while training reads 2,048 tokens of it
    for begun, spent in ((True, 10.0), (False, 0.0)):
        made = settle(stated, Budget(seconds=100.0, cpu=True), TEXT_TASKS, silent, begun=begun)
        seconds = 100.0 - 6 - 5 - final - spent
        assert made.config.train.steps == pytest.approx(seconds / 0.512, abs=1)
        assert made.seconds == pytest.approx(100.0, abs=0.6)
    made = settle(stated, Budget(seconds=10.0, cpu=True), TEXT_TASKS, silent)  # nothing is left
    assert made.config.train.steps == 20


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"data": {"max_tokens": 1000}}, "1,000 tokens to train on"),
        ({"data": {}, "train": {"batch_size": 10**6, "order": "contiguous"}}, "too few for 1000000 streams"),
        ({"data": {}, "train": {"optimizer": "sgd"}}, "train.learning_rate: the rules are for adamw"),
    ],
)
def test_what_is_refused(stated: dict[str, Any], message: str, book: str) -> None:
    stated = {**stated, "data": {**stated["data"], "train": book}}
    with pytest.raises(InputError, match=message):
        settled(10**5, **stated)


def test_a_run_keeps_what_the_rules_made(book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file goes on with a run that was stopped, by the values that it was begun with; another one is refused."""
    path, folder = tmp_path / "my.yaml", tmp_path / "run"
    path.write_text(f"data: {{train: {book}}}\nmodel: {{size: tiny}}\ntrain: {{budget: 10k tokens, threads: 1}}\n")
    told: list[str] = []
    whole = train(resolve(str(path)), tmp_path / "whole", quiet=True, say=told.append)
    assert any(line.split() == ["learning_rate:", "0.00781", "#", "0.5", "/", "hidden_size"] for line in told)
    saved = read_yaml(tmp_path / "whole" / "config.yaml")
    assert (saved["train"]["budget"], saved["train"]["steps"], saved["model"]["hidden_size"]) == (None, 20, 64)

    def stop(*values: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run, "fit", stop)
        with pytest.raises(KeyboardInterrupt):
            train(resolve(str(path)), folder, quiet=True, say=silent)
    monkeypatch.setattr(run, "settle", stop)
    again = train(resolve(str(path)), folder, quiet=True, say=silent)
    assert again["final"] == whole["final"]
    assert resume(folder, say=silent)["final"] == whole["final"]
    reproduced = train(resolve(str(folder)), tmp_path / "other", quiet=True, say=silent)
    assert reproduced["final"] == whole["final"]
    monkeypatch.setattr(run, "settle", settle)
    with pytest.raises(InputError, match=r"holds a run with another configuration: train.seed is 1 there, 2 here"):
        train(resolve(str(path), overrides=["train.seed=2"]), folder, quiet=True, say=silent)


def test_a_time_is_of_one_process(monkeypatch: pytest.MonkeyPatch, book: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"data: {{train: {book}}}\ntrain: {{budget: 5 minutes}}\n")
    monkeypatch.setattr(run, "world_size", lambda: 2)
    with pytest.raises(InputError, match=r"train.budget: a time is measured for one process, here are 2; give tokens"):
        train(resolve(str(path)), tmp_path / "run", quiet=True, say=silent)
