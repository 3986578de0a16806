"""A configuration for one's own text: every task, and the rules of its values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fullrank.config.load import resolve
from fullrank.experiments import run as speed
from fullrank.experiments import translation
from fullrank.experiments.init import choose_data, write_configuration
from fullrank.experiments.run import train

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORDS = [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in "mnprst"]

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def book(tmp_path) -> str:
    return write_lines(tmp_path / "book.txt", 1200, 0)


def write_lines(path: Path, lines: int, seed: int) -> str:
    """Eight words a line, about 40 characters."""
    drawn = torch.randint(len(WORDS), (lines, 8), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text("".join(" ".join(map(WORDS.__getitem__, line)) + "\n" for line in drawn), encoding="utf-8")
    return str(path)


@pytest.fixture
def slow(monkeypatch) -> list[int]:
    """A machine that takes 10 µs and 1 ps a parameter for a token of training, and 2 s for an evaluation."""
    sizes = []

    def measure(task):
        options = task.options
        tokens = options.batch_tokens or options.batch_size * options.segment_length
        sizes.append(sum(p.numel() for p in task.model.parameters()))
        return tokens * (1e-5 + 1e-12 * sizes[-1]), 2.0

    monkeypatch.setattr(speed, "measure_speed", measure)
    translate = translation.translate_split  # it is timed on some sentences, which takes long
    monkeypatch.setattr(translation, "translate_split", lambda *call: translate(*call) if len(call) == 4 else None)
    return sizes


@pytest.mark.parametrize(
    ("wish", "states"),
    [
        ({"tokens": "character"}, {"segment_length": 128, "order": "shuffled"}),
        ({"tokens": "bpe"}, {"segment_length": 64}),
        ({"task": "translation", "languages": ("de", "en")}, {"label_smoothing": 0.1}),
    ],
)
def test_every_task_is_written_and_can_be_trained(wish, states, book, tmp_path, slow):
    """The file is a valid configuration, says the reason of each value, and its model trains a step."""
    texts = [book]
    if wish.get("task"):
        texts = [str(tmp_path / "train")]
        write_lines(tmp_path / "train.de", 600, 1)
        write_lines(tmp_path / "train.en", 600, 2)
    out = tmp_path / "my.yaml"
    config = write_configuration(texts, out, minutes=1.0, **wish)
    assert resolve(str(out)).config == config
    assert {key: getattr(config.train, key) for key in states} == states
    assert config.model.position == "rotary"
    lines = out.read_text(encoding="utf-8").splitlines()
    assert all("  # " in line for line in lines if line.startswith("  "))
    few = ["train.steps=1", "train.warmup_steps=1", "eval.every_steps=1", "eval.beams=1", "train.threads=1"]
    few += ["eval.max_length_a=0", "eval.max_length_b=3"] if wish.get("task") else []
    result = train(resolve(str(out), overrides=few), tmp_path / "run", quiet=True)
    assert math.isfinite(result["final"]["valid"]["nll"])


@pytest.mark.parametrize("minutes", [1.0, 60.0])
def test_steps_fill_the_time_that_evaluation_leaves(minutes, book, tmp_path, slow):
    """By the speed that `slow` measures: at most 40 times through the text, in batches that leave 2,000 updates."""
    config = write_configuration([book], tmp_path / "my.yaml", minutes=minutes, size="tiny")
    per_step = config.train.batch_size * config.train.segment_length
    text = Path(book).read_text(encoding="utf-8").splitlines(keepends=True)
    cut = len(text) // 20
    train, valid, test = (len("".join(part)) for part in (text[: -2 * cut], text[-2 * cut : -cut], text[-cut:]))
    final = 2.0 * (valid + test) / min(config.eval.max_tokens, valid)
    seconds = minutes * 60 - 6 - 5 * 2.0 - final
    reads = min(seconds / (1e-5 + 1e-12 * slow[-1]), 40 * train)
    assert config.train.steps * per_step == pytest.approx(reads, rel=0.02)
    assert config.train.steps >= 2000 or per_step == 512
    assert config.model.dropout.residual == (0.0 if reads <= 25 * train else 0.1)
    assert config.train.weight_decay == (0.1 if reads <= 4 * train else 1.0)
    assert config.train.learning_rate == pytest.approx(0.08 / 8, rel=1e-2)


def test_units_and_vocabularies(tmp_path):
    for size, tokens, entries in ((99_999, "character", None), (100_000, "bpe", 500), (10**9, "bpe", 16_000)):
        with open(tmp_path / "t", "wb") as file:
            file.truncate(size)
        data = {"name": "text", "train": str(tmp_path / "t")}
        chosen = {key: value for key, value, _ in choose_data(data)}
        assert (chosen["data.tokens"], chosen.get("data.max_vocabulary")) == (tokens, entries)
    assert ("data.min_count", 2) in [rule[:2] for rule in choose_data({**data, "tokens": "word"})]


def test_the_examples_are_configurations():
    """Each is complete, and says what it reached."""
    tasks = set()
    for path in sorted(EXAMPLES.glob("*.yaml")):
        config = resolve(str(path)).config
        assert (config.model.position, config.train.epochs) == ("rotary", None)
        assert "Reached:" in path.read_text(encoding="utf-8")
        tasks.add((config.task, config.data.tokens, bool(config.model.memory_length)))
    assert {("language_model", kind, False) for kind in ("character", "word", "bpe")} < tasks
    assert {("translation", "bpe", False), ("language_model", "character", True)} < tasks
