"""The mental model's table of equations names a file, a line and a definition that stand there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(
    r"^\| (?P<equation>.+?) \| (?P<paper>.+?) \| \[`(?P<name>[\w.]+)`\]\(\.\./(?P<file>[\w/]+\.py)#L(?P<line>\d+)\) \|$",
    re.M,
)


def rows():
    text = (ROOT / "docs" / "mental_model.md").read_text(encoding="utf-8")
    table = text[text.index("<!-- equations") : text.index("<!-- end of equations")]
    return list(ROW.finditer(table))


def test_the_table_has_all_equations():
    text = (ROOT / "docs" / "mental_model.md").read_text(encoding="utf-8")
    table = text[text.index("<!-- equations") : text.index("<!-- end of equations")]
    assert len(rows()) == table.count("\n|") - 2 == 27


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["name"])
def test_an_equation_stands_where_the_table_says(row):
    """In one definition of at most 120 lines."""
    body = ast.parse((ROOT / row["file"]).read_text(encoding="utf-8")).body
    for part in row["name"].split("."):
        found = next(node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part)
        body = found.body
    assert found.lineno == int(row["line"])
    assert found.end_lineno is not None
    assert found.end_lineno - found.lineno < 120
