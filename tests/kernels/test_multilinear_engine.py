"""The engine of multi-linear attention against the equations, in every order in which it may take the pairs of positions."""

import pytest
import torch
from test_vocabulary import Watch

import closeness
import fullrank as fr
from fullrank.core import multilinear as definition
from fullrank.core.engine import Pairs, Tokens
from fullrank.kernels import multilinear as engine

NAMES = ("query", "keys", "values", "weight")


def leaves_of(batch, queries, keys, length=None, rank=5, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    length = length or keys
    shapes = ((batch, queries, rank), (batch, keys, rank), (batch, keys, rank), (length, length, width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def seen_by(way, queries, keys, rows=1):
    """(rows, N, M): who sees what."""
    if way == "visible":
        seen = torch.rand(rows, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.4
        seen[:, queries // 2] = False
        return seen
    last = torch.arange(keys - queries, keys) if way == "causal" else torch.full((queries,), keys)
    return (torch.arange(keys) <= last[:, None])[None]


def equation(query, keys, values, weight, seen):
    """The output matrix as the authors lay it out, (E, M^2), keys major."""
    used = keys.shape[1]
    output_map = weight[:used, :used].permute(2, 0, 1).reshape(weight.shape[2], used * used)
    tensor = torch.einsum("bir,bjr,bmr->bijm", query, keys, values) * seen[:, :, :, None] * seen[:, :, None, :]
    return torch.nn.functional.linear(tensor.flatten(2), output_map)


def computed(leaves, way="causal", seen=None):
    return engine.multiply_pairs(Pairs(*leaves, causal=way == "causal", visible=seen))


def agree(out, expected, leaves, tolerance=1e-9):
    closeness.agree(out, expected, dict(zip(NAMES, leaves, strict=True)), tolerance)


@pytest.mark.parametrize(("queries", "keys", "length", "way", "by_state", "most"), [
    (11, 11, 11, "causal", False, 4096), (11, 11, 13, "causal", True, 4096), (6, 10, 10, "causal", True, 11),
    (6, 10, 12, "causal", False, 11), (1, 12, 12, "causal", False, 4096), (1, 1, 1, "causal", True, 4096),
    (13, 9, 9, "full", False, 4096), (13, 9, 11, "full", True, 20), (9, 9, 9, "full", True, 4096),
    (9, 19, 19, "visible", False, 40), (9, 19, 21, "visible", False, 4096),
])  # fmt: skip
def test_every_order_is_exact(queries, keys, length, way, by_state, most, monkeypatch):
    """Shells of 3 positions, slabs of at most `most` pairs, directly and by the state, with a map for longer texts too."""
    monkeypatch.setattr(engine, "_SHELL_SMALL", 3)
    monkeypatch.setattr(engine, "_PAIRS", most)
    monkeypatch.setattr(engine, "order", lambda size: engine.list_steps(size, by_state))
    leaves = leaves_of(2, queries, keys, length)
    seen = seen_by(way, queries, keys, rows=1 if length == keys else 2)
    out = computed(leaves, way, seen if way == "visible" else None)
    assert way != "visible" or not out[:, queries // 2].any()
    agree(out, equation(*leaves, seen), leaves)


@pytest.mark.parametrize(("batch", "tokens", "way"), [(2, 70, "causal"), (4, 150, "causal"), (2, 90, "full")])
def test_fp32_and_autocast(batch, tokens, way):
    """Operands in bf16, sums in fp32, gradients in the dtype of their leaves; short texts and longer ones."""
    leaves = leaves_of(batch, tokens, tokens, rank=8, width=6, dtype=torch.float32)
    with torch.no_grad():
        leaves[3] /= tokens
    expected = equation(*leaves, seen_by(way, tokens, tokens))
    out = computed(leaves, way)
    assert out.dtype == torch.float32
    agree(out, expected, leaves, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        rough = computed(leaves, way)
    assert rough.dtype == torch.bfloat16
    agree(rough, equation(*leaves, seen_by(way, tokens, tokens)), leaves, 0.03)


@pytest.mark.parametrize("tokens", [40, 130])
def test_no_look_ahead(tokens):
    """Later tokens may be anything, also inf: outputs keep every bit."""
    leaves = leaves_of(1, tokens, tokens, rank=3, width=2)
    before = computed(leaves)
    for place in (0, tokens // 2, tokens - 2):
        to_keys, to_values = torch.autograd.grad(before[:, : place + 1].sum(), leaves[1:3], retain_graph=True)
        assert not to_keys[:, place + 1 :].any()
        assert not to_values[:, place + 1 :].any()
        assert to_keys[:, place].any()
        changed = [tensor.detach().clone() for tensor in leaves]
        for tensor, number in zip(changed[:3], (5.0, -7.0, float("inf")), strict=True):
            tensor[:, place + 1 :] = number
        assert torch.equal(computed(changed)[:, : place + 1], before[:, : place + 1])


def test_who_computes():
    """Small tensors are left to the definition, unless the engine is chosen by name."""

    def by_engine(tokens, kernel):
        with fr.kernel(kernel):
            out = definition.multilinear(Pairs(*leaves_of(1, tokens, tokens, rank=2, width=2), causal=True))
        return "Eager" in type(out.grad_fn).__name__

    cases = [(50, "auto"), (51, "auto"), (51, "reference"), (5, "multilinear")]
    assert [by_engine(*case) for case in cases] == [False, True, False, True]


@pytest.mark.parametrize(("way", "tokens"), [("causal", 200), ("full", 140), ("visible", 140)])
def test_nothing_of_size_n_cubed(way, tokens):
    leaves = [leaf.detach() for leaf in leaves_of(1, tokens, tokens, rank=4, width=4, dtype=torch.float32)]
    seen = seen_by(way, tokens, tokens) if way == "visible" else None
    arguments = engine.Arguments(*leaves, seen, way == "causal", torch.float32)
    with Watch() as watch:
        out, states = engine._forward(arguments)
        engine._backward(arguments, out, states, (True,) * 4)
    assert tokens * tokens * 4 <= watch.largest < tokens**3 / 4


LOG = [-1e-6, -0.3, -40.0]  # decays from nearly 1 to nearly 0


def recurrence(tokens, log, distances, state, last):
    """A_s(i) = a_s^(distance to the token before) A_s(i - 1) + x_i, one token after the other; the last ones."""
    sums = []
    for i, distance in enumerate(distances):
        state = torch.exp(log * distance)[:, None] * state + tokens[:, i, None]
        sums.append(state)
    return torch.stack(sums, 1)[:, -last:]


@pytest.mark.parametrize(("count", "gaps", "with_state"), [
    (1, [], True), (16, [], False), (37, [], True), (37, [1] * 20, False), (5, [1, 9, 1, 3], False), (4200, [], False),
])  # fmt: skip
def test_decayed_sums(count, gaps, with_state):
    """Within a chunk and over many, after earlier tokens with gaps (distance of each to the next), and after a state."""
    generator = torch.Generator().manual_seed(5)
    log = torch.tensor(LOG, dtype=torch.float64).requires_grad_()
    tokens = torch.randn(2, len(gaps) + count, 2, generator=generator, dtype=torch.float64).requires_grad_()
    state = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64).requires_grad_()
    before = torch.tensor([sum(gaps[i:]) - 1 for i in range(len(gaps))])
    out = engine.compute_decayed_sums(Tokens(tokens, log, before, state if with_state else None))
    expected = recurrence(tokens, log, [1, *gaps, *[1] * (count - 1)], state * with_state, count)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    leaves = {"tokens": tokens, "log": log} | ({"state": state} if with_state else {})
    closeness.agree(out, expected, leaves)


@pytest.mark.full
@pytest.mark.parametrize("output_map", ["pairs", "decayed"])
def test_compiled_without_a_graph_break(output_map):
    """Two lengths at which the engine computes: the same numbers and gradients as without compiling."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    layer = fr.MultiLinearAttention(hidden_size=6, rank=4, max_position_embeddings=70, output_map=output_map)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if output_map == "pairs" else "eager")
    for tokens in (64, 70):
        x = torch.randn(1, tokens, 6)
        results = []
        for module in (layer, compiled):
            out = module(x)
            results.append((out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))))
        for a, b in zip(*results, strict=True):
            assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.detach().abs().max()))
