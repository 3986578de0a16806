"""The papers' parameter totals, exactly, without allocating anything."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fullrank as fr
from fullrank.analysis.size import parameters_by_part, size


def imagined(config):
    with torch.device("meta"):
        return fr.LanguageModel(config)


def test_parts_add_up():
    """fairseq's `transformer_lm_wiki103` with Mixhead B; totals of the papers' tables are in tests/recipes."""
    clusters = {"kind": "adaptive", "cutoffs": [20_000, 60_000]}
    config = fr.ModelConfig(
        vocab_size=267_744, hidden_size=1024, num_hidden_layers=16, num_attention_heads=8, intermediate_size=4096,
        final_norm=False, attention={"mix": "position_wise"}, input=clusters | {"div_val": 4},
        output={"kind": "adaptive", "tied": True},
    )  # fmt: skip
    parts = parameters_by_part(imagined(config))
    assert parts["embedding"] == 20_000 * 1024 + 40_000 * 256 + 207_744 * 64 + 1024 * (1024 + 256 + 64)
    assert (parts["output"], parts["mixing"], parts.get("other", 0)) == (2 * 1024, 17_408, 0)
    assert sum(number for part, number in parts.items() if part != "total") == parts["total"] == 246_933_504 + 17_408
    untied = replace(config, output={"kind": "adaptive", "tied": True, "tied_projections": False})
    assert imagined(untied).num_parameters() == parts["total"] + 327_680


sizes = st.integers(1, 12)


@settings(max_examples=8)
@given(
    layers=st.integers(1, 4), heads=sizes, head_dim=sizes, width=sizes, inner=sizes, vocabulary=st.integers(2, 40),
    tied=st.booleans(), attention_bias=st.booleans(), mlp_bias=st.booleans(), gated=st.booleans(), pre=st.booleans(),
    learned=st.booleans(),
)  # fmt: skip
def test_every_size_by_its_formula(
    layers, heads, head_dim, width, inner, vocabulary, tied, attention_bias, mlp_bias, gated, pre, learned
):
    def count(mix, **choices):
        return imagined(
            fr.ModelConfig(
                vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                head_dim=head_dim, intermediate_size=inner, output=fr.OutputConfig(tied=tied), mlp_bias=mlp_bias,
                hidden_act="swiglu" if gated else "gelu", norm="pre" if pre else "post", max_position_embeddings=9,
                position="learned" if learned else "none",
                attention=fr.AttentionConfig(mix=mix, bias=attention_bias, **choices),
            )
        ).num_parameters()  # fmt: skip

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
    assert count("none", gate="head") == total + layers * heads * width


def test_size_counts_flops_by_their_formula():
    """Two for each multiply-add of a token: matrices, scores and values over (n + 1) / 2 keys, mixing, vocabulary."""
    e, h, d, f, v, layers, n = 12, 3, 5, 20, 30, 2, 9

    def flops(mix="none", output=None, **attention):
        config = fr.ModelConfig(
            vocab_size=v, hidden_size=e, num_hidden_layers=layers, num_attention_heads=h, head_dim=d, intermediate_size=f,
            attention=fr.AttentionConfig(mix=mix, **attention), output=output or {},
        )  # fmt: skip
        report = size(config, n)
        assert report["flops_per_token"]["length"] == n
        assert report["flops_per_token"]["training"] == 3 * report["flops_per_token"]["forward"]
        assert report["bytes"]["weights_fp32"] == 4 * imagined(config).num_parameters()
        assert report["bytes"]["cache_per_token_fp32"] == 4 * 2 * layers * h * d
        return report["flops_per_token"]["forward"]

    keys = (n + 1) / 2
    plain = 2 * (layers * (4 * e * h * d + 2 * e * f) + layers * 2 * h * d * keys + v * e)
    assert flops() == plain
    assert flops(gate="head") == plain + 2 * layers * h * e
    mixture = {"kind": "mixture_of_softmaxes", "mixtures": 5}  # latents, prior, and the vocabulary five times
    assert flops(output=mixture) == plain + 2 * (5 * e**2 + 5 * e + 4 * v * e)
    assert flops("position_independent") == plain + 2 * layers * h * h * keys
    assert flops("position_wise") == plain + 2 * layers * (h * h * keys + h * h * d)
