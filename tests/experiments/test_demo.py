"""The main job, very short: every model trained on equal terms, table and report, and going on after a stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullrank.config.recipe import resolve
from fullrank.core.errors import InputError
from fullrank.data import prepare
from fullrank.experiments import demo
from fullrank.experiments.language_model import training_batches


def run(out: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FULLRANK_CACHE": str(cache), "COLUMNS": "110", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "fullrank", "demo", "--minutes", "0.05", "--out", str(out)]
    return subprocess.run(words, capture_output=True, text=True, timeout=500, env=environment, check=False)


def test_demo_trains_all_rows_on_equal_terms(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = run(out, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    results = [
        json.loads((out / row / "result.json").read_text(encoding="utf-8"))
        for row in ("plain", "a", "b", "b-sigsoftmax")
    ]
    assert len({(r["tokens_seen"], r["seed"], r["steps"], r["corpus"]["fingerprint"]) for r in results}) == 1
    heads, layers, head_dim = 8, 4, 16
    added = [r["parameters"]["total"] - results[0]["parameters"]["total"] for r in results]
    position_wise = layers * (heads**2 + head_dim * heads)
    assert added == [0, layers * heads**2, position_wise, position_wise]
    for word in ("plain", "b-sigsoftmax", "Unigram", "report.html"):
        assert word in done.stdout
    assert (out / "report.html").is_file()

    before = (out / "a" / "metrics.jsonl").read_bytes()
    (out / "b" / "result.json").unlink()  # as if it had been stopped before its last evaluation
    again = run(out, tmp_path / "cache")
    assert again.returncode == 0, again.stderr
    assert "Measuring" not in again.stderr
    assert json.loads((out / "b" / "result.json").read_text(encoding="utf-8"))["final"] == results[2]["final"]
    assert (out / "a" / "metrics.jsonl").read_bytes() == before


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
