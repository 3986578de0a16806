"""The masked language model: what it sees, what it computes at masked places, and that nothing else counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullrank as fr

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
ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"mix": "position_wise", "normalize": "sigsoftmax"},
    "relative": {"score": "relative", "mix": "position_independent"},
    "multilinear": {"kind": "multilinear", "rank": 5, "cores": 2, "output_map": "decayed", "decays": 3},
    "synthesizer": {"score": "random_synthesizer"},
}


def model(output: str = "softmax", attention: str = "plain", **changes: Any) -> fr.MaskedLanguageModel:
    torch.manual_seed(3)
    position = "relative" if attention == "relative" else "sinusoidal"
    config = fr.ModelConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, position=position,
        max_position_embeddings=16, attention=fr.AttentionConfig(**ATTENTIONS[attention]),
        output=fr.OutputConfig(**OUTPUTS[output]), **changes,
    )  # fmt: skip
    made = fr.MaskedLanguageModel(config).double().eval()
    with torch.no_grad():  # so that what starts at zero shows
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def text(rows: int = 3, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """inputs with masks, the tokens themselves, and weights that are no zeros and ones."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(VOCABULARY - 1, (rows, tokens), generator=generator)
    asked = torch.rand(rows, tokens, generator=generator) < 0.4
    asked[0, 0] = True
    weights = asked * torch.rand(rows, tokens, generator=generator, dtype=torch.float64)
    return torch.where(asked, VOCABULARY - 1, targets), targets, weights


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_token_sees_every_other(attention: str) -> None:
    made, inputs = model(attention=attention), text(rows=1)[0]
    before = made(inputs).logits[0]
    for place in (0, 4, 8):
        other = inputs.clone()
        other[0, place] = (other[0, place] + 1) % (VOCABULARY - 1)
        moved = (made(other).logits[0] - before).abs().amax(1)
        assert (moved > 1e-9).all(), f"a change at {place} is not seen everywhere"


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


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_changes_nothing(attention: str) -> None:
    made = model("adaptive", attention)
    inputs, targets, weights = text(rows=2, tokens=6)
    alone = made(inputs).logits
    loss = made.loss(inputs, targets, weights)
    for left, right in ((0, 3), (2, 0), (1, 2)):
        if left and ATTENTIONS[attention].get("score") == "random_synthesizer":
            continue  # it knows places, and padding on the left moves them
        around = (left, right)
        mask = nn.functional.pad(torch.ones_like(inputs), around)
        padded = nn.functional.pad(inputs, around, value=4)
        logits = made(padded, mask).logits[:, left : left + 6]
        torch.testing.assert_close(logits, alone, rtol=1e-9, atol=1e-11)
        found = made.loss(padded, nn.functional.pad(targets, around, value=2), nn.functional.pad(weights, around), mask)
        torch.testing.assert_close(found, loss, rtol=1e-9, atol=1e-11)


def test_what_it_is_made_of() -> None:
    """A causal model with the same vocabulary has the same parts."""
    made = model("tied")
    assert made.mask_id == VOCABULARY - 1
    assert made.num_parameters() == fr.LanguageModel(made.config).num_parameters()
    assert made.compile_targets() == list(made.encoder.blocks)
    assert made.max_length is None
    assert model(attention="synthesizer").max_length == 16
    with torch.device("meta"):
        assert fr.MaskedLanguageModel(made.config).num_parameters() == made.num_parameters()
    trace = fr.Trace()
    made(text()[0], trace=trace)
    assert [tuple(layer.weights.shape) for layer in trace.layers] == [(3, 4, 9, 9)] * 2
