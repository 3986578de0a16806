"""Stochastic cross-head attention against its distribution."""

import itertools
import math
from collections import Counter

import pytest
import torch

import fullrank as fr
from fullrank.core.stages import StochasticCrossHead

HEADS = 3


def order(route):
    """The head that each head listened to; keys and values must agree."""
    keys = torch.arange(HEADS, dtype=torch.float32).view(1, HEADS, 1, 1).expand(2, HEADS, 4, 5)
    routed_keys, routed_values = route(keys, keys + 100)
    assert torch.equal(routed_keys + 100, routed_values), "keys and values went different ways"
    assert torch.equal(routed_keys, routed_keys[:1, :, :1, :1].expand_as(routed_keys)), (
        "one order for rows and positions"
    )
    return tuple(int(number) for number in routed_keys[0, :, 0, 0])


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_permutations_come_as_often_as_beta_says(beta):
    """Each of the H! orders has probability beta / H!; the unchanged one has 1 - beta more."""
    route = StochasticCrossHead(beta).train()
    draws = 3000
    counts = Counter(order(route) for _ in range(draws))
    assert set(counts) <= set(itertools.permutations(range(HEADS)))
    for permutation in itertools.permutations(range(HEADS)):
        p = beta / math.factorial(HEADS) + (1 - beta if permutation == tuple(range(HEADS)) else 0)
        assert abs(counts[permutation] - draws * p) <= 4.5 * math.sqrt(draws * p * (1 - p)) + 1e-9, permutation


@pytest.mark.parametrize("options", [{"score": "relative"}, {"mix": "position_wise"}], ids=["relative", "mixed"])
def test_permuted_heads_are_permuted_weights(options):
    """Keys, keys of distances and values change places together; queries, u and v and the query of the mixing stay."""
    config = fr.AttentionConfig(**options, cross_head=1.0)
    attention = fr.Attention(config, hidden_size=6, num_attention_heads=3, head_dim=2).double().train()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    torch.manual_seed(6)
    permuted = attention(x)
    torch.manual_seed(6)
    read = order(attention.permute)
    assert read != (0, 1, 2)
    attention.eval()
    project = attention.project
    matrices = [project.key.weight, project.value.weight]
    if "score" in options:
        matrices.append(project.relative.weight)
    with torch.no_grad():
        for matrix in matrices:
            matrix.copy_(matrix.view(3, 2, 6)[list(read)].reshape(6, 6))
        for bias in (project.key.bias, project.value.bias):
            bias.copy_(bias.view(3, 2)[list(read)].reshape(6))
    assert torch.allclose(attention(x), permuted, atol=1e-12)
