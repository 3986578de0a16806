"""What the mixture of softmaxes keeps in memory, computes in vain, and does in lower precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mixture_equations as equations
import pytest
import torch
from mixture_equations import DOUBLE, Case, watched
from torch import Tensor, nn
from torch.nn import functional as F

LARGE = Case((1, 260), 10_007, 4, 10)
TOKENS, ALL = 260 * 10_007, 260 * 10_007 * 10  # numbers in (T, V) and in (T, K, V)
CHUNK = 20 * 2**20  # bytes: 16 MiB of logits, and some of their rows once more


def large(case: Case = LARGE) -> tuple[nn.Module, Tensor, Tensor]:
    return case.layer(torch.float32).output, *case.batch(torch.float32)


def naive() -> None:
    """The formula of the released codes, forward and backward."""
    layer, hidden, targets = large()
    latents = torch.tanh(layer.mixture.latent(hidden)).view(260, 10, 4)
    prior = torch.softmax(layer.mixture.prior(hidden), -1).view(260, 10, 1)
    each = torch.softmax(F.linear(latents, layer.weight, layer.bias), -1)
    F.nll_loss((prior * each).sum(1).log(), targets.flatten()).backward()


def stock() -> None:
    """One softmax as PyTorch has it."""
    layer, hidden, targets = large()
    F.cross_entropy(F.linear(hidden, layer.weight, layer.bias)[0], targets[0]).backward()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_takes_a_tenth_of_the_naive_memory_and_less_than_one_stock_softmax(smoothing: float) -> None:
    layer, hidden, targets = large()
    watch = watched(lambda: layer.loss(hidden, targets, None, smoothing)[0].backward())
    naively = watched(naive)
    assert naively.largest >= ALL  # the instrument sees what it is to see
    assert naively.peak > 2 * 4 * ALL
    assert watch.largest < ALL // 5
    assert watch.peak < naively.peak / 10, f"{watch.peak / 2**20:.0f} MiB"
    if smoothing == 0:
        assert watch.largest * 4 <= 16.1 * 2**20
        assert watch.peak < watched(stock).peak, f"{watch.peak / 2**20:.0f} MiB"


def test_nothing_builds_all_logits() -> None:
    """Neither forward nor backward; beside what a chunk may take, (T, V) of log-probabilities a few times."""
    layer, hidden, targets = large(Case((1, 120), 10_007, 4, 10))
    everything, one = 120 * 10_007 * 10, 120 * 10_007
    runs: dict[str, Callable[[], object]] = {
        "nll": lambda: layer.nll(hidden, targets).sum().backward(),
        "smoothed": lambda: layer.loss(hidden, targets, None, 0.1)[0].backward(),
        "log_prob": lambda: layer.log_prob(hidden).sum().backward(),
        "forward": lambda: layer(hidden)[..., 0].sum().backward(),
    }
    for name, run in runs.items():
        watch = watched(run)
        assert watch.largest < everything / 2, name
        assert watch.peak < 4 * 4 * one + CHUNK, f"{name}: {watch.peak / 2**20:.0f} MiB"
        with torch.no_grad():
            watch = watched(lambda run=run: _ignoring_backward(run))
        assert watch.peak < 2 * 4 * one + CHUNK, f"{name}: {watch.peak / 2**20:.0f} MiB"


def _ignoring_backward(run: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        run()


def test_gradients_are_kept_no_longer_than_needed() -> None:
    """Between forward and backward: the gradients of what there is, not the logits."""
    layer, hidden, targets = large()
    with equations.Watch() as watch:
        loss = layer.loss(hidden, targets)[0]
        held = watch.held()
    assert held < 4 * TOKENS // 5
    loss.backward()


GRADIENTS = ["hidden", "weight", "bias", "mixture.latent.weight", "mixture.latent.bias", "mixture.prior.weight"]


@pytest.mark.parametrize("mixtures", [1, 3])
def test_only_what_is_asked_for(mixtures: int) -> None:
    """Every set of parameters may be frozen; the others have the gradients they have anyway."""
    case = Case((2, 3), 13, 4, mixtures)
    made = case.layer()
    hidden, targets = case.batch()
    leaves = made.tensors() | {"hidden": hidden}
    assert sorted(leaves) == sorted(GRADIENTS)
    values = {
        "nll": lambda: made.output.nll(hidden, targets).square().sum(),
        "loss": lambda: made.output.loss(hidden, targets, None, 0.1)[0],
        "log_prob": lambda: made.output(hidden).square().sum(),
    }
    right = {
        name: dict(zip(leaves, torch.autograd.grad(f(), list(leaves.values())), strict=True))
        for name, f in values.items()
    }
    for chosen in itertools.product([True, False], repeat=len(leaves)):
        asked = [name for name, wanted in zip(leaves, chosen, strict=True) if wanted]
        for name, leaf in leaves.items():
            leaf.requires_grad_(name in asked)
        for value, compute in values.items():
            found = compute()
            assert found.requires_grad is bool(asked)
            gradients = torch.autograd.grad(found, [leaves[name] for name in asked]) if asked else ()
            for name, gradient in zip(asked, gradients, strict=True):
                equations.close(f"{value}, {asked}: {name}", gradient, right[value][name], 1e-12, 1e-3)


def test_what_is_not_asked_for_is_not_computed() -> None:
    """A frozen matrix needs no (V, E) product, and hidden states without gradient none of rows and E."""
    case = Case((1, 6), 23, 4, 3)  # rows 18, 12 latents
    made = case.layer()
    hidden, targets = case.batch()
    made.output.weight.requires_grad_(False)
    for value in (lambda: made.output.loss(hidden, targets)[0], lambda: made.output.nll(hidden, targets).sum()):
        shapes = watched(lambda value=value: value().backward()).products
        assert shapes
        assert not any(set(shape) == {23, 4} for shape in shapes)
    made = case.layer()
    hidden, _ = case.batch()
    hidden.requires_grad_(False)
    made.output.mixture.requires_grad_(False)
    for value in (lambda: made.output.loss(hidden, targets)[0], lambda: made.output.nll(hidden, targets).sum()):
        shapes = watched(lambda value=value: value().backward()).products
        assert any(set(shape) == {23, 4} for shape in shapes)
        assert not any(set(shape) == {18, 4} for shape in shapes)


def test_without_gradients_none_are_formed() -> None:
    case = Case((1, 6), 23, 4, 3)
    layer = case.layer().output
    hidden, targets = case.batch()
    expected = equations.log_prob(case, case.layer().copy(), hidden.detach())
    for context in (torch.no_grad, torch.inference_mode):
        with context(), equations.Watch() as watch:
            loss, nll = layer.loss(hidden, targets)
            each, logs = layer.nll(hidden, targets), layer(hidden)
        assert watch.products
        assert all(4 not in shape for shape in watch.products), "only logits, latents and priors are wanted"
        assert not any(value.requires_grad for value in (loss, nll, each, logs))
        assert torch.allclose(logs, expected, atol=1e-12)
        assert torch.allclose(each, -expected.gather(-1, targets[..., None]).squeeze(-1), atol=1e-12)
        assert torch.allclose(loss, each.mean(), atol=1e-12)
        assert torch.allclose(nll, loss, atol=1e-15)


def test_backward_twice_and_accumulation() -> None:
    """Gradients formed in the forward pass are not spoiled by a backward, another cotangent or an optimiser."""
    case = Case((2, 5), 13, 4, 3)
    layer = case.layer().output
    hidden, targets = case.batch()
    leaves = [hidden, *layer.parameters()]
    right = torch.autograd.grad(layer.nll(hidden, targets).mean(), leaves)
    loss, _ = layer.loss(hidden, targets)
    loss.backward(retain_graph=True)
    for leaf in leaves:
        leaf.grad.mul_(2)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    for leaf, gradient in zip(leaves, right, strict=True):
        equations.close("gradient", leaf.grad, 6 * gradient, 1e-12)
    first, second = (layer.loss(hidden, targets)[0] for _ in range(2))
    for found, gradient in zip(torch.autograd.grad(first + 2 * second, leaves), right, strict=True):
        equations.close("gradient", found, 3 * gradient, 1e-12)


def test_memory_that_is_not_contiguous() -> None:
    """Hidden states, targets, weights and cotangents as views of other tensors."""
    case = Case((3, 5), 13, 4, 2)
    layer = case.layer().output
    wide, ids, weights = torch.randn(4, 5, 6, dtype=DOUBLE), torch.randint(13, (5, 3)), torch.rand(5, 3)
    hidden = wide.permute(1, 2, 0)[:, ::2].transpose(0, 1).requires_grad_()  # (3, 5, 4)
    for run in (
        lambda h, x, w: layer.nll(h, x).t()[::2].sum(),
        lambda h, x, w: layer.loss(h, x, w, 0.1)[0],
        lambda h, x, w: layer(h)[..., ::3].sum(),
    ):
        found = torch.autograd.grad(run(hidden, ids.t(), weights.t()), [hidden, *layer.parameters()])
        plain = hidden.detach().contiguous().requires_grad_()
        right = torch.autograd.grad(
            run(plain, ids.t().contiguous(), weights.t().contiguous()), [plain, *layer.parameters()]
        )
        for one, other in zip(found, right, strict=True):
            equations.close("gradient", one, other, 1e-12)


# -- lower precision --------------------------------------------------------------------------------------------------


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autocast_to_bfloat16(smoothing: float, normalize: str) -> None:
    """Products in bf16; softmax, nll and sums in fp32: close to fp32, and gradients in the dtype of the parameters."""
    case = Case((4, 150), 1009, 16, 5, normalize=normalize)
    layer = case.layer(torch.float32).output
    with torch.no_grad():
        layer.weight.mul_(0.25)  # logits of about one
        layer.mixture.latent.weight.mul_(0.25)
        layer.mixture.prior.weight.mul_(0.25)
    hidden, targets = case.batch(torch.float32)
    leaves, cotangent = [hidden, *layer.parameters()], torch.randn(4, 150)
    right = (layer.loss(hidden, targets, None, smoothing)[0], layer.nll(hidden, targets), layer(hidden))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = (layer.loss(hidden, targets, None, smoothing)[0], layer.nll(hidden, targets), layer(hidden))
    assert [value.dtype for value in given] == [torch.float32] * 3
    assert abs(float((given[0] / right[0]).detach()) - 1) < 1e-3
    assert float((given[1] - right[1]).detach().abs().max()) < 0.1
    assert float((given[2].exp().sum(-1) - 1).detach().abs().max()) < 1e-5, "a softmax in fp32 sums to one"
    for name, (found, expected, cot) in {
        "loss": (given[0], right[0], None), "nll": (given[1], right[1], cotangent),
        "log_prob": (given[2], right[2], torch.randn(right[2].shape)),
    }.items():  # fmt: skip
        for leaf, one, other in zip(
            leaves, torch.autograd.grad(found, leaves, cot), torch.autograd.grad(expected, leaves, cot), strict=True
        ):
            assert one.dtype == leaf.dtype == torch.float32
            assert relative(one, other) < 3e-2, f"{name}: {tuple(leaf.shape)}"


def test_double_stays_double_under_autocast() -> None:
    case = Case((2, 3), 7, 4, 2)
    layer = case.layer().output
    hidden, targets = case.batch()
    expected = layer.nll(hidden, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer.nll(hidden, targets)
    assert torch.equal(found, expected)


def test_a_bfloat16_layer() -> None:
    """Parameters and hidden states in bf16: gradients are, too; log-probabilities and nll are fp32."""
    case = Case((1, 50), 101, 8, 3)
    layer = case.layer(torch.bfloat16).output
    hidden, targets = case.batch(torch.bfloat16)
    exact = case.layer(torch.bfloat16).output.double()
    read = hidden.detach().double().requires_grad_()
    loss, right = layer.loss(hidden, targets)[0], exact.loss(read, targets)[0]
    assert layer.nll(hidden, targets).dtype == layer(hidden).dtype == loss.dtype == torch.float32
    assert abs(float(loss.detach()) / float(right.detach()) - 1) < 0.02
    found = torch.autograd.grad(loss, [hidden, *layer.parameters()])
    for one, other in zip(found, torch.autograd.grad(right, [read, *exact.parameters()]), strict=True):
        assert one.dtype == torch.bfloat16
        assert relative(one, other) < 0.05
