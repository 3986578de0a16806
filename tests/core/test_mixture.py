"""The mixture of softmaxes against its equation: values and every gradient."""

from __future__ import annotations

import itertools
import math

import mixture_equations as equations
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixture_equations import DOUBLE, Case
from torch import Tensor

import fullrank as fr

SHAPES = [
    Case((1, 1), 11, 5, 3),
    Case((2, 5), 11, 5, 1),
    Case((1, 3), 13, 4, 10, bias=False),  # more softmaxes than tokens
    Case((1, 3), 7, 2, 70),  # a single token has more rows than a chunk needs
    Case((7, 13), 97, 6, 5),
    Case((1, 67), 101, 3, 10),
    Case((3, 23), 1009, 7, 2, tied=True),
    Case((1, 2111), 37, 3, 3, bias=False),
    Case((3, 3), 40_000, 3, 2),
    Case((1, 5), 33_333, 3, 10, bias=False),
    Case((1, 53), 40_000, 2, 2, bias=False),  # more rows than fit into a chunk of 16 MiB
    Case((1, 23), 39_999, 2, 5, tied=True),
]
KINDS = [
    Case((3, 7), 19, 5, 3, bias, tied, normalize, epsilon)
    for bias, tied, normalize, epsilon in itertools.product(
        [False, True], [False, True], ["softmax", "sigsoftmax"], [0.0, 1e-8, 1e-3]
    )
]
BIG = [Case((1, 29), 9_011, 3, 5, epsilon=1e-3), Case((1, 29), 9_011, 3, 5, normalize="sigsoftmax")]
cases = pytest.mark.parametrize("case", SHAPES + KINDS + BIG, ids=str)
LOSSES = list(itertools.product((0.0, 0.1, 0.6), (False, True)))  # label smoothing, weighted
dtypes = pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["fp32", "fp64"])


