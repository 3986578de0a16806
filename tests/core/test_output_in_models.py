"""Models that end in every kind of output layer: losses, decoding, files, lower precision, compiled."""

from __future__ import annotations

from typing import Any

import output_equations as equations
import pytest
import torch
from output_equations import DOUBLE
from torch import Tensor, nn

import fullrank as fr

V, E = 13, 8
CLUSTERS = {"kind": "adaptive", "cutoffs": [4, 8], "div_val": 2}
KINDS: dict[str, dict[str, Any]] = {
    "mixture": {"kind": "mixture_of_softmaxes", "mixtures": 3},
    "residual mixture": {"kind": "mixture_of_softmaxes", "mixtures": 3, "latent": "residual"},
    "tied mixture": {"kind": "mixture_of_softmaxes", "mixtures": 2, "tied": True, "bias": True, "normalize": "sigsoftmax"},
    "adaptive": {"kind": "adaptive", "tied": True},
    "transformer_xl": {"kind": "adaptive", "tied": True, "form": "transformer_xl", "tied_projections": False},
    "untied adaptive": {"kind": "adaptive"},
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


def model(kind: str, dtype: torch.dtype = DOUBLE, **changes: Any) -> fr.LanguageModel:
    """Away from its start, where priors and latents hardly differ."""
    torch.manual_seed(1)
    config = fr.ModelConfig(
        vocab_size=V, hidden_size=E, num_hidden_layers=1, num_attention_heads=2, position="sinusoidal",
        input=fr.InputConfig(**CLUSTERS if "adaptive" in kind or kind == "transformer_xl" else {}),
        output=fr.OutputConfig(**KINDS[kind]), **changes,
    )  # fmt: skip
    made = fr.LanguageModel(config).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


def batch(rows: int = 4, length: int = 6) -> tuple[Tensor, Tensor]:
    ids = torch.randint(V, (rows, length + 1))
    return ids[:, :-1], ids[:, 1:]


def gradients(made: nn.Module, value: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    value.backward(retain_graph=True)
    return {name: parameter.grad.clone() for name, parameter in made.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        equations.close(name, found[name], tensor, tolerance, 1e-2)


@kinds
def test_nll_and_loss_are_the_cross_entropy_of_the_logits(kind: str) -> None:
    """The logits are normalised, so that cross entropy takes them as they are; tied tensors get both of their gradients."""
    made, (read, targets) = model(kind), batch()
    logs = made(read).logits
    assert torch.allclose(logs.exp().sum(-1), torch.ones(read.shape, dtype=DOUBLE))
    each = -logs.gather(-1, targets[..., None]).squeeze(-1)
    nll = made.nll(read, targets).per_token
    assert torch.allclose(nll, each, atol=1e-12)
    found = gradients(made, nll.square().sum())
    same(found, gradients(made, each.square().sum()))
    assert all(float(gradient.abs().max()) > 0 for gradient in found.values() if gradient.dim() > 1)
    weights = torch.rand(read.shape)
    weights[1, 2:] = 0
    for smoothing, share in ((0.0, None), (0.1, weights)):
        expected = equations.mean_loss(logs, targets, share, smoothing)
        parts = made.loss_parts(read, targets, share, label_smoothing=smoothing)
        assert abs(float((parts.loss - expected).detach())) < 1e-12
        assert abs(float(parts.nll - equations.mean_loss(logs, targets, share, 0.0).detach())) < 1e-12
        same(gradients(made, parts.loss), gradients(made, expected))


@pytest.mark.parametrize("mixtures", [1, 4])
@pytest.mark.parametrize("initializer", ["fairseq", "pytorch", "xavier_uniform", "transformer_xl"])
def test_a_residual_mixture_starts_as_one_softmax_and_its_components_part(initializer: str, mixtures: int) -> None:
    sizes: dict[str, Any] = {"vocab_size": 23, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    output = {"kind": "mixture_of_softmaxes", "mixtures": mixtures, "latent": "residual"}
    mixed = fr.LanguageModel(
        fr.ModelConfig(**sizes, initializer=initializer, output=fr.OutputConfig(**output))
    ).double()
    plain = fr.LanguageModel(fr.ModelConfig(**sizes)).double()
    plain.load_state_dict({name: value for name, value in mixed.state_dict().items() if "mixture" not in name})
    ids = torch.randint(23, (2, 7))
    torch.testing.assert_close(mixed(ids).logits, plain(ids).logits.log_softmax(-1), rtol=1e-12, atol=1e-12)

    mixed.loss(ids[:, :-1], ids[:, 1:]).backward()
    gradients = mixed.output.mixture.latent.weight.grad.view(mixtures, 8, 8)
    assert gradients.abs().amax((1, 2)).min() > 0
    assert all((gradients[0] - other).abs().max() > 1e-3 * gradients[0].abs().max() for other in gradients[1:])
