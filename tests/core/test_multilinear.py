"""Multi-linear attention as a layer, over pairs of positions and as decayed sums, against its equations."""

import math
from itertools import product

import pytest
import torch
from multilinear_equations import (
    ENCODER,
    MASKS,
    WIDE,
    E,
    P,
    R,
    agree,
    decayed_equation,
    distances,
    factors,
    layer,
    moved,
    pairs_equation,
    sinusoid,
    tokens,
)

import fullrank as fr


@pytest.mark.parametrize(("length", "core_weights", "bias", "causal", "cores"), [
    (1, "softmax", True, "masked", 1), (1, "free", False, "as_published", 3), (7, "softmax", False, "as_published", 1),
    (7, "free", True, "masked", 3), (13, "softmax", True, "as_published", 4), (13, "free", False, "masked", 1),
    (13, "softmax", False, "masked", 2),
])  # fmt: skip
@pytest.mark.parametrize("kernel", ["auto", "multilinear"])
def test_pairs(length, core_weights, bias, causal, cores, kernel):
    """13 of 16 positions: a shorter text uses the leading part of the map. By the definition and by the engine."""
    module = layer(cores=cores, causal=causal, core_weights=core_weights, bias=bias)
    x = tokens(2, length)
    with fr.kernel(kernel):
        agree(module, module(x), pairs_equation(module, x, sees=MASKS[causal]), [x])


@pytest.mark.parametrize(("causal", "cores"), [("masked", 3), ("as_published", 1)])
def test_the_position_term(cores, causal):
    config = fr.AttentionConfig(kind="multilinear", score="relative", rank=R, cores=cores, causal=causal)
    torch.manual_seed(3)
    module = moved(fr.MultiLinearAttention(config, hidden_size=E, max_position_embeddings=P).double())
    x = tokens(2, 11)
    agree(module, module(x), pairs_equation(module, x, sees=MASKS[causal]), [x])
    attention = fr.Attention(config, hidden_size=E, max_position_embeddings=P).double()
    attention.load_state_dict(module.state_dict())  # one class for every kind, with the same names
    torch.testing.assert_close(attention(x), module(x), rtol=0, atol=0)


def test_the_published_form_as_its_code_has_it():
    """A loop over queries, keys, values and cores; W_O (d, L^2), keys major; positions L-1 .. 0, without shift; u and v."""
    length, cores = 5, 2
    config = fr.AttentionConfig(kind="multilinear", score="relative", rank=R, cores=cores, causal="as_published",
                                core_weights="free", bias=False)  # fmt: skip
    module = moved(fr.MultiLinearAttention(config, hidden_size=E, max_position_embeddings=length).double())
    state = module.state_dict()
    x = tokens(1, length).detach()
    q, k, val = ((x[0] @ state[f"project.{name}.weight"].T).tolist() for name in ("query", "key", "value"))
    u, v = (state[f"attend.score.biases.{name}_bias"][0].tolist() for name in ("content", "position"))
    p = [(state["attend.score.weight"] @ sinusoid(length - 1 - j)).tolist() for j in range(length)]
    g = state["attend.cores.weight"].tolist()
    w_o = state["attend.weight"].permute(2, 0, 1).reshape(E, length**2)  # nn.Linear(L^2, d, bias=False).weight
    for i in range(length):
        flat = []
        for j, m in product(range(length), repeat=2):
            entry = 0.0
            for c, a in product(range(cores), range(R)):
                entry += g[c][a] * (q[i][a] + u[a]) * k[j][a] * val[m][a] / cores
                entry += g[c][a] * (q[i][a] + v[a]) * p[j][a] * val[m][a] / cores
            flat.append(entry)
        expected = w_o @ torch.tensor(flat, dtype=WIDE)
        torch.testing.assert_close(module(x)[0, i], expected, rtol=1e-9, atol=1e-9)


def test_the_start_is_that_of_the_paper():
    """softmax(rand(0, 1)): positive, sums to one, trained; free cores start there and are not normalised."""
    for free in ("softmax", "free"):
        module = fr.MultiLinearAttention(hidden_size=E, rank=R, cores=3, core_weights=free)
        cores = module.attend.cores().detach()
        torch.testing.assert_close(cores.sum(-1), torch.ones(3))
        assert float(cores.min()) > 1 / (1 + (R - 1) * math.e)
        assert float(cores.max()) < math.e / (R - 1 + math.e)
        assert module.attend.cores.weight.requires_grad
        assert module.attend.weight.shape == (1024, 1024, E)


@pytest.mark.parametrize(
    ("causal", "padding", "kernel"),
    [(True, "right", "auto"), (True, "left", "multilinear"), (False, "right", "multilinear"), (False, "left", "auto"),
     (False, "none", "auto")],
)  # fmt: skip
def test_layouts_of_encoders_and_padding(causal, padding, kernel):
    mask = ENCODER[padding]
    real = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    module = layer(cores=2)
    x = tokens(2, 7)

    def sees(b, i, j):
        return (j <= i or not causal) and (mask is None or bool(mask[b][j]))

    layout = fr.Layout.of(7, causal=causal, key_mask=real)
    with fr.kernel(kernel):
        agree(module, module(x, layout=layout), pairs_equation(module, x, sees=sees), [x])
        if real is not None:  # padding may be anything
            changed = x.detach().masked_fill(~real[..., None], 1e9)
            assert torch.equal(module(changed, layout=layout)[real], module(x, layout=layout)[real])


