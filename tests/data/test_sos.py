"""`data.sos`: every line begins with <sos>. Tokens, counts, cache keys, real corpora."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fullrank.config.data import DataConfig
from fullrank.data import Corpus, WordVocabulary, prepare

WORDS = WordVocabulary.from_counts(Counter(["a", "b", "b", "<eos>", "<sos>", "<eos>", "<sos>"]), line_start=True)


def config(folder: Path, **more: object) -> DataConfig:
    given = {"train": "train.txt", "valid": "valid.txt", "test": "test.txt", "dir": str(folder)} | more
    return DataConfig(name="text", cache=str(folder / "cache"), **given)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for split, text in {"train": "a b\n\nb a\n", "valid": "b\n", "test": "\na\n\nb a"}.items():
        (tmp_path / f"{split}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def entries(corpus: Corpus, split: str) -> str:
    assert isinstance(corpus.tokenizer, WordVocabulary)
    return " ".join(corpus.tokenizer.entries[i] for i in corpus.ids(split).tolist())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\n", "<sos> a b <eos>"),
        ("a\n\nb\n", "<sos> a <eos> <sos> <eos> <sos> b <eos>"),
        ("a\nb", "<sos> a <eos> <sos> b"),
        ("\n", "<sos> <eos>"),
        ("", ""),
    ],
)
def test_every_line_begins_with_sos(text: str, expected: str) -> None:
    """The form of the paper's code: `<sos>` words `<eos>`, for a blank line, too."""
    assert WORDS.words(text) == expected.split()
    assert WORDS.decode(WORDS.encode(text)) == text
    assert WORDS.start_id == WORDS.eos_id != WORDS.sos_id


def test_penn_treebank(corpora: Path, tmp_path: Path) -> None:
    """The counts of the paper's code: 10,001 entries, 77,130 and 86,191 tokens; it is no slice of the published corpus."""
    given = DataConfig(name="ptb", dir=str(corpora), cache=str(tmp_path), sos=True)
    corpus = prepare(given, allow_slice=False)
    assert len(corpus.tokenizer) == 10_001
    assert [corpus.splits[split]["tokens"] for split in ("valid", "test")] == [77_130, 86_191]
    assert [corpus.splits[split]["words"] for split in ("train", "valid", "test")] == [929_589, 73_760, 82_430]
    raw = (corpora / "ptb" / "ptb.test.txt").read_text(encoding="utf-8")
    expected = [word for line in raw.splitlines() for word in ["<sos>", *line.split(), "<eos>"]]
    assert entries(corpus, "test").split() == expected
    assert (corpus.label, corpus.is_slice) == ("ptb (with <sos>)", False)
    assert prepare(replace(given, max_tokens=5000)).label == "ptb (slice; with <sos>)"
