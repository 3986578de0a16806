"""Averages of weights against brute force over all the weights there were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from training_toy import train

from fullrank.config.run import TrainConfig
from fullrank.training import EvaluationResult
from fullrank.training.checkpoint import WeightAverage


def test_swa_is_the_plain_mean_after_its_start() -> None:
    model = nn.Linear(3, 2, dtype=torch.float64)
    average = WeightAverage(model, TrainConfig(steps=20, averaging="swa", swa_start=0.7), 20)
    seen = []
    for step in range(1, 21):
        with torch.no_grad():
            model.weight.mul_(-1.1)
        average.update(step)
        seen.append(model.weight.detach().clone())
    expected = torch.stack(seen[14:]).mean(0)
    with average.apply():
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.weight, seen[-1])


def test_averages_are_evaluated_and_saved_and_do_not_touch_training(tmp_path: Path) -> None:
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
    model, _ = train(tmp_path / "averaged", evaluate=evaluate, **rhythm, averaging="swa", swa_start=0.5)
    expected = sum(plain[4:]) / len(plain[4:])
    torch.testing.assert_close(evaluated[-1], expected)
    assert torch.equal(model.inner.weight, evaluated[-1])
    saved = safetensors.torch.load_file(tmp_path / "averaged" / "checkpoints" / "last" / "model.safetensors")
    own = safetensors.torch.load_file(tmp_path / "averaged" / "checkpoints" / "last" / "training.safetensors")
    assert torch.equal(saved["inner.weight"], evaluated[-1])
    assert torch.equal(own["own.inner.weight"], plain[-1])
    assert saved["seen"] == model.seen > 0
