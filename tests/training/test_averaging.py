"""Averages of weights against the mean of all weights that were averaged."""

import safetensors.torch
import torch
from training_toy import train

from fullrank.training.values import EvaluationResult


def test_averages_are_evaluated_and_saved_and_do_not_touch_training(tmp_path):
    evaluated = []

    def evaluate(model):
        evaluated.append(model.inner.weight.detach().clone())
        return EvaluationResult(10.0 - len(evaluated), 10)

    plain = []

    def remember(model):
        plain.append(model.inner.weight.detach().clone())
        return EvaluationResult(1.0, 10)

    rhythm = {"eval_options": {"every_steps": 1}, "steps": 8}
    train(tmp_path / "plain", evaluate=remember, **rhythm)
    model, _ = train(tmp_path / "averaged", evaluate=evaluate, **rhythm, averaging="swa", swa_start=0.5)
    expected = sum(plain[4:]) / len(plain[4:])
    torch.testing.assert_close(evaluated[-1], expected)
    assert torch.equal(model.inner.weight, evaluated[-1])
    saved = safetensors.torch.load_file(tmp_path / "averaged" / "checkpoints" / "last" / "model.safetensors")
    state = safetensors.torch.load_file(tmp_path / "averaged" / "checkpoints" / "last" / "training.safetensors")
    assert torch.equal(saved["inner.weight"], evaluated[-1])
    assert torch.equal(state["own.inner.weight"], plain[-1])
    assert saved["seen"] == model.seen > 0
