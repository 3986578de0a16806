"""x W' + b, for few rows in C++ and for large products by oneDNN, against PyTorch's; attention of one query in C++."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import fullrank as fr
from fullrank.core.embedding import Linear, linear
from fullrank.core.engine import Problem
from fullrank.kernels import vocabulary
from fullrank.kernels.build import library
from fullrank.kernels.native.few_rows import attend_one_query, multiply_few_rows
from fullrank.kernels.vocabulary import multiply, multiply_large

needs_compiler = pytest.mark.skipif(library() is None, reason="no C++ compiler")
TOLERANCES = {torch.float32: 3e-6, torch.float64: 1e-14}


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN, also for small products and where MKL is as fast."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("torch is built without oneDNN")
    monkeypatch.setattr(vocabulary, "prefers_onednn", lambda: True)
    monkeypatch.setattr(vocabulary, "_LEAST_PRODUCT", 1)


def draw(shape, size, dtype=torch.float32):
    torch.manual_seed(2)
    return [torch.randn(dims, dtype=dtype, requires_grad=True) for dims in (shape, (size, shape[-1]), (size,))]


def widen(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("rows", [*[(n,) for n in range(1, 9)], (2, 3)])
@pytest.mark.parametrize(("width", "size"), [(1, 1), (7, 3), (33, 65), (64, 5001)])
def test_few_rows(dtype, rows, width, size, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x, weight, bias = draw((*rows, width), size, dtype)
    for offset in (bias, None):
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        out = multiply_few_rows(x, weight, offset)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCES[dtype] * width**0.5)
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("mixing", [None, (5, 5), (3, 1, 5, 5)])
@pytest.mark.parametrize(
    ("length", "width", "threads"), [(1, 1, 1), (7, 16, 1), (130, 20, 1), (600, 64, 1), (600, 64, 2)]
)
def test_one_query(dtype, mixing, length, width, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    keys, values = torch.randn(2, 3, 5, length + 2, width, dtype=dtype)[:, :, :, :length]
    query = torch.randn(3, 1, 5, width, dtype=dtype).transpose(1, 2)
    matrix = None if mixing is None else torch.randn(mixing, dtype=dtype)
    problem = Problem(query, keys, values, matrix, None, fr.Layout.of(1, length), 0.3, "softmax", 0.0)
    with torch.no_grad():
        out = attend_one_query(problem)
    torch.set_num_threads(before)
    weights = (0.3 * query.double() @ keys.double().mT).softmax(-1)
    if matrix is not None:
        weights = torch.einsum("bjnm,bnji->binm", weights, matrix.double().expand(3, 1, 5, 5))
    torch.testing.assert_close(out.double(), weights @ values.double(), rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize(("shape", "size"), [((3, 67, 65), 90), ((201, 128), 47), ((4,), 3)])
def test_large_products_and_their_gradients(shape, size, onednn):
    operands = draw(shape, size)
    wide = widen(operands)
    out = multiply(*operands)
    assert len(shape) == 1 or out.grad_fn.name() == "OneDnnProductBackward"
    expected = F.linear(*wide)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-5)
    cotangent = torch.randn_like(out)
    gradients = torch.autograd.grad(expected, wide, cotangent.double())
    for gradient, reference in zip(torch.autograd.grad(out, operands, cotangent), gradients, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=0, atol=2e-4)


def test_gradients_of_gradients(onednn):
    def penalize(product, *operands):
        gradients = torch.autograd.grad(product(*operands).square().sum(), operands, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), operands)

    operands = draw((9, 7), 5)
    references = penalize(F.linear, *widen(operands))
    for gradient, reference in zip(penalize(multiply, *operands), references, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-3)


def test_products_of_views(onednn):
    x, weight, bias = (tensor.detach() for tensor in draw((9, 8), 6))
    windows = torch.arange(16.0).unfold(0, 8, 1)
    pairs = [(x, windows), (windows, weight), (torch.randn(8, 20)[:, :9].t(), weight)]
    for operands in [(x, weight, bias[:1].expand(6)), (x, weight[:3], bias[::2]), *pairs]:
        weight = operands[1].requires_grad_()
        out = multiply(*operands)
        assert out.grad_fn.name() == "OneDnnProductBackward"
        torch.testing.assert_close(out, F.linear(*operands))
        torch.testing.assert_close(torch.autograd.grad(out.sum(), weight)[0], operands[0].sum(0).expand_as(weight))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_gradients(rows, grad, onednn):
    x, weight, _ = (tensor.detach() for tensor in draw((rows, 256), 256))
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        out = linear(forward_ad.make_dual(x, x), weight)
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, F.linear(x, weight))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(0, 4), torch.randn(3, 4)),
        (torch.randn(2, 4), torch.randn(3, 4, device="meta")),
        (torch.randn(2, 4), torch.eye(4).to_sparse()),
        (torch.randn(2, 4).bfloat16(), torch.randn(3, 4).bfloat16()),
        (torch.randn(2, 4), torch.randn(3, 4).double()),
        (torch.randn(2, 4), torch.randn(3, 2)),
        (torch.randn(2, 4, device="meta"), torch.randn(3, 4, device="meta")),
    ],
)
def test_leaves_other_tensors_to_torch(x, weight, onednn):
    assert multiply_few_rows(x, weight, None) is None
    assert multiply_large(x, weight) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore:TF32:UserWarning")
def test_leaves_casts_traces_and_transforms_to_torch(onednn):
    x, weight, _ = (tensor.detach() for tensor in draw((2, 64), 600))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert multiply_large(x, weight) is None
    other = torch.randn(2, 64)
    expected = F.linear(other, weight)
    with torch.no_grad():
        mapped = torch.func.vmap(lambda row: linear(row, weight))
        traced = torch.jit.trace(lambda rows: linear(rows, weight), (x,), check_trace=False)
        compiled = torch.compile(lambda rows: linear(rows, weight), backend="eager", fullgraph=True)
        for transformed in (mapped, traced, compiled):
            torch.testing.assert_close(transformed(other), expected)


def test_a_layer_asks_by_size(monkeypatch):
    monkeypatch.setattr(vocabulary, "prefers_onednn", lambda: True)
    layer = Linear(256, 128)
    small, large = layer(torch.randn(2, 3, 256)), layer(torch.randn(2, 50, 256))
    assert small.grad_fn.name() != large.grad_fn.name() == "OneDnnProductBackward"
    x = torch.randn(8, 256)
    with torch.no_grad(), fr.kernel("reference"):
        assert layer(x).equal(F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("mix", ["none", "position_wise"])
def test_a_model_token_by_token_and_at_once(mix, onednn):
    """Layers large enough for both kinds of products, beside the same model in fp64."""
    sizes = {"vocab_size": 300, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = fr.LanguageModel(fr.ModelConfig(**sizes, attention=fr.AttentionConfig(mix=mix))).eval()
    ids = torch.randint(300, (2, 9))
    cache = model.new_cache()
    parts = []
    with torch.no_grad():
        for token in ids.split(1, dim=1):
            out = model(token, cache=cache)
            cache = out.cache
            parts.append(out.logits)
        expected = copy.deepcopy(model).double()(ids).logits
        for logits in (torch.cat(parts, 1), model(ids).logits):
            torch.testing.assert_close(
                logits.double(), expected, rtol=0, atol=2e-6 * max(1, float(expected.abs().max()))
            )
