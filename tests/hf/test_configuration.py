"""The oldest transformers that Hugging Face models work with is said in one message, and in pyproject.toml."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from fullrank.core.errors import InputError
from fullrank.hf import configuration


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.12.1", "5.17.0"])
def test_an_older_transformers_is_refused(monkeypatch, version):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(InputError, match=rf"transformers {version} is too old.*transformers>=5\.20"):
        importlib.reload(configuration)


def test_the_floor_of_the_extras_is_the_same():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert set(re.findall(r'"transformers>=([\d.]+)[,"]', text)) == {"5.20"}
