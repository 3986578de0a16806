"""The search with Optuna, at a tiny size."""

import importlib.util
from pathlib import Path

import pytest

from cli_runs import write_config, write_text
from run_files import read_metrics

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("optuna", reason="optuna is not installed")
MODEL = "model: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}\n"


def load_example():
    spec = importlib.util.spec_from_file_location("search_with_optuna", ROOT / "examples" / "search_with_optuna.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_poor_trials_stop_early_and_the_best_has_the_lowest_loss(tmp_path, monkeypatch):
    example = load_example()
    write_text(tmp_path, sentences=60)
    config = write_config(
        tmp_path / "small.yaml", tmp_path, tmp_path / "cache", batch_size=4, segment_length=8, device="cpu"
    )
    config.write_text(MODEL + config.read_text())
    rates = [0.03, 1e-6, 1e30, 1e-7]
    monkeypatch.setattr(example, "suggest_settings", lambda trial: [f"train.learning_rate={rates[trial.number]}"])
    best = example.search(str(config), steps=8, trials=4, out=tmp_path / "runs")
    assert best.number == 0
    assert best.value == min(best.intermediate_values.values())
    assert list(best.intermediate_values) == [2, 4, 8]
    steps = {0: 8, 1: 2, 3: 2}
    for number, step in steps.items():
        lines = read_metrics(tmp_path / "runs" / f"trial-{number}")
        assert max(line["step"] for line in lines) == step
    assert not list((tmp_path / "runs").rglob("result.json"))  # nothing was measured on the test text
