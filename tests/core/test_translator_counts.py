"""Numbers of parameters of a translator: the published integers, and formulas of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fullrank as fr

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


@pytest.mark.parametrize(
    ("heads", "in_self", "everywhere"),
    [(4, (192, 6_336), (288, 9_504)), (32, (12_288, 18_432), (18_432, 27_648)), (64, (49_152, 55_296), (73_728, 82_944))],
)  # fmt: skip
def test_what_mixing_adds(heads: int, in_self: tuple[int, int], everywhere: tuple[int, int]) -> None:
    """In self-attention of encoder and decoder (12 layers of attention), and in cross-attention too (18)."""
    size = WIDTH // heads
    of_one = (heads * heads, heads * heads + size * heads)
    for mix, one, own, all_of_them in zip(
        ("position_independent", "position_wise"), of_one, in_self, everywhere, strict=True
    ):
        assert (12 * one, 18 * one) == (own, all_of_them)
        assert iwslt(heads, mix).num_parameters() - IWSLT == all_of_them
        released = iwslt(heads, mix, released_cross=True)
        assert released.num_parameters() - IWSLT == own
        names = [name for name, _ in released.named_parameters() if ".attend.mix." in name]
        assert not [name for name in names if "cross_attention" in name]
        assert len({name.split(".mix.")[0] for name in names}) == 12
