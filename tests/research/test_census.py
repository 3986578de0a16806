"""The census: it goes on where it stopped, and checks a class."""

import json

import pytest

from fullrank.checking import Finding, Report
from research import census

pytest.importorskip("transformers")
PAIR = ("gpt2", "GPT2LMHeadModel")


def make_report(*failing, layers=(), difference=1.0):
    findings = [Finding("passes", "logits", 0.0, 1e-10, check="saved and loaded: same numbers")]
    findings += [Finding("fails", "logits", difference, 1e-10, check=check, layers=layers) for check in failing]
    return Report(tuple(findings), {"parameters": 7})


def test_it_goes_on_where_it_stopped(tmp_path, monkeypatch):
    checked = []

    def check(pair, limit):
        checked.append(pair[1])
        return census.row_of(pair, make_report(), 1.0)

    monkeypatch.setattr(census, "check_apart", check)
    file = tmp_path / "census.jsonl"
    rows = census.take_census(file, ["gpt2", "bart"], jobs=1, limit=1)
    assert [row["class"] for row in rows] == ["BartForCausalLM", "BartForConditionalGeneration", PAIR[1]] == checked
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1], json.dumps({**rows[2], "transformers": "5.0.0"})]) + "\n")
    assert census.take_census(file, ["gpt2", "bart"], jobs=1, limit=1) == rows
    assert checked[3:] == [PAIR[1]]


@pytest.mark.full
def test_a_model_type():
    row = census.check_class(PAIR)
    assert row["verdict"] == "passes"
    assert 0 < row["parameters"] < 500_000
