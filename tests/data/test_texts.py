"""Preparing corpora from files: splits, counts, settings, caching, damage, full disks, two processes at once."""

import errno
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data import Corpus, load_corpus, preparation, prepare, unigram_perplexity
from fullrank.data import files as files_module

LINES = [f"the {animal} number {i} saw a {animal}" for i in range(50) for animal in ("cat", "dog")]


@pytest.fixture
def files(tmp_path):
    """Three files of text and an empty cache."""
    for split, lines in {"train": LINES, "valid": ["the cat saw a yak"], "test": ["a dog", "", "the dog"]}.items():
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def config(folder: Path, **more: object) -> DataConfig:
    given = {"train": "train.txt", "valid": "valid.txt", "test": "test.txt", "dir": str(folder)} | more
    return DataConfig(**{"name": "text", "cache": str(folder / "cache")} | given)


def prepared_folders(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "corpora").iterdir())


def text_of(corpus: Corpus, split: str) -> str:
    return corpus.tokenizer.decode(corpus.ids(split).tolist())


def test_words_of_three_files(files):
    corpus = prepare(config(files))
    assert (corpus.name, corpus.label, corpus.is_slice) == ("text", "text (train.txt)", False)
    assert text_of(corpus, "train") == "\n".join(LINES) + "\n"
    assert text_of(corpus, "valid") == "the cat saw a <unk>\n"
    assert text_of(corpus, "test") == "a dog\n\nthe dog\n"
    test = corpus.splits["test"]
    assert test == {"tokens": 7, "words": 7, "characters": 15, "bytes": 15}
    assert corpus.splits["train"]["tokens"] == sum(len(line.split()) + 1 for line in LINES)
    ids = corpus.ids("train")
    assert ids.dtype == np.uint16
    assert not ids.flags.writeable
    with pytest.raises(InputError, match="splits train, valid, test, not 'dev'"):
        corpus.ids("dev")


@pytest.mark.parametrize("tokens", ["byte", "character", "bpe"])
def test_other_tokens_keep_the_text_exactly(files, tokens):
    (files / "test.txt").write_text("a\tdog  \u00e9t\u00e9 \r\n\n the dog\n", encoding="utf-8", newline="")
    corpus = prepare(config(files, tokens=tokens, train=["train.txt", "test.txt"]))
    ends = tokens == "byte"  # others read CRLF as a newline
    text = (files / "test.txt").read_bytes().decode()
    assert text_of(corpus, "train") == "\n".join(LINES) + "\n" + (text if ends else text.replace("\r", ""))
    test = corpus.splits["test"]
    assert (test["words"], test["characters"], test["bytes"]) == (5 + 3, 22 + ends, 24 + ends)
    if tokens != "bpe":
        assert test["tokens"] == {"byte": 24 + ends, "character": 22}[tokens]


@pytest.mark.parametrize("tokens", ["word", "bpe"])
def test_marks_in_a_text_are_text(files, tokens):
    (files / "train.txt").write_text("the <eos> a<eos>b\n<pad> <s> @@\n" * 9, encoding="utf-8")
    corpus = prepare(config(files, tokens=tokens))
    assert text_of(corpus, "train") == (files / "train.txt").read_text(encoding="utf-8")
    assert corpus.ids("train").tolist().count(corpus.tokenizer.eos_id) == 18


def test_no_eos(files):
    corpus = prepare(config(files, eos=False))
    assert text_of(corpus, "test") == "a dog the dog"
    assert corpus.tokenizer.eos_id == corpus.tokenizer.start_id
    assert corpus.splits["test"]["words"] == 7  # published counts have line ends whatever the tokens
    assert text_of(prepare(config(files, eos=False, tokens="bpe")), "test") == "a dog\n\nthe dog\n"


def test_lower_case_rare_words_and_largest_vocabulary(files):
    (files / "train.txt").write_text("A a a B b C\nD\n", encoding="utf-8")
    assert prepare(config(files, lowercase=True)).tokenizer.entries == ["a", "<eos>", "b", "c", "d", "<unk>"]
    assert prepare(config(files, min_count=2)).tokenizer.entries == ["<unk>", "<eos>", "a"]
    assert prepare(config(files, max_vocabulary=3)).tokenizer.entries == ["<unk>", "<eos>", "a"]
    assert len(prepare(config(files, tokens="character", max_vocabulary=3)).tokenizer) == 3


@pytest.mark.parametrize("tokens", ["word", "byte", "character", "bpe"])
@pytest.mark.parametrize("limit", [1, 333])
def test_max_tokens_cuts_training_exactly(files, tokens, limit):
    whole, corpus = prepare(config(files, tokens=tokens)), prepare(config(files, tokens=tokens, max_tokens=limit))
    assert corpus.splits["train"]["tokens"] == limit == len(corpus.ids("train"))
    assert text_of(whole, "train").startswith(text_of(corpus, "train"))
    kind = {"word": "", "byte": ", bytes", "character": ", characters", "bpe": ", BPE"}[tokens]
    assert corpus.label == f"text (train.txt{kind}; first {limit} tokens)"
    assert corpus.splits["test"] == whole.splits["test"]
    assert corpus.splits["train"]["bytes"] == len(text_of(corpus, "train").encode())
    if tokens == "word":  # its own vocabulary: of what is used
        assert set(corpus.tokenizer.entries) == {*text_of(corpus, "train").split(), "<eos>", "<unk>"}


