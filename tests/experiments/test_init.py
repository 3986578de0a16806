"""A configuration for one's own text: every task, the rules of its values, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from fullrank.config.recipe import resolve
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.data.sources import files_of
from fullrank.experiments import rules
from fullrank.experiments.init import Request, write_configuration
from fullrank.experiments.rules import choose_data
from fullrank.experiments.run import train
from fullrank.experiments.speed import Speed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORDS = [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in "mnprst"]

pytestmark = pytest.mark.usefixtures("own_cache")


def silent(line: str) -> None:
    pass


@pytest.fixture
def book(tmp_path: Path) -> str:
    return write_lines(tmp_path / "book.txt", 1200, 0)


def write_lines(path: Path, lines: int, seed: int) -> str:
    """Eight words a line, about 40 characters."""
    drawn = torch.randint(len(WORDS), (lines, 8), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text("".join(" ".join(WORDS[i] for i in line) + "\n" for line in drawn), encoding="utf-8")
    return str(path)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine that takes 10 µs and 1 ps a parameter for a token of training, and 2 s for an evaluation."""
    sizes: list[int] = []

    def measure(parts, clock, spend=1.0):
        options = parts.options
        tokens = options.batch_tokens or options.batch_size * options.segment_length
        sizes.append(sum(p.numel() for p in parts.model.parameters()))
        return Speed(tokens * (1e-5 + 1e-12 * sizes[-1]), 2.0)

    monkeypatch.setattr(rules, "measure_speed", measure)
    monkeypatch.setattr(rules, "translate_split", lambda *some: None)  # timed, and it takes long
    return sizes


@pytest.mark.parametrize(
    ("wish", "states"),
    [
        ({"tokens": "character"}, {"segment_length": 128, "order": "shuffled"}),
        ({"tokens": "bpe"}, {"segment_length": 64}),
        ({"memory": True}, {"order": "contiguous"}),
        ({"task": "translation", "languages": ("de", "en")}, {"label_smoothing": 0.1}),
    ],
)
def test_every_task_is_written_and_can_be_trained(wish, states, book: str, tmp_path: Path, slow: list[int]) -> None:
    """The file is a valid configuration, says the reason of each value, and its model trains a step."""
    texts = [book]
    if wish.get("task"):
        texts = [str(tmp_path / "train")]
        write_lines(tmp_path / "train.de", 600, 1)
        write_lines(tmp_path / "train.en", 600, 2)
    out = tmp_path / "my.yaml"
    config = write_configuration(Request(texts, minutes=1.0, **wish), out, say=silent)
    assert resolve(str(out)).config == config
    assert {key: getattr(config.train, key) for key in states} == states
    assert config.model.position == "rotary"
    assert bool(config.model.memory_length) == bool(wish.get("memory"))
    lines = out.read_text(encoding="utf-8").splitlines()
    assert all("  # " in line for line in lines if line.startswith("  "))
    few = ["train.steps=1", "train.warmup_steps=1", "eval.every_steps=1", "eval.beams=1", "train.threads=1"]
    few += ["eval.max_length_a=0", "eval.max_length_b=3"] if wish.get("task") else []
    result = train(resolve(str(out), overrides=few), tmp_path / "run", quiet=True, say=silent)
    assert math.isfinite(result["final"]["valid"]["nll"])


