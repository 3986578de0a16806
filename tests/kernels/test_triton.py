"""The Triton kernels against the equation: on a GPU where there is one, otherwise under the interpreter."""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch
from calls import call, check

import fullrank as fr
from fullrank.kernels import KERNELS, triton
from fullrank.kernels.native import differentiable
from fullrank.kernels.triton import attend
from layouts import LAYOUTS

if sys.platform != "linux":
    pytest.importorskip("triton", reason="Triton is for Linux")

# weights of keys that are not seen may be infinite before they are left out
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = 2e-6 if DEVICE == "cpu" else 5e-6  # of fp32
on_a_gpu = [pytest.mark.cuda, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]
of = fr.Layout.of


def moved(layout):
    mask = layout.key_mask
    return replace(
        layout,
        query_positions=layout.query_positions.to(DEVICE),
        key_positions=layout.key_positions.to(DEVICE),
        key_mask=None if mask is None else mask.to(DEVICE),
        documents=None if layout.documents is None else layout.documents.to(DEVICE),
    )


def fp32(layout, mixing="A", **choices):
    keys = {"dtype": torch.float32, "heads": 2, "size": 16, "device": DEVICE, "batch": 1, **choices}
    if layout.key_mask is not None or layout.documents is not None:
        keys["batch"] = 2
    return call(moved(layout), mixing, **keys)


CASES = {  # layout, mixing, normaliser, other choices
    "one token": (of(1), "B", "softmax", {"batch": 2}),
    "one new token": (of(1, 9), "A", "softmax", {"heads": 8, "size": 64}),
    "nothing mixed, padding": (LAYOUTS["past and padding"], "none", "sigsoftmax", {"heads": 3}),
    "past": (of(7, 40), "B", "sigsoftmax", {"heads": 3, "size": 40}),
    "twelve heads": (of(3), "B", "softmax", {"heads": 12}),
    "gaps and window": (fr.Layout.from_runs(7, ((0, 12), (15, 3), (20, 30)), window=20), "B", "softmax", {}),
    "documents and one mask": (LAYOUTS["documents and one mask"], "A", "sigsoftmax", {"heads": 3}),
    "nothing mixed, documents": (LAYOUTS["documents and past"], "none", "softmax", {"heads": 3}),
    "documents and window": (LAYOUTS["documents and window"], "A", "softmax", {}),
    "cross": (of(19, 5, causal=False), "A", "sigsoftmax", {}),
    "mixed scores": (of(19), "A, A scores", "softmax", {"heads": 3}),
    "mixed scores, padding": (LAYOUTS["cross and padding"], "none, B scores", "sigsoftmax", {}),
    "keys mix": (of(5, 19), "B, none scores, keys", "softmax", {"heads": 5}),
    "keys mix, documents": (LAYOUTS["documents and window"], "none, B scores, keys", "sigsoftmax", {}),
}


# these have every mixing, normaliser and kind of layout; the others are of the full tier
FEW = {"nothing mixed, padding", "documents and one mask", "past", "gaps and window", "cross", "keys mix, documents"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in CASES])
def test_equals_the_equation(name):
    layout, mixing, normalize, choices = CASES[name]
    problem = fp32(layout, mixing, normalize=normalize, **choices)
    assert KERNELS["triton"].reason(problem) is None
    check(problem, attend(problem), EXACT)


def test_large_scores_do_not_overflow():
    for normalize in ("softmax", "sigsoftmax"):
        problem = fp32(of(5), normalize=normalize)
        problem = replace(problem, query=problem.query.detach().mul(60).requires_grad_())
        check(problem, attend(problem), 1e-4 if DEVICE == "cpu" else 2e-3)


def test_no_look_ahead():
    problem = fp32(of(18), "B")
    with torch.no_grad():
        before = attend(problem)
        problem.keys[:, :, 15:] = problem.values[:, :, 15:] = 100.0
        after = attend(problem)
    assert torch.equal(before[:, :, :15], after[:, :, :15])
    assert not torch.equal(before[:, :, 15:], after[:, :, 15:])


