"""The C++ kernel equals the equation, outputs and every gradient, at sizes that reach whole blocks and the rests of them."""

from dataclasses import replace

import pytest
import torch
from calls import call, check, equation, exact, needs_compiler

import fullrank as fr
from fullrank.core.cache import Buffer
from fullrank.kernels import KERNELS, native
from fullrank.kernels.native import attend, differentiable

DOUBLE, SINGLE = torch.float64, torch.float32
READY = native._ready


@pytest.fixture(autouse=True)
def _compiled():
    needs_compiler()


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layout(where, queries, keys, batch=2):
    before = keys - queries
    first, second = before // 3, before // 2
    runs = ((0, first), (first + 4, second), (first + second + 11, keys - first - second))  # queries end the last one
    at, number = torch.arange(keys)[None], torch.arange(batch)[:, None]
    holes = torch.rand(batch, keys, generator=torch.Generator().manual_seed(3)) > 0.3
    empty = holes.clone()
    empty[0] = False
    masks = {
        "left": at >= number * (keys // 2),
        "right": at < keys - number * (keys // 2),
        "holes": holes,
        "empty": empty,
    }
    match where:
        case "window":
            return fr.Layout.of(queries, keys, window=max(1, keys // 3))
        case "documents" | "documents, window" | "documents, holes":
            numbers = torch.arange(keys) // (keys // 4 + 1)
            rows = torch.stack([(numbers > 0).long() if row % 2 else numbers for row in range(batch)])
            window = max(1, keys // 5) if where.endswith("window") else None
            mask = holes if where.endswith("holes") else None
            return replace(fr.Layout.of(queries, keys, window=window, key_mask=mask), documents=rows)
        case "gaps":
            return fr.Layout.from_runs(queries, runs)
        case "gaps and window":
            return fr.Layout.from_runs(queries, runs, window=keys // 2 + 3)
    mask = masks.get(where.removeprefix("cross, "))
    return fr.Layout.of(queries, keys, causal=not where.startswith("cross"), key_mask=mask)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "size", "relative", "normalize", "mixing", "where", "dtype"),
    [
        (1, 1, 1, 1, False, "sigsoftmax", "B", "causal", DOUBLE),
        (16, 16, 2, 16, True, "sigsoftmax", "A", "causal", SINGLE),
        (16, 33, 12, 5, False, "softmax", "B", "window", DOUBLE),
        (17, 17, 3, 41, True, "softmax", "B", "causal", SINGLE),
        (17, 64, 8, 64, True, "sigsoftmax", "B", "gaps", SINGLE),
        (33, 33, 5, 100, True, "softmax", "A", "window", DOUBLE),
        (33, 47, 33, 5, False, "sigsoftmax", "B", "holes", SINGLE),
        (47, 47, 2, 64, False, "sigsoftmax", "A", "right", DOUBLE),
        (47, 129, 3, 16, True, "softmax", "B", "gaps and window", SINGLE),
        (49, 49, 1, 41, True, "sigsoftmax", "none", "window", DOUBLE),
        (49, 200, 8, 1, False, "softmax", "A", "window", SINGLE),
        (64, 64, 8, 64, True, "softmax", "B", "causal", SINGLE),
        (64, 64, 9, 17, False, "softmax", "A", "empty", DOUBLE),
        (70, 200, 3, 41, True, "softmax", "none", "gaps", DOUBLE),
        (129, 129, 5, 16, False, "softmax", "B", "left", DOUBLE),
        (129, 200, 4, 64, True, "softmax", "B", "gaps", SINGLE),
        (200, 200, 1, 100, True, "sigsoftmax", "none", "causal", SINGLE),
        (64, 64, 3, 16, True, "softmax", "B", "documents", DOUBLE),
        (49, 129, 4, 41, True, "sigsoftmax", "A", "documents, window", SINGLE),
        (70, 70, 8, 17, False, "softmax", "B", "documents, holes", SINGLE),
        (70, 33, 5, 16, False, "softmax", "B", "cross", DOUBLE),
        (129, 7, 3, 41, False, "sigsoftmax", "A", "cross", SINGLE),
        (17, 129, 9, 5, False, "softmax", "B", "cross, holes", DOUBLE),
        (17, 17, 3, 5, False, "softmax", "A, A scores", "causal", DOUBLE),
        (33, 47, 12, 17, False, "sigsoftmax", "B, A scores", "holes", DOUBLE),
        (70, 70, 8, 64, False, "softmax", "A, A scores", "window", SINGLE),
        (129, 200, 4, 16, True, "softmax", "B, A scores", "gaps", DOUBLE),
        (64, 64, 9, 41, True, "sigsoftmax", "none, A scores", "causal", SINGLE),
        (49, 129, 2, 16, False, "softmax", "A, A scores", "documents", DOUBLE),
        (70, 33, 5, 16, False, "softmax", "none, A scores", "cross, empty", DOUBLE),
        (17, 33, 3, 5, False, "softmax", "B, B scores, keys", "causal", DOUBLE),
        (129, 129, 9, 16, True, "sigsoftmax", "A, none scores, keys", "window", DOUBLE),
        (64, 70, 12, 17, False, "softmax", "none, B scores, keys", "holes", SINGLE),
        (33, 129, 8, 41, False, "softmax", "none, none scores, keys", "documents", DOUBLE),
        (33, 33, 3, 5, False, "softmax", "none, convolution", "causal", DOUBLE),
        (16, 16, 2, 16, False, "softmax", "A, convolution", "left", SINGLE),
        (70, 70, 9, 17, False, "sigsoftmax", "B, convolution", "window", SINGLE),
        (129, 129, 5, 64, False, "softmax", "B, convolution", "holes", DOUBLE),
        (64, 64, 3, 16, False, "softmax", "none, convolution", "cross, empty", DOUBLE),
    ],
)
def test_equals_the_equation(queries, keys, heads, size, relative, normalize, mixing, where, dtype):
    options = {"relative": relative, "normalize": normalize, "heads": heads, "size": size, "dtype": dtype}
    problem = call(layout(where, queries, keys), mixing, **options)
    assert KERNELS["native"].reason(problem) is None
    out = attend(problem)
    assert out.dtype == dtype
    check(problem, out, 5e-6 if dtype == SINGLE else 1e-12)


@pytest.mark.parametrize(("normalize", "where"), [("softmax", "empty"), ("sigsoftmax", "causal")])
def test_no_less_exact_than_the_equation_in_fp32(where, normalize):
    """The logarithm of the sum is rounded as the scores are; gradients of a row's scores must add up to zero all the same."""
    single = call(layout(where, 84, 84), "B", normalize=normalize, heads=10, size=16, dtype=SINGLE, times=4.0)
    double = exact(single)
    cotangent = torch.randn(2, 10, 84, 16)
    ours, plain, right = (
        [out.detach(), *torch.autograd.grad(out, differentiable(problem)[:2], cotangent.to(out))]
        for problem, out in ((single, attend(single)), (single, equation(single)), (double, equation(double)))
    )
    for name, tensor, in_fp32, in_fp64 in zip(("output", "query", "keys"), ours, plain, right, strict=True):
        allowed = 2 * (in_fp32 - in_fp64).abs().max() + 5e-7 * right[1].abs().max()
        assert (tensor - in_fp64).abs().max() <= allowed, name


@pytest.mark.parametrize(("offset", "mixing"), [(-1e4, "A"), (300.0, "A"), (-715.03, "none, none scores, keys")])
@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
def test_scores_far_from_zero(normalize, offset, mixing):
    """One dimension of keys is constant, so that all scores of a query are near the offset, where exp is 0 or infinite."""
    problem = call(fr.Layout.of(135), mixing, normalize=normalize, heads=2, size=16)  # several tiles of keys
    with torch.no_grad():
        problem.query[:, :, -1] = 0  # exp(0 - lse) of the rows beyond the text, which read its lse, is infinite
        problem.query[..., 0] = offset / problem.scale
        problem.keys[..., 0] = 1.0
    inputs = differentiable(problem)
    both = (
        [out.detach(), *torch.autograd.grad(out.sin().sum(), inputs)] for out in (attend(problem), equation(problem))
    )
    for ours, expected in zip(*both, strict=True):
        assert float((ours - expected).abs().max()) <= 1e-14 * abs(offset) * max(1.0, float(expected.abs().max()))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("batch", "relative"), [(2, False), (3, True)])
@pytest.mark.parametrize("scoring", ["A scores", "none scores, keys", "convolution"])
def test_threads(relative, batch, scoring):
    """Sequences that do not divide by the threads, and more threads than there is work for."""

    def computed(threads, tokens=80):
        torch.set_num_threads(threads)
        options = {"relative": relative and scoring != "convolution", "batch": batch, "size": 17}
        problem = call(fr.Layout.of(tokens), f"{'A' if batch % 2 else 'B'}, {scoring}", **options)
        out = attend(problem)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), differentiable(problem))]

    expected = computed(1)
    for threads in (2, 64):
        first = computed(threads)
        computed(threads, tokens=50)  # its buffers are those of the longer call, which are kept
        second = computed(threads)
        assert all(map(torch.equal, first, second)), "it differs from call to call"
        for tensor, reference in zip(first, expected, strict=True):
            assert torch.allclose(tensor, reference, rtol=1e-12, atol=1e-12), f"{threads} threads"


