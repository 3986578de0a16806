"""docs/scoring.md: its table is made of research/measured/scorers.json, and the score function on it runs."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import torch

import fullrank as fr

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scoring.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "benchmarks"))
import scorers  # noqa: E402


def test_the_table_is_that_of_the_results():
    found = json.loads((ROOT / "research" / "measured" / "scorers.json").read_text(encoding="utf-8"))
    assert [row["scorer"] for row in found] == [name for name, *_ in scorers.SCORERS]
    shown = PAGE.partition(scorers.MARKS[0])[2].partition(scorers.MARKS[1])[0]
    assert shown == scorers.page_table(found)


def test_our_own_evaluation_passes_again():
    """A row that takes little time, made anew."""
    name, make, *_ = next(row for row in scorers.SCORERS if row[0] == "fullrank eval, blocks")
    assert scorers.check(name, make).passes


def test_the_score_function_of_the_page_passes(monkeypatch):
    code = re.search(r"```python\n(.+?)```", PAGE, flags=re.DOTALL)
    assert code is not None
    rows = torch.randn(5, 5)
    project = ModuleType("my_project")
    model = lambda ids: rows[ids]  # noqa: E731
    model.eval = lambda: model
    project.load = lambda: model
    monkeypatch.setitem(sys.modules, "my_project", project)
    names = {}
    exec(code[1], names)
    assert fr.check_scoring(names["score"], vocab_size=5, length=19).passes
