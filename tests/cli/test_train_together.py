"""`fullrank train --procs N`: what torchrun is asked to run, and faults that are told before any process starts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fullrank.cli import main
from fullrank.training import distributed

TINY = "mixhead/table1-vanilla"


def test_every_option_reaches_the_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(distributed, "launch", lambda processes, words: launched.append((processes, list(words))) or 3)
    options = ["--row", "b", "--scale", "tiny", "--out", str(tmp_path / "run"), "--kernel", "blocks", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(["train", TINY, "train.steps=2", *options, "--procs", "2"])
    assert ended.value.code == 3
    (processes, words) = launched[0]
    assert processes == 2
    assert words[:3] == ["train", TINY, "train.steps=2"]
    pairs = set(zip(words[3:], [*words[4:], ""], strict=True))
    assert {("--row", "b"), ("--scale", "tiny"), ("--out", str(tmp_path / "run")), ("--kernel", "blocks")} <= pairs
    assert "--quiet" in words
    assert "--procs" not in words


def test_a_fault_of_the_configuration_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "launch", lambda processes, words: pytest.fail("no process is to start"))
    with pytest.raises(SystemExit, match="2"):
        main(["train", TINY, "train.stepz=2", "--scale", "tiny", "--procs", "2"])
    assert capsys.readouterr().err.count("train.stepz") == 1


def test_torchrun_itself_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that fails says why; the lines of torchrun's loggers would bury it."""
    heard: list[bool] = []
    monkeypatch.delenv("LOGLEVEL", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        "torch.distributed.run.run",
        lambda _: heard.append(logging.getLogger("torch.distributed.elastic").isEnabledFor(logging.ERROR)),
    )
    try:
        assert distributed.launch(2, ["info"]) == 0
    finally:
        logging.disable(logging.NOTSET)
    assert heard == [False]
