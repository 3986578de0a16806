"""Relative scores as published against their equation; ours: test_memory_brute_force.py and test_translator_equations.py."""

import math

import numpy as np
import pytest
import torch

import fullrank as fr

E, H, D = 10, 3, 4


def layer(**options):
    """Away from its start, in double precision."""
    torch.manual_seed(2)
    config = fr.AttentionConfig(score={"name": "relative", **options})
    made = fr.Attention(config, hidden_size=E, num_attention_heads=H, head_dim=D).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.7)
    return made


def sinusoid(distance):
    half = [distance / 10000 ** (2 * i / E) for i in range(E // 2)]
    return np.array([math.sin(x) for x in half] + [math.cos(x) for x in half])


def equation(made, x, distance, visible):
    """One text (N, E) by a loop over all queries and keys; distance(n, m) in tokens, visible(n, m)."""

    def numbers(tensor):
        return tensor.detach().numpy()

    def linear(module, x):
        return x @ numbers(module.weight).T + numbers(module.bias)

    q, k, v = (linear(module, x) for module in (made.project.query, made.project.key, made.project.value))
    u, w = (numbers(b) for b in (made.attend.score.biases.content_bias, made.attend.score.biases.position_bias))
    to_keys = numbers(made.project.relative.weight)
    count = len(x)
    weights = np.zeros((H, count, count))
    for h in range(H):
        part = slice(h * D, (h + 1) * D)
        for n in range(count):
            scores = {}
            for m in range(count):
                if visible(n, m):
                    r = to_keys[part] @ sinusoid(distance(n, m))
                    scores[m] = ((q[n, part] + u[h]) @ k[m, part] + (q[n, part] + w[h]) @ r) / math.sqrt(D)
            total = sum(math.exp(score) for score in scores.values())
            for m, score in scores.items():
                weights[h, n, m] = math.exp(score) / total
    heads = [weights[h] @ v[:, h * D : (h + 1) * D] for h in range(H)]
    return linear(made.merge, np.concatenate(heads, 1))


def test_as_published_measures_from_the_end_of_the_block():
    made = layer(as_published=True)
    x = torch.randn(1, 6, E, dtype=torch.float64)
    out = made(x)[0].detach().numpy()
    assert np.abs(out - equation(made, x[0].numpy(), lambda n, m: 5 - m, lambda n, m: m <= n)).max() < 1e-12
    assert np.abs(out - equation(made, x[0].numpy(), lambda n, m: n - m, lambda n, m: m <= n)).max() > 1e-2
    shorter = made(x[:, :5])[0].detach().numpy()
    assert np.abs(out[:5] - shorter).max() > 1e-3  # what is appended changes what was there
    other = x.clone()
    other[:, 5] += 1  # but not by what it says
    assert np.array_equal(made(other)[0, :5].detach().numpy(), out[:5])


@pytest.mark.parametrize("start", ["empty", "zeros"])
def test_a_model_as_published_with_same_length(start):
    """Evaluation of the released code: a block after a memory, each query sees as many keys as the memory is long."""
    torch.manual_seed(3)
    made = fr.LanguageModel(
        fr.ModelConfig(
            vocab_size=20, hidden_size=E, num_hidden_layers=1, num_attention_heads=H, head_dim=D, norm="post",
            position="relative", memory_length=4, same_length=True, memory_start=start,
            attention=fr.AttentionConfig(score={"name": "relative", "as_published": True}),
        )
    ).double().eval()  # fmt: skip
    ids = torch.randint(20, (1, 9))
    first = made(ids[:, :5])
    block = made.blocks[0]
    attention = block.attention
    x = made.embedding(ids).detach()[0]
    after_zeros = torch.cat((torch.zeros(4, E), x))  # a memory of zeros in front, which the second block no longer sees
    for block_end, logits in ((5, first.logits), (9, made(ids[:, 5:], first.memory).logits)):
        begin = 0 if block_end == 5 else 5
        keys = after_zeros[begin : 4 + block_end] if start == "zeros" or begin else x[:block_end]
        count = len(keys)
        expected = equation(
            attention, keys.numpy(), lambda n, m, last=count - 1: last - m, lambda n, m: n - 4 < m <= n
        )[-(block_end - begin) :]
        hidden = block.attention_norm(x[begin:block_end] + torch.from_numpy(expected))
        hidden = block.feed_forward_norm(hidden + block.feed_forward(hidden))
        assert (made.output(hidden[None]) - logits).abs().max() < 1e-12
