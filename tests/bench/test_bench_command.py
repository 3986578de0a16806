"""`fullrank bench`: its JSON, and the last line of its table."""

import dataclasses
import json
import re

import pytest
import torch

import cli_runs
import measure
from machine import describe_machine
from suites import SUITES

SMALL = ("--heads", "2", "--head-dim", "8", "--rounds", "2", "--no-compile")


@pytest.fixture
def called(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *words: cli_runs.called("bench", *words)


@pytest.fixture
def without_memory(monkeypatch):
    """A system that does not count resident memory: no processes are started. Nothing is repeated for precision."""
    monkeypatch.setattr(measure, "counts_resident_memory", lambda: False)
    for name in ("growth", "layer"):
        monkeypatch.setitem(SUITES, name, dataclasses.replace(SUITES[name], shortest=0.0))


@pytest.mark.usefixtures("without_memory")
def test_json_says_everything(called):
    status, out, stderr = called("growth", "--lengths", "8,16,12", *SMALL, "--json")
    assert status == 0
    assert stderr.splitlines() == [f"growth: B 1, H 2, N {n}, D 8, forward + backward" for n in (8, 12, 16)]
    document = json.loads(out)
    (benchmark,) = document["benchmarks"]
    assert [row["length"] for row in benchmark["rows"]] == [8, 12, 16]
    assert [figure["name"] for figure in benchmark["rows"][0]["figures"]] == ["Mixhead A", "Mixhead B", "plain SDPA"]
    assert [(pair["mechanism"], pair["peer"]) for pair in benchmark["rows"][0]["against"]] == [
        ("Mixhead A", "plain SDPA"), ("Mixhead B", "plain SDPA"),
    ]  # fmt: skip
    assert all(
        pair["time"]["low"] <= pair["time"]["middle"] <= pair["time"]["high"]
        for pair in benchmark["rows"][0]["against"]
    )
    assert document["environment"]["threads"] == 1
    assert document["environment"]["torch"] == torch.__version__


@pytest.mark.usefixtures("without_memory")
def test_the_last_line_names_the_machine_and_all_ratios(called):
    """Forward and backward, over the first peer of each mechanism, in the order of lengths."""
    status, out, _ = called("layer", "--lengths", "8,16", *SMALL)
    assert status == 0
    machine = describe_machine()
    number = r"\d+\.\d\d"
    assert re.fullmatch(
        rf"to compare: {re.escape(machine['cpu'])} \({machine['cpu_capability']}\); layer, forward \+ backward, n 8, 16: "
        rf"Mixhead A / SDPA layer {number}, {number}; Mixhead B / SDPA layer {number}, {number}",
        out.splitlines()[-1],
    )
