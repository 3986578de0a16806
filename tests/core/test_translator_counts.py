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


def test_a_part_counts_by_itself() -> None:
    """The encoder's and the decoder's own layers, vocabularies and attention."""
    one_table = iwslt(4, encoder=fr.EncoderConfig(share_embedding=True))
    assert one_table.num_parameters() == IWSLT - SOURCE * WIDTH
    separate = iwslt(4, encoder=fr.EncoderConfig())  # as many source as target words, each with a vector
    assert separate.num_parameters() == IWSLT - (SOURCE - TARGET) * WIDTH
    attention, feed_forward, norm = 4 * (WIDTH**2 + WIDTH), 2 * WIDTH * INNER + INNER + WIDTH, 2 * WIDTH
    deep = iwslt(4, encoder=fr.EncoderConfig(vocab_size=SOURCE, num_hidden_layers=9))
    assert deep.num_parameters() - IWSLT == 3 * (attention + feed_forward + 2 * norm)
    assert deep.encoder.num_parameters() == SOURCE * WIDTH + 9 * (attention + feed_forward + 2 * norm)
    assert len(deep.encoder.blocks) == 9
    assert len(deep.decoder.blocks) == LAYERS
    multilinear = fr.AttentionConfig(kind="multilinear", rank=40, cores=2)
    config = {"encoder": fr.EncoderConfig(vocab_size=SOURCE, attention=multilinear), "max_position_embeddings": 60}
    core = iwslt(4, **config)
    own = 3 * (WIDTH * 40 + 40) + 2 * 40 + 60 * 60 * WIDTH + WIDTH  # Q, K, V; the cores; the output map and its bias
    assert core.num_parameters() - IWSLT == LAYERS * (own - attention)


def test_pre_norm_norms_once_more_in_each_half() -> None:
    post = fr.ModelConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, norm="post")
    pre = fr.ModelConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        assert fr.Translator(pre).num_parameters() - fr.Translator(post).num_parameters() == 2 * 2 * 8
