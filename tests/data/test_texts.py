"""Preparing corpora from files: splits, counts, settings, caching, damage, full disks, two processes at once."""

import errno

import numpy as np
import pytest

from fullrank.config.run import DataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data import load_corpus, prepare, unigram_perplexity
from fullrank.data.corpora import files_of

LINES = [f"the {animal} number {i} saw a {animal}" for i in range(50) for animal in ("cat", "dog")]


@pytest.fixture
def files(tmp_path):
    """Three files of text and an empty cache."""
    for split, lines in {"train": LINES, "valid": ["the cat saw a yak"], "test": ["a dog", "", "the dog"]}.items():
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def config(folder, **more):
    settings = {"train": "train.txt", "valid": "valid.txt", "test": "test.txt", "dir": str(folder)} | more
    return DataConfig(**{"name": "text", "cache": str(folder / "cache")} | settings)


def prepared_folders(folder):
    return sorted((folder / "cache" / "corpora").iterdir())


def text_of(corpus, split):
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


@pytest.mark.parametrize("tokens", ["word", "byte", "character", "bpe"])
@pytest.mark.parametrize("limit", [1, 333])
def test_max_tokens_cuts_training_exactly(files, tokens, limit):
    uncut = prepare(config(files, tokens=tokens))
    corpus = prepare(config(files, tokens=tokens, max_tokens=limit))
    assert corpus.splits["train"]["tokens"] == limit == len(corpus.ids("train"))
    assert text_of(uncut, "train").startswith(text_of(corpus, "train"))
    kind = {"word": "", "byte": ", bytes", "character": ", characters", "bpe": ", BPE"}[tokens]
    assert corpus.label == f"text (train.txt{kind}; first {limit} tokens)"
    assert corpus.splits["test"] == uncut.splits["test"]
    assert corpus.splits["train"]["bytes"] == len(text_of(corpus, "train").encode())
    if tokens == "word":  # the vocabulary of the tokens that are used
        assert set(corpus.tokenizer.entries) == {*text_of(corpus, "train").split(), "\n", "<unk>"}


def test_absent_splits_are_cut_from_the_end(files, caplog):
    caplog.set_level("INFO")
    corpus = prepare(config(files, valid=None, test=None))
    assert text_of(corpus, "train") == "\n".join(LINES[:90]) + "\n"
    assert corpus.splits["valid"]["tokens"] == sum(len(line.split()) + 1 for line in LINES[90:95])
    assert corpus.splits["test"]["tokens"] == sum(len(line.split()) + 1 for line in LINES[95:])
    note = "valid and test: the last lines of the training files, 5 % each"
    assert corpus.details["notes"] == [note]
    assert note in caplog.messages
    only_valid = prepare(config(files, valid=None))
    assert text_of(only_valid, "train") == "\n".join(LINES[:95]) + "\n"
    assert text_of(only_valid, "test") == "a dog\n\nthe dog\n"


@pytest.mark.parametrize("between", ["\r", " "])
def test_a_text_without_newlines_is_cut_by_bytes(files, between):
    text = between.join(LINES)
    (files / "train.txt").write_text(text, encoding="utf-8", newline="")
    corpus = prepare(config(files, tokens="character", valid=None, test=None))
    assert "".join(text_of(corpus, split) for split in corpus.splits) == text.replace("\r", "\n")
    assert [corpus.splits[split]["bytes"] for split in ("valid", "test")] == [len(text) // 20] * 2


def test_other_content_or_settings_is_another_corpus(files):
    folders = {prepare(config(files, **more)).folder for more in ({}, {"min_count": 2}, {"tokens": "byte"})}
    (files / "valid.txt").write_text("the dog\n", encoding="utf-8")
    folders.add(prepare(config(files)).folder)
    assert len(folders) == 4 == len(prepared_folders(files))


def test_a_full_disk_leaves_nothing_and_destroys_nothing(files, monkeypatch):
    of_bytes = prepare(config(files, tokens="byte"))

    def fill(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fullrank.data.tokenizers.write_checked", fill)
        with pytest.raises(RunError, match=r"no space left on the disk of .*cache.*; .* set data.cache"):
            prepare(config(files))
    assert prepared_folders(files) == [of_bytes.folder]
    assert load_corpus(of_bytes.folder).splits == of_bytes.splits


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


def test_folder_with_brackets_in_its_name(tmp_path):
    folder = tmp_path / "part [1]"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n", encoding="utf-8")
    assert files_of(DataConfig(name="text", train=str(folder)), "train") == [folder / "a.txt"]
    assert files_of(DataConfig(name="text", train="?.txt", dir=str(folder)), "train") == [folder / "a.txt"]


def test_bytes_of_a_cut_character_are_counted_as_they_are(files):
    (files / "train.txt").write_text("\u00e9\u65e5\u672c", encoding="utf-8")
    corpus = prepare(config(files, tokens="byte", max_tokens=4))
    assert {key: corpus.splits["train"][key] for key in ("tokens", "bytes")} == {"tokens": 4, "bytes": 4}
