"""The last checkpoint beside the best, and perplexity without <sos>, where a recipe or a text gives reason to show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reporting_runs import comparison, make_run, printed

from fullrank.reporting import report
from fullrank.reporting.figures import WITHOUT_SOS
from fullrank.reporting.summary import summarize

PAPER = {"valid": 100.04, "test": 92.95, "checkpoint": "last"}


def figures(valid: float, test: float, without: float | None) -> dict[str, Any]:
    """`without`: how much higher perplexity is without <sos>."""
    found: dict[str, Any] = {
        split: {"perplexity": value, "tokens": 90} for split, value in (("valid", valid), ("test", test))
    }
    if without is not None:
        for split in found.values():
            split |= {"perplexity_without_sos": split["perplexity"] + without, "tokens_without_sos": 80}
    return found


def run(
    folder: Path, row: str, seed: int, by: float, *, last: float = 5.0, without: float | None = 20.0, **more: Any
) -> Path:
    """A run whose best checkpoint has 110 + by, 105 + by, and whose last one is `last` worse."""
    result = {
        "final": figures(110 + by, 105 + by, without),
        "last": figures(110 + by + last, 105 + by + last, without),
        "scale": "small",
    }
    return make_run(folder, row=row, seed=seed, result=result, **({"paper": PAPER} | more))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [run(tmp_path / f"k2-{seed}", "k2", seed, by) for seed, by in ((1, 0.0), (2, 2.0))] + [
        run(tmp_path / "k5", "k5", 1, -4.0, mix="position_wise")
    ]


def test_means_over_seeds(runs: list[Path]) -> None:
    first, second = comparison(runs).rows
    assert (first.figures["test"].mean, first.last["test"].mean) == (106, 111)
    assert first.by_checkpoint(WITHOUT_SOS)["final"]["valid"].mean == 131
    assert first.by_checkpoint(WITHOUT_SOS)["last"]["test"].mean == 131
    assert first.by_checkpoint(WITHOUT_SOS)["last"]["test"].count == 2
    assert (second.last["valid"].mean, second.by_checkpoint(WITHOUT_SOS)["last"]["valid"].mean) == (111, 131)
    assert second.best == ("valid", "test"), "rows are judged by the best checkpoint"


def test_columns_on_the_terminal(runs: list[Path]) -> None:
    lines = [line.split() for line in printed(runs).splitlines() if line.strip()]
    assert lines[2] == ["model"] + 2 * ["paper", "ours,", "best", "ours,", "last"] + ["params", "+params", "tokens/s"]
    assert [line for line in lines if line[0] == "k5"][1][1:6] == ["92.95", "101.00", "106.00", "100.04", "106.00"]
    text = printed(runs)
    assert "Perplexity without <sos>, as tokens are usually counted" in text
    assert [line for line in lines if line[0] == "k5"][2] == ["k5", "126.00", "131.00", "121.00", "126.00"]
    assert "compare them with ours of the last checkpoint." in text
    assert "<sos>, which counts in the perplexities" in text
    narrow = printed(runs, width=60)
    assert "111.00" in narrow
    assert "131.00" in narrow


def test_nothing_more_where_it_does_not_matter(tmp_path: Path) -> None:
    """No column for the last checkpoint unless the paper's figures are of it; no second table without <sos>."""
    paper = {"valid": 100.04, "test": 92.95}
    plain = [run(tmp_path / name, name, 1, 0.0, without=None, paper=paper) for name in ("a", "b")]
    text = printed(plain)
    assert "last" not in text
    assert "sos" not in text
    page = report(plain).write(tmp_path / "page").read_text()
    assert "ours, last" not in page
    assert "as tokens are usually counted" not in page
    assert all(row["perplexity_without_sos"] is None for row in report(plain).as_json()["rows"])


def test_where_the_last_is_the_best_it_is_said(tmp_path: Path) -> None:
    same = [run(tmp_path / name, name, 1, 0.0, last=0.0) for name in ("a", "b")]
    assert not comparison(same).shows_last
    assert "ours, last" not in printed(same)
    cautions = summarize(comparison(same)).cautions
    assert any("ours of the last checkpoint, which in these runs is the best." in text for text in cautions)
    older = [make_run(tmp_path / "old", paper=PAPER)]  # from before the last checkpoint was measured
    assert any(text.endswith("ours of the last checkpoint.") for text in summarize(comparison(older)).cautions)
    assert "ours, last" not in printed(older)


def test_page_and_json(runs: list[Path], tmp_path: Path) -> None:
    page = report(runs).write(tmp_path / "page").read_text()
    assert page.count(">ours, last<") == 2
    assert "Perplexity without &lt;sos&gt;, as tokens are usually counted" in page
    assert ">131.00 ± 1.41<" in page
    assert ">136.00 ± 1.41<" in page, "valid, last"
    assert ">test ppl, last<" in page
    first = report(runs).as_json()["rows"][0]
    assert first["last"]["perplexity"]["test"]["mean"] == 111
    assert first["perplexity_without_sos"]["final"]["test"]["mean"] == 126
    assert first["perplexity_without_sos"]["last"]["valid"]["mean"] == 136
