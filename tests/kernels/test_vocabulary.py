"""Per-token nll and the weighted loss against `F.cross_entropy`: values and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fullrank.core.engine import Cluster, Components
from fullrank.kernels.vocabulary import vocabulary_loss, vocabulary_nll

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "fp64"])


def operands(rows: int, width: int, vocabulary: int, dtype: torch.dtype, bias: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(rows + vocabulary)
    hidden = torch.randn(rows, width, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, dtype=torch.float64) / width**0.5).to(dtype).requires_grad_()
    shift = torch.randn(vocabulary, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return hidden, weight, shift, torch.randint(vocabulary, (rows,))  # type: ignore[return-value]


def softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Components:
    """One softmax of hidden states (T, E)."""
    return Components(hidden[:, None], None, (Cluster(weight, bias),))


def token_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    return vocabulary_nll(softmax(hidden, weight, bias), ids)


def weighted_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, scale: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    return vocabulary_loss(softmax(hidden, weight, bias), ids, scale, smoothing)


def gradients(value: Tensor, cotangent: Tensor, leaves: tuple[Tensor, ...]) -> dict[str, Tensor]:
    kept = [leaf for leaf in leaves if leaf is not None]
    names = ["hidden", "weight", "bias"][: len(kept)]
    return dict(zip(names, torch.autograd.grad(value, kept, cotangent), strict=True)) | {"value": value.detach()}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        off = float((found[name] - tensor).abs().max())
        assert off <= tolerance * max(1.0, float(tensor.abs().max())), f"{name} is off by {off:.1e}"


SHAPES = [(1, 3, 2), (7, 5, 11), (63, 4, 40_000), (64, 3, 33_333), (65, 3, 40_000), (4095, 3, 2), (4096, 2, 5), (4097, 3, 7),
          (16, 3, 33_000), (17, 2, 33_001), (9_001, 3, 500), (129, 7, 32_769)]  # fmt: skip


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_token_nll(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Odd sizes, both sides of a chunk's boundary, with and without bias, any cotangent."""
    *leaves, targets = operands(*shape, dtype, bias=shape[0] % 2 == 1)
    cotangent = torch.randn(shape[0], dtype=torch.float64).to(dtype)
    expected = F.cross_entropy(F.linear(*leaves), targets, reduction="none")
    found = token_nll(*leaves, targets)
    assert found.shape == (shape[0],)
    compare(gradients(found, cotangent, leaves), gradients(expected, cotangent, leaves), TOLERANCES[dtype])


@dtypes
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("shape", SHAPES[:5:2] + SHAPES[-3:], ids=str)
def test_weighted_loss(shape: tuple[int, int, int], smoothing: float, dtype: torch.dtype) -> None:
    """With label smoothing as PyTorch defines it, weights with zeros, and a cotangent other than one."""
    *leaves, targets = operands(*shape, dtype, bias=shape[0] % 2 == 1)
    scale = torch.rand(shape[0], dtype=torch.float64).to(dtype)
    scale[:: 3 if shape[0] > 1 else 2] = 0
    cotangent = torch.tensor(-1.7, dtype=dtype)
    logits = F.linear(*leaves)
    each = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    expected = (scale * each).sum() / max(1, shape[0])
    found, nll = weighted_loss(*leaves, targets, scale / max(1, shape[0]), smoothing)
    compare(gradients(found, cotangent, leaves), gradients(expected, cotangent, leaves), TOLERANCES[dtype])
    plain = (scale * F.cross_entropy(logits, targets, reduction="none")).sum() / max(1, shape[0])
    assert abs(float(nll - plain.detach())) <= TOLERANCES[dtype] * max(1, float(plain.detach()))
    assert not nll.requires_grad


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 9),
    vocabulary=st.integers(2, 600),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.25]),
)
def test_any_size(rows: int, width: int, vocabulary: int, bias: bool, smoothing: float) -> None:
    *leaves, targets = operands(rows, width, vocabulary, torch.float64, bias)
    scale, cotangent = torch.rand(rows, dtype=torch.float64), torch.randn(rows, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    each = F.cross_entropy(F.linear(*leaves), targets, reduction="none", label_smoothing=smoothing)
    loss, _ = weighted_loss(*leaves, targets, scale, smoothing)
    compare(gradients(loss, one, leaves), gradients((scale * each).sum(), one, leaves), 1e-12)
    each = F.cross_entropy(F.linear(*leaves), targets, reduction="none")
    compare(gradients(token_nll(*leaves, targets), cotangent, leaves), gradients(each, cotangent, leaves), 1e-12)


def test_gradcheck() -> None:
    *leaves, targets = operands(4, 3, 5, torch.float64)
    assert torch.autograd.gradcheck(lambda *given: token_nll(*given, targets), leaves)
    scale = torch.tensor([0.5, 0.0, 1.0, 2.0], dtype=torch.float64)
    for smoothing in (0.0, 0.3):
        assert torch.autograd.gradcheck(lambda *given, s=smoothing: weighted_loss(*given, targets, scale, s)[0], leaves)


@dtypes
def test_an_impossible_target_keeps_its_gradient(dtype: torch.dtype) -> None:
    """log p = -200: exp underflows in fp32, the gradient does not vanish."""
    hidden = torch.tensor([[200.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=dtype, requires_grad=True)
    targets = torch.tensor([1])
    for value in (
        token_nll(hidden, weight, None, targets).sum(),
        weighted_loss(hidden, weight, None, targets, torch.ones(1, dtype=dtype))[0],
    ):
        assert abs(float(value.detach()) - 200) < 1e-4
        (gradient,) = torch.autograd.grad(value, hidden)
        assert abs(float(gradient) - 1) < 1e-6


@pytest.mark.parametrize("needed", [n for n in itertools.product([True, False], repeat=3) if any(n)], ids=str)
def test_only_what_is_asked_for(needed: tuple[bool, ...]) -> None:
    *leaves, targets = operands(5, 3, 7, torch.float64)
    for leaf, need in zip(leaves, needed, strict=True):
        leaf.requires_grad_(need)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), targets, reduction="sum"), asked)
    scale = torch.ones(5, dtype=torch.float64)
    for value in (token_nll(*leaves, targets).sum(), weighted_loss(*leaves, targets, scale)[0]):
        for found, right in zip(torch.autograd.grad(value, asked), expected, strict=True):
            assert torch.allclose(found, right, atol=1e-13)


