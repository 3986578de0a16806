"""The papers' parameter totals, exactly, without allocating anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fullrank as fr
from fullrank.analysis.size import size


def imagined(config: fr.ModelConfig) -> fr.LanguageModel:
    with torch.device("meta"):
        return fr.LanguageModel(config)


MIXTURES = {  # vocabulary (with <sos>), width -> softmaxes (0: no mixture) -> parameters, by the papers' code
    (10_001, 300): {0: 8_182_601, 10: 9_088_601},
    (10_001, 200): {0: 4_978_401, 10: 5_382_401},
    (33_279, 300): {0: 22_172_679, 10: 23_078_679},
    (33_279, 200): {0: 14_312_879, 2: 14_393_679, 5: 14_514_879, 10: 14_716_879, 15: 14_918_879},
}


@pytest.mark.parametrize(("vocabulary", "width"), MIXTURES, ids=str)
def test_mixtures_of_softmaxes(vocabulary: int, width: int) -> None:
    """Transformer-MoS: four layers with their norms behind them, no tie, an output bias; K d^2 + 2 K d for a mixture.

    FLOPs: latents and prior K d^2 + K d, and the vocabulary K times instead of once.
    """
    shape = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": 4,
             "intermediate_size": width, "norm": "post"}  # fmt: skip
    plain = size(fr.ModelConfig(**shape), 35)
    for mixtures, total in MIXTURES[vocabulary, width].items():
        mixture = fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=mixtures or 1)
        found = size(fr.ModelConfig(**shape, output=mixture), 35) if mixtures else plain
        assert found["parameters"]["total"] == total
        assert found["parameters"].get("other", 0) == 0
        if mixtures:
            more = {part: number - plain["parameters"][part] for part, number in found["parameters"].items()}
            assert {part: number for part, number in more.items() if number} == dict.fromkeys(
                ("total", "output"), mixtures * width**2 + 2 * mixtures * width
            )
            flops = 2 * (mixtures * width**2 + mixtures * width + (mixtures - 1) * vocabulary * width)
            assert found["flops_per_token"]["forward"] - plain["flops_per_token"]["forward"] == flops


sizes = st.integers(1, 12)


@settings(max_examples=8)
@given(
    layers=st.integers(1, 4), heads=sizes, head_dim=sizes, width=sizes, inner=sizes, vocabulary=st.integers(2, 40),
    tied=st.booleans(), attention_bias=st.booleans(), mlp_bias=st.booleans(), gated=st.booleans(), pre=st.booleans(),
    learned=st.booleans(),
)  # fmt: skip
def test_every_size_by_its_formula(
    layers: int, heads: int, head_dim: int, width: int, inner: int, vocabulary: int, tied: bool, attention_bias: bool,
    mlp_bias: bool, gated: bool, pre: bool, learned: bool,
) -> None:  # fmt: skip
    def count(mix: str, **choices: object) -> int:
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
                attention=fr.AttentionConfig(mix=mix, bias=attention_bias, **choices),
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
    assert count("none", gate="head") == total + layers * heads * width


def test_size_counts_flops_by_their_formula() -> None:
    """Two for each multiply-add of a token: matrices, scores and values over (n + 1) / 2 keys, mixing, vocabulary."""
    e, h, d, f, v, layers, n = 12, 3, 5, 20, 30, 2, 9

    def flops(mix: str = "none", **attention: object) -> int:
        config = fr.ModelConfig(
            vocab_size=v, hidden_size=e, num_hidden_layers=layers, num_attention_heads=h, head_dim=d, intermediate_size=f,
            attention=fr.AttentionConfig(mix=mix, **attention),
        )  # fmt: skip
        found = size(config, n)
        assert found["flops_per_token"]["length"] == n
        assert found["flops_per_token"]["training"] == 3 * found["flops_per_token"]["forward"]
        assert found["bytes"]["weights_fp32"] == 4 * imagined(config).num_parameters()
        assert found["bytes"]["cache_per_token_fp32"] == 4 * 2 * layers * h * d
        return found["flops_per_token"]["forward"]

    keys = (n + 1) / 2
    plain = 2 * (layers * (4 * e * h * d + 2 * e * f) + layers * 2 * h * d * keys + v * e)
    assert flops() == plain
    assert flops(gate="head") == plain + 2 * layers * h * e
    assert flops("position_independent") == plain + 2 * layers * h * h * keys
    assert flops("position_wise") == plain + 2 * layers * (h * h * keys + h * h * d)


# -- translators ---------------------------------------------------------------------------------------------------------

SOURCE, TARGET, WIDTH, INNER, LAYERS = 8848, 6632, 512, 1024, 6
IWSLT = 39_469_056  # fairseq's transformer_iwslt_de_en with these vocabularies


def iwslt(heads: int, general: str = "none", *, released_cross: bool = False, **keys: Any) -> fr.Translator:
    """fairseq's: post-norm, biases, the decoder's embedding is its output matrix, no output bias."""
    config = fr.ModelConfig(
        vocab_size=TARGET, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=heads,
        intermediate_size=INNER, norm="post", scale_embedding=True, output=fr.OutputConfig(tied=True),
        attention=fr.AttentionConfig(mix=general), decoder=fr.DecoderConfig(released_cross=released_cross),
        **{"encoder": fr.EncoderConfig(vocab_size=SOURCE)} | keys,
    )  # fmt: skip
    with torch.device("meta"):
        return fr.Translator(config)


def by_hand() -> int:
    attention = 4 * (WIDTH * WIDTH + WIDTH)
    feed_forward = WIDTH * INNER + INNER + INNER * WIDTH + WIDTH
    norm = 2 * WIDTH
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    return (SOURCE + TARGET) * WIDTH + LAYERS * (encoder + decoder)


@pytest.mark.parametrize("heads", [4, 32, 64])
def test_iwslt(heads: int) -> None:
    model = iwslt(heads)
    assert model.num_parameters() == IWSLT == by_hand()
    assert all(parameter.is_meta for parameter in model.parameters())