def both(
    case: Case, dtype: torch.dtype
) -> tuple[torch.nn.Module, Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The layer, hidden states, targets; then what gradients are taken of: the layer's tensors, and the equation's."""
    layer = case.layer(dtype)
    hidden, targets = case.batch(dtype)
    copies = layer.copy() | {"hidden": hidden.detach().double().requires_grad_()}
    return layer.output, hidden, targets, layer.tensors() | {"hidden": hidden}, copies


@dtypes
@cases
def test_log_probabilities(case: Case, dtype: torch.dtype) -> None:
    layer, hidden, _, leaves, copies = both(case, dtype)
    expected = equations.log_prob(case, copies, copies["hidden"])
    found = layer.log_prob(hidden)
    equations.compared(found, expected, leaves, copies, torch.randn(expected.shape, dtype=DOUBLE))
    assert torch.equal(layer(hidden), found)
    for logs, tolerance in ((expected, 1e-10), (found, 1e-10 if dtype == DOUBLE else 1e-4)):
        sums = logs.detach().exp().sum(-1) - (1 + case.vocabulary * case.epsilon)
        assert float(sums.abs().max()) < tolerance


@dtypes
@cases
def test_nll(case: Case, dtype: torch.dtype) -> None:
    """Under a random cotangent, under the one of a sum, and under one that asks a single token."""
    layer, hidden, targets, leaves, copies = both(case, dtype)
    expected = -equations.log_prob(case, copies, copies["hidden"]).gather(-1, targets[..., None]).squeeze(-1)
    found = layer.nll(hidden, targets)
    single = torch.zeros(case.tokens, dtype=DOUBLE)
    single[-1, -1] = -2.5
    cotangents = [torch.randn(case.tokens, dtype=DOUBLE), single, torch.ones(()).expand(case.tokens)]
    for cotangent in cotangents if case.small else cotangents[:1]:
        equations.compared(found, expected, leaves, copies, cotangent)


@dtypes
@cases
def test_loss(case: Case, dtype: torch.dtype) -> None:
    """Label smoothing, weights with zeros, and cotangents that are one and not one."""
    layer, hidden, targets, leaves, copies = both(case, dtype)
    logs = equations.log_prob(case, copies, copies["hidden"])
    weights = torch.rand(case.tokens, dtype=DOUBLE).to(dtype) + 0.1
    weights[:, 1::3] = 0
    for smoothing, weighted in LOSSES if case.small else ((0.0, True), (0.1, False)):
        share = weights if weighted else None
        expected = equations.mean_loss(logs, targets, share, smoothing)
        loss, nll = layer.loss(hidden, targets, share, smoothing)
        assert loss.shape == nll.shape == ()
        plain = equations.mean_loss(logs, targets, share, 0.0).detach()
        assert abs(float(nll - plain)) <= (1e-9 if dtype == DOUBLE else 1e-5) * max(1, float(plain))
        assert not nll.requires_grad
        for cotangent in (1.0, -1.7) if case.small else (-1.7,):
            equations.compared(loss, expected, leaves, copies, torch.tensor(cotangent, dtype=DOUBLE))


@settings(max_examples=30)
@given(
    rows=st.integers(1, 3), tokens=st.integers(1, 40), vocabulary=st.integers(2, 300), width=st.integers(1, 9),
    mixtures=st.integers(1, 12), bias=st.booleans(), tied=st.booleans(), smoothing=st.sampled_from([0.0, 0.25]),
)  # fmt: skip
def test_any_size(
    rows: int, tokens: int, vocabulary: int, width: int, mixtures: int, bias: bool, tied: bool, smoothing: float
) -> None:
    case = Case((rows, tokens), vocabulary, width, mixtures, bias, tied)
    layer, hidden, targets, leaves, copies = both(case, DOUBLE)
    logs, weights = equations.log_prob(case, copies, copies["hidden"]), torch.rand(case.tokens, dtype=DOUBLE)
    each = -logs.gather(-1, targets[..., None]).squeeze(-1)
    equations.compared(layer.nll(hidden, targets), each, leaves, copies, torch.randn(case.tokens, dtype=DOUBLE))
    loss = layer.loss(hidden, targets, weights, smoothing)[0]
    equations.compared(loss, equations.mean_loss(logs, targets, weights, smoothing), leaves, copies, torch.ones(()))
    equations.compared(layer(hidden), logs, leaves, copies, torch.randn(logs.shape, dtype=DOUBLE))


def test_the_equation_itself_in_plain_numbers() -> None:
    """p(v) of one token with nothing but `math`, so that the equation above is not taken on trust; and the layer's."""
    case = Case((1, 1), 4, 2, 2, normalize="sigsoftmax")
    layer = case.layer()
    hidden, _ = case.batch()
    read = {name: tensor.tolist() for name, tensor in layer.output.state_dict().items()}
    g = hidden.detach()[0, 0].tolist()
    shares = [math.exp(sum(a * b for a, b in zip(row, g, strict=True))) for row in read["mixture.prior.weight"]]
    found = [0.0] * 4
    for k in range(2):
        latent = [
            math.tanh(sum(a * b for a, b in zip(read["mixture.latent.weight"][2 * k + i], g, strict=True))
                      + read["mixture.latent.bias"][2 * k + i])
            for i in range(2)
        ]  # fmt: skip
        scores = [
            sum(a * b for a, b in zip(row, latent, strict=True)) + shift
            for row, shift in zip(read["weight"], read["bias"], strict=True)
        ]
        raised = [math.exp(z) / (1 + math.exp(-z)) for z in scores]
        found = [p + shares[k] / sum(shares) * r / sum(raised) for p, r in zip(found, raised, strict=True)]
    expected = torch.tensor(found, dtype=DOUBLE).log()
    assert torch.allclose(layer.output(hidden)[0, 0], expected, atol=1e-13)
    assert torch.allclose(equations.log_prob(case, layer.copy(), hidden)[0, 0], expected, atol=1e-13)


@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_gradcheck(normalize: str, epsilon: float) -> None:
    case = Case((1, 4), 5, 3, 2, normalize=normalize, epsilon=epsilon)
    layer = case.layer()
    hidden, targets = case.batch()
    leaves = (hidden, *layer.tensors().values())  # perturbed in place, so that the layer sees it
    weights = torch.tensor([[0.5, 0.0, 1.0, 2.0]], dtype=DOUBLE)
    for value in (
        lambda *_: layer.output.nll(hidden, targets),
        lambda *_: layer.output.log_prob(hidden),
        lambda *_: layer.output.loss(hidden, targets, weights)[0],
        lambda *_: layer.output.loss(hidden, targets, None, 0.3)[0],
    ):
        assert torch.autograd.gradcheck(value, leaves)


def test_second_derivatives_are_right_or_refused() -> None:
    """Never wrong in silence, and always there with the formulas of the reference."""
    case = Case((1, 3), 5, 3, 2)
    layer, hidden, targets, leaves, copies = both(case, DOUBLE)

    def penalty(value: Tensor, leaf: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        return gradient.square().sum()

    logs = equations.log_prob(case, copies, copies["hidden"])
    expected = penalty(equations.mean_loss(logs, targets, None, 0.0) * 3, copies["hidden"])
    for value in (
        lambda: layer.nll(hidden, targets).sum(),
        lambda: layer.loss(hidden, targets)[0] * 3,
        lambda: -layer(hidden).gather(-1, targets[..., None]).sum(),
    ):
        with fr.kernel("reference"):
            equations.compared(penalty(value(), hidden), expected, leaves, copies, torch.ones(()))
        try:
            found = penalty(value(), hidden)
        except RuntimeError as error:
            assert "no second derivative" in str(error)  # noqa: PT017 - it may also succeed
        else:
            equations.compared(found, expected, leaves, copies, torch.ones(()))


@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_kernels_agree(normalize: str, epsilon: float) -> None:
    """The formulas of the reference, which keep all logits, and the fast ones: 1e-6 in fp32, values and gradients."""
    layer, hidden, targets, leaves, _ = both(Case((3, 17), 211, 6, 4, True, False, normalize, epsilon), torch.float32)
    weights, every = torch.rand(3, 17), list(leaves.values())
    results = []
    for name in ("auto", "reference"):
        with fr.kernel(name):
            values = [
                layer(hidden), layer.nll(hidden, targets), layer.loss(hidden, targets, weights)[0],
                layer.loss(hidden, targets, None, 0.2)[0],
            ]  # fmt: skip
            torch.manual_seed(8)
            results.append([(v.detach(), *torch.autograd.grad(v, every, torch.randn_like(v))) for v in values])
    for fast, slow in zip(*results, strict=True):
        for found, expected in zip(fast, slow, strict=True):
            equations.close("value or gradient", found, expected.double(), 1e-6)


def improbable(dtype: torch.dtype, epsilon: float = 0.0) -> tuple[torch.nn.Module, Tensor, dict[str, Tensor], Case]:
    """Two words, of which both softmaxes give the second about e^-270 and e^-200."""
    case = Case((1, 1), 2, 1, 2, bias=False, epsilon=epsilon)
    layer = case.layer(dtype)
    numbers = {"mixture.latent.weight": [[1.0], [0.5]], "mixture.latent.bias": [0.0, 0.13], "weight": [[360.0], [0.0]]}
    with torch.no_grad():
        for name, value in numbers.items():
            layer.tensors()[name].copy_(torch.tensor(value))
    return layer.output, torch.ones(1, 1, 1, dtype=dtype, requires_grad=True), layer.copy(), case


@dtypes
def test_an_improbable_word_keeps_its_gradient(dtype: torch.dtype) -> None:
    """log p = -200: exp underflows in fp32, the gradient does not vanish."""
    layer, hidden, copies, case = improbable(dtype)
    read, targets = hidden.detach().double().requires_grad_(), torch.tensor([[1]])
    expected = -equations.log_prob(case, copies, read)[..., 1].sum()
    assert 190 < float(expected.detach()) < 210
    (right,) = torch.autograd.grad(expected, read)
    assert float(right.abs()) > 100
    for value in (layer.nll(hidden, targets).sum(), layer.loss(hidden, targets)[0], -layer(hidden)[..., 1].sum()):
        assert abs(float(value.detach() / expected.detach()) - 1) < 1e-5
        (gradient,) = torch.autograd.grad(value, hidden)
        assert abs(float(gradient / right) - 1) < 1e-4


def test_the_sum_of_probabilities_would_lose_that_gradient_in_fp32() -> None:
    """What the released codes compute has no value there, or with their epsilon no gradient; `epsilon` is the same, as told."""
    layer, hidden, copies, _ = improbable(torch.float32)
    single = {name: tensor.detach().float() for name, tensor in copies.items()}
    probability = equations.probabilities(single, hidden[0], 2)[0, 1]
    assert float(probability.detach()) == 0
    assert float((probability.detach()).log()) == -math.inf
    (gradient,) = torch.autograd.grad((probability + 1e-8).log(), hidden)
    assert float(gradient) == 0
    assert float(torch.autograd.grad(layer(hidden)[0, 0, 1], hidden)[0].abs()) > 100
    layer, hidden, _, _ = improbable(torch.float32, 1e-8)
    for value in (layer.nll(hidden, torch.tensor([[1]])).sum(), layer.loss(hidden, torch.tensor([[1]]))[0]):
        assert abs(float(value.detach()) - 8 * math.log(10)) < 1e-4
        assert float(torch.autograd.grad(value, hidden)[0]) == 0


@dtypes
def test_extreme_priors_and_logits_stay_numbers(dtype: torch.dtype) -> None:
    """Priors and logits of thousands, or all alike: values and gradients are finite."""
    for size, normalize, epsilon in itertools.product((1e-6, 3e3), ("softmax", "sigsoftmax"), (0.0, 1e-8)):
        layer, hidden, targets, leaves, _ = both(Case((2, 3), 7, 4, 3, True, False, normalize, epsilon), dtype)
        with torch.no_grad():
            for tensor in layer.parameters():
                tensor.mul_(size)
        for value in (layer.nll(hidden, targets).sum(), layer.loss(hidden, targets, None, 0.1)[0], layer(hidden).sum()):
            assert value.isfinite()
            assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(value, list(leaves.values())))
