"""Masked language models in a report: compared with each other, under their own name, and with nobody else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from reporting_runs import comparison, make_run, printed

from fullrank.config.run import MASKED_TOKEN
from fullrank.reporting import report
from fullrank.reporting.summary import summarize

PROTOCOL = "15 % of the tokens asked for, given all of their block of 64 tokens"


def masked_run(
    folder: Path, row: str, test: float, accuracy: float, *, seed: int = 1, finished: bool = True, words: str = PROTOCOL
) -> Path:
    """A run whose figures are of masked tokens."""
    final = {
        split: {"nll": math.log(value), "perplexity": value, "accuracy_percent": accuracy, "tokens": 6000}
        for split, value in (("valid", test + 1), ("test", test))
    }
    protocol = f"{words}; {MASKED_TOKEN}"
    result: dict[str, Any] = {
        "task": "masked_modeling", "final": final, "last": final, "protocol": protocol, "recipe": None, "scale": None,
        "protocol_settings": {"kind": "masked", "next_token": False}, "mask": {"token": "<mask>", "id": 10_000},
    }  # fmt: skip
    make_run(folder, row=row, seed=seed, test=test, valid=test + 1, finished=finished, result=result)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["train"]["objective"] = "masked"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"objective": "masked"} | ({"accuracy_percent": accuracy} if line["split"] == "valid" else {})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        masked_run(tmp_path / "plain-1", "plain", 20.0, 41.25, seed=1),
        masked_run(tmp_path / "plain-2", "plain", 22.0, 40.25, seed=2),
        masked_run(tmp_path / "b-1", "b", 12.0, 50.0, seed=1),
        masked_run(tmp_path / "b-2", "b", 13.0, 49.0, seed=2),
    ]


def test_they_compare_with_each_other(runs: list[Path]) -> None:
    compared = comparison(runs)
    plain, best = compared.rows
    assert (plain.best, best.best) == ((), ("valid", "test"))
    assert best.difference["test"] == pytest.approx(12.5 / 21 - 1)
    summary = summarize(compared)
    assert summary.headline == (
        "b is best: test masked-token perplexity 12.50 ± 0.71, 40.5 % below plain (95 % interval −70.7 to −10.2 %)"
    )
    assert summary.warnings == ()
    (said,) = [caution for caution in summary.cautions if MASKED_TOKEN in caution]
    assert said.startswith("What is compared is a masked-token perplexity, not comparable with next-token perplexity")


def test_every_table_says_what_it_is(runs: list[Path], tmp_path: Path) -> None:
    text = printed(runs)
    assert "test masked ppl" in text
    assert "test accuracy in %" in text
    assert MASKED_TOKEN in text
    assert "†" not in text, "all figures are of one kind, and their name says which"
    assert " ppl" not in text.replace("masked ppl", "")
    rows = {line.split()[0]: line for line in text.splitlines() if " ± " in line and "best" not in line}
    assert "12.50 ± 0.71" in rows["b"]
    assert "49.50 ± 0.71" in rows["b"]
    page = report(runs).write(tmp_path / "page").read_text()
    for words in (
        "Masked-token perplexity: lower is better",
        "Validation masked-token perplexity",
        "Nats per masked token",
        "Lowest test masked-token perplexity",
        "accuracy in %",
        MASKED_TOKEN,
    ):
        assert words in page, words
    assert "<strong>12.50" in page
    assert "†" not in page


def test_json(runs: list[Path]) -> None:
    rows = report(runs).as_json()["rows"]
    assert [(row["task"], row["next_token"], row["remark"]) for row in rows] == [
        ("masked_modeling", False, MASKED_TOKEN)
    ] * 2
    assert rows[0]["accuracy_percent"]["test"]["mean"] == pytest.approx(40.75)
    assert rows[1]["perplexity"]["test"]["mean"] == pytest.approx(12.5)


@pytest.mark.parametrize("first", ["causal", "masked"])
def test_next_tokens_and_masked_ones_never_meet(first: str, runs: list[Path], tmp_path: Path) -> None:
    causal = make_run(tmp_path / "causal", row="causal", test=100.0, valid=105.0)
    given = [causal, *runs] if first == "causal" else [*runs, causal]
    compared = comparison(given)
    warning = summarize(compared).warnings[0]
    text = printed(given)
    if first == "causal":
        assert [row.name for row in compared.rows] == ["causal"]
        assert "These are language models, as the first run is; masked language models are left out: plain (" in warning
        assert "12.50" not in text
    else:
        assert [row.name for row in compared.rows] == ["plain", "b"]
        assert (
            "These are masked language models, as the first run is; language models are left out: causal (" in warning
        )
        assert "100.00" not in text


def test_other_masks_are_told(tmp_path: Path) -> None:
    other = "40 % of the tokens asked for, given all of their block of 64 tokens"
    runs = [
        masked_run(tmp_path / "few", "few", 20.0, 40.0),
        masked_run(tmp_path / "many", "many", 30.0, 35.0, words=other),
    ]
    text = " ".join(printed(runs).split())
    assert "not all evaluated by the same protocol" in text
    assert "many (protocol [2])" in text


def test_a_run_on_its_way(tmp_path: Path) -> None:
    """Nothing is recorded but its configuration and its curve."""
    folder = masked_run(tmp_path / "going-on", "going-on", 20.0, 40.0, finished=False)
    compared = comparison([folder])
    assert compared.task == "masked_modeling"
    page = report([folder]).write(tmp_path / "page").read_text()
    assert "last validation masked-token perplexity" in page
    assert MASKED_TOKEN in page