@pytest.mark.parametrize(("changed", "relative"), [(15, True), (16, False)])
def test_sees_nothing_ahead(relative, changed):
    """Other keys and values later on change nothing before them, to the last bit."""
    problem = call(fr.Layout.of(64), "B", relative=relative)
    with torch.no_grad():
        before = attend(problem)
        problem.keys[:, :, changed:] += 3
        problem.values[:, :, changed:] -= 5
        after = attend(problem)
    assert torch.equal(before[:, :, :changed], after[:, :, :changed])
    assert not torch.equal(before[:, :, changed], after[:, :, changed])


@pytest.mark.parametrize("mixing", ["none", "B"])
def test_no_weights_are_kept(mixing):
    """Nothing that is saved for the backward pass has N M numbers; no input has as many."""
    problem = call(fr.Layout.of(90, 100), mixing, relative=True, batch=1, heads=2, size=3)
    sizes = []

    def packed(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        attend(problem)
    assert 0 < max(sizes) < 90 * 100


@pytest.mark.parametrize("mixing", ["none", "B"])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 3)])
@pytest.mark.parametrize(("size", "dtype"), [(41, SINGLE), (48, SINGLE), (29, DOUBLE)])
def test_keys_of_a_cache_are_read_in_place(size, dtype, batch, heads, mixing, monkeypatch):
    """A window of the last 30 keys, amid others; the same bits as from copies."""
    problem = call(fr.Layout.of(7, 30), mixing, batch=batch, heads=heads, size=size, dtype=dtype)
    parts = []
    with torch.no_grad():
        for heads_of_all in (problem.keys, problem.values):
            before = torch.full((batch, heads, 9, size), torch.nan, dtype=dtype)
            seen, buffer = Buffer(before).append(before, heads_of_all[:, :, :11].detach())
            seen, buffer = buffer.append(seen, heads_of_all[:, :, 11:].detach())
            parts.append(seen[:, :, -30:])
        cached = replace(problem, keys=parts[0], values=parts[1])
        out = attend(cached)
        assert torch.equal(out, attend(problem))
        monkeypatch.setattr(native, "_ready", refuse_keys)
        assert torch.equal(out, attend(cached))


def refuse_keys(tensor):
    assert tensor.shape[2] != 30
    return READY(tensor)
