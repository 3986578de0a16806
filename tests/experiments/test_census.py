"""The census: verdicts of rows, what becomes of processes that end badly, and going on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fullrank.checking import Finding, Report
from fullrank.core.errors import InputError
from fullrank.experiments import census as module
from fullrank.experiments.census import census, read_rows, row_of
from fullrank.files import silent

pytest.importorskip("transformers")
PAIR = ("gpt2", "GPT2LMHeadModel")


def report(*failing: str, layers: tuple[str, ...] = ()) -> Report:
    findings = [Finding("passes", "logits", 0.0, 1e-10, check="saved and loaded: same numbers")]
    findings += [Finding("not applicable", reason="forward takes no attention_mask", check="padding changes nothing")]
    findings += [Finding("fails", "logits", 1.0, 1e-10, check=check, layers=layers) for check in failing]
    return Report(tuple(findings), {"parameters": 7})


@pytest.mark.parametrize(
    ("failing", "verdict"),
    [
        ((), "passes"),
        (("future, by perturbation, sdpa",), "leaks"),
        (("cache = one pass", "rows of a batch are independent, training"), "leaks"),
        (("last position",), "leaks"),
        (("cache = one pass",), "fails otherwise"),
    ],
)
def test_verdicts(failing: tuple[str, ...], verdict: str) -> None:
    row = row_of(PAIR, report(*failing), 1.26)
    assert (row["type"], row["class"], row["verdict"], row["parameters"], row["seconds"]) == (*PAIR, verdict, 7, 1.3)
    assert [failure["check"] for failure in row["failures"]] == list(failing)
    assert row["not_applicable"] == {"padding changes nothing": "forward takes no attention_mask"}


def test_a_path_that_does_not_run_is_no_leak() -> None:
    finding = Finding(
        "fails", reason="the model has to run", remark="RuntimeError", check="future, by perturbation, sdpa"
    )
    assert row_of(PAIR, Report((finding,), {"parameters": 7}), 1.0)["verdict"] == "fails otherwise"


def test_a_failure_has_its_figures_and_layers() -> None:
    failure = row_of(PAIR, report("future, by gradient, evaluation", layers=("h.0.attn",)), 1.0)["failures"][0]
    assert (failure["layers"], failure["difference"], failure["tolerance"]) == (("h.0.attn",), 1.0, 1e-10)
    assert "remark" not in failure


def _sleeps(pair: tuple[str, str], out: Connection) -> None:
    time.sleep(60)


def _dies(pair: tuple[str, str], out: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leaves(pair: tuple[str, str], out: Connection) -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("instead", "verdict", "words"),
    [
        (_sleeps, "too slow", "not done after 0.5 seconds"),
        (_dies, "crashed", "its process was killed by SIGKILL"),
        (_leaves, "crashed", "its process ended with status 3"),
    ],
)
def test_bad_ends_are_rows(
    instead: Any, verdict: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_check", instead)
    said: list[str] = []
    limit = 0.5 if instead is _sleeps else 60
    (row,) = census(tmp_path, only=["gpt2"], limit=limit, say=said.append)
    assert (row["class"], row["verdict"], row["reason"]) == (PAIR[1], verdict, words)
    assert said == [f"1/1 {PAIR[1]}: {verdict}: {words}"]
    assert read_rows(tmp_path / "census.jsonl") == [row]
    assert json.loads((tmp_path / "census.json").read_text(encoding="utf-8")) == {"classes": [row]}


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_outcomes", lambda pairs, jobs, limit: (row_of(pair, report(), 1.0) for pair in pairs))
    first = census(tmp_path, only=["gpt2", "bart"], say=silent)
    assert [row["class"] for row in first] == ["BartForCausalLM", "BartForConditionalGeneration", PAIR[1]]
    book = tmp_path / "census.jsonl"
    lines = book.read_text(encoding="utf-8").splitlines()
    older = {**json.loads(lines[2]), "transformers": "5.0.0"}  # of another version: it counts for nothing
    book.write_text("\n".join([lines[0], json.dumps(older), lines[1][:40]]) + "\n", encoding="utf-8")
    said: list[str] = []
    assert census(tmp_path, only=["gpt2", "bart"], say=said.append) == first
    assert said[0] == f"1 of 3 classes are in {book}"
    assert [words.partition(" ")[0] for words in said[1:]] == ["1/2", "2/2"]
    monkeypatch.setattr(module, "_outcomes", lambda pairs, *_: iter(()) if not pairs else pytest.fail("checked again"))
    assert census(tmp_path, only=["gpt2", "bart"], say=silent) == first


def test_an_unknown_type(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--only: lama: no model type that predicts next tokens"):
        census(tmp_path, only=["lama", "gpt2"])


@pytest.mark.full
def test_model_types(tmp_path: Path) -> None:
    rows = {row["type"]: row for row in census(tmp_path, only=["gpt2", "llama"], jobs=2, say=silent)}
    assert {kind: row["verdict"] for kind, row in rows.items()} == {"gpt2": "passes", "llama": "passes"}
    assert all(0 < row["parameters"] < 500_000 and 0 < row["seconds"] < 60 for row in rows.values())
