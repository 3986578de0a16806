"""The demo, very short: two rows trained on equal terms, table and report, and resuming after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fullrank.config.recipe import load, resolve
from fullrank.core.errors import InputError
from fullrank.data import prepare
from fullrank.experiments import demo
from fullrank.experiments.language_model import training_batches

SMALL = """\
extends: demo/builtin
base:
  model: {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64}}
  data: {{name: text, tokens: byte, dir: {0}, train: train, valid: valid, test: test, cache: {0}/cache}}
rows: {{plain: {{}}, b: {{set: {{model.attention.mix: position_wise}}}}}}
"""


def test_the_shipped_demo() -> None:
    """Every row is a configuration; tokens and seeds are equal, and so are the sizes but for the mechanism."""
    runs = {row: resolve(demo.RECIPE, row).config for row in load(demo.RECIPE).rows}
    assert next(iter(runs)) == "plain"
    assert {run.data.name for run in runs.values()} == {"builtin"}
    for row in runs.values():
        assert (row.train, row.eval, row.model.hidden_size) == (runs["plain"].train, runs["plain"].eval, 128)


def test_demo_trains_rows_on_equal_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a text and a model that are smaller than those of the demo."""
    out, rows = tmp_path / "demo", ("plain", "b")
    for split, lines in (("train", 1000), ("valid", 50), ("test", 50)):
        (tmp_path / split).write_text("a line of the text\n" * lines, encoding="utf-8")
    (tmp_path / "small.yaml").write_text(SMALL.format(tmp_path), encoding="utf-8")
    monkeypatch.setattr(demo, "RECIPE", str(tmp_path / "small.yaml"))
    monkeypatch.setenv("COLUMNS", "110")
    demo.run_demo(0.01, out, 1)
    results = [json.loads((out / row / "result.json").read_text(encoding="utf-8")) for row in rows]
    assert len({(r["tokens_seen"], r["seed"], r["steps"], r["corpus"]["fingerprint"]) for r in results}) == 1
    heads, layers, head_dim = 4, 2, 8
    added = results[1]["parameters"]["total"] - results[0]["parameters"]["total"]
    assert added == layers * (heads**2 + head_dim * heads)
    printed = capsys.readouterr().out
    for word in ("plain", "b", "Unigram", "report.html"):
        assert word in printed
    assert (out / "report.html").is_file()

    before = (out / "plain" / "metrics.jsonl").read_bytes()
    (out / "b" / "result.json").unlink()  # as if it had been stopped before its last evaluation
    demo.run_demo(0.01, out, 1)
    assert "Measuring" not in capsys.readouterr().err
    assert json.loads((out / "b" / "result.json").read_text(encoding="utf-8"))["final"] == results[1]["final"]
    assert (out / "plain" / "metrics.jsonl").read_bytes() == before


def test_the_demo_counts_the_steps_that_are_made(tmp_path: Path) -> None:
    """One batch holds the short end of the text: as many tokens take a step more than in full batches."""
    for split, lines in (("train", 1001), ("valid", 10), ("test", 10)):
        (tmp_path / split).write_text("a line\n" * lines, encoding="utf-8")
    settings = ["train.tokens=20480", "data.name=text", "data.tokens=byte", f"data.dir={tmp_path}", "data.valid=valid"]
    settings += ["data.train=train", "data.test=test", f"data.cache={tmp_path / 'cache'}"]
    config = resolve(demo.RECIPE, overrides=settings).config
    batches = training_batches(config, prepare(config.data, report=lambda text: None))
    seen = steps = 0
    while seen < 20480:
        seen += batches.batch(*divmod(steps, batches.batches_per_epoch)).tokens
        steps += 1
    assert demo._steps(config) == steps > 20480 / (8 * 64)


def test_other_settings_need_another_place(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text(
        json.dumps({"minutes": 8.0, "seed": 1, "rows": ["plain"], "tokens": 5}), encoding="utf-8"
    )
    with pytest.raises(InputError, match="--out"):
        demo.run_demo(2.0, tmp_path, 1)
    (tmp_path / "demo.json").unlink()
    (tmp_path / "letter").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="not empty"):
        demo.run_demo(2.0, tmp_path, 1)


def test_the_last_to_finish_decides() -> None:
    assert demo._makespan([1.0, 1.0, 1.0], 2) == 2.0
    assert demo._makespan([1.0, 2.0, 1.5, 1.0], 2) == 3.0
    assert demo._makespan([1.0, 2.0], 1) == 3.0
