"""AR and TAR: the objective's loss is the mean nll plus both, over the tokens that are predicted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fullrank as fr
from fullrank.config.training import TrainConfig
from fullrank.data.batches import Batch
from fullrank.experiments.language_model import CausalObjective
from fullrank.training.values import TrainingPosition


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 0.0), (0.0, 3.0), (2.0, 3.0)])
def test_the_penalties_of_the_last_hidden_states(alpha: float, beta: float) -> None:
    config = fr.ModelConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    model = fr.LanguageModel(
        dataclasses.replace(config, dropout=dataclasses.replace(config.dropout, output=0.5))
    ).double()
    ids = torch.randint(9, (3, 12))
    batch = Batch(ids[:, :-1], ids[:, 5:])  # 4 inputs are context, 7 are predicted
    options = TrainConfig(steps=1, activation_regularization=alpha, temporal_regularization=beta)

    def loss(options: TrainConfig) -> torch.Tensor:
        torch.manual_seed(1)
        return CausalObjective(model.train(), options)(batch, {}, TrainingPosition(1)).value

    hidden = model.eval().hidden(batch.inputs).hidden[:, 4:].detach()  # no dropout acts before them
    squares = sum(float(h.square().sum()) for h in hidden.unbind(1)) / hidden.numel()
    changes = [float((b - a).square().sum()) for a, b in zip(hidden.unbind(1), hidden.unbind(1)[1:], strict=False)]
    expected = alpha * squares + beta * sum(changes) / (6 * hidden[:, 0].numel())
    penalized, plain = loss(options), loss(TrainConfig(steps=1))
    assert float((penalized - plain).detach()) == pytest.approx(expected, rel=1e-12)
    gradient = torch.autograd.grad(penalized - plain, model.final_norm.bias)[0]
    assert float(gradient.abs().max()) > 0
