"""Dropout of output layers: of latents, in tails; values and gradients under one seed; none in evaluation."""

import math

import pytest
import torch
from output_equations import DOUBLE, Case


def revealing(p, width=40, mixtures=3):
    """The latents are tanh(0.5) everywhere, so that what is dropped can be seen; W is the unit matrix."""
    case = Case(mixtures, bias=False, vocabulary=width, width=width)
    layer = case.layer(latent_dropout=p)
    with torch.no_grad():
        layer.mixture.latent.weight.zero_()
        layer.mixture.latent.bias.fill_(0.5)
        layer.weight.copy_(torch.eye(width))
    return layer


def masks(layer, hidden):
    """(B, N, K, E): by how much the latents were multiplied."""
    states, _ = layer.mixture(hidden)
    return states.detach().view(*hidden.shape[:2], -1, hidden.shape[2]) / math.tanh(0.5)


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_latents_are_dropped(p):
    """A share p of them is zero and the rest 1 / (1 - p), each on its own."""
    factors = masks(revealing(p), torch.randn(50, 6, 40, dtype=DOUBLE))
    dropped = factors == 0
    assert torch.allclose(factors[~dropped], torch.full((), 1 / (1 - p), dtype=DOUBLE), atol=1e-5)
    assert abs(float(dropped.double().mean()) - p) < 5 * math.sqrt(p * (1 - p) / dropped.numel())
    pairs = [(dropped[0], dropped[1]), (dropped[:, :, 0], dropped[:, :, 1]), (dropped[:, 0], dropped[:, 1])]
    expected = p * p + (1 - p) * (1 - p)
    for first, second in pairs:  # two sequences, two softmaxes, two positions
        agree = float((first == second).double().mean())
        assert abs(agree - expected) < 5 * math.sqrt(expected * (1 - expected) / first.numel())


def test_values_agree_under_one_seed_and_evaluation_draws_nothing():
    case = Case(3)
    layer = case.layer(latent_dropout=0.4)
    hidden, targets = case.batch()

    def values():
        results = []
        for value in (
            lambda: layer.loss(hidden, targets)[0],
            lambda: layer.loss(hidden, targets)[1],
            lambda: layer.nll(hidden, targets).mean(),
            lambda: -layer(hidden).gather(-1, targets[..., None]).mean(),
        ):
            torch.manual_seed(21)
            results.append(value())
        return results

    noisy = values()
    for value in noisy[1:]:
        assert abs(float((value - noisy[0]).detach())) < 1e-12
    gradients = [torch.autograd.grad(value, hidden)[0] for value in (noisy[0], *noisy[2:])]
    for gradient in gradients[1:]:
        assert torch.allclose(gradient, gradients[0], atol=1e-12)
    layer.eval()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    layer.loss(hidden, targets)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.allclose(layer(hidden), case.log_prob(case.tensors(layer), hidden), atol=1e-12)


def test_dropout_in_tails():
    """Between their two matrices, scaled, in training only, and nowhere in the head."""
    case = Case(cutoffs=(3, 4), form="transformer_xl", vocabulary=12, width=64, tokens=(1, 5))
    layer = case.layer(tail_dropout=0.5)
    hidden = torch.randn(1, 5, 64, dtype=DOUBLE)
    plain = layer.eval()(hidden)
    assert torch.equal(plain, layer(hidden))
    layer.train()
    noisy = layer(hidden)
    assert torch.equal(noisy[..., :4], plain[..., :4])  # the fourth word is alone in its tail
    assert not torch.allclose(noisy[..., 4:], plain[..., 4:])
    with torch.no_grad():
        layer.weights[2].zero_()
        layer.weights[2][0, 0] = 1
    read = (hidden @ layer.projections["2"])[..., 0]
    logits = [layer(hidden)[..., 4:] - layer.biases[2] for _ in range(30)]
    values = torch.stack([(tail[..., 0] - tail[..., 1]) / read for tail in logits])
    assert bool(((values - 2).abs().minimum(values.abs()) < 1e-8).all())
    assert 0.3 < float((values > 1).double().mean()) < 0.7


@pytest.mark.parametrize("mixtures", [None, 2])
def test_gradients_are_those_of_the_values_under_dropout(mixtures):
    """Also where a part is computed again in the backward pass, which must draw the same masks."""
    case = Case(mixtures, () if mixtures else (2, 4), vocabulary=8, width=5, tokens=(1, 4))
    layer = case.layer(**{"latent_dropout" if mixtures else "tail_dropout": 0.3})
    read = layer.mixture.prior.weight if mixtures else layer.class_weight
    hidden, targets = case.batch()

    def seeded(*_, run):
        torch.manual_seed(3)
        return run()

    for run in (
        lambda: layer.nll(hidden, targets), lambda: layer.loss(hidden, targets, None, 0.2)[0],
        lambda: layer(hidden)[..., ::3],
    ):  # fmt: skip
        assert torch.autograd.gradcheck(lambda *x, run=run: seeded(*x, run=run), (hidden, read))