@pytest.mark.parametrize("minutes", [1.0, 3.0, 60.0])
def test_steps_fill_the_time_that_evaluation_leaves(minutes: float, book: str, tmp_path: Path, slow: list[int]) -> None:
    """By the stated speed: at most 40 times through the text, in batches that leave 2,000 updates."""
    config = write_configuration(Request([book], minutes=minutes, size="tiny"), tmp_path / "my.yaml", say=silent)
    per_step = config.train.batch_size * config.train.segment_length
    text = Path(book).read_text(encoding="utf-8").splitlines(keepends=True)
    cut = len(text) // 20
    have, valid, test = (len("".join(part)) for part in (text[: -2 * cut], text[-2 * cut : -cut], text[-cut:]))
    final = 2.0 * (valid + test) / min(config.eval.max_tokens, valid)
    seconds = minutes * 60 - 6 - 5 * 2.0 - final
    reads = min(seconds / (1e-5 + 1e-12 * slow[-1]), 40 * have)
    assert config.train.steps * per_step == pytest.approx(reads, rel=0.02)
    assert config.train.steps >= 2000 or per_step == 512
    assert config.model.dropout.residual == (0.0 if reads <= 4 * have else 0.1 if reads <= 12 * have else 0.2)
    assert config.train.learning_rate == pytest.approx(0.5 / 64, rel=1e-3)


def test_a_large_vocabulary_has_clusters(tmp_path: Path, slow: list[int]) -> None:
    """A softmax over all words would be most of the work of every step."""
    words = tmp_path / "words.txt"
    names = [f"w{i}" for i in range(6000)]
    words.write_text("".join(" ".join(names[i : i + 10] * 2) + "\n" for i in range(0, 6000, 10)), encoding="utf-8")
    config = write_configuration(Request([str(words)], tokens="word"), tmp_path / "my.yaml", say=silent)
    assert (config.model.output.kind, config.model.output.tied, config.model.input.kind) == (
        "adaptive",
        True,
        "adaptive",
    )
    assert (config.data.min_count, config.data.max_vocabulary) == (2, 10_000)


@pytest.mark.full
def test_the_time_is_measured(book: str, tmp_path: Path) -> None:
    """Without a stated speed: the file trains, and its training takes about the seconds that it says."""
    config = write_configuration(Request([book], minutes=0.05, size="tiny"), tmp_path / "my.yaml", say=silent)
    assert re.search(r"Takes about 0\.[12] minutes", (tmp_path / "my.yaml").read_text(encoding="utf-8"))
    result = train(resolve(str(tmp_path / "my.yaml")), tmp_path / "run", quiet=True, say=silent)
    assert result["steps"] == config.train.steps >= 20
    unigram = result["corpus"]["unigram_perplexity"]["valid"]
    assert result["final"]["valid"]["perplexity"] < unigram
    assert LanguageModel.load(tmp_path / "run").config.hidden_size == 64


def test_units_and_vocabularies(tmp_path: Path) -> None:
    for size, tokens, entries in ((99_999, "character", None), (100_000, "bpe", 500), (10**9, "bpe", 16_000)):
        with open(tmp_path / "t", "wb") as file:
            file.truncate(size)
        data = {"name": "text", "train": str(tmp_path / "t")}
        chosen = {key: value for key, value, _ in choose_data(data)}
        assert (chosen["data.tokens"], chosen.get("data.max_vocabulary")) == (tokens, entries)
    assert ("data.min_count", 2) in [rule[:2] for rule in choose_data({**data, "tokens": "word"})]


def test_a_batch_is_no_larger_than_the_text(tmp_path: Path, slow: list[int]) -> None:
    """About 2,500 tokens to train on: the 8,192 tokens that an hour allows would be more than the text."""
    short = write_lines(tmp_path / "short.txt", 85, 0)
    config = write_configuration(Request([short], minutes=60, size="tiny"), tmp_path / "my.yaml", say=silent)
    assert config.train.batch_size * config.train.segment_length == 2048


