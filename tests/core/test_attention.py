"""The whole layer against Eq. 8 to 12 in plain numpy, and the ways to build it."""

import numpy as np
import pytest
import torch

import fullrank as fr
from fullrank.core.embedding import Rotary

E, H, D, N = 10, 3, 4, 6


def layer(position="sinusoidal", **attention):
    torch.manual_seed(2)
    config = fr.ModelConfig(hidden_size=E, num_attention_heads=H, head_dim=D, position=position,
                            attention=fr.AttentionConfig(**attention))  # fmt: skip
    made = fr.Attention(config).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.7)
    return made


def in_numpy(made, x, source, *, causal, query, rotary = False,
             ):  # fmt: skip
    """One text, head by head. `query` says which query builds the mixing: the equation's, or one of the wrong ones."""

    def linear(module, x, bias=True):
        out = x @ module.weight.detach().numpy().T
        return out + module.bias.detach().numpy() if bias else out

    def turned(heads):
        tensor = torch.from_numpy(heads.copy())[None, None]
        return Rotary(D, 10000.0)(tensor, torch.arange(len(heads)))[0, 0].numpy()

    cut = [slice(i * D, (i + 1) * D) for i in range(H)]
    q, k, v = (
        linear(m, s) for m, s in ((made.project.query, x), (made.project.key, source), (made.project.value, source))
    )
    bare = linear(made.project.query, x, bias=False)
    weights, readers = [], []
    for c in cut:
        scored, keys = (turned(q[:, c]), turned(k[:, c])) if rotary else (q[:, c], k[:, c])
        scores = scored @ keys.T / np.sqrt(D)
        if causal:
            scores = np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)
        exp = np.exp(scores - scores.max(-1, keepdims=True))
        weights.append(exp / exp.sum(-1, keepdims=True))
        wrong = {"scaled": q[:, c] / np.sqrt(D), "rotated": scored, "without bias": bare[:, c]}
        readers.append(wrong.get(query, q[:, c]))
    heads = []
    for i in range(H):
        total = np.zeros_like(weights[0])
        for j in range(H):
            mix = made.attend.mix
            m = readers[j] @ mix.from_query.detach().numpy()[:, i] + mix.mixing.detach().numpy()[j, i]
            total += m[:, None] * weights[j]
        heads.append(total @ v[:, cut[i]])
    return linear(made.merge, np.concatenate(heads, axis=-1))


@pytest.mark.parametrize("position", ["sinusoidal", "rotary"])
def test_position_wise_layer_is_equations_8_to_12(position):
    """The query that builds the mixing is the projected one with its bias, before scale and rotation."""
    made, x = layer(position, mix="position_wise"), torch.randn(2, N, E, dtype=torch.float64)
    given = made(x).detach().numpy()
    rotary = position == "rotary"
    for b in range(2):
        row = x[b].numpy()
        expected = in_numpy(made, row, row, causal=True, query="as projected", rotary=rotary)
        assert np.abs(given[b] - expected).max() < 1e-11
        for wrong in ("scaled", "without bias", *(["rotated"] if rotary else [])):
            other = in_numpy(made, row, row, causal=True, query=wrong, rotary=rotary)
            assert np.abs(given[b] - other).max() > 1e-2, wrong


@pytest.mark.parametrize("length", [3, 6, 9])
def test_cross_attention_reads_another_source(length):
    made = layer(mix="position_wise")
    x, source = torch.randn(1, N, E, dtype=torch.float64), torch.randn(1, length, E, dtype=torch.float64)
    given = made(x, source)[0].detach().numpy()
    expected = in_numpy(made, x[0].numpy(), source[0].numpy(), causal=False, query="as projected")
    assert np.abs(given - expected).max() < 1e-11
    mask = torch.ones(1, length, dtype=torch.bool)
    mask[0, 1] = False
    masked = made(x, source, fr.Layout.of(N, length, causal=False, key_mask=mask))[0].detach().numpy()
    kept = source[0, mask[0]].numpy()
    assert np.abs(masked - in_numpy(made, x[0].numpy(), kept, causal=False, query="as projected")).max() < 1e-11


def test_dropout_acts_after_mixing():
    """One key, values of one, both heads the sum of both: 2, so 0 or 4 with p = 1/2; dropping before mixing gives 2 too."""
    made = fr.Attention(
        fr.AttentionConfig(mix="position_independent", bias=False), hidden_size=4, num_attention_heads=2, dropout=0.5
    )
    made = made.train()
    with torch.no_grad():
        made.attend.mix.mixing.fill_(1.0)
        made.project.value.weight.copy_(torch.eye(4))
        made.merge.weight.copy_(torch.eye(4))
    out = made(torch.ones(500, 1, 4))
    assert set(out.flatten().tolist()) == {0.0, 4.0}
    assert not torch.equal(made(torch.ones(500, 1, 4)), out)
    assert set(made.eval()(torch.ones(5, 1, 4)).flatten().tolist()) == {2.0}
