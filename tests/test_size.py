"""The figures of `make size`: what counts as a token, and which names begin with neither a verb nor a noun."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SIZE = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "size.py"))

SOURCE = '''"""Docstring."""

import os
from math import (
    pi,
)


def area(radius):  # comment
    """Docstring of two
    lines."""
    return f"{pi * radius}"
'''


def test_docstrings_comments_and_imports_are_no_tokens():
    size = SIZE["measure_source"](SOURCE)
    assert (size.lines, size.code_lines) == (12, 2)
    assert size.tokens == len(["def", "area", "(", "radius", ")", ":"]) + len(["return", 'f"..."'])


@pytest.mark.parametrize("name", ["open_run", "is_open", "from_file", "__init__", "seed", "embed_tokens", "perplexity"])
def test_verbs_and_nouns_are_not(name):
    assert not SIZE["begins_oddly"](name)
