"""Mixhead Theorem 1: what one small head cannot reach, what mixed heads reach (docs/derivations/low_rank_heads.md)."""

import math

import pytest
import torch

import fullrank as fr
from fullrank.core.layout import Layout
from fullrank.core.trace import Trace


def some_weights(tokens, seed=3):
    """A positive row-stochastic matrix P (N, N)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(tokens, tokens, dtype=torch.float64, generator=generator), -1)


def centred(logits):
    """`L C`: the mean of each row taken off, which a softmax does not see."""
    return logits - logits.mean(-1, keepdim=True)


def distance_to_heads(weights, head_dim):
    """t_d(P): no head of `head_dim` dimensions has logarithms nearer than this to those of P, up to shifts of rows."""
    return float(torch.linalg.svdvals(centred(weights.log()))[head_dim:].norm())


def layer_of(logits, head_dim, mixing=None):
    """A real layer whose head i has the scores logits[i] (N, N) of rank at most `head_dim`, and its input X (1, N, E)."""
    tokens, heads = logits[0].shape[0], len(logits)
    attention = fr.AttentionConfig(mix="none" if mixing is None else "position_independent", bias=False)
    layer = fr.Attention(attention, hidden_size=tokens + 3, num_attention_heads=heads, head_dim=head_dim).double()
    x = torch.randn(tokens, tokens + 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inverse = torch.linalg.pinv(x)  # (E, N), a right inverse: X has full row rank
    with torch.no_grad():
        for i, scores in enumerate(logits):
            left, values, right = torch.linalg.svd(scores * head_dim**0.5)
            rows = slice(i * head_dim, (i + 1) * head_dim)
            size = values[:head_dim].sqrt()
            rank = len(size)
            layer.project.query.weight[rows] = 0
            layer.project.key.weight[rows] = 0
            layer.project.query.weight[rows][:rank] = (inverse @ left[:, :rank] * size).T
            layer.project.key.weight[rows][:rank] = (inverse @ right[:rank].T * size).T
        if mixing is not None:
            layer.attend.mix.mixing.copy_(mixing)
    return layer, x[None]


def weights_of(layer, x, causal=False):
    """The weights of the layer's heads before and after mixing, (H, N, N) each."""
    trace = Trace()
    with torch.no_grad():
        layer(x, layout=Layout.of(x.shape[1], causal=causal), trace=trace)
    return trace.layers[0].weights[0], trace.layers[0].mixed[0]


def shares(weights, head_dim):
    """The scores of ceil(N / d) + 1 heads of which each holds d rows of P, and M, whose column 0 adds them up to P."""
    tokens = weights.shape[0]
    groups = range(0, tokens, head_dim)
    logits = [torch.zeros_like(weights) for _ in range(len(groups) + 1)]
    for scores, start in zip(logits, groups, strict=False):
        rows = slice(start, start + head_dim)
        scores[rows] = weights[rows].log().clamp_min(-1e3)  # a hidden entry: any number will do
    mixing = torch.eye(len(logits), dtype=weights.dtype)
    mixing[:, 0] = 1
    mixing[-1, 0] = 1 - len(groups)
    return logits, mixing


@pytest.mark.parametrize("head_dim", [1, 4])
def test_a_head_of_fewer_than_n_minus_1_dimensions_stays_at_its_distance(head_dim):
    """The truncated scores reach the distance, which is that of the singular values left out (Eckart and Young)."""
    tokens = 7
    weights = some_weights(tokens)
    bound = distance_to_heads(weights, head_dim)
    assert bound > 0.1
    left, values, right = torch.linalg.svd(centred(weights.log()))
    best = left[:, :head_dim] * values[:head_dim] @ right[:head_dim]
    layer, x = layer_of([best], head_dim)
    reached = weights_of(layer, x)[0][0]
    assert float(centred(reached.log() - weights.log()).norm()) == pytest.approx(bound, rel=1e-9)
    in_weights = float(weights.min()) * bound / (tokens + bound)
    assert float((reached - weights).abs().max()) >= in_weights > 0


def test_a_head_of_n_minus_1_dimensions_reaches_every_matrix():
    """The paper asks for n: a softmax does not see the mean of a row."""
    tokens = 7
    weights = some_weights(tokens)
    assert distance_to_heads(weights, tokens - 1) < 1e-12
    assert int(torch.linalg.matrix_rank(weights.log())) == tokens
    layer, x = layer_of([centred(weights.log())], tokens - 1)
    torch.testing.assert_close(weights_of(layer, x)[0][0], weights, atol=1e-12, rtol=0)


@pytest.mark.parametrize("tokens", [6, 7])
def test_with_the_causal_mask_half_the_length_is_enough(tokens):
    """What is hidden is free, so that ceil(n / 2) dimensions reach a masked P and fewer than floor(n / 2) do not."""
    logits = some_weights(tokens).log()
    weights = torch.softmax(logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -math.inf), -1)
    half = (tokens + 1) // 2
    visible = weights.log().masked_fill(weights == 0, 0)
    top, block, side = visible[: tokens - half, :half], visible[tokens - half :, :half], visible[tokens - half :, half:]
    upper = torch.cat([top, top @ torch.linalg.inv(block) @ side], 1)
    scores = torch.cat([upper, visible[tokens - half :]])
    assert int(torch.linalg.matrix_rank(scores)) == half
    layer, x = layer_of([scores], half)
    torch.testing.assert_close(weights_of(layer, x, causal=True)[0][0], weights, atol=1e-9, rtol=0)
    first = tokens // 2  # rows first .., columns .. first: a block of which every entry is visible
    assert int(torch.linalg.matrix_rank(centred(weights[first:, : first + 1].log()))) == tokens // 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tokens", "head_dim"), [(7, 2), (7, 1), (9, 3)])
def test_mixed_heads_reach_what_none_of_them_can(tokens, head_dim, causal):
    weights = some_weights(tokens)
    if causal:
        weights = weights.tril() / weights.tril().sum(-1, keepdim=True)
    else:
        assert distance_to_heads(weights, head_dim) > 0.1
    logits, mixing = shares(weights, head_dim)
    assert len(logits) == math.ceil(tokens / head_dim) + 1
    assert float(mixing[:, 0].sum()) == 1
    layer, x = layer_of(logits, head_dim, mixing)
    heads, mixed = weights_of(layer, x, causal)
    torch.testing.assert_close(mixed[0], weights, atol=1e-10, rtol=0)
    assert all(float((head - weights).abs().max()) > 0.01 for head in heads)