def shown_mask(problem):
    """The factors of dropout, read off values that are one-hot; there are at most as many keys as a head has dimensions."""
    keys, size = problem.keys.shape[2:]
    one_hot = torch.eye(size, device=DEVICE)[:keys].expand_as(problem.values)
    mixing = None if problem.mixing is None else problem.mixing.detach().abs() + 0.1
    same = replace(problem, query=torch.zeros_like(problem.query), values=one_hot, mixing=mixing, key_mixing=None)
    undropped, dropped = (attend(replace(same, dropout=p)) for p in (0.0, problem.dropout))
    seen = problem.layout.visible().expand(*problem.query.shape[:2], -1, -1)
    ratio = (dropped / undropped.where(undropped != 0, 1))[..., :keys]
    return torch.where(seen, ratio, torch.ones_like(ratio))


@pytest.mark.full
@pytest.mark.parametrize("mixing", ["none", "B", "B, A scores, keys"])
def test_backward_drops_what_forward_dropped(mixing):
    """Five heads: two draws of four, and several groups of heads."""
    problem = fp32(of(9, 17), mixing, heads=5, size=20, p=0.4)
    torch.manual_seed(11)
    factors = shown_mask(problem).double()
    assert (factors.isclose(torch.tensor(1 / 0.6, dtype=factors.dtype)) | (factors == 0) | (factors == 1)).all()
    assert (factors == 0).any()
    torch.manual_seed(11)
    check(problem, attend(problem), EXACT, (factors > 0).double())


@pytest.mark.full
def test_dropout_has_its_distribution():
    """Share of dropped weights, and no connection between heads, sequences, queries or keys."""
    p = 0.3
    keep_mask = (shown_mask(fp32(of(32, 64, causal=False), p=p, batch=2, heads=5, size=64)) > 0).double()
    deviation = math.sqrt(p * (1 - p))
    assert abs(float(keep_mask.mean()) - (1 - p)) < 5 * deviation / math.sqrt(keep_mask.numel())
    centred = (keep_mask - (1 - p)) / deviation
    for head in range(1, 5):
        together = float((centred[:, 0] * centred[:, head]).mean())
        assert abs(together) < 5 / math.sqrt(2 * 32 * 64), head
    for dim in (0, 2, 3):
        together = float((centred * centred.roll(1, dim)).mean())
        assert abs(together) < 5 / math.sqrt(centred.numel() / 2), dim


# Dynamo asks every tensor for its gradient and hides the warnings of those that have none, but not from a filter that raises.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("mixing", ["A", "B"])
def test_one_graph_when_compiled(mixing):
    problem = fp32(of(9), mixing)

    def around(query):
        return attend(replace(problem, query=query + 1)) * 2

    expected = around(problem.query)
    out = torch.compile(around, fullgraph=True, backend="aot_eager")(problem.query)
    assert torch.equal(out, expected)
    both = (torch.autograd.grad(o.square().sum(), differentiable(problem)) for o in (out, expected))
    assert all(map(torch.equal, *both))


