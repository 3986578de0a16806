"""The mixture of softmaxes as a layer: its parameters, what it is with one softmax, and dropout of its latents."""

from __future__ import annotations

import math
from typing import Any

import mixture_equations as equations
import pytest
import torch
from mixture_equations import DOUBLE, Case
from torch import Tensor, nn

import fullrank as fr
from fullrank.core.embedding import TokenEmbedding
from fullrank.core.errors import ConfigError
from fullrank.core.output import SoftmaxOutput

# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_names_and_shapes(tied: bool, bias: bool) -> None:
    """Those of the plain softmax, and K E^2 + 2 K E more."""
    case = Case(width=6, mixtures=4, bias=bias, tied=tied)
    mixture = fr.LanguageModel(case.config())
    plain = fr.LanguageModel(case.config(kind="softmax", mixtures=None))
    own = {name: tuple(tensor.shape) for name, tensor in plain.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in mixture.state_dict().items()}
    assert {name: found.pop(name) for name in list(found) if ".mixture." in name} == {
        "output.mixture.latent.weight": (24, 6), "output.mixture.latent.bias": (24,),
        "output.mixture.prior.weight": (4, 6),
    }  # fmt: skip
    assert found == own
    assert ("output.weight" in own, "output.bias" in own) == (not tied, bias)
    assert mixture.num_parameters() - plain.num_parameters() == 4 * 36 + 2 * 4 * 6


