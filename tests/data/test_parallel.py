"""Corpora made in parts: the same bytes in any number of processes, and after any interruption."""

import io
import multiprocessing
import os
import signal
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError, Interrupted
from fullrank.data import WordVocabulary, parallel, prepare, texts
from fullrank.data import files as files_module
from fullrank.data.files import Part, Section, parts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere one process makes all parts")
LINES = [f"{'the' * (i % 3 + 1)} cat {i % 37} saw Ärger  {'x' * (i % 11)}" for i in range(400)]
SETTINGS = {
    "words": {},
    "few words": {"max_vocabulary": 20, "lowercase": True, "sos": True},
    "no line ends": {"eos": False, "min_count": 3},
    "characters": {"tokens": "character", "max_tokens": 7001},
    "bpe": {"tokens": "bpe", "max_vocabulary": 300, "max_tokens": 3001},
}


def config(folder: Path, cache: str, **more: object) -> DataConfig:
    given = {split: str(folder / f"{split}.txt") for split in ("valid", "test")}
    train = [str(folder / "train.txt"), str(folder / "more.txt")]
    return DataConfig(name="text", train=train, cache=str(folder / cache), **given, **more)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Text of about twenty parts, in two files without a last line end."""
    (tmp_path / "train.txt").write_text("\n".join(LINES), encoding="utf-8")
    (tmp_path / "more.txt").write_text("  ".join(LINES), encoding="utf-8")
    for split in ("valid", "test"):
        (tmp_path / f"{split}.txt").write_text("\n".join(LINES[:20]), encoding="utf-8")
    monkeypatch.setattr(files_module, "_PIECE", 500)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return tmp_path


def one_part(files: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> dict[str, bytes]:
    """The corpus as it is made in one part of each file, and parts of a thousand bytes from now on."""
    whole = content(prepare(config(files, "whole", **more)).folder)
    monkeypatch.setattr(files_module, "_PART", 1000)
    assert 15 < sum(1 for path in ("train", "more") for _ in parts(Section(files / f"{path}.txt"), exact=False)) < 40
    return whole


@pytest.mark.parametrize("name", SETTINGS)
def test_parts_and_processes_change_nothing(files, monkeypatch, name):
    whole = one_part(files, monkeypatch, **SETTINGS[name])
    monkeypatch.setattr(texts, "_TYPES_AT_ONCE", 50)
    monkeypatch.setattr(texts, "_OPEN_FILES", 3)
    assert content(prepare(config(files, "parts", **SETTINGS[name])).folder) == whole


def test_a_last_line_without_an_end_is_no_beginning_of_the_next_file(files):
    expected = sum(len((files / f"{name}.txt").read_text(encoding="utf-8").split()) for name in ("train", "more"))
    assert prepare(config(files, "cache")).splits["train"].words == expected + len(LINES) + 1


def test_a_file_that_becomes_shorter_is_an_error(files):
    part = Part(files / "train.txt", (0, 1 << 20), True, True)
    with pytest.raises(ValueError, match=r"train.txt became shorter while it was read"):
        list(part.texts(exact=False, key="data.train"))


@pytest.mark.parametrize("stage", ["counts", "train"])
def test_a_killed_preparation_goes_on(files, monkeypatch, stage):
    """SIGKILL to the process, whose own processes die with it; what they had finished is not made again."""
    whole = one_part(files, monkeypatch)
    real = parallel._recording

    def slow(work: parallel.Work, task: parallel._Task) -> parallel.Counts:
        if f"-{stage}-" in task[1].name:
            time.sleep(0.03)
        return real(work, task)

    with monkeypatch.context() as patch:
        patch.setattr(parallel, "_recording", slow)
        process = multiprocessing.get_context("fork").Process(target=prepare, args=(config(files, "cache"),))
        process.start()
        folder = files / "cache" / "corpora"
        while len(list(folder.glob(f".tmp-*/part-{stage}-*.json"))) < 5:
            assert process.is_alive()
            time.sleep(0.002)
        of_process = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.join()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in of_process):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(of_process) == 2
    said: list[str] = []
    assert content(prepare(config(files, "cache"), report=said.append).folder) == whole
    assert any("parts were done before" in line for line in said)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_ctrl_c_leaves_what_is_finished_and_an_error_nothing(files, monkeypatch):
    whole = one_part(files, monkeypatch)
    monkeypatch.setattr(parallel, "_LINES_EVERY", 0.0)

    def stop(line: str) -> None:
        if line.startswith("encoding train: "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(files, "cache"), report=stop)
    (kept,) = (files / "cache" / "corpora").iterdir()
    assert {"vocabulary.json", "train.bin"} & {path.name for path in kept.iterdir()} == {"vocabulary.json"}
    assert list(kept.glob("part-train-0-*.json"))
    said: list[str] = []
    assert content(prepare(config(files, "cache"), report=said.append).folder) == whole
    assert not any("making a word vocabulary" in line for line in said)
    (files / "more.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"more.txt is not UTF-8 text"):
        prepare(config(files, "cache"))
    assert len(list((files / "cache" / "corpora").iterdir())) == 1


def test_a_process_that_is_killed_for_want_of_memory(files, monkeypatch):
    whole = one_part(files, monkeypatch)
    real = parallel._recording

    def dies(work: parallel.Work, task: parallel._Task) -> parallel.Counts:
        if "-train-7-" in task[1].name:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(work, task)

    with monkeypatch.context() as patch:
        patch.setattr(parallel, "_recording", dies)
        with pytest.raises(Interrupted, match=r"was killed .* goes on with the parts that are left"):
            prepare(config(files, "cache"))
    assert content(prepare(config(files, "cache")).folder) == whole


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(files, monkeypatch):
    one_part(files, monkeypatch)
    monkeypatch.setattr(parallel, "_LINES_EVERY", 0.0)
    said: list[str] = []
    prepare(config(files, "lines"), report=said.append)
    assert sum(line.startswith("encoding train: 0 of 0 MB") for line in said) > 10
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    said.clear()
    prepare(config(files, "bar"), report=said.append)
    assert "encoding train" in terminal.getvalue()
    assert not any(" MB" in line for line in said)
    terminal.truncate(0)
    prepare(config(files, "quiet"))
    assert not terminal.getvalue().strip("\0")


def test_only_entries_that_fit_in_are_held():
    """200,000 types, of which 1,000 are kept, in less memory than a list of them takes (over 14 MB)."""
    counts = ((f"{i:07}", i % 1009) for i in range(200_000))
    tracemalloc.start()
    vocabulary = WordVocabulary.from_counts(counts, max_vocabulary=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert vocabulary.entries[:3] == ["<unk>", "0001008", "0002017"]
    assert len(vocabulary) == 1000
    assert peak < 9e6
