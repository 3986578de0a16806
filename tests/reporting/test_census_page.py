"""The page of a census: counts, what is said of each class, and reproductions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fullrank.reporting.census import counts, page, why
from fullrank.reporting.result_pages import make_pages

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def row(kind: str, verdict: str, reason: str = "", seconds: float | None = 2.0, **known: Any) -> dict[str, Any]:
    versions = {"transformers": "5.23.0", "torch": "2.13.0"}
    figures = {"parameters": 12345, "seconds": seconds, "failures": [], "not_applicable": {}}
    return {"type": kind, "class": f"{kind}LM", "verdict": verdict, "reason": reason, **versions, **figures, **known}


LEAK = {
    "check": "future, by perturbation, sdpa", "layers": ["h.0.attn", "h.1.attn"], "path": "sdpa, training",
    "leaks": "position 3 sees position 4", "reproduction": "a = 1\nb = 2",
}  # fmt: skip
ROWS = [
    row("a", "passes"),
    row("b", "leaks", failures=[LEAK, *({"check": f"other {number}"} for number in range(4))], seconds=7.0),
    row("c", "not applicable", "it needs a picture", seconds=None, parameters=None),
    row("d", "passes", seconds=1.0),
]


def test_counts_and_reasons() -> None:
    assert counts(ROWS) == {"passes": 2, "leaks": 1, "not applicable": 1}
    assert why(ROWS[0]) == ""
    assert why(ROWS[1]) == "future, by perturbation, sdpa (h.0.attn); other 0; other 1; and 2 more"
    assert why(ROWS[2]) == "it needs a picture"


def test_the_page() -> None:
    pieces = list(page(ROWS))
    assert (
        "transformers 5.23.0, torch 2.13.0; 4 classes; CPU time of a class 2.0 s (median), 7.0 s at most." in pieces[0]
    )
    assert pieces[1][0] == {"verdict": "passes", "classes": "2"}
    assert [piece for piece in pieces if str(piece).startswith("##")] == [
        "## Leaks",
        "## Not applicable",
        "## Every class",
    ]
    leaks = pieces.index("## Leaks")
    assert pieces[leaks + 1] == [{"type": "b", "class": "`bLM`", "why": why(ROWS[1])}]
    assert "sdpa, training; position 3 sees position 4" in pieces[leaks + 2]
    assert "```text\na = 1\nb = 2\n```" in pieces[leaks + 2]
    assert pieces[-1][2] == {
        "type": "c", "class": "`cLM`", "verdict": "not applicable", "parameters": "", "CPU seconds": "",
    }  # fmt: skip


def test_it_is_one_of_the_result_pages(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    (tmp_path / "results" / "census.json").write_text(json.dumps({"classes": ROWS}), encoding="utf-8")
    pages = make_pages(tmp_path / "results")
    assert "| a | `aLM` | passes | 12,345 | 2.0 |" in pages["census.md"]
    assert "[Census](census.md): the check of 4 classes of transformers" in pages["README.md"]