def test_what_the_layer_alone_refuses() -> None:
    config, sizes = fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=2), {"vocab_size": 9, "hidden_size": 4}
    for build, message in (
        (lambda: fr.MixtureOfSoftmaxes(config), "give a ModelConfig, or an OutputConfig with"),
        (lambda: fr.MixtureOfSoftmaxes(config, hidden_size=4), "vocab_size: must be a number"),
        (lambda: fr.MixtureOfSoftmaxes(config, vocab_size=4), "OutputConfig with vocab_size and hidden_size"),
        (lambda: fr.MixtureOfSoftmaxes(Case().config(), **sizes), "a ModelConfig has its own sizes"),
        (lambda: fr.MixtureOfSoftmaxes(fr.OutputConfig(), **sizes), r"model\.output\.kind: .*given 'softmax'"),
        (lambda: fr.MixtureOfSoftmaxes(Case(tied=True).config()), r"model\.output\.tied: .*`model\.input\.kind: token`"),
        (lambda: fr.MixtureOfSoftmaxes(Case(tied=True).config(), nn.Linear(2, 2)), r"model\.output\.tied: "),
        (
            lambda: fr.MixtureOfSoftmaxes(Case(tied=True, vocabulary=9).config(), TokenEmbedding(Case().config())),
            r"model\.output\.tied: the embedding has a table \(11, 5\), the output asks for vocab_size 9",
        ),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            build()
    assert fr.MixtureOfSoftmaxes(config, **sizes)(torch.randn(2, 3, 4)).shape == (2, 3, 9)


def test_ids_outside_the_vocabulary_and_no_tokens() -> None:
    layer = Case().layer().output
    hidden = torch.randn(1, 1, 5, dtype=DOUBLE)
    for wrong in (-1, 11):
        for value in (layer.nll, layer.loss):
            with pytest.raises((RuntimeError, IndexError), match="index"):
                value(hidden, torch.tensor([[wrong]]))
    nothing, no_ids = hidden[:, :0].requires_grad_(), torch.zeros(1, 0, dtype=torch.int64)
    assert layer(nothing).shape == (1, 0, 11)
    assert layer.nll(nothing, no_ids).shape == (1, 0)
    layer.nll(nothing, no_ids).sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


# -- one softmax ------------------------------------------------------------------------------------------------------


def measured(layer: nn.Module, hidden: Tensor, targets: Tensor) -> list[Tensor]:
    """Everything a vocabulary layer computes, with the gradients of hidden states, weight and bias."""
    weights, leaves = torch.linspace(0, 1, targets.numel()).view(targets.shape), (hidden, layer.weight, layer.bias)
    torch.manual_seed(9)
    values = [
        layer.log_prob(hidden),
        torch.log_softmax(layer(hidden), -1),
        layer.nll(hidden, targets),
        layer.loss(hidden, targets, weights, 0.0)[0],
        layer.loss(hidden, targets, None, 0.2)[0],
    ]
    found = [layer.loss(hidden, targets, None, 0.2)[1]]
    for value in values:
        cotangent = torch.randn_like(value)
        found += [value.detach(), *torch.autograd.grad(value, leaves, cotangent, materialize_grads=True)]
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(DOUBLE, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_one_softmax_without_latent_is_the_plain_layer(dtype: torch.dtype, tolerance: float) -> None:
    case = Case((3, 29), 1013, 7, 1)
    mixture = fr.MixtureOfSoftmaxes(case.config(latent=False)).to(dtype)
    plain = SoftmaxOutput(case.config(kind="softmax", mixtures=None), nn.Identity()).to(dtype)
    nn.init.normal_(mixture.bias)
    assert mixture.state_dict().keys() == plain.state_dict().keys() == {"weight", "bias"}
    plain.load_state_dict(mixture.state_dict())
    hidden, targets = case.batch(dtype)
    for found, expected in zip(measured(mixture, hidden, targets), measured(plain, hidden, targets), strict=True):
        equations.close("softmax", found, expected.double(), tolerance)


def test_the_same_softmax_again_and_again_is_one_softmax() -> None:
    """Whatever the prior, which then has no gradient."""
    case = Case((2, 11), 53, 6, 4)
    layer = case.layer()
    squares = layer.output.mixture.latent
    with torch.no_grad():
        squares.weight.copy_(squares.weight[:6].repeat(4, 1))
        squares.bias.copy_(squares.bias[:6].repeat(4))
    hidden, targets = case.batch()
    latent = torch.tanh(nn.functional.linear(hidden.detach(), squares.weight[:6], squares.bias[:6])).detach()
    plain = SoftmaxOutput(case.config(kind="softmax", mixtures=None), nn.Identity()).double()
    plain.load_state_dict({name: layer.output.state_dict()[name] for name in ("weight", "bias")})
    layer_values, plain_values = (
        (made.log_prob(states), made.nll(states, targets), made.loss(states, targets, None, 0.1)[0])
        for made, states in ((layer.output, hidden), (plain, latent))
    )
    for found, expected in zip(layer_values, plain_values, strict=True):
        equations.close("value", found.detach(), expected.detach(), 1e-12)
        cotangent = torch.randn_like(expected)
        asked = (layer.output.weight, layer.output.bias, layer.output.mixture.prior.weight)
        *shared, prior = torch.autograd.grad(found, asked, cotangent)
        for one, other in zip(
            shared, torch.autograd.grad(expected, (plain.weight, plain.bias), cotangent), strict=True
        ):
            equations.close("gradient", one, other, 1e-12)
        assert float(prior.abs().max()) < 1e-12


def test_the_order_of_the_softmaxes_does_not_matter() -> None:
    case = Case((1, 9), 17, 3, 4)
    first, second = case.layer().output, case.layer().output
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        second.mixture.latent.weight.copy_(first.mixture.latent.weight.view(4, 3, 3)[order].view(12, 3))
        second.mixture.latent.bias.copy_(first.mixture.latent.bias.view(4, 3)[order].flatten())
        second.mixture.prior.weight.copy_(first.mixture.prior.weight[order])
    hidden, targets = case.batch()
    assert torch.allclose(first(hidden), second(hidden), atol=1e-12)
    assert torch.allclose(first.nll(hidden, targets), second.nll(hidden, targets), atol=1e-12)


# -- dropout of the latents -------------------------------------------------------------------------------------------


def revealing(p: float, locked: bool, width: int = 40, mixtures: int = 3) -> nn.Module:
    """The latents are tanh(0.5) everywhere, so that what is dropped can be seen; W is the unit matrix."""
    config = fr.OutputConfig(
        kind="mixture_of_softmaxes", mixtures=mixtures, latent_dropout=p, latent_dropout_locked=locked, bias=False
    )
    layer = fr.MixtureOfSoftmaxes(config, vocab_size=width, hidden_size=width).double()
    with torch.no_grad():
        layer.mixture.latent.weight.zero_()
        layer.mixture.latent.bias.fill_(0.5)
        layer.weight.copy_(torch.eye(width))
    return layer


def masks(layer: nn.Module, hidden: Tensor) -> Tensor:
    """(B, N, K, E): by how much the latents were multiplied."""
    latents = layer.mixture(hidden)[0].detach()
    return latents.view(*hidden.shape[:2], -1, hidden.shape[2]) / math.tanh(0.5)


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("p", [0.2, 0.5])
def test_latents_are_dropped(p: float, locked: bool) -> None:
    """A share p of them is zero and the rest 1 / (1 - p): each on its own, or for all positions of a sequence at once."""
    layer, hidden = revealing(p, locked), torch.randn(50, 6, 40, dtype=DOUBLE)
    found = masks(layer, hidden)
    dropped = found == 0
    assert torch.allclose(found[~dropped], torch.full((), 1 / (1 - p), dtype=DOUBLE), atol=1e-5)
    draws = dropped[:, 0] if locked else dropped
    assert abs(float(draws.double().mean()) - p) < 5 * math.sqrt(p * (1 - p) / draws.numel())
    if locked:
        assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    pairs = [(dropped[0], dropped[1]), (dropped[:, :, 0], dropped[:, :, 1])]  # two sequences, two softmaxes
    pairs += [] if locked else [(dropped[:, 0], dropped[:, 1])]
    for one, other in pairs:
        agree, expected = float((one == other).double().mean()), p * p + (1 - p) * (1 - p)
        count = one.numel() / (6 if locked else 1)
        assert abs(agree - expected) < 5 * math.sqrt(expected * (1 - expected) / count), "masks depend on each other"


@pytest.mark.parametrize("locked", [False, True])
def test_dropout_reaches_the_probabilities_and_spares_the_prior(locked: bool) -> None:
    layer, hidden = revealing(0.5, locked, 7, 2), torch.randn(3, 5, 7, dtype=DOUBLE)
    prior = torch.softmax(hidden @ layer.mixture.prior.weight.T, -1)
    torch.manual_seed(4)
    latents = masks(layer, hidden) * math.tanh(0.5)
    torch.manual_seed(4)
    found = layer(hidden)
    assert torch.allclose(layer.mixture(hidden)[1].exp().view(3, 5, 2), prior, atol=1e-12)
    expected = (prior[..., None] * torch.softmax(latents, -1)).sum(2).log()
    assert torch.allclose(found, expected, atol=1e-12)
    assert not torch.allclose(layer(hidden), found)  # drawn anew


@pytest.mark.parametrize("locked", [False, True])
def test_values_agree_under_one_seed_and_evaluation_draws_nothing(locked: bool) -> None:
    case = Case((3, 7), 23, 5, 3)
    layer = case.layer(latent_dropout=0.4, latent_dropout_locked=locked).output
    hidden, targets = case.batch()

    def values() -> list[Tensor]:
        found = []
        for value in (
            lambda: layer.loss(hidden, targets)[0],
            lambda: layer.loss(hidden, targets)[1],
            lambda: layer.nll(hidden, targets).mean(),
            lambda: -layer(hidden).gather(-1, targets[..., None]).mean(),
        ):
            torch.manual_seed(21)
            found.append(value())
        return found

    noisy = values()
    for value in noisy[1:]:
        assert abs(float((value - noisy[0]).detach())) < 1e-12
    gradients = [torch.autograd.grad(value, hidden)[0] for value in (noisy[0], *noisy[2:])]
    for gradient in gradients[1:]:
        assert torch.allclose(gradient, gradients[0], atol=1e-12)
    layer.eval()
    state, plain = torch.get_rng_state(), values()[0].detach()
    torch.manual_seed(5)
    assert torch.equal(layer.loss(hidden, targets)[0].detach(), plain)
    torch.set_rng_state(state)
    layer.loss(hidden, targets)
    assert torch.equal(torch.get_rng_state(), state)
    assert abs(float(noisy[0].detach() - plain)) > 1e-3
    assert torch.allclose(layer(hidden), equations.log_prob(case, case.layer().copy(), hidden), atol=1e-12)


def test_dropout_of_a_model_is_no_dropout_of_latents() -> None:
    """`dropout.output` acts before the layer; the prior then reads what it left."""
    seen: dict[str, Any] = {}
    config = fr.ModelConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, dropout=fr.DropoutConfig(output=0.5),
        output=fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=2),
    )  # fmt: skip
    model = fr.LanguageModel(config)
    model.output.mixture.register_forward_hook(lambda _, given, out: seen.update(given=given[0], out=out))
    model(torch.zeros(2, 5, dtype=torch.int64))
    assert 0.2 < float((seen["given"] == 0).double().mean()) < 0.8
    assert int((seen["out"][0] == 0).sum()) == 0
