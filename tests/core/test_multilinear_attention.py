"""Multi-linear attention as a layer, over pairs of positions and as decayed sums, against its equations."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

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
from fullrank.core.errors import ConfigError, InputError

# -- pairs of positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize(("core_weights", "bias"), [("softmax", True), ("free", False)])
@pytest.mark.parametrize("length", [1, 7, 13])
def test_pairs(length: int, core_weights: str, bias: bool, causal: str, cores: int) -> None:
    """13 of 16 places: a text that is shorter uses the leading part of the map."""
    module, x = layer(cores=cores, causal=causal, core_weights=core_weights, bias=bias), tokens(2, length)
    expected = pairs_equation(module, x, sees=MASKS[causal])
    agree(module, module(x), expected, [x])
    with fr.kernel("reference"):
        agree(module, module(x), pairs_equation(module, x, sees=MASKS[causal]), [x])


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("cores", [1, 3])
def test_the_position_term(cores: int, causal: str) -> None:
    config = fr.AttentionConfig(kind="multilinear", score="relative", rank=R, cores=cores, causal=causal)
    torch.manual_seed(3)
    module: Any = fr.MultiLinearAttention(config, hidden_size=E, max_position_embeddings=P).double()
    moved(module)
    x = tokens(2, 11)
    agree(module, module(x), pairs_equation(module, x, sees=MASKS[causal]), [x])
    attention: Any = fr.Attention(config, hidden_size=E, max_position_embeddings=P).double()
    attention.load_state_dict(module.state_dict())  # one class for every kind, with the same names
    torch.testing.assert_close(attention(x), module(x), rtol=0, atol=0)


def test_the_published_form_as_its_code_has_it() -> None:
    """A loop over queries, keys, values and cores; W_O (d, L^2), keys major; positions L-1 .. 0, without shift; u and v."""
    length, cores = 5, 2
    config = fr.AttentionConfig(
        kind="multilinear",
        score="relative",
        rank=R,
        cores=cores,
        causal="as_published",
        core_weights="free",
        bias=False,
    )
    module: Any = fr.MultiLinearAttention(config, hidden_size=E, max_position_embeddings=length).double()
    moved(module)
    state, x = dict(module.state_dict()), tokens(1, length).detach()
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


@pytest.mark.parametrize("output_map", ["pairs", "decayed"])
@pytest.mark.parametrize("core_weights", ["softmax", "free"])
def test_cores_are_one_core_with_their_mean(core_weights: str, output_map: str) -> None:
    many, one = (
        layer(cores=3, core_weights=core_weights, output_map=output_map),
        layer(core_weights="free", output_map=output_map),
    )
    state = many.state_dict()
    raw = state["attend.cores.weight"]
    state["attend.cores.weight"] = (raw if core_weights == "free" else raw.softmax(-1)).mean(0, keepdim=True)
    one.load_state_dict(state)
    x = tokens(2, 9)
    torch.testing.assert_close(one(x), many(x), rtol=1e-12, atol=1e-12)


def test_the_start_is_that_of_the_paper() -> None:
    """softmax(rand(0, 1)): positive, sums to one, trained; free cores start there and are not normalised."""
    for free in ("softmax", "free"):
        module: Any = fr.MultiLinearAttention(hidden_size=E, rank=R, cores=3, core_weights=free)
        cores = module.attend.cores().detach()
        torch.testing.assert_close(cores.sum(-1), torch.ones(3))
        assert float(cores.min()) > 1 / (1 + (R - 1) * math.e)
        assert float(cores.max()) < math.e / (R - 1 + math.e)
        assert module.attend.cores.weight.requires_grad
        assert module.attend.weight.shape == (1024, 1024, E)


@pytest.mark.parametrize("padding", ENCODER)
@pytest.mark.parametrize("causal", [True, False])
def test_layouts_of_encoders_and_padding(causal: bool, padding: str) -> None:
    mask = ENCODER[padding]
    real = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    module, x = layer(cores=2), tokens(2, 7)
    out = module(x, layout=fr.Layout.of(7, causal=causal, key_mask=real))

    def sees(b: int, i: int, j: int) -> bool:
        return (j <= i or not causal) and (mask is None or bool(mask[b][j]))

    agree(module, out, pairs_equation(module, x, sees=sees), [x])


def test_cross_attention() -> None:
    for queries, keys in ((7, 5), (4, 9)):
        module, x, source = layer(cores=2), tokens(2, queries), tokens(2, keys, seed=6)
        agree(module, module(x, source), pairs_equation(module, x, source, lambda b, i, j: True), [x, source])
        decayed = layer(output_map="decayed", decays=3)
        apart, _ = distances(list(range(keys - queries, keys)), list(range(keys)))
        expected = decayed_equation(decayed, x, apart, torch.ones_like(apart), source)
        agree(decayed, decayed(x, source), expected, [x, source])


def test_queries_after_earlier_keys_gaps_and_windows() -> None:
    """Rows of the map are places in the text; what a resting layer left out has none."""
    module = layer()
    for layout, window in (
        (fr.Layout.of(3, 8), None),
        (fr.Layout.of_runs(3, ((0, 2), (4, 1), (8, 5))), None),
        (fr.Layout.of(3, 8, window=4), 4),
        (fr.Layout.of_runs(3, ((0, 2), (4, 1), (8, 5)), window=6), 6),
        (fr.Layout.of(8, 8, causal=False, window=3), 3),
    ):
        queries, keys = layout.shape
        own, places = layout.query_positions.tolist(), layout.key_positions.tolist()
        source = tokens(2, keys)
        x = source[:, -queries:]
        # the same on a text whose other places are empty
        text = torch.zeros(2, max(places) + 1, E, dtype=WIDE).index_copy(1, layout.key_positions, source)

        def sees(
            b: int, i: int, j: int, own: list[int] = own, places: list[int] = places, window: int | None = window,
            causal: bool = layout.causal,
        ) -> bool:  # fmt: skip
            near = window is None or j > own[i] - window
            return j in places and near and (j <= own[i] or not causal)

        agree(module, module(x, source, layout), pairs_equation(module, x, text, sees), [source])


def test_longer_texts_are_refused_with_the_reason() -> None:
    with pytest.raises(
        InputError, match=r"17 positions, but .* a column for each pair of 16 positions .* max_position_emb"
    ):
        layer()(tokens(1, 17))
    with pytest.raises(InputError, match="17 positions"):
        layer()(tokens(1, 2), tokens(1, 17))
    assert layer()(tokens(1, 16)).shape == (1, 16, E)


# -- decayed sums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
@pytest.mark.parametrize(("core_weights", "bias"), [("softmax", True), ("free", False)])
@pytest.mark.parametrize("length", [1, 7, 37])
def test_decayed(length: int, core_weights: str, bias: bool, cores: int) -> None:
    """37 tokens: more than max_position_embeddings, and more than two chunks."""
    module, x = (
        layer(output_map="decayed", decays=4, cores=cores, core_weights=core_weights, bias=bias),
        tokens(2, length),
    )
    apart, seen = distances(list(range(length)), list(range(length)))
    if length == 1:  # decays take no part in it
        torch.testing.assert_close(module(x), decayed_equation(module, x, apart, seen), rtol=1e-9, atol=1e-9)
        return
    agree(module, module(x), decayed_equation(module, x, apart, seen), [x])
    with fr.kernel("reference"):
        agree(module, module(x), decayed_equation(module, x, apart, seen), [x])


@pytest.mark.parametrize("padding", ENCODER)
def test_decayed_both_ways_and_with_padding(padding: str) -> None:
    mask, module, x = ENCODER[padding], layer(output_map="decayed", decays=3), tokens(2, 7)
    real = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    apart, before = distances(list(range(7)), list(range(7)))
    there = torch.ones_like(apart) if real is None else real[:, None, :].to(WIDE).expand_as(apart)
    out = module(x, layout=fr.Layout.of(7, causal=False, key_mask=real))
    agree(module, out, decayed_equation(module, x, apart, there), [x])
    if real is not None:
        causal = module(x, layout=fr.Layout.of(7, key_mask=real))
        expected = decayed_equation(module, x, apart, there * before)
        # a query that is padding itself is not used
        agree(module, causal[real], expected[real], [x])


def test_decayed_over_gaps_and_windows() -> None:
    module = layer(output_map="decayed", decays=3)
    for layout in (
        fr.Layout.of(3, 8),
        fr.Layout.of_runs(3, ((0, 2), (4, 1), (20, 5))),
        fr.Layout.of_runs(3, ((-9, 2), (0, 3)), origin=40),
        fr.Layout.of(3, 8, window=4),
        fr.Layout.of_runs(3, ((0, 2), (4, 1), (8, 5)), window=6),
    ):
        queries, keys = layout.shape
        source = tokens(2, keys)
        apart, seen = distances(layout.query_positions.tolist(), layout.key_positions.tolist())
        if layout.window is not None:
            seen = seen * (apart < layout.window)
        expected = decayed_equation(module, source[:, -queries:], apart, seen, source)
        agree(module, module(source[:, -queries:], source, layout), expected, [source])


def test_outputs_stay_bounded_at_any_length() -> None:
    """|O| <= sum |g U'| max|Q| max|K| max|V|; sums that were no means would grow with 1 / (1 - a)^2."""
    module: Any = layer(output_map="decayed", decays=4, bias=False)
    with torch.no_grad():
        for decay in (module.attend.decayed.key_decay, module.attend.decayed.value_decay):
            decay.copy_(torch.tensor([2.0, 6.0, 9.0, 14.0]))  # the last one forgets in a million tokens
        x = torch.ones(1, 10_000, E, dtype=WIDE) + 0.1 * torch.randn(1, 10_000, E, dtype=WIDE)
        query, keys, values, core = factors(module, x, x)
        tops = [float(tensor.abs().max()) for tensor in (query, keys, values)]
        limit = float((core[:, None] * module.attend.decayed.weight).abs().sum((0, 1)).max()) * math.prod(tops)
        out = module(x)
    assert out.isfinite().all()
    assert 0.001 * limit < float(out.abs().max()) <= limit


def test_the_layer_says_what_it_lacks() -> None:
    options = fr.AttentionConfig(kind="multilinear", rank=R)
    with pytest.raises(ConfigError, match="give a ModelConfig, or an AttentionConfig with hidden_size"):
        fr.MultiLinearAttention(rank=R)
    with pytest.raises(ConfigError, match="the configuration has rank, bias"):
        fr.MultiLinearAttention(fr.ModelConfig(attention=options), rank=3, bias=False)
    with pytest.raises(ConfigError, match="must be 'multilinear', given 'weighted'"):
        fr.MultiLinearAttention(fr.AttentionConfig(), hidden_size=E)
    with pytest.raises(ConfigError, match="a ModelConfig has its own sizes"):
        fr.MultiLinearAttention(fr.ModelConfig(attention=options), hidden_size=E)
    with fr.kernel("sdpa"), pytest.raises(InputError, match="'sdpa' cannot compute multi-linear attention"):
        layer()(tokens(1, 3))
    plain = fr.Attention(fr.AttentionConfig(), hidden_size=E, num_attention_heads=2)
    with fr.kernel("multilinear"), pytest.raises(InputError, match="'multilinear' cannot compute DotProduct"):
        plain(torch.zeros(1, 3, E))
