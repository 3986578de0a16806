"""The notebooks run from the first cell to the last, with fewer updates than a reader makes, and show what they say."""

import json
from pathlib import Path

import matplotlib
import pytest
import torch

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


@pytest.fixture
def names(request, tmp_path, monkeypatch):
    """Names that the cells of a notebook define."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    cells = json.loads((NOTEBOOKS / f"{request.param}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    namespace = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"]).replace("STEPS, LENGTH = 60,", "STEPS, LENGTH = 8,")
            exec(
                compile(code.replace("STEPS, LENGTH, ROWS = 200,", "STEPS, LENGTH, ROWS = 8,"), request.param, "exec"),
                namespace,
            )
    return namespace


@pytest.mark.parametrize("names", ["train"], indirect=True)
def test_train(names):
    assert [len(curve) for curve in names["curves"].values()] == [8, 8]
    assert all(score < 4.6 for score in names["scores"].values())  # ln 100, the first guess


@pytest.mark.parametrize("names", ["inject"], indirect=True)
def test_inject(names):
    torch.testing.assert_close(names["after"].softmax(-1), names["before"].softmax(-1), rtol=0, atol=1e-5)
    assert names["trained"] < names["injected"]


@pytest.mark.parametrize("names", ["diagnose"], indirect=True)
def test_diagnose(names):
    assert names["measured"].rank <= names["measured"].layer.bound < names["mixed"].rank


@pytest.mark.full
@pytest.mark.parametrize("names", ["check"], indirect=True)
def test_check(names):
    assert not names["leaking"].passes
    assert names["causal"].passes
    assert not names["wrong"].passes
