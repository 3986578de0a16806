"""Corpora of sentence pairs: files found and checked, text to ids and back, folders that appear whole or not at all."""

import hashlib
import json
from collections import Counter

import numpy as np
import pytest

from fullrank.config.run import DataConfig, list_corpora
from fullrank.core.errors import InputError, RunError
from fullrank.data import load_corpus, prepare

GERMAN = ["ein Hund läuft .", "eine Katze läuft .", "ein Hund schläft nicht .", "zwei Katzen schlafen ."]
ENGLISH = ["a dog runs .", "a cat runs .", "a dog does not sleep .", "two cats sleep ."]


def write(folder, name, source, target):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.de").write_text("".join(f"{line}\n" for line in source), encoding="utf-8", newline="")
    (folder / f"{name}.en").write_text("".join(f"{line}\n" for line in target), encoding="utf-8", newline="")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "train", GERMAN * 3, ENGLISH * 3)
    write(tmp_path, "valid", GERMAN[:2], ENGLISH[:2])
    write(tmp_path, "test", ["ein Wolf 🐺 läuft .", "", "\t ein  Hund\u2028 "], ["a wolf 🐺 runs .", "", "a  dog\r"])
    return tmp_path


def config(folder, **keys):
    base = {"name": "parallel", "dir": str(folder), "cache": str(folder / "cache"), "source": "de", "target": "en"}
    return DataConfig(**{**base, "train": "train", "valid": "valid", "test": "test", **keys})


def sentences(pairs, side):
    return [getattr(pairs, side)[i].tolist() for i in range(len(pairs))]


def entries_of(pairs, side):
    entries = getattr(pairs, side).language.entries
    return [[*map(entries.__getitem__, ids)] for ids in sentences(pairs, side)]


def test_words_with_a_vocabulary_for_each_language(folder):
    corpus = prepare(config(folder, tokens="word", vocabulary="separate"))
    for language, lines in ((corpus.source, GERMAN), (corpus.target, ENGLISH)):
        counts = Counter(word for line in lines * 3 for word in line.split())
        assert language.entries == ["\n", "<unk>", *sorted(counts, key=lambda word: (-counts[word], word))]
        assert (language.eos_id, language.unk_id) == (0, 1)
    assert corpus.source.fingerprint != corpus.target.fingerprint
    train = corpus.pairs("train")
    assert len(train) == 12
    for side, lines in (("source", GERMAN), ("target", ENGLISH)):
        assert entries_of(train, side) == [line.split() for line in lines * 3]
    assert corpus.target.decode(train.target[2]) == corpus.target.tokens(train.target[2]) == ENGLISH[2]
    test = corpus.pairs("test")
    assert entries_of(test, "source") == [["ein", "<unk>", "<unk>", "läuft", "."], [], ["ein", "Hund"]]
    assert test.target.read_lines() == ["a wolf 🐺 runs .", "", "a dog"]
    assert test.source.read_lines() == ["ein Wolf 🐺 läuft .", "", "ein Hund"]
    counts = corpus.splits["test"]
    assert counts.pop("pairs") == 3
    for side in ("source", "target"):
        figures = {unit: counts.pop(f"{side}_{unit}") for unit in ("tokens", "words", "unknown")}
        assert figures == {"tokens": 7 + 3, "words": 7, "unknown": 2}
    assert counts == {}
    digest = hashlib.sha256((corpus.folder / "test.target.bin").read_bytes()).hexdigest()
    assert corpus.checksums["test"]["test.target.bin"] == digest


def test_joint_bpe_knows_every_character_and_gives_every_line_back(folder):
    corpus = prepare(config(folder, max_vocabulary=300))
    assert 258 < len(corpus.source) <= 300
    assert corpus.source.fingerprint == corpus.target.fingerprint
    for split in ("train", "valid", "test"):
        pairs = corpus.pairs(split)
        assert [corpus.target.decode(ids) for ids in sentences(pairs, "target")] == pairs.target.read_lines()
        assert [corpus.source.decode(ids) for ids in sentences(pairs, "source")] == pairs.source.read_lines()
        assert corpus.splits[split]["source_unknown"] == 0
    # a word is the same wherever it stands
    hund = corpus.source.encode("Hund")
    assert corpus.source.encode("ein Hund") == corpus.source.encode("ein") + hund


@pytest.mark.parametrize("damage", ["train.source.bin", "valid.target.offsets", "source/vocabulary.json"])
def test_damage_is_found_and_mended(folder, damage, caplog):
    corpus = prepare(config(folder))
    path = corpus.folder / damage
    good = path.read_bytes()
    path.write_bytes(good[:-3] + b"xy\n")
    with pytest.raises(RunError, match="damaged"):
        load_corpus(corpus.folder)
    caplog.set_level("INFO")
    again = prepare(config(folder))
    assert "cannot be used, preparing it again" in caplog.messages[0]
    assert (again.folder, path.read_bytes()) == (corpus.folder, good)
    path.unlink()
    with pytest.raises((RunError, InputError)):
        load_corpus(corpus.folder)