def test_absent_splits_are_cut_from_the_end(files):
    told: list[str] = []
    corpus = prepare(config(files, valid=None, test=None), report=told.append)
    assert text_of(corpus, "train") == "\n".join(LINES[:90]) + "\n"
    assert corpus.splits["valid"]["tokens"] == sum(len(line.split()) + 1 for line in LINES[90:95])
    assert corpus.splits["test"]["tokens"] == sum(len(line.split()) + 1 for line in LINES[95:])
    note = "valid and test: the last lines of the training files, 5 % each"
    assert corpus.details["notes"] == [note]
    assert note in told
    only_valid = prepare(config(files, valid=None))
    assert text_of(only_valid, "train") == "\n".join(LINES[:95]) + "\n"
    assert text_of(only_valid, "test") == "a dog\n\nthe dog\n"


def test_second_call_only_opens(files, monkeypatch):
    first = prepare(config(files))
    monkeypatch.setattr(preparation, "write_corpus", None)  # would fail if called
    again = prepare(config(files))
    assert again.folder == first.folder
    assert again.splits == first.splits
    assert load_corpus(first.folder).tokenizer.fingerprint == first.tokenizer.fingerprint


def test_other_content_or_settings_is_another_corpus(files):
    folders = {
        prepare(config(files, **more)).folder for more in ({}, {"min_count": 2}, {"tokens": "byte"}, {"eos": False})
    }
    (files / "valid.txt").write_text("the dog\n", encoding="utf-8")
    folders.add(prepare(config(files)).folder)
    assert len(folders) == 5 == len(prepared_folders(files))


@pytest.mark.parametrize(
    ("victim", "damage"),
    [
        ("train.ids.bin", "truncated"),
        ("test.ids.bin", "changed"),
        ("corpus.json", "gone"),
        ("ids/tokenizer.json", "changed"),
        ("ids/vocabulary.json", "truncated"),
    ],
)
def test_a_damaged_cache_is_made_again(files, victim, damage):
    good = prepare(config(files))
    path = good.folder / victim
    content = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "changed":
            path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        case _:
            path.unlink()
    if damage == "changed" and victim == "ids/tokenizer.json":
        path.write_bytes(content.replace(b"cat", b"cow"))
    with pytest.raises((RunError, InputError)):
        load_corpus(good.folder)
    told: list[str] = []
    again = prepare(config(files), report=told.append)
    assert any("preparing it again" in line for line in told)
    assert again.splits == good.splits
    assert path.read_bytes() == content
    assert prepared_folders(files) == [good.folder]


def test_a_full_disk_leaves_nothing_and_destroys_nothing(files, monkeypatch):
    other = prepare(config(files, tokens="byte"))

    def fill(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fullrank.data.tokenizers.write_checked", fill)
        with pytest.raises(RunError, match=r"no space left on the disk of .*cache.*; .* set data.cache"):
            prepare(config(files))
    assert prepared_folders(files) == [other.folder]
    assert load_corpus(other.folder).splits == other.splits


def test_a_cache_that_cannot_be_written(files):
    (files / "cache").write_text("a file")
    with pytest.raises(InputError, match=r"data.cache: cannot write to .*set data.cache \(or FULLRANK_CACHE\)"):
        prepare(config(files))


ERRORS = {
    "unknown corpus": (
        {"name": "wikitext2", "train": None, "valid": None, "test": None},
        r"data.name: unknown corpus 'wikitext2'; did you mean 'wikitext-2'\?",
    ),
    "missing file": ({"train": "no.txt"}, r"data.train: no such file: .*no.txt"),
    "folder": ({"valid": "nothing"}, r"data.valid: no file matches .*nothing"),
    "empty": ({"test": "empty.txt"}, r"data.test: .*empty.txt is empty"),
    "no words": ({"train": "blank.txt"}, r"data.train: .*blank.txt: there are no words"),
    "too few lines": (
        {"train": "valid.txt", "valid": None},
        r"data.train: .*valid.txt: 1 lines are too few to cut 2 splits",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_key(files, case):
    more, message = ERRORS[case]
    (files / "empty.txt").touch()
    (files / "nothing").mkdir()
    (files / "blank.txt").write_text(" \n\t\n")
    name = more.get("name", "text")
    given = {"train": "train.txt", "valid": "valid.txt", "test": "test.txt"} | {
        k: v for k, v in more.items() if k != "name"
    }
    with pytest.raises(InputError, match=message):
        prepare(DataConfig(name=name, dir=str(files), cache=str(files / "cache"), **given))


def test_ids_beyond_sixteen_bits(files):
    words = [f"w{i}" for i in range(70_000)]
    (files / "train.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    corpus = prepare(config(files))
    assert len(corpus.tokenizer) == 70_002
    assert corpus.ids("train").dtype == np.int32
    assert text_of(corpus, "train").split() == words


def test_unigram_perplexity(files):
    corpus = prepare(config(files))
    counts = {"the": 1, "<eos>": 1} | {word: 1 for line in LINES for word in line.split()} | {"<unk>": 1}  # add one
    for line in LINES:
        for word in [*line.split(), "<eos>"]:
            counts[word] += 1
    total = sum(counts.values())
    product = 1.0
    test = ["a", "dog", "<eos>", "<eos>", "the", "dog", "<eos>"]
    for word in test:
        product *= counts[word] / total
    assert unigram_perplexity(corpus, "test") == pytest.approx(product ** (-1 / len(test)), rel=1e-12)


def test_memory_does_not_grow_with_the_text(files, monkeypatch):
    """1 MB of text, read in pieces of 64 kB, passes through less memory than its words would take at once (over 7 MB)."""
    monkeypatch.setattr(files_module, "_PIECE", 1 << 16)
    line = " ".join(f"word{i % 997}" for i in range(1000)) + "\n"
    (files / "train.txt").write_text(line * 130, encoding="utf-8")
    tracemalloc.start()
    corpus = prepare(config(files))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.splits["train"]["tokens"] == 130 * 1001
    assert peak < 4e6
