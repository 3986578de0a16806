"""The demo, very short: two rows trained on equal terms, table and report, and resuming after a stop."""

import functools

from fullrank.config.load import load, resolve
from fullrank.experiments import demo
from fullrank.experiments import run as speed
from run_files import read_result

SMALL = """\
extends: demo/builtin
base:
  model: {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64}}
  data: {{name: text, tokens: byte, dir: {0}, train: train, valid: valid, test: test, cache: {0}/cache}}
rows: {{plain: {{}}, b: {{set: {{model.attention.mix: position_wise}}}}}}
"""


def test_the_shipped_demo():
    """Every row is a configuration; tokens and seeds are equal, and so are the sizes but for the mechanism."""
    runs = {row: resolve(demo.RECIPE, row).config for row in load(demo.RECIPE).rows}
    assert next(iter(runs)) == "plain"
    assert {run.data.name for run in runs.values()} == {"builtin"}
    for row in runs.values():
        assert (row.train, row.eval, row.model.hidden_size) == (runs["plain"].train, runs["plain"].eval, 128)


def test_demo_trains_rows_on_equal_terms(tmp_path, monkeypatch, capsys):
    """On a text and a model that are smaller than those of the demo."""
    out = tmp_path / "demo"
    for split, lines in (("train", 1000), ("valid", 50), ("test", 50)):
        (tmp_path / split).write_text("a line of the text\n" * lines, encoding="utf-8")
    (tmp_path / "small.yaml").write_text(SMALL.format(tmp_path), encoding="utf-8")
    monkeypatch.setattr(demo, "RECIPE", str(tmp_path / "small.yaml"))
    monkeypatch.setattr(speed, "measure_speed", functools.partial(speed.measure_speed, spend=0.05))
    monkeypatch.setenv("COLUMNS", "110")
    demo.run_demo(0.01, out, 1)
    results = [read_result(out / row) for row in ("plain", "b")]
    assert len({(r["tokens_seen"], r["seed"], r["steps"], r["corpus"]["fingerprint"]) for r in results}) == 1
    added = results[1]["parameters"]["total"] - results[0]["parameters"]["total"]
    assert added == 2 * (4**2 + 8 * 4)  # layers * (heads^2 + head_dim * heads)
    printed = capsys.readouterr().out
    for word in ("plain", "b", "writes, after", "Perplexity is", "report.html"):
        assert word in printed
    assert '<section id="analyses"' in (out / "report.html").read_text(encoding="utf-8")

    before = (out / "plain" / "metrics.jsonl").read_bytes()
    (out / "b" / "result.json").unlink()  # as if it had been stopped before its last evaluation
    content = demo.run_demo(0.01, out, 1, aside=True)
    assert content["report"] == str(out / "report.html")
    assert read_result(out / "b")["final"] == results[1]["final"]
    assert (out / "plain" / "metrics.jsonl").read_bytes() == before
