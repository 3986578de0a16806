"""Rows whose figures are no next-token perplexities: marked everywhere, compared with nothing, best of nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from reporting_runs import comparison, make_run, printed

from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.reporting import report
from fullrank.reporting.summary import summarize

PROTOCOL = "consecutive blocks of 64 tokens"


def masked(folder: Path, row: str, test: float, **more: Any) -> Path:
    result = {"protocol": PROTOCOL, "protocol_settings": {"next_token": True}}
    return make_run(folder, row=row, test=test, valid=test + 5, mix=row, result=result, **more)


def published(folder: Path, row: str, test: float, *, recorded: bool = True, honest: bool = False, **more: Any) -> Path:
    """A run that sees the future; ten times worse at last positions. `honest`: its final figures were measured by stride 1."""
    final = {
        split: {"perplexity": value, "tokens": 90, "last_position": {"nll": 1.0, "perplexity": 10 * value, "tokens": 9}}
        for split, value in (("valid", test + 5), ("test", test))
    }
    if honest:
        for figures in final.values():
            del figures["last_position"]
    result: dict[str, Any] = {"final": final, "protocol": PROTOCOL if honest else f"{PROTOCOL}; {NOT_NEXT_TOKEN}"}
    if recorded:
        result["protocol_settings"] = {"next_token": honest}
    made = make_run(folder, row=row, test=test, valid=test + 5, mix=row, result=result, **more)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"]["attention"] |= {"kind": "multilinear", "causal": "as_published"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return made


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """The leaking rows would be best by far."""
    return [
        masked(tmp_path / "plain", "plain", 100.0),
        published(tmp_path / "core-1", "core-1", 12.0),
        masked(tmp_path / "ours", "ours", 90.0),
        published(tmp_path / "core-2", "core-2", 11.0),
    ]


def test_neither_best_nor_a_gain(runs: list[Path]) -> None:
    rows = {row.name: row for row in comparison(runs).rows}
    for name in ("core-1", "core-2"):
        assert not rows[name].next_token
        assert rows[name].best == ()
        assert rows[name].difference == {}
        assert rows[name].figures["test"].mean == pytest.approx({"core-1": 12, "core-2": 11}[name])
    assert rows["ours"].best == ("valid", "test")
    assert rows["ours"].difference["test"] == pytest.approx(-0.1)
    assert rows["plain"].best == ()


def test_a_baseline_that_sees_the_future_is_none(runs: list[Path]) -> None:
    first = comparison([runs[1], runs[0], runs[2]])
    assert all(row.difference == {} for row in first.rows)
    summary = summarize(first)
    assert summary.headline == "ours is lowest: test perplexity 90.00"
    assert "The first row, core-1, has no test perplexity of next tokens to compare with." in " ".join(
        summary.paragraphs
    )


def test_one_honest_row_is_compared_with_nothing(runs: list[Path]) -> None:
    compared = comparison(runs[:2])
    assert [row.best for row in compared.rows] == [(), ()]
    summary = summarize(compared)
    assert summary.headline == "plain: test perplexity 100.00"
    assert "12.00" not in " ".join(summary.paragraphs)


def test_the_terminal(runs: list[Path]) -> None:
    text = printed(runs)
    lines = [line.split() for line in text.splitlines() if line.strip()]
    figures = {name: [line for line in lines if line[0] == name] for name in ("plain", "core-1", "core-2")}
    assert figures["core-1"][0][1:5] == ["12.00", "†", "17.00", "†"]
    assert figures["plain"][0][1:3] == ["100.00", "105.00"]
    assert figures["core-1"][1] == ["core-1", "170.00", "120.00"], "at last positions"
    assert len(figures["plain"]) == 1
    assert "Perplexity at the last position of every segment" in text
    assert f"† core-1 and core-2: {NOT_NEXT_TOKEN}." in text
    assert "[1]" not in text, "they were read alike, and the mark says the rest"
    assert "†" not in printed([runs[0], runs[2]])
    assert "last position" not in printed([runs[0], runs[2]])


def test_the_page(runs: list[Path], tmp_path: Path) -> None:
    page = report(runs).write(tmp_path / "page").read_text()
    assert f"† core-1 and core-2: {NOT_NEXT_TOKEN}." in page
    assert page.count(">12.00 †<") == 2, "in the table and among the single runs"
    assert ">12.00<" not in page
    assert ">17.00 †<" in page
    assert "<strong>12.00" not in page
    assert "<strong>90.00" in page
    assert "Perplexity at the last position of every segment" in page
    assert ">120.00<" in page
    assert "core-1 12.00 †" in page, "what the dots say to a reader who does not see them"
    assert f"† {NOT_NEXT_TOKEN}; such a curve compares with no other." in page
    assert ">core-2 †<" in page, "the curves and their legend"
    assert ">ours †<" not in page
    plain = report([runs[0], runs[2]]).write(tmp_path / "plain-page").read_text()
    assert "†" not in plain


def test_nothing_but_such_rows(runs: list[Path], tmp_path: Path) -> None:
    compared = comparison([runs[1], runs[3]])
    summary = summarize(compared)
    assert summary.headline == f"core-1 and core-2: perplexity is {NOT_NEXT_TOKEN}"
    assert "on the test split: core-1 120.00 and core-2 110.00." in " ".join(summary.paragraphs)
    assert "lower" not in " ".join(summary.paragraphs)
    page = report([runs[1]]).write(tmp_path / "one").read_text()
    assert "<b>12.00 †</b>" in page
    assert "<b>120.00</b>" in page, "a tile of its own"


def test_json(runs: list[Path]) -> None:
    rows = report(runs).as_json()["rows"]
    assert [row["next_token"] for row in rows] == [True, False, True, False]
    assert [row["remark"] for row in rows] == [None, NOT_NEXT_TOKEN, None, NOT_NEXT_TOKEN]
    assert rows[1]["last_position"]["final"]["test"]["mean"] == 120
    assert rows[0]["last_position"] is None
    assert rows[1]["difference"] == {}
    assert rows[1]["best"] == []


def test_windows_of_stride_1_are_ordinary_figures_after_other_curves(runs: list[Path], tmp_path: Path) -> None:
    """Figures while the model trained are marked, its final figures are not."""
    runs = [runs[0], published(tmp_path / "slid", "slid", 95.0, honest=True)]
    compared = comparison(runs)
    assert compared.rows[1].best == ("valid", "test")
    assert compared.rows[1].difference["test"] == pytest.approx(-0.05)
    assert "†" not in printed(runs)
    page = report(runs).write(tmp_path / "page").read_text()
    assert ">95.00 †<" not in page
    assert ">slid †<" in page
    assert "such a curve compares with no other" in page


def test_results_that_do_not_record_it_are_judged_by_their_configuration(tmp_path: Path) -> None:
    run = published(tmp_path / "old", "old", 12.0, recorded=False)
    assert not comparison([run]).rows[0].next_token


def test_a_run_on_its_way(tmp_path: Path) -> None:
    run = published(tmp_path / "going-on", "going-on", 12.0, finished=False)
    page = report([run]).write(tmp_path / "page").read_text()
    assert f"({NOT_NEXT_TOKEN})" in page
