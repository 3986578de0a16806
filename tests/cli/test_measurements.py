"""A measurement of a stranger: one function and one decorator give a verb, a document, a figure and a part of the report."""

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fullrank as fr
from cli_runs import SMALL, called, succeeds
from fullrank import records
from fullrank.config.run import list_corpora
from fullrank.data import register_corpus
from fullrank.errors import InputError
from fullrank.text import read_file

MODULE = '''
import torch
import fullrank as fr

@fr.measurement("confidence", needs={"logits"}, table=fr.Table(rows="position"), plot=fr.Lines(x="position", y="value"))
def measure_confidence(model: fr.LoadedModel, text: fr.Text, *, scale: float = 1.0):
    """Measure the mean probability of the likeliest token at each position.

    Args:
        scale: factor on each.
    """
    top = [model.logits(ids).softmax(-1).amax(-1) for ids in text]
    for position, value in enumerate(torch.cat(top).mean(0).tolist()):
        yield fr.Record({"position": position}, measure="confidence", value=scale * value, unit="probability")

@fr.measurement("inside", needs={"attention"})
def measure_inside(model, text):
    yield fr.Record({}, "layers", len(list(model.attention(next(iter(text))))))
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_measurement.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("fullrank.analysis")  # so that its measurements stay registered
    monkeypatch.setattr(records, "_known", dict(records._known))
    monkeypatch.delitem(sys.modules, "my_measurement", raising=False)


def measure(*words):
    code, out, err = called("analyze", *words, "--import", "my_measurement", "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_document_has_the_records_of_the_function(run, text):
    content = measure("confidence", run, "--text", text / "valid.txt", "--segment-length", 6)
    model = fr.LanguageModel.load(run).eval()
    read = fr.open_model(str(run))
    ids = torch.cat(list(read_file(read, text / "valid.txt", 6)))
    with torch.no_grad():
        expected = model(ids).logits.softmax(-1).amax(-1).mean(0)
    assert [record["labels"] for record in content["records"]] == [{"position": i} for i in range(6)]
    assert [record["value"] for record in content["records"]] == pytest.approx(expected.tolist(), rel=1e-5)
    assert content["records"][0].keys() == {"labels", "measure", "value", "unit", "interval", "protocol", "note"}
    assert content["records"][0]["unit"] == "probability"


def test_terminal_figure_and_options(run, tmp_path):
    words = ["analyze", "confidence", run, "--import=my_measurement", "--segment-length", 4, "--texts", 3]
    out = succeeds(*words, "--scale", 0, "--out", tmp_path / "figures")
    rows = [line.split() for line in out.splitlines()]
    described = succeeds("analyze", "confidence", "--import=my_measurement", "--help")
    assert "likeliest token" in described
    assert "Args" not in described
    assert ["position", "probability"] in rows
    assert ["3", "0"] in rows
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["confidence.png", "confidence.svg"]


def test_report_shows_table_and_plot_without_the_module(run, tmp_path):
    content = measure("confidence", run, "--segment-length", 4)
    saved = json.loads((run / "analysis" / "confidence.json").read_text())
    assert saved["records"] == content["records"]
    records._known.clear()
    code, _, err = called("report", run, "--out", tmp_path / "report.html")
    assert (code, err) == (0, "")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    analyses = page[page.index('id="analyses"') :]
    assert "confidence" in analyses
    assert "<svg" in analyses
    (run / "analysis" / "confidence.json").unlink()


def test_the_worked_example_of_the_book():
    page = (Path(__file__).parents[2] / "docs" / "add_a_measurement.md").read_text(encoding="utf-8")
    names = {"__name__": "add_a_measurement"}
    exec(compile(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], "add_a_measurement.md", "exec"), names)
    model = fr.open_model(lambda ids: torch.zeros(*ids.shape, 4))
    text = fr.Text.from_ids(torch.arange(12) % 4, 3)
    measured = records.check_records("confidence", names["measure_confidence"](model, text))
    assert [record.value for record in measured] == pytest.approx([0.25] * 3)


CORPUS = """
from fullrank.data import CorpusInfo, register_corpus

register_corpus(CorpusInfo("mine", "word", "ours", "by hand", files={s: (f"{s}.txt",) for s in ("train", "valid", "test")}))
"""


def test_a_corpus_of_ones_own(text, tmp_path, monkeypatch):
    monkeypatch.setitem(list_corpora(), "mine", None)  # forgotten after the test
    del list_corpora()["mine"]
    (tmp_path / "my_corpus.py").write_text(CORPUS, encoding="utf-8")
    words = ["--from", text, "--import", "my_corpus", "--json"]
    out = succeeds("data", "prepare", "mine", "--to", tmp_path, *words)
    assert json.loads(out)["name"] == "mine"
    settings = ["data.name=mine", "data.tokens=word", f"data.cache={tmp_path}", "train.steps=2"]
    (tmp_path / "c.yaml").write_text("data: {name: mine}\n", encoding="utf-8")
    out = succeeds("train", tmp_path / "c.yaml", *SMALL, *settings, "--out", tmp_path / "run", *words)
    with pytest.raises(InputError, match="a new name"):
        register_corpus(replace(list_corpora()["ptb"], tokens="byte"))
    with pytest.raises(InputError, match="a new name"):
        register_corpus(replace(list_corpora()["iwslt14-de-en"], name="pairs of mine"))
    assert "pairs of mine" not in list_corpora()
