"""Averages of weights against brute force over all the weights there were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from training_toy import train

from fullrank.config.training import TrainConfig
from fullrank.training import EvaluationResult
from fullrank.training.state import WeightAverage


def walk(model: nn.Linear, average: WeightAverage, steps: int) -> list[Tensor]:
    """Weights after every update of a made-up training."""
    generator = torch.Generator().manual_seed(1)
    seen = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            model.weight.add_(torch.randn(model.weight.shape, dtype=torch.float64, generator=generator))
        average.update(step)
        seen.append(model.weight.detach().clone())
    return seen


def test_ema_is_the_weighted_mean_of_all_updates() -> None:
    model = nn.Linear(3, 2, dtype=torch.float64)
    average = WeightAverage(model, TrainConfig(steps=20, averaging="ema", ema_decay=0.8), 20)
    seen = walk(model, average, 20)
    weights = [0.8 ** (20 - s) for s in range(1, 21)]
    expected = sum(w * p for w, p in zip(weights, seen, strict=True)) / sum(weights)
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.weight, seen[-1])


@pytest.mark.parametrize("options", [{"averaging": "ema", "ema_decay": 0.7}, {"averaging": "swa", "swa_start": 0.5}])
def test_averages_are_evaluated_and_saved_and_do_not_touch_training(options: dict[str, Any], tmp_path: Path) -> None:
    evaluated = []

    def evaluate(model: Any) -> EvaluationResult:
        evaluated.append(model.inner.weight.detach().clone())
        return EvaluationResult(10.0 - len(evaluated), 10)

    plain: list[Tensor] = []

    def remember(model: Any) -> EvaluationResult:
        plain.append(model.inner.weight.detach().clone())
        return EvaluationResult(1.0, 10)

    rhythm = {"eval_options": {"every_steps": 1}, "steps": 8}
    train(tmp_path / "plain", evaluate=remember, **rhythm)
    model, _ = train(tmp_path / "averaged", evaluate=evaluate, **rhythm, **options)
    used = plain if options["averaging"] == "ema" else plain[4:]
    weights = [0.7 ** (len(used) - 1 - i) if options["averaging"] == "ema" else 1.0 for i in range(len(used))]
    expected = sum(w * p for w, p in zip(weights, used, strict=True)) / sum(weights)
    torch.testing.assert_close(evaluated[-1], expected)
    assert torch.equal(model.inner.weight, evaluated[-1])
    saved = safetensors.torch.load_file(tmp_path / "averaged" / "checkpoints" / "last" / "model.safetensors")
    own = safetensors.torch.load_file(tmp_path / "averaged" / "checkpoints" / "last" / "training.safetensors")
    assert torch.equal(saved["inner.weight"], evaluated[-1])
    assert torch.equal(own["own.inner.weight"], plain[-1])
    assert saved["seen"] == model.seen > 0
