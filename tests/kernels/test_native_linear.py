"""`x W' + b` for a few rows in C++, against `torch.nn.functional.linear`."""

import pytest
import torch
from torch.nn import functional as F

import fullrank as fr
from fullrank.core.embedding import Linear, linear
from fullrank.kernels.native.build import library
from fullrank.kernels.native.linear import multiply_few_rows

TOLERANCES = {torch.float32: 3e-6, torch.float64: 1e-14}


@pytest.fixture(autouse=True)
def _needs_compiler():
    if library() is None:
        pytest.skip("no C++ compiler")


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize(("width", "size"), [(1, 1), (7, 3), (33, 65), (48, 17), (64, 5001)])
def test_equals_the_product_of_torch(dtype, rows, width, size, threads):
    torch.manual_seed(rows)
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((rows, width), (size, width), (size,)))
    for offset in (bias, None):
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        out = multiply_few_rows(x, weight, offset)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCES[dtype] * width**0.5)


def test_leading_dimensions_stay():
    x, weight = torch.randn(2, 3, 5), torch.randn(4, 5)
    torch.testing.assert_close(multiply_few_rows(x, weight, None), F.linear(x, weight))


def test_leaves_more_rows_to_torch():
    x, weight = torch.randn(9, 4), torch.randn(3, 4)
    with torch.no_grad():
        assert linear(x, weight).equal(F.linear(x, weight))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(0, 4), torch.randn(3, 4)),
        (torch.randn(4, 2).T, torch.randn(3, 4)),
        (torch.randn(2, 4), torch.randn(4, 3).T),
        (torch.randn(2, 4).bfloat16(), torch.randn(3, 4).bfloat16()),
        (torch.randn(2, 4), torch.randn(3, 4).double()),
        (torch.randn(2, 4), torch.randn(3, 2)),
        (torch.randn(2, 4, device="meta"), torch.randn(3, 4, device="meta")),
    ],
)
def test_leaves_other_tensors_to_torch(x, weight):
    assert multiply_few_rows(x, weight, None) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_leaves_autocast_and_transforms_to_torch():
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, weight).dtype == torch.bfloat16
        mapped = torch.func.vmap(lambda row: linear(row, weight))(x)
        traced = torch.jit.trace(lambda row: linear(row, weight), (x,), check_trace=False)
    torch.testing.assert_close(mapped, F.linear(x, weight))
    other = torch.randn(2, 4)
    torch.testing.assert_close(traced(other), F.linear(other, weight))


def test_gradients_and_the_reference_are_those_of_torch():
    layer, x = Linear(4, 3), torch.randn(2, 4)
    expected = F.linear(x, layer.weight, layer.bias)
    assert layer(x).requires_grad
    assert layer(x).equal(expected)
    with torch.no_grad(), fr.kernel("reference"):
        assert layer(x).equal(expected)