def test_cross_attention():
    for queries, keys in ((7, 5), (4, 9)):
        module = layer(cores=2)
        x, source = tokens(2, queries), tokens(2, keys, seed=6)
        agree(module, module(x, source), pairs_equation(module, x, source, lambda b, i, j: True), [x, source])
        decayed = layer(output_map="decayed", decays=3)
        apart, _ = distances(list(range(keys - queries, keys)), list(range(keys)))
        expected = decayed_equation(decayed, x, apart, torch.ones_like(apart), source)
        agree(decayed, decayed(x, source), expected, [x, source])


@pytest.mark.parametrize("kernel", ["auto", "multilinear"])
def test_queries_after_earlier_keys_gaps_and_windows(kernel):
    """Rows of the map are positions in the text; tokens that a skipped layer left out have none."""
    module = layer()
    for layout, window in (
        (fr.Layout.of(3, 8), None),
        (fr.Layout.from_runs(3, ((0, 2), (4, 1), (8, 5))), None),
        (fr.Layout.of(3, 8, window=4), 4),
        (fr.Layout.from_runs(3, ((0, 2), (4, 1), (8, 5)), window=6), 6),
        (fr.Layout.of(8, 8, causal=False, window=3), 3),
    ):
        queries, keys = layout.shape
        query_places, key_places = layout.query_positions.tolist(), layout.key_positions.tolist()
        source = tokens(2, keys)
        x = source[:, -queries:]
        # the same on a text whose other places are empty
        text = torch.zeros(2, max(key_places) + 1, E, dtype=WIDE).index_copy(1, layout.key_positions, source)

        def sees(b, i, j, query_places=query_places, key_places=key_places, window=window, causal=layout.causal):
            near = window is None or j > query_places[i] - window
            return j in key_places and near and (j <= query_places[i] or not causal)

        with fr.kernel(kernel):
            agree(module, module(x, source, layout), pairs_equation(module, x, text, sees), [source])


@pytest.mark.parametrize(("length", "core_weights", "bias", "cores", "kernel"), [
    (1, "softmax", True, 2, "auto"), (7, "free", False, 1, "auto"), (7, "softmax", True, 3, "multilinear"),
    (37, "free", True, 2, "auto"), (37, "softmax", False, 4, "reference"),
])  # fmt: skip
def test_decayed(length, core_weights, bias, cores, kernel):
    """37 tokens: more than max_position_embeddings, and more than two chunks."""
    module = layer(output_map="decayed", decays=4, cores=cores, core_weights=core_weights, bias=bias)
    x = tokens(2, length)
    apart, seen = distances(list(range(length)), list(range(length)))
    with fr.kernel(kernel):
        if length == 1:  # decays take no part in it
            torch.testing.assert_close(module(x), decayed_equation(module, x, apart, seen), rtol=1e-9, atol=1e-9)
        else:
            agree(module, module(x), decayed_equation(module, x, apart, seen), [x])


@pytest.mark.parametrize("padding", ENCODER)
def test_decayed_both_ways_and_with_padding(padding):
    mask = ENCODER[padding]
    module = layer(output_map="decayed", decays=3)
    x = tokens(2, 7)
    real = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    apart, before = distances(list(range(7)), list(range(7)))
    seen = torch.ones_like(apart) if real is None else real[:, None, :].to(WIDE).expand_as(apart)
    out = module(x, layout=fr.Layout.of(7, causal=False, key_mask=real))
    agree(module, out, decayed_equation(module, x, apart, seen), [x])
    if real is not None:
        causal = module(x, layout=fr.Layout.of(7, key_mask=real))
        expected = decayed_equation(module, x, apart, seen * before)
        # a query that is padding itself is not used
        agree(module, causal[real], expected[real], [x])


def test_outputs_stay_bounded_at_any_length():
    """|O| <= sum |g U'| max|Q| max|K| max|V|; sums that are not means would grow with 1 / (1 - a)^2."""
    module = layer(output_map="decayed", decays=4, bias=False)
    with torch.no_grad():
        for decay in (module.attend.decayed.key_decay, module.attend.decayed.value_decay):
            decay.copy_(torch.tensor([2.0, 6.0, 9.0, 14.0]))  # the last one forgets in a million tokens
        x = torch.ones(1, 5000, E, dtype=WIDE) + 0.1 * torch.randn(1, 5000, E, dtype=WIDE)
        query, keys, values, core = factors(module, x, x)
        tops = [float(tensor.abs().max()) for tensor in (query, keys, values)]
        limit = float((core[:, None] * module.attend.decayed.weight).abs().sum((0, 1)).max()) * math.prod(tops)
        out = module(x)
    assert out.isfinite().all()
    assert 0.001 * limit < float(out.abs().max()) <= limit
