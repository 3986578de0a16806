"""Corpora made in pieces: the same bytes in any number of processes, and nothing left of a preparation that stopped."""

import os
import signal
import sys

import pytest

from fullrank import files as files_module
from fullrank.config.run import DataConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data import Tokenizer, preparation, prepare
from fullrank.files import Section, read_pieces

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere one process makes all pieces")
LINES = [f"{'the' * (i % 3 + 1)} cat {i % 37} saw Ärger  {'x' * (i % 11)}" for i in range(400)]
SETTINGS = {
    "words": {},
    "few words": {"max_vocabulary": 20, "lowercase": True},
    "characters": {"tokens": "character", "max_tokens": 7001},
    "bpe": {"tokens": "bpe", "max_vocabulary": 300, "max_tokens": 3001},
}


def config(folder, cache, **more):
    splits = {split: str(folder / f"{split}.txt") for split in ("valid", "test")}
    splits["train"] = [str(folder / "train.txt"), str(folder / "more.txt")]
    return DataConfig(name="text", cache=str(folder / cache), **splits, **more)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Text of about forty pieces, in two files without a last line end."""
    (tmp_path / "train.txt").write_text("\n".join(LINES), encoding="utf-8")
    (tmp_path / "more.txt").write_text("  ".join(LINES), encoding="utf-8")
    for split in ("valid", "test"):
        (tmp_path / f"{split}.txt").write_text("\n".join(LINES[:20]), encoding="utf-8")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return tmp_path


def in_small_pieces(files, monkeypatch):
    monkeypatch.setattr(files_module, "_PIECE", 1000)
    monkeypatch.setattr(files_module, "_LONGEST_LINE", 300)
    assert sum(1 for name in ("train", "more") for _ in read_pieces(Section(files / f"{name}.txt"), exact=False)) > 20


@pytest.mark.parametrize("name", SETTINGS)
def test_pieces_and_processes_change_nothing(files, monkeypatch, name):
    at_once = content(prepare(config(files, "whole", **SETTINGS[name])).folder)
    in_small_pieces(files, monkeypatch)
    pieces = content(prepare(config(files, "pieces", **SETTINGS[name])).folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert content(prepare(config(files, "alone", **SETTINGS[name])).folder) == pieces
    if "max_tokens" in SETTINGS[name]:  # the text of the last tokens is counted without its white space
        del at_once["corpus.json"], pieces["corpus.json"]
    assert pieces == at_once


def test_what_stops_leaves_nothing(files, monkeypatch):
    in_small_pieces(files, monkeypatch)

    def stop(line):
        if line.endswith("encoding train"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation.logger, "info", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(files, "cache"))
    with monkeypatch.context() as patch:  # as the system does for want of memory
        patch.setattr(Tokenizer, "cut", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RunError, match="was killed"):
            prepare(config(files, "cache"))
    for encoding in ("latin1", "utf-16"):
        (files / "more.txt").write_text("café", encoding=encoding)
        with pytest.raises(InputError, match=rf"more.txt is not UTF-8 text.*iconv -f {encoding}"):
            prepare(config(files, "cache"))
    assert list((files / "cache" / "corpora").iterdir()) == []
