"""The translator beside its equations: outputs, and the gradients of everything; T5 is in tests/hf/test_blocks_of_others.py."""

import re

import pytest
import torch
import translator_equations as equations

from closeness import close
from translator_models import MECHANISMS, TARGET, WIDE, padding, sentences, tokens, translator

# everything whose equation is written here; the output layers, adaptive ones and mixtures have their own tests
ELSEWHERE = re.compile("synth|decayed|term|mixture|adaptive|average")
WRITTEN = [name for name in MECHANISMS if not ELSEWHERE.search(name)]
LENGTHS = [6, 1, 4]


def parameters(model):
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in model.state_dict().items()}


SIDED = [  # every day each mechanism with one side; both in the full tier
    pytest.param(mechanism, side, marks=() if i % 2 == k else pytest.mark.full)
    for i, mechanism in enumerate(WRITTEN)
    for k, side in enumerate(["right", "left"])
]


@pytest.mark.parametrize(("mechanism", "side"), SIDED)
def test_outputs_and_every_gradient(mechanism, side):
    """A padded batch, its padding another token than those of the sentences, beside each sentence alone."""
    model = translator(mechanism)
    source, target = sentences(model, 3, 6, 5)
    mask = padding(LENGTHS, 6, side)
    read = parameters(model)
    out = model(source, target, mask).logits
    right = torch.stack(
        [
            equations.logits(model.config, read, source[row][mask[row].bool()], target[row])
            for row in range(len(LENGTHS))
        ]
    )
    close(out, right, "logits", 1e-9)
    cotangent = torch.randn(out.shape, dtype=WIDE, generator=torch.Generator().manual_seed(8))
    out.backward(cotangent)
    right.backward(cotangent)
    largest = max(float(tensor.grad.abs().max()) for tensor in read.values() if tensor.grad is not None)
    named = dict(model.named_parameters())
    assert set(named) <= set(read)
    for name, parameter in named.items():
        gradient = read[name].grad
        assert parameter.grad is not None, f"no gradient for {name}"
        assert gradient is not None, f"the equation does not read {name}"
        off = float((parameter.grad - gradient).abs().max())
        assert off <= 1e-9 * largest, f"gradient of {name} is off by {off:.1e}"
        if "project.key.bias" not in name:  # one number added to all scores of a query matters to sigsoftmax alone
            assert float(gradient.abs().max()) > 1e-9 * largest, f"the gradient of {name} is zero"


def test_loss_and_nll():
    """sum(w nll) / sum(w), label smoothing, and gradients of both, from log p of the logits."""
    model = translator("B")
    source, target = sentences(model, 3, 6, 5)
    targets = tokens(TARGET, 3, 5, seed=9)
    mask = padding(LENGTHS, 6, "right")
    weights = padding([5, 2, 3], 5, "right").double()
    logs = model(source, target, mask).logits.log_softmax(-1)
    nll = -logs.gather(-1, targets[..., None])[..., 0]
    close(model.nll(source, target, targets, mask).per_token, nll, "nll")
    expected = (nll * weights).sum() / weights.sum()
    parts = model.loss_parts(source, target, targets, weights, mask, label_smoothing=0.1)
    close(parts.nll, expected, "nll of the loss")
    smooth = (((1 - 0.1) * nll - 0.1 * logs.mean(-1)) * weights).sum() / weights.sum()
    close(parts.loss, smooth, "loss")
    close(model.loss(source, target, targets, weights, mask), expected, "plain loss")
    close(model.loss(source, target, targets), model.nll(source, target, targets).per_token.mean(), "no weights")
    gradients, references = (torch.autograd.grad(loss, list(model.parameters())) for loss in (parts.loss, smooth))
    for (name, _), gradient, reference in zip(model.named_parameters(), gradients, references, strict=True):
        close(gradient, reference, name, 1e-9)
