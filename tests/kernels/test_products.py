"""Products with weights by oneDNN, against `torch.nn.functional.linear`: values, gradients and gradients of gradients."""

import pytest
import torch
from torch.nn import functional as F

from fullrank.core.embedding import Linear, linear
from fullrank.kernels import vocabulary
from fullrank.kernels.vocabulary import multiply, multiply_large

SHAPES = [((3, 67, 65), 90), ((201, 128), 47), ((129, 90), 101)]


@pytest.fixture(autouse=True)
def _on_any_processor(monkeypatch):
    """Also where MKL is as fast."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("torch is built without oneDNN")
    monkeypatch.setattr(vocabulary, "prefers_onednn", lambda: True)


def draw(shape, size, requires_grad=True):
    torch.manual_seed(2)
    x, weight, bias = torch.randn(shape), torch.randn(size, shape[-1]), torch.randn(size)
    return [tensor.requires_grad_(requires_grad) for tensor in (x, weight, bias)]


def widen(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize(("shape", "size"), SHAPES)
def test_value_and_gradients_are_those_of_torch(shape, size, monkeypatch):
    monkeypatch.setattr(vocabulary, "_LEAST_PRODUCT", 1)
    operands = draw(shape, size)
    wide = widen(operands)
    out = multiply_large(*operands)
    assert out.grad_fn.name() == "OneDnnProductBackward"
    expected = F.linear(*wide)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-5)
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, operands, cotangent)
    for gradient, reference in zip(found, torch.autograd.grad(expected, wide, cotangent.double()), strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=0, atol=2e-4)


def test_gradients_of_gradients_are_those_of_torch(monkeypatch):
    monkeypatch.setattr(vocabulary, "_LEAST_PRODUCT", 1)
    operands = draw((9, 7), 5)
    wide = widen(operands)

    def penalize(product, x, weight, bias):
        loss = product(x, weight, bias).square().sum()
        gradients = torch.autograd.grad(loss, (x, weight, bias), create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), (x, weight, bias))

    for gradient, reference in zip(penalize(multiply, *operands), penalize(F.linear, *wide), strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_operands_without_gradient_get_none(frozen, monkeypatch):
    monkeypatch.setattr(vocabulary, "_LEAST_PRODUCT", 1)
    operands = draw((9, 7), 5)
    operands[frozen].requires_grad_(False)
    multiply(*operands).sum().backward()
    assert [operand.grad is None for operand in operands] == [i == frozen for i in range(3)]


def test_a_layer_takes_it_for_large_products_alone():
    layer = Linear(128, 128)
    small, large = layer(torch.randn(2, 3, 128)), layer(torch.randn(2, 50, 128))
    assert small.grad_fn.name() != large.grad_fn.name() == "OneDnnProductBackward"


def test_a_vector_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(vocabulary, "_LEAST_PRODUCT", 1)
    operands = draw((7,), 5)
    found = torch.autograd.grad(multiply(*operands).sum(), operands)
    expected = torch.autograd.grad(F.linear(*operands).sum(), operands)
    assert all(map(torch.equal, found, expected))


def test_leaves_other_types_casts_and_transforms_to_torch():
    x, weight, _ = draw((600, 64), 40, requires_grad=False)
    expected = F.linear(x, weight)
    assert multiply_large(x.double(), weight.double()) is None
    assert multiply_large(x.bfloat16(), weight.bfloat16()) is None
    assert multiply_large(x.to("meta"), weight.to("meta")) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    mapped = torch.func.vmap(lambda row: linear(row, weight))(x)
    torch.testing.assert_close(mapped, expected)
    compiled = torch.compile(lambda rows: linear(rows, weight), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
