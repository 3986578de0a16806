"""The papers' parameter totals, exactly, without allocating anything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fullrank as fr
from fullrank.model.size import parameters_by_part, size


def imagined(config: fr.ModelConfig) -> fr.LanguageModel:
    with torch.device("meta"):
        return fr.LanguageModel(config)


def vanilla(vocabulary: int, layers: int, mix: str = "none", normalize: str = "softmax") -> fr.ModelConfig:
    """Mixhead's Vanilla Transformer: fairseq's `transformer_lm`, tied, without an output bias."""
    return fr.ModelConfig(
        vocab_size=vocabulary, hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, head_dim=64,
        intermediate_size=2048, position="sinusoidal", scale_embedding=True, output=fr.OutputConfig(tied=True),
        attention=fr.AttentionConfig(mix=mix, normalize=normalize),
    )  # fmt: skip


@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize(
    ("vocabulary", "layers", "total", "a", "b"),
    [(267_744, 6, 156_000_256, 384, 3_456), (33_280, 16, 67_478_528, 1_024, 9_216)],
    ids=["WikiText-103", "WikiText-2"],
)
def test_the_papers_totals(vocabulary: int, layers: int, total: int, a: int, b: int, normalize: str) -> None:
    for mix, more in (("none", 0), ("position_independent", a), ("position_wise", b), ("random", 0), ("average", 0)):
        model = imagined(vanilla(vocabulary, layers, mix, normalize))
        parts = parameters_by_part(model)
        assert model.num_parameters() == total + more
        assert parts["total"] == total + more
        assert parts["mixing"] == more
        assert sum(number for part, number in parts.items() if part != "total") == total + more
        assert parts.get("other", 0) == 0


sizes = st.integers(1, 12)


@given(
    layers=st.integers(1, 4), heads=sizes, head_dim=sizes, width=sizes, inner=sizes, vocabulary=st.integers(2, 40),
    tied=st.booleans(), attention_bias=st.booleans(), mlp_bias=st.booleans(), gated=st.booleans(), pre=st.booleans(),
    learned=st.booleans(),
)  # fmt: skip
def test_every_size_by_its_formula(
    layers: int, heads: int, head_dim: int, width: int, inner: int, vocabulary: int, tied: bool, attention_bias: bool,
    mlp_bias: bool, gated: bool, pre: bool, learned: bool,
) -> None:  # fmt: skip
    def count(mix: str) -> int:
        return imagined(
            fr.ModelConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                head_dim=head_dim,
                intermediate_size=inner,
                output=fr.OutputConfig(tied=tied),
                mlp_bias=mlp_bias,
                hidden_act="swiglu" if gated else "gelu",
                norm="pre" if pre else "post",
                position="learned" if learned else "none",
                max_position_embeddings=9,
                attention=fr.AttentionConfig(mix=mix, bias=attention_bias),
            )
        ).num_parameters()

    both = heads * head_dim
    attention = 4 * width * both + (3 * both + width) * attention_bias
    up = inner * (2 if gated else 1)
    feed_forward = width * up + inner * width + (up + width) * mlp_bias
    vocabularies = vocabulary * width if tied else 2 * vocabulary * width + vocabulary
    total = vocabularies + layers * (attention + feed_forward + 4 * width) + 2 * width * pre + 9 * width * learned
    assert count("none") == total
    assert count("position_independent") == total + layers * heads**2
    assert count("position_wise") == total + layers * (heads**2 + head_dim * heads)
    assert count("random") == count("average") == total


def test_size_counts_flops_by_their_formula() -> None:
    """Two for each multiply-add of a token: matrices, scores and values over (n + 1) / 2 keys, mixing, vocabulary."""
    e, h, d, f, v, layers, n = 12, 3, 5, 20, 30, 2, 9

    def flops(mix: str) -> int:
        config = fr.ModelConfig(
            vocab_size=v, hidden_size=e, num_hidden_layers=layers, num_attention_heads=h, head_dim=d, intermediate_size=f,
            attention=fr.AttentionConfig(mix=mix),
        )  # fmt: skip
        found = size(config, n)
        assert found["flops_per_token"]["length"] == n
        assert found["flops_per_token"]["training"] == 3 * found["flops_per_token"]["forward"]
        assert found["bytes"]["weights_fp32"] == 4 * imagined(config).num_parameters()
        assert found["bytes"]["cache_per_token_fp32"] == 4 * 2 * layers * h * d
        return found["flops_per_token"]["forward"]

    keys = (n + 1) / 2
    plain = 2 * (layers * (4 * e * h * d + 2 * e * f) + layers * 2 * h * d * keys + v * e)
    assert flops("none") == plain
    assert flops("position_independent") == plain + 2 * layers * h * h * keys
    assert flops("position_wise") == plain + 2 * layers * (h * h * keys + h * h * d)
