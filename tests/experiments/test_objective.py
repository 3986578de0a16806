"""The training objective: nll, label smoothing and penalties, against what they are made of."""

import pytest
import torch
from torch.nn import functional as F

import fullrank as fr
from fullrank.config.run import TrainConfig
from fullrank.data.batches import Batch
from fullrank.experiments.language_model import CausalObjective
from fullrank.training.values import TrainingPosition
from moving import narrow


@pytest.fixture
def model():
    return narrow(size=0.1, vocab_size=13, attention={"mix": "position_wise"})


@pytest.fixture
def batch():
    weights = torch.ones(3, 7)
    weights[2, 4:] = 0
    return Batch(torch.randint(13, (3, 7)), torch.randint(13, (3, 7)), weights)


def test_value_nll_and_tokens(model, batch):
    logits = model(batch.inputs).logits
    counted = batch.weights.bool()
    smoothed = F.cross_entropy(logits[counted], batch.targets[counted], label_smoothing=0.1)
    plain = F.cross_entropy(logits[counted], batch.targets[counted], reduction="sum")
    loss = CausalObjective(model, TrainConfig(label_smoothing=0.1))(batch, {}, TrainingPosition(step=1))
    torch.testing.assert_close(loss.value, smoothed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.as_tensor(loss.nll), plain, rtol=1e-12, atol=1e-12)
    assert loss.tokens == int(counted.sum())


def test_penalties_are_added_with_their_coefficients(model, batch):
    trace = fr.Trace()
    model(batch.inputs, trace=trace)
    plain = CausalObjective(model, TrainConfig())(batch, {}, TrainingPosition(step=1)).value
    penalized = CausalObjective(model, TrainConfig(orthogonality=0.3, overlap=0.02))
    value = penalized(batch, {}, TrainingPosition(step=1)).value
    expected = 0.3 * fr.orthogonality(trace) + 0.02 * fr.overlap(trace)
    assert expected > 1e-3
    torch.testing.assert_close(value - plain, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 0.0), (0.0, 3.0), (2.0, 3.0)])
def test_the_penalties_of_the_last_hidden_states(alpha, beta):
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = fr.LanguageModel(fr.ModelConfig(**sizes, dropout={"output": 0.5})).double()
    ids = torch.randint(9, (3, 12))
    batch = Batch(ids[:, :-1], ids[:, 5:])  # 4 inputs are context, 7 are predicted
    options = TrainConfig(steps=1, activation_regularization=alpha, temporal_regularization=beta)

    def loss(options):
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