def test_cleaning_by_length_and_ratio(folder):
    source = ["w " * n for n in (3, 4, 5, 6, 1, 2)]
    target = ["v " * n for n in (3, 6, 6, 5, 2, 1)]
    write(folder, "train", source, target)
    write(folder, "valid", ["w " * 9], ["v"])
    corpus = prepare(config(folder, tokens="word", max_length=5, max_ratio=1.5))
    # 3/3 stays; 4/6, 5/6 and 6/5 are too long; 1/2 and 2/1 are beyond 1.5
    assert corpus.details["cleaning"] == {"given": 6, "kept": 1, "empty": 0, "too_long": 3, "ratio": 2, "valid": 0}
    assert corpus.splits["valid"]["pairs"] == 1
    border = prepare(config(folder, tokens="word", max_length=6, max_ratio=1.5))
    assert border.details["cleaning"] == {"given": 6, "kept": 4, "empty": 0, "too_long": 0, "ratio": 2, "valid": 0}
    with pytest.raises(
        InputError, match=r"data.train: none of 6 training pairs is left: 0 with an empty side, 6 longer"
    ):
        prepare(config(folder, max_length=1, max_ratio=1.0))


@pytest.fixture(scope="module")
def real_multi30k(corpora, tmp_path_factory):
    config = DataConfig(name="multi30k-de-en", dir=str(corpora), cache=str(tmp_path_factory.mktemp("cache")))
    return prepare(config, allow_slice=False)


@pytest.mark.full
def test_multi30k_is_the_published_one(corpora, real_multi30k):
    corpus = real_multi30k
    assert [counts["pairs"] for counts in corpus.splits.values()] == [29_000, 1_014, 1_000, 1_000]
    assert (corpus.label, corpus.is_slice) == ("multi30k-de-en", False)
    assert len(corpus.source) == len(corpus.target) == 10_000
    text = (corpora / "multi30k" / "test2016.en").read_text(encoding="utf-8").split("\n")[:-1]
    test = corpus.pairs("test")
    assert test.target.read_lines() == [" ".join(line.split()) for line in text]
    assert [corpus.target.decode(ids) for ids in sentences(test, "target")] == test.target.read_lines()
    assert corpus.splits["test"]["target_words"] == sum(len(line.split()) for line in text)
    words = np.diff(np.fromfile(corpus.folder / "test.target.offsets", dtype="<i8"))
    assert int(words.sum()) + 1000 == corpus.splits["test"]["target_tokens"]
    record = json.loads((corpus.folder / "corpus.json").read_text(encoding="utf-8"))
    assert {row["sha256"] for row in record["details"]["sources"]} == set(
        list_corpora()["multi30k-de-en"].sha256.values()
    )


def test_splits_that_are_not_given_are_the_last_training_pairs(folder):
    """5 % each, of several files together; line k of both sides stays one pair."""
    for name, first, count in (("one", 0, 70), ("two", 70, 30)):
        numbers = range(first, first + count)
        write(folder, name, [f"Ä {i}" for i in numbers], [f"e {i}" for i in numbers])
    corpus = prepare(config(folder, train=["one", "two"], valid=None, test=None, tokens="word", min_count=1))
    assert [corpus.splits[split]["pairs"] for split in ("train", "valid", "test")] == [90, 5, 5]
    assert corpus.pairs("valid").target.read_lines() == [f"e {i}" for i in range(90, 95)]
    assert corpus.pairs("test").source.read_lines() == [f"Ä {i}" for i in range(95, 100)]
    assert "the last pairs of the training files, 5 % each" in corpus.details["notes"][0]


@pytest.mark.parametrize("moses", [False, True])
def test_neighbours_are_joined_while_both_sides_are_short_enough(folder, moses):
    if moses:
        pytest.importorskip("sacremoses")
    corpus = prepare(config(folder, tokens="word", moses=moses, concatenate=9))
    assert corpus.label.endswith("joined to 9 tokens)")
    pairs = corpus.pairs("train")
    for side, lines in (("source", GERMAN * 3), ("target", ENGLISH * 3)):
        joined = getattr(pairs, side)
        assert [word for line in joined.read_lines() for word in line.split()] == " ".join(lines).split()
        assert joined.read_tokens() == [joined.language.tokens(ids) for ids in sentences(pairs, side)]
    both = [pairs.source.lengths, pairs.target.lengths]
    assert all(lengths.max() <= 9 for lengths in both)
    longer = np.maximum(both[0][:-1] + both[0][1:], both[1][:-1] + both[1][1:])
    assert (longer > 9).all(), "two that fit together are together"