def test_pairs_without_validation_files_are_cut_from_training(tmp_path: Path, slow: list[int]) -> None:
    write_lines(tmp_path / "a.de", 600, 1)
    write_lines(tmp_path / "a.en", 600, 2)
    names = [str(tmp_path / "a.en"), str(tmp_path / "a.de")]
    config = write_configuration(Request(names, task="translation"), tmp_path / "my.yaml", say=silent)
    assert (config.data.source, config.data.target, config.data.valid) == ("en", "de", None)
    for split in ("train", "valid", "test"):
        for side in ("de", "en"):
            write_lines(tmp_path / f"{split}.{side}", 600, 1)
    beside = write_configuration(
        Request([str(tmp_path / "train")], task="translation"), tmp_path / "b.yaml", say=silent
    )
    assert (beside.data.valid, beside.data.test) == (str(tmp_path / "valid"), str(tmp_path / "test"))
    assert (beside.data.source, beside.data.target) == ("de", "en")


@pytest.mark.parametrize(
    ("content", "wish", "message"),
    [
        (None, {}, "TEXT"),
        ("", {}, "is empty"),
        ("a line\n" * 100, {}, "2,000"),
        ("word " * 5000, {}, "too few"),
        ("a line\n" * 1000, {"task": "speech"}, "--task"),
        ("a line\n" * 1000, {"tokens": "letter"}, "--tokens"),
        ("a line\n" * 1000, {"size": "giant"}, "--size"),
        ("a line\n" * 1000, {"minutes": float("nan")}, "--minutes"),
        ("a line\n" * 1000, {"task": "translation", "memory": True}, "--memory"),
        ("a line\n" * 1000, {"task": "translation"}, "two languages"),
    ],
)
def test_what_is_refused(content: str | None, wish, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "text").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        write_configuration(Request([str(tmp_path / "text")], **wish), tmp_path / "my.yaml", say=silent)
    assert not (tmp_path / "my.yaml").exists()


def test_a_strange_name_stays_in_its_line(tmp_path: Path, slow: list[int]) -> None:
    name = write_lines(tmp_path / 'a\nmodel: {x: "\u001b[31m"} # b.txt', 1200, 0)
    config = write_configuration(Request([name]), tmp_path / "my.yaml", say=silent)
    assert resolve(str(tmp_path / "my.yaml")).config == config
    assert config.data.train == name
    assert "\u001b" not in (tmp_path / "my.yaml").read_text(encoding="utf-8")


def test_an_existing_file_stays_without_force(book: str, tmp_path: Path, slow: list[int]) -> None:
    out = tmp_path / "my.yaml"
    out.write_text("mine\n", encoding="utf-8")
    with pytest.raises(InputError, match="--force"):
        write_configuration(Request([book]), out, say=silent)
    assert out.read_text(encoding="utf-8") == "mine\n"
    write_configuration(Request([book]), out, force=True, say=silent)
    assert resolve(str(out)).config.data.train == book


def test_the_examples_are_configurations() -> None:
    """Each is complete, and says what it reached."""
    tasks = set()
    for path in sorted(EXAMPLES.glob("*.yaml")):
        config = resolve(str(path)).config
        assert (config.model.position, config.train.epochs) == ("rotary", None)
        assert "Reached:" in path.read_text(encoding="utf-8")
        tasks.add((config.task, config.data.tokens, bool(config.model.memory_length)))
    assert {("language_model", kind, False) for kind in ("character", "word", "bpe")} < tasks
    assert {("translation", "bpe", False), ("language_model", "character", True)} < tasks


def test_folders_patterns_and_several_files_are_one_text(tmp_path: Path, slow: list[int]) -> None:
    chapters = tmp_path / "book"
    (chapters / "two").mkdir(parents=True)
    for name in ("one.txt", "two/three.txt", "notes.md"):
        write_lines(chapters / name, 600, 3)
    for texts, count in (
        ([chapters], 2),
        ([chapters / "*.txt"], 1),
        ([chapters / "one.txt", chapters / "notes.md"], 2),
    ):
        config = write_configuration(
            Request([str(text) for text in texts], minutes=1), tmp_path / "my.yaml", force=True, say=silent
        )
        assert len(files_of(config.data, "train")) == count
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no file matches"):
        write_configuration(Request([str(tmp_path / "empty")]), tmp_path / "other.yaml", say=silent)
