"""The model's nll and loss, its cache as a value, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import fullrank as fr
from fullrank.core.errors import InputError

V = 13


def model(**changes: object) -> fr.LanguageModel:
    sizes = {
        "vocab_size": V,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer": "pytorch",
    }
    return fr.LanguageModel(fr.ModelConfig(**(sizes | changes))).double()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(V, (3, 5)), torch.randint(V, (3, 5))


def grads(made: fr.LanguageModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in made.named_parameters()}
    made.zero_grad()
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nll_and_loss_are_the_cross_entropy_of_the_logits(
    tied: bool, training: bool, batch: tuple[torch.Tensor, ...]
) -> None:
    """Values and the gradients of every parameter, differentiated through logits, nll and loss."""
    read, targets = batch
    made = model(output=fr.OutputConfig(tied=tied)).train(training)
    weights = torch.tensor([[1.0, 0.0, 2.0, 0.5, 0.0]]).double().expand(3, 5)
    each = F.cross_entropy(made(read).logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 5)
    (each * weights).sum().div(weights.sum()).backward()
    expected = grads(made)
    nll = made.nll(read, targets)
    assert nll.per_token.shape == (3, 5)
    assert nll.memory is None
    assert torch.allclose(nll.per_token, each, atol=1e-12)
    (nll.per_token * weights).sum().div(weights.sum()).backward()
    through_nll = grads(made)
    loss = made.loss(read, targets, weights)
    assert loss.shape == ()
    assert abs(float((loss - (each * weights).sum() / weights.sum()).detach())) < 1e-12
    loss.backward()
    through_loss = grads(made)
    for name, gradient in expected.items():
        assert torch.allclose(through_nll[name], gradient, atol=1e-12), name
        assert torch.allclose(through_loss[name], gradient, atol=1e-12), name


def test_padding_and_weights_give_the_mean_over_the_tokens(batch: tuple[torch.Tensor, ...]) -> None:
    """A padded batch has the loss of its texts alone, each token counting once."""
    read, targets = batch
    made, lengths = model().eval(), (5, 2, 3)
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in lengths])
    alone = sum(made.nll(read[i : i + 1, :n], targets[i : i + 1, :n]).per_token.sum() for i, n in enumerate(lengths))
    loss = made.loss(read, targets, mask.double(), attention_mask=mask)
    assert torch.allclose(loss, alone / 10, atol=1e-12)


KINDS = {
    "softmax": {},
    "mixture": {"output": fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=2)},
    "adaptive": {"output": fr.OutputConfig(kind="adaptive", cutoffs=[4, 8])},
}


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_minus_100_do_not_count(kind: str, kernel: str, batch: tuple[torch.Tensor, ...]) -> None:
    """The ignored target of PyTorch's cross entropy: values and gradients, with weights, smoothing and in each token's nll."""
    read, targets = batch
    targets = targets.clone()
    targets[0, :3] = targets[2, 4] = -100
    made = model(**KINDS[kind])
    for smoothing in (0.0, 0.1):
        logits = made(read).logits.flatten(0, 1)
        F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing).backward()
        expected = grads(made)
        with fr.kernel(kernel):
            made.loss(read, targets, label_smoothing=smoothing).backward()
        for name, found in grads(made).items():
            torch.testing.assert_close(found, expected[name], msg=name)
    each = F.cross_entropy(made(read).logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 5)
    weights = torch.rand(3, 5).double()
    with fr.kernel(kernel):
        torch.testing.assert_close(made.nll(read, targets).per_token, each)
        wanted = (each * weights).sum() / (weights * (targets != -100)).sum()
        torch.testing.assert_close(made.loss(read, targets, weights), wanted)
        assert made.loss(read, torch.full_like(targets, -100)).item() == 0
        plain = made.loss(read, batch[1])
        assert torch.equal(plain, made.loss(read, batch[1].int()))


@pytest.mark.parametrize("memory", [0, 4])
def test_inputs_before_the_targets_are_context(memory: int) -> None:
    """T targets of N inputs: the loss of the last T positions, and the gradients of a loss with weight 0 at the others."""
    made = model(output=fr.OutputConfig(tied=True), memory_length=memory)
    read, targets = torch.randint(V, (3, 7)), torch.randint(V, (3, 7))
    weights = torch.zeros(3, 7).double()
    weights[:, 3:] = 1
    expected = made.loss(read, targets, weights)
    expected.backward()
    gradients = grads(made)
    loss = made.loss(read, targets[:, 3:])
    assert abs(float((loss - expected).detach())) < 1e-12
    loss.backward()
    for name, gradient in grads(made).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12, msg=name)
    with pytest.raises(InputError, match="targets"):
        made.loss(read[:, :3], targets)
    with pytest.raises(InputError, match="targets"):
        made.nll(read, targets[:, 3:])  # a figure is of all tokens
