"""The command line at its edges: what excludes each other, half a run, Ctrl-C, silence, and JSON that everybody reads."""

import json
import math
from pathlib import Path

import pytest

from cli_runs import SMALL, called, document, succeeds, write_config, write_text
from fullrank.cli.app import print_json
from fullrank.core.errors import Interrupted
from fullrank.files import write_json


def test_reproduce_trains_and_measures_the_rows_of_a_figure(text, tmp_path, monkeypatch):
    from fullrank.config import load as recipe

    table = tmp_path / "table.yaml"
    table.write_text(
        "rows: {plain: {}, a: {set: {model.attention.mix: position_independent}}, average: {}}\n"
        "base:\n  model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2}\n"
        f"  data: {{name: text, train: {text}/train.txt, valid: {text}/valid.txt, test: {text}/test.txt, "
        f"cache: {text}/cache}}\n  train: {{steps: 3, batch_size: 4, segment_length: 8, threads: 1, device: cpu}}\n",
        encoding="utf-8",
    )
    figure = recipe.Figure("ours", {str(table): ["plain", "a"]}, "spectrum", 2)
    monkeypatch.setattr(recipe, "read_figures", lambda: {"own/figure1": figure})
    out = tmp_path / "figure"
    measured = document("reproduce", "own/figure1", "--out", out, "--quiet")
    assert measured["measurement"] == "spectrum"
    names = ["plain-seed1", "a-seed1"]
    assert [model["model"] for model in measured["models"]] == names
    assert {record["labels"]["model"] for record in measured["records"]} == set(names)
    assert {Path(file).suffix for file in measured["files"]} == {".png", ".svg"}
    assert Path(measured["report"]) == out / "report.html"
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "spectrum" in report
    assert all(row in report for row in ("plain", "position_independent"))


def test_figures_of_the_papers_name_rows_and_measurements_that_exist():
    from fullrank.config.load import load, read_figures
    from fullrank.records import find_measurement

    assert set(read_figures()) == {"mixhead/figure1", "mixhead/figure3", "skip-cross-head/table3"}
    for figure in read_figures().values():
        find_measurement(figure.measurement)
        assert all(set(rows) <= set(load(name).rows) for name, rows in figure.rows.items())


@pytest.mark.full
def test_a_table_of_several_backbones_is_one_command():
    out = succeeds("reproduce", "mixhead/table1", "--scale", "tiny", "--rows", "plain,b", "--list", "--json")
    folders = [Path(cell["folder"]).parts for cell in json.loads(out)]
    backbones = ("baevski", "synthesizer", "transformer-xl", "vanilla")
    expected = [(f"mixhead-table1-{name}", f"{row}-tiny-seed1") for name in backbones for row in ("plain", "b")]
    assert [parts[1:] for parts in folders] == expected
    code, _, err = called("train", "mixhead/table1")
    assert code == 2
    assert "did you mean 'mixhead/table1-baevski' or 'mixhead/table1-synthesizer' or" in err
    assert "table10" not in err


def test_an_interrupted_command_says_how_it_goes_on(monkeypatch, tmp_path):
    def stopped(*arguments, **options):
        raise Interrupted("stopped by SIGINT after step 3 of 12; everything is saved in there")

    monkeypatch.setattr("fullrank.experiments.run.train", stopped)
    words = ("reproduce", "mixhead/table1-vanilla", "--scale", "tiny", "train.steps=12", "--out", tmp_path / "a b")
    code, out, err = called(*words, "--quiet")
    again = f"fullrank reproduce mixhead/table1-vanilla --scale tiny train.steps=12 --out '{tmp_path}/a b' --quiet"
    assert (code, out, err.splitlines()[-1]) == (130, "", f"fullrank: to go on: {again}")


def test_json_is_valid_whatever_the_figures(tmp_path, capsys):
    content = {"a": math.nan, "b": [math.inf, 1.5, (-math.inf,)], "c": {"d": 2, "e": "nan"}}
    expected = {"a": None, "b": [None, 1.5, [None]], "c": {"d": 2, "e": "nan"}}

    def refuse(word):
        raise AssertionError(word)

    print_json(content)
    write_json(tmp_path / "file.json", content)
    for written in (capsys.readouterr().out, (tmp_path / "file.json").read_text(encoding="utf-8")):
        assert json.loads(written, parse_constant=refuse) == expected


def test_ctrl_c_is_reported(monkeypatch):
    from fullrank.config import load as recipe

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "list_shipped", interrupt)
    assert called("recipes", "list") == (130, "", "fullrank: interrupted\n")


def test_a_text_is_trained_by_one_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path, sentences=200)
    calls = []

    def write_small(texts, out, **options):
        calls.append((texts, out))
        write_config(out, tmp_path, tmp_path / "cache", steps=110)

    monkeypatch.setattr("fullrank.experiments.init.write_configuration", write_small)
    out = succeeds("train", "train.txt", *SMALL)
    assert calls == [(["train.txt"], Path("train.yaml"))]
    assert "next: fullrank generate" in out
    assert "train.yaml is there already" in called("train", "train.txt", *SMALL)[2]
    assert called("train", "train.txt", *SMALL, "--quiet")[2] == ""
    assert "not a run folder" in called("train", tmp_path)[2], "it holds runs beside the text"


def test_a_run_pauses_and_is_measured_when_it_goes_on(run, config, tmp_path):
    paused = tmp_path / "paused"
    for words in (["train", config, *SMALL, "--out", paused, "--until", 7], ["train", paused, "--until", 12]):
        status, out, err = called(*words)
        assert (status, out) == (0, "")
        assert "paused: paused, and not measured; without --until it goes on" in err
        assert not (paused / "result.json").exists()
    assert called("train", paused)[0] == 0
    assert (paused / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert "final" in json.loads(succeeds("train", paused, "--until", 12, "--json"))