class Products(TorchDispatchMode):
    """Notes the shape of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))  # type: ignore[operator]
        if "mm" in str(func):
            self.shapes.append(tuple(out.shape))
        return out


def test_without_gradients_none_are_formed() -> None:
    *leaves, targets = operands(5, 3, 7, torch.float64)
    expected = F.cross_entropy(F.linear(*leaves), targets, reduction="none").detach()
    scale = torch.ones(5, dtype=torch.float64)
    with torch.no_grad(), Products() as products:
        loss, nll = weighted_loss(*leaves, targets, scale)
        each = token_nll(*leaves, targets)
    assert products.shapes
    assert set(products.shapes) == {(5, 7)}, "only logits are wanted"
    with Products() as products:
        weighted_loss(*leaves, targets, scale)
    assert {(7, 3), (5, 3)} <= set(products.shapes)  # where gradients are wanted they come with the forward pass
    assert torch.allclose(each, expected, atol=1e-13)
    assert torch.allclose(loss, expected.sum(), atol=1e-12)
    assert torch.equal(loss, nll)
    assert not loss.requires_grad
    assert not each.requires_grad
    with torch.inference_mode():
        assert torch.equal(weighted_loss(*leaves, targets, scale)[0], loss)


def test_backward_twice_and_accumulation() -> None:
    """Gradients formed in the forward pass are not spoiled by the first backward, by another cotangent or by an optimiser."""
    *leaves, targets = operands(5, 3, 7, torch.float64)
    scale = torch.full((5,), 0.2, dtype=torch.float64)
    right = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), targets), leaves)
    loss, _ = weighted_loss(*leaves, targets, scale)
    loss.backward(retain_graph=True)
    leaves[0].grad = 2 * leaves[0].grad  # a view of what was formed: autograd refuses to change it in place
    for leaf in leaves[1:]:
        leaf.grad.mul_(2)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    for leaf, gradient in zip(leaves, right, strict=True):
        assert torch.allclose(leaf.grad, 6 * gradient, atol=1e-12)
    first, second = weighted_loss(*leaves, targets, scale)[0], weighted_loss(*leaves, targets, scale)[0]
    for found, gradient in zip(torch.autograd.grad(first + 2 * second, leaves), right, strict=True):
        assert torch.allclose(found, 3 * gradient, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autocast_to_bfloat16_is_close_and_sums_in_fp32(smoothing: float) -> None:
    *leaves, targets = operands(300, 16, 1000, torch.float32)
    scale = torch.full((300,), 1 / 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = weighted_loss(*leaves, targets, scale, smoothing)
        each = token_nll(*leaves, targets)
    assert loss.dtype == each.dtype == torch.float32
    each_right = F.cross_entropy(F.linear(*leaves), targets, reduction="none")
    right = F.cross_entropy(F.linear(*leaves), targets, label_smoothing=smoothing)
    assert abs(float((loss - right).detach())) < 2e-3 * float(right.detach())
    assert (each - each_right).abs().max() < 0.1
    cotangent = torch.randn(300)
    for found, expected in (
        (torch.autograd.grad(loss, leaves), torch.autograd.grad(right, leaves)),
        (torch.autograd.grad(each, leaves, cotangent), torch.autograd.grad(each_right, leaves, cotangent)),
    ):
        for gradient, exact in zip(found, expected, strict=True):
            assert gradient.dtype == torch.float32
            assert float((gradient - exact).norm() / exact.norm()) < 0.02


def test_a_bfloat16_model() -> None:
    *leaves, targets = operands(50, 16, 100, torch.bfloat16)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = torch.autograd.grad(F.cross_entropy(F.linear(*exact), targets), exact)
    loss, _ = weighted_loss(*leaves, targets, torch.full((50,), 0.02))
    for found, expected in zip(torch.autograd.grad(loss, leaves), right, strict=True):
        assert found.dtype == torch.bfloat16
        assert float((found.double() - expected).norm() / expected.norm()) < 0.03


def test_double_stays_double_under_autocast() -> None:
    *leaves, targets = operands(6, 3, 5, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_nll(*leaves, targets)
    assert torch.allclose(found, F.cross_entropy(F.linear(*leaves), targets, reduction="none"), atol=1e-13)


def test_no_tokens() -> None:
    *leaves, targets = operands(3, 2, 5, torch.float64)
    empty = token_nll(leaves[0][:0], leaves[1], leaves[2], targets[:0])
    assert empty.shape == (0,)
    empty.sum().backward()
    assert torch.equal(leaves[1].grad, torch.zeros_like(leaves[1]))


def test_second_derivatives_are_refused() -> None:
    """Rather than left out of a gradient penalty in silence."""
    *leaves, targets = operands(3, 2, 5, torch.float64)
    scale = torch.ones(3, dtype=torch.float64)
    for value in (token_nll(*leaves, targets).sum(), weighted_loss(*leaves, targets, scale)[0]):
        with pytest.raises(RuntimeError, match=r"no second derivative .*logits"):
            torch.autograd.grad(value, leaves[0], create_graph=True)
