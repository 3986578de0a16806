"""The masked language model: its loss at masked places, of every output layer. Who sees whom is in tests/properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fullrank as fr
from moving import moved

VOCABULARY = 24  # the last is <mask>
CLUSTERS: dict[str, Any] = {"cutoffs": [7, 13], "div_val": 2}
OUTPUTS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax"},
    "tied": {"kind": "softmax", "tied": True},
    "sigsoftmax": {"kind": "softmax", "normalize": "sigsoftmax"},
    "adaptive": {"kind": "adaptive", **CLUSTERS},
    "mixture": {"kind": "mixture_of_softmaxes", "mixtures": 3},
    "mixture, tied": {"kind": "mixture_of_softmaxes", "mixtures": 3, "tied": True},
}


def model(output: str = "softmax", **changes: Any) -> fr.MaskedLanguageModel:
    torch.manual_seed(3)
    config = fr.ModelConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, position="sinusoidal",
        max_position_embeddings=16, output=fr.OutputConfig(**OUTPUTS[output]), **changes,
    )  # fmt: skip
    return moved(fr.MaskedLanguageModel(config).double().eval(), 0.05)


def text(rows: int = 3, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """inputs with masks, the tokens themselves, and weights that are no zeros and ones."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(VOCABULARY - 1, (rows, tokens), generator=generator)
    asked = torch.rand(rows, tokens, generator=generator) < 0.4
    asked[0, 0] = True
    weights = asked * torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    return torch.where(asked, VOCABULARY - 1, targets), targets, weights


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", OUTPUTS)
def test_the_loss_at_masked_places_is_that_of_all_with_weights(name: str, smoothing: float) -> None:
    """From the logits, written out: sum w ((1 - e) nll + e mean over words of -log p) / sum w."""
    made = model(name)
    inputs, targets, weights = text()
    logs = torch.log_softmax(made(inputs).logits, -1)
    nll = -logs.gather(2, targets[..., None])[..., 0]
    each = (1 - smoothing) * nll - smoothing * logs.mean(-1)
    expected = (weights * each).sum() / weights.sum()
    wanted = torch.autograd.grad(expected, list(made.parameters()))
    found = made.loss_parts(inputs, targets, weights, label_smoothing=smoothing)
    torch.testing.assert_close(found.loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.nll, (weights * nll).sum() / weights.sum(), rtol=1e-10, atol=1e-12)
    found.loss.backward()
    for (key, parameter), gradient in zip(made.named_parameters(), wanted, strict=True):
        assert parameter.grad is not None, key
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_output_layer_reads_masked_places_only(name: str) -> None:
    made = model(name)
    inputs, targets, weights = text()
    read: list[Tensor] = []
    loss = made.output.loss

    def watched(hidden: Tensor, *rest: Any) -> Any:
        read.append(hidden)
        return loss(hidden, *rest)

    made.output.loss = watched
    made.loss(inputs, targets, weights)
    assert [tuple(hidden.shape) for hidden in read] == [(1, int((weights != 0).sum()), 16)]


def test_what_it_is_made_of() -> None:
    """A causal model with the same vocabulary has the same parts."""
    made = model("tied")
    assert made.mask_id == VOCABULARY - 1
    assert made.num_parameters() == fr.LanguageModel(made.config).num_parameters()
    assert made.compile_targets() == list(made.encoder.blocks)
    assert made.max_length is None
    assert model(attention=fr.AttentionConfig(score="random_synthesizer")).max_length == 16
    with torch.device("meta"):
        assert fr.MaskedLanguageModel(made.config).num_parameters() == made.num_parameters()
    trace = fr.Trace()
    made(text()[0], trace=trace)
    assert [tuple(layer.weights.shape) for layer in trace.layers] == [(3, 4, 9, 9)] * 2
