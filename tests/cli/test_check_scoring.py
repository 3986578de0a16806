"""`fullrank check --scoring`: a function of a module in the working directory; exit status, JSON, the table, errors."""

from __future__ import annotations

import json
from pathlib import Path

import cli_runs
import pytest

MODULE = """
import math

def right(ids):
    return [math.log(5)] * len(ids)

def start(ids):
    return 0.5 + math.log(5) * len(ids)

def words(text):
    return {"nll": 2.0 * len(text.split()), "words": len(text.split())}

def characters(text):
    return {"nll": 2.0 * len(text.split()), "words": len(text)}

number = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_scores.py").write_text(MODULE)
    (tmp_path / "text.txt").write_text("one two three\n\nfour five\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def test_a_right_function_passes() -> None:
    code, out, said = cli_runs.called("check", "--scoring", "my_scores:right", "--vocab-size", 5, "--length", 9)
    assert (code, said) == (0, "")
    assert "my_scores:right: a scoring function" in out
    assert out.count("probabilities sum to one") == 1
    assert "4 checks pass, 3 are not applicable" in out


def test_a_wrong_one_fails() -> None:
    code, out, _ = cli_runs.called("check", "--scoring", "my_scores:start", "--vocab-size", 5, "--json")
    assert code == 1
    found = json.loads(out)
    assert (found["passes"], found["name"], found["length"]) == (False, "my_scores:start", 67)
    assert [one["check"] for one in found["checks"] if one["verdict"] == "fails"] == ["every token is scored once"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--scoring", "my_scores:right"], "--scoring: give --vocab-size N"),
        (["--scoring", "my_scores", "--vocab-size", 5], "MODULE:FUNCTION is needed, as in my_model:make"),
        (["--scoring", "my_scores:left", "--vocab-size", 5], "no such function (AttributeError"),
        (["--scoring", "no_such_module:left", "--vocab-size", 5], "no such function (ModuleNotFoundError"),
        (["--scoring", "my_scores:number", "--vocab-size", 5], "a function is needed, given int"),
        (["gpt2", "--scoring", "my_scores:words", "--vocab-size", 5], "check them one at a time"),
        ([], "MODEL: give what to check"),
    ],
)
def test_errors(words: list[object], says: str) -> None:
    code, out, said = cli_runs.called("check", *words)
    assert code == 2
    assert says in " ".join(f"{out} {said}".split())
