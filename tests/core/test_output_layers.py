"""What every vocabulary layer owes to whoever calls it alone: shapes that fit, sums in fp32, no gradients that stay behind."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import fullrank as fr
from fullrank.core.errors import InputError

VOCABULARY, WIDTH = 23, 6
OUTPUTS = {
    "softmax": {},
    "mixture": {"kind": "mixture_of_softmaxes", "mixtures": 3},
    "adaptive": {"kind": "adaptive", "cutoffs": [8, 15]},
    "mixture of adaptive": {"kind": "mixture_of_softmaxes", "mixtures": 3, "cutoffs": [8, 15]},
}
every_layer = pytest.mark.parametrize("kind", OUTPUTS)


def layer(kind: str) -> nn.Module:
    config = fr.ModelConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_attention_heads=1, num_hidden_layers=1,
        output=fr.OutputConfig(**OUTPUTS[kind]),
    )  # fmt: skip
    return fr.LanguageModel(config).output


@every_layer
@pytest.mark.parametrize("shape", [(3, 4), (3, 6), (1, 1), (5, 3), (15,)], ids=str)
@pytest.mark.parametrize("head_only", [True, False])
def test_targets_of_another_shape(kind: str, shape: tuple[int, ...], head_only: bool) -> None:
    """More targets than hidden states would be scored with what memory happens to hold, as many in another order wrongly."""
    made, hidden, targets = layer(kind), torch.randn(3, 5, WIDTH), torch.zeros(shape, dtype=torch.long)
    if not head_only:
        targets += VOCABULARY - 1
    for call in (made.nll, made.loss, lambda h, t: made.loss(h, t, label_smoothing=0.1)):
        with pytest.raises(InputError, match=r"targets \(.*\): one for each hidden state, .*\(3, 5\)"):
            call(hidden, targets)


@every_layer
def test_weights_and_smoothing_that_are_none(kind: str) -> None:
    made, hidden, targets = layer(kind), torch.randn(3, 5, WIDTH), torch.zeros(3, 5, dtype=torch.long)
    for wrong in (torch.ones(1), torch.ones(3, 1), torch.ones(5, 3), torch.ones(15)):
        with pytest.raises(InputError, match=r"weights \(.*\) must have the shape of targets \(3, 5\)"):
            made.loss(hidden, targets, wrong)
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match=f"label_smoothing: at least 0 and below 1, given {smoothing}"):
            made.loss(hidden, targets, None, smoothing)


@every_layer
def test_hidden_states_of_chosen_tokens(kind: str) -> None:
    """(M, E), as a masked-language head has them, are M tokens."""
    made, hidden, targets = layer(kind), torch.randn(3, 5, WIDTH), torch.randint(VOCABULARY, (3, 5))
    assert torch.allclose(made.nll(hidden.flatten(0, 1), targets.flatten()), made.nll(hidden, targets).flatten())
    weights = torch.rand(3, 5)
    few = made.loss(hidden.flatten(0, 1), targets.flatten(), weights.flatten(), 0.1)
    for found, expected in zip(few, made.loss(hidden, targets, weights, 0.1), strict=True):
        assert torch.allclose(found, expected)


@every_layer
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sums_are_fp32_under_autocast(kind: str, kernel: str, smoothing: float) -> None:
    """Only the products are rounded to bfloat16: a mean of 4096 nlls is not, which bfloat16 would give in steps of 1/64."""
    made, hidden = layer(kind), torch.randn(16, 256, WIDTH)
    targets = torch.randint(VOCABULARY, (16, 256))
    with torch.autocast("cpu", dtype=torch.bfloat16), fr.kernel(kernel):
        each = made.nll(hidden, targets)
        loss, nll = made.loss(hidden, targets, None, smoothing)
    assert loss.dtype == nll.dtype == torch.float32
    assert abs(float(nll) - float(each.detach().double().mean())) < 1e-5
    if smoothing == 0:
        assert float(loss.detach()) == float(nll)


@every_layer
def test_a_loss_that_is_kept_keeps_no_gradients(kind: str) -> None:
    """As of any other loss: a list of them is a list of numbers once their backward passes are done."""
    made, hidden, targets = layer(kind), torch.randn(3, 5, WIDTH), torch.randint(VOCABULARY, (3, 5))
    loss, _ = made.loss(hidden, targets)
    assert _tensors_behind(loss)
    loss.backward()
    assert not _tensors_behind(loss)


def _tensors_behind(loss: torch.Tensor) -> list[torch.Tensor]:
    """What the nodes of its graph hold on to."""
    found, seen, nodes = [], set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        kept = list(vars(node).values()) if hasattr(node, "__dict__") else []
        with contextlib.suppress(AttributeError, RuntimeError):  # has none, or has them no longer
            kept += list(node.saved_tensors)
        for value in kept:
            found += [
                one for one in (value if isinstance(value, tuple | list) else [value]) if isinstance(one, torch.Tensor)
            ]
    return found


def test_locked_dropout_of_one_sequence() -> None:
    """(N, E): one mask for all N positions, not one for all entries of a position."""
    config = fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=2, latent_dropout=0.5, latent_dropout_locked=True)
    made = fr.MixtureOfSoftmaxes(config, vocab_size=5, hidden_size=50)
    dropped = made.mixture(torch.randn(7, 50))[0].flatten(1) == 0
    assert torch.equal(dropped, dropped[:1].expand_as(dropped))
    assert 0.2 < float(dropped[0].float().mean()) < 0.8