def test_block_sizes_for_every_number_and_size_of_heads():
    """Every call has block sizes to try, with the shared memory of an H100 and of an RTX 4090; no group of heads is empty."""
    from fullrank.kernels.triton.launch import KERNELS, Call, list_choices

    assert triton.declines(fp32(of(3), "none, A scores", heads=17))  # programs hold tiles of all heads
    sizes_and_precisions = ((2, "ieee"), (4, "tf32"), (4, "tf32x3"))
    cards = ((9, 232_448), (8, 101_376))
    shapes = itertools.product(
        KERNELS, (1, 2, 3, 7, 8, 10, 12, 16, 31, 32), (16, 32, 64, 128), sizes_and_precisions, cards, (False, True)
    )
    for name, heads, width, (size, precision), (capability, shared), is_scored in shapes:
        call = Call(name, heads, width, size, precision, capability, shared, is_scored)
        tried = list_choices(call)
        assert 1 <= len(tried) <= 3, call
        for choice in tried:
            assert choice.num_warps in (4, 8)
            for group in (choice.kwargs.get("G", 1), choice.kwargs.get("GJ", 1)):
                assert 1 <= group <= heads
                assert (-(-heads // group) - 1) * group < heads


def test_rows_of_any_stride_are_read_where_they_are():
    """Query, keys and values as slices of one projection, and keys whose numbers do not stand side by side."""
    problem = fp32(of(21), "B", heads=3, size=20, batch=2)
    projection = torch.stack([problem.query, problem.keys, problem.values], 3).detach()
    query, keys, values = (projection[:, :, :, part].requires_grad_() for part in range(3))
    keys = keys.detach().mT.contiguous().mT.requires_grad_()
    assert query.stride(2) == 60
    assert keys.stride(3) != 1
    problem = replace(problem, query=query, keys=keys, values=values)
    check(problem, attend(problem), EXACT)


def test_kernels_that_fail_are_left_out_with_their_reason(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of resource: shared memory\nmore of it")

    monkeypatch.setattr(triton, "_TRIAL", (1, 16))
    kind = (torch.device(DEVICE), torch.float32, 2, 16)
    only_mixing = (2, None, None, None)
    for dimensions in ((None,) * 4, only_mixing, (4, 2, 4, 4)):
        assert triton.find_failure(*kind, dimensions, True, True, True, True) is None
    monkeypatch.setattr("fullrank.kernels.triton.launch.launch", fail)
    with pytest.warns(RuntimeWarning, match="out of resource: shared memory$") as warned:
        reasons = [triton.find_failure(*kind, only_mixing) for _ in range(2)]
    assert reasons == ["its kernels fail on this machine: RuntimeError: out of resource: shared memory"] * 2
    assert len(warned) == 1
    triton.try_out.cache_clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiler_traces_no_trial(monkeypatch):
    """The graph holds neither the trial nor a warning about the cache: the answer is a constant."""
    monkeypatch.setattr(triton, "_TRIAL", (1, 16))
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.op for node in graph.graph.nodes])
        return graph

    def double(x):
        fails = triton.find_failure(x.device, x.dtype, 2, 16, (2, None, None, None)) is not None
        return x if fails or not triton._runs_on(x.device) else x * 2

    torch._dynamo.reset()
    triton.try_out.cache_clear()
    x = torch.ones(3, device=DEVICE)
    assert torch.equal(torch.compile(double, fullgraph=True, backend=backend)(x), 2 * x)
    assert graphs == [["placeholder", "call_function", "output"]]


class TestOnAGpu:
    pytestmark = on_a_gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("mixing", ["none", "A", "B", "none, A scores", "B, B scores, keys"])
    @pytest.mark.parametrize(("heads", "size"), [(8, 64), (3, 24), (10, 41), (16, 128), (32, 16)])
    def test_real_sizes(self, heads, size, mixing, dtype):
        tolerance = {torch.float32: EXACT, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
        heads = min(heads, 16) if "scores" in mixing else heads
        problem = fp32(of(203, 331), mixing, batch=2, heads=heads, size=size, dtype=dtype)
        check(problem, attend(problem), tolerance)

    def test_memory_grows_with_the_length(self):
        """Four times the tokens take four times the memory, within a tenth; weights would take sixteen times."""
        peaks = []
        for length in (2048, 8192):
            problem = fp32(of(length), heads=8, size=64, dtype=torch.bfloat16)
            for _ in range(2):  # the first call tries block sizes
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                attend(problem).square().sum().backward()
                torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        assert peaks[1] < 4.4 * peaks[0]
