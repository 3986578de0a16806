"""`fullrank train --procs N`: what torchrun is asked to run, and faults that are reported before any process starts."""

import itertools
import logging

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fullrank import files
from fullrank.cli import main
from fullrank.cli.app import log_to_stderr
from fullrank.training import device as distributed

TINY = "mixhead/table1-vanilla"


def test_every_option_reaches_the_processes(monkeypatch, tmp_path):
    launched = []
    monkeypatch.setattr(distributed, "launch", lambda processes, words: launched.append((processes, list(words))) or 3)
    options = ["--row", "b", "--scale", "tiny", "--out", str(tmp_path / "run"), "--kernel", "native", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *options, "--procs", "2", "--import", "json", "--", TINY, "train.steps=2"])
    assert ended.value.code == 3
    (processes, words) = launched[0]
    assert processes == 2
    assert words[0] == "train"
    assert words[-3:] == ["--", TINY, "train.steps=2"]
    pairs = set(itertools.pairwise(words))
    assert {
        ("--import", "json"),
        ("--row", "b"),
        ("--scale", "tiny"),
        ("--out", str(tmp_path / "run")),
        ("--kernel", "native"),
    } <= pairs
    assert "--quiet" in words


def test_a_fault_of_the_configuration_is_reported_once(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "launch", lambda processes, words: pytest.fail("no process is to start"))
    with pytest.raises(SystemExit, match="2"):
        main(["train", TINY, "train.stepz=2", "--scale", "tiny", "--procs", "2"])
    assert capsys.readouterr().err.count("train.stepz") == 1


@pytest.mark.parametrize(("codes", "status"), [({0: 1, 1: -9}, 1), ({0: -15, 1: 2}, 2)])
def test_a_process_that_has_said_why_gives_the_status(codes, status, monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "CRITICAL")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("torch.distributed.run.run", fail_with(codes))
    assert distributed.launch(2, ["train"]) == status


def fail_with(codes):
    """A torchrun whose processes end with these exit statuses; a negative one is that of a signal."""

    def run(arguments):
        raise ChildFailedError(
            "fullrank", {number: ProcessFailure(number, 1, code, "none") for number, code in codes.items()}
        )

    return run


def test_a_rank_without_a_world_is_no_other_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert files.is_main_process()
    with log_to_stderr():
        assert logging.getLogger("fullrank").isEnabledFor(logging.INFO)
