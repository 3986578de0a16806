"""Recipes of translation: sizes from the architecture, what is mixed where, the papers' figures."""

from __future__ import annotations

import pytest
from recipe_counts import config_of, total

from fullrank.config.load import flatten, load

SCALES = ("paper", "small", "tiny")
HEADS = (4, 32, 64)
LAYERS = 6


def transformer(width: int, inner: int, source: int, target: int, layers: int = LAYERS) -> int:
    """Encoder and decoder with post-norm, target vectors tied: 4 E^2 + 4 E of each attention, feed-forward, norms."""
    attention, feed_forward, norm = 4 * width**2 + 4 * width, 2 * width * inner + inner + width, 2 * width
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    return (source + target) * width + layers * (encoder + decoder)


def mixing(heads: int, width: int, kind: str, stacks: int) -> int:
    """Mixing parameters of `stacks` stacks of attention: H^2 numbers a layer for A, D H more for B, with D = E / H."""
    return LAYERS * stacks * {"plain": 0, "a": heads**2, "b": heads**2 + width}[kind]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mix", ["a", "b"])
def test_what_mixing_adds(heads: int, mix: str) -> None:
    """Encoder and decoder self-attention: two stacks of six layers; three with cross-attention."""
    plain, row = total("mixhead/table4", f"h{heads}-plain"), f"h{heads}-{mix}"
    assert plain == transformer(512, 1024, 8848, 6632) == 39_469_056  # fairseq's transformer_iwslt_de_en
    added = total("mixhead/table4", row) - plain
    assert added == mixing(heads, 512, mix, 2)
    assert added == {"a": {4: 192, 32: 12_288, 64: 49_152}, "b": {4: 6_336, 32: 18_432, 64: 55_296}}[mix][heads]
    assert total("mixhead/table4", f"{row}-released") - plain == added
    assert total("mixhead/table4", f"{row}-cross") - plain == mixing(heads, 512, mix, 3)


@pytest.mark.parametrize("scale", SCALES)
def test_rows_of_table_4_differ_in_heads_and_mixing_only(scale: str) -> None:
    base = flatten(config_of("mixhead/table4", "h4-plain", scale).to_dict())
    for row in load("mixhead/table4").rows:
        config = config_of("mixhead/table4", row, scale)
        heads, mix, *how = row.split("-")
        model, decoder = config.model, config.model.decoder
        assert decoder is not None
        assert f"h{model.num_attention_heads}" == heads
        assert model.head_dim == model.hidden_size // model.num_attention_heads
        assert model.attention.mix == {"plain": "none", "a": "position_independent", "b": "position_wise"}[mix]
        assert model.get_cross_config().attention.mix == (model.attention.mix if how == ["cross"] else "none")
        assert decoder.released_decoding == (how == ["released"])
        assert (
            model.get_encoder_config().attention.mix == model.get_decoder_config().attention.mix == model.attention.mix
        )
        flat = flatten(config.to_dict())
        assert {key for key in flat if flat[key] != base[key]} <= {
            "model.num_attention_heads", "model.head_dim", "model.attention.mix", "model.decoder.released_cross",
            "model.decoder.released_decoding",
        }  # fmt: skip


def test_table_4_follows_fairseqs_example() -> None:
    run = config_of("mixhead/table4", "h4-plain")
    model, train, dropout = run.model, run.train, run.model.dropout
    assert (model.norm, model.final_norm, model.hidden_act, model.scale_embedding) == ("post", False, "relu", True)
    assert (model.output.tied, model.output.bias, model.encoder and model.encoder.share_embedding) == (
        True,
        False,
        False,
    )
    assert (dropout.embedding, dropout.residual, dropout.attention, dropout.activation) == (0.3, 0.3, 0.0, 0.0)
    assert (train.optimizer, train.betas, train.weight_decay) == ("adamw", (0.9, 0.98), 1e-4)  # its Adam decays so
    assert (train.schedule, train.learning_rate, train.warmup_steps, train.warmup_from) == (
        "inverse_sqrt",
        5e-4,
        4000,
        1e-7,
    )
    assert (train.batch_tokens, train.label_smoothing, train.max_grad_norm) == (4096, 0.1, None)
    assert (run.eval.beams, run.eval.length_penalty, run.eval.metric) == (5, 1.0, "bleu")


def test_the_papers_bleu() -> None:
    """Table 4, and no figure at a row that the paper does not have."""
    figures = {
        "h4-plain": (35.28, 34.76), "h4-a": (34.71, 33.84), "h4-b": (35.06, 34.25),
        "h32-plain": (33.31, 32.60), "h32-a": (32.94, 32.58), "h32-b": (33.15, 32.35),
        "h64-plain": (28.69, 27.88), "h64-a": (31.74, 31.32), "h64-b": (31.75, 31.44),
    }  # fmt: skip
    assert {row: content["paper"] for row, content in load("mixhead/table4").rows.items() if "paper" in content} == {
        row: {"valid_tokenised_bleu": valid, "test_tokenised_bleu": test} for row, (valid, test) in figures.items()
    }


def test_joined_sentences_are_longer_than_heads_are_wide() -> None:
    """The paper's n / d_k = 240 / 128 at every scale; but for the length, rows are those of Table 4 at h = 4."""
    for scale in SCALES:
        for row in ("plain", "a", "b"):
            joined, single = (
                config_of("mixhead/table4-long", row, scale),
                config_of("mixhead/table4", f"h4-{row}", scale),
            )
            assert (joined.model, joined.train, joined.eval) == (single.model, single.train, single.eval)
            differ = {key for key, value in joined.data.to_dict().items() if value != single.data.to_dict()[key]}
            assert differ == {"concatenate"}
            assert joined.data.concatenate is not None
            assert joined.model.head_dim is not None
            assert joined.data.concatenate * 128 == 240 * joined.model.head_dim
    rows = load("mixhead/table4-long").rows
    assert {row: rows[row]["paper"] for row in rows} == {
        "plain": {"bleu": "< 1.0"}, "a": {"bleu": 34.5}, "b": {"bleu": 34.5},
    }  # fmt: skip


def multilinear(width: int, rank: int, cores: int, output_map: int) -> int:
    """Q, K, V and the output with biases, cores, and an output map of so many rows of E numbers."""
    return 3 * (width * rank + rank) + output_map * width + width + cores * rank


def test_totals_of_the_tensorized_translator() -> None:
    """One table of 16,000 entries; multi-linear attention in the six layers of the encoder only."""
    plain = transformer(512, 2048, 0, 16_000)
    assert plain == total("tensorized/table3", "plain") == 52_330_496  # the paper's 52M
    encoder = 6 * (4 * 512**2 + 4 * 512)
    for cores in (1, 2):
        expected = plain - encoder + 6 * multilinear(512, 64, cores, 192**2)
        assert total("tensorized/table3", f"core{cores}") == expected
    assert total("tensorized/table3", "core1") == 159_867_392
    decayed = 6 * (multilinear(512, 64, 1, 8 * 64) + 2 * 8)
    assert total("tensorized/table3", "decayed") == plain - encoder + decayed
    notes = load("tensorized/table3").notes
    assert "52,330,496" in notes
    assert "159,867,392" in notes


@pytest.mark.parametrize("scale", SCALES)
def test_multi_linear_attention_in_the_encoder_only(scale: str) -> None:
    base = config_of("tensorized/table3", "plain", scale)
    for row in ("core1", "core2", "decayed"):
        config = config_of("tensorized/table3", row, scale)
        assert (config.data, config.train, config.eval) == (base.data, base.train, base.eval)
        attention = config.model.get_encoder_config().attention
        assert (attention.kind, attention.rank, attention.cores) == ("multilinear", 64, 2 if row == "core2" else 1)
        assert attention.output_map == ("decayed" if row == "decayed" else "pairs")
        assert config.model.get_decoder_config() == base.model.get_decoder_config()
        assert config.model.get_cross_config() == base.model.get_cross_config()
    assert (base.eval.beams, base.eval.length_penalty) == (5, 0.6)


def test_the_papers_table_3() -> None:
    papers = {row: dict(content.get("paper") or {}) for row, content in load("tensorized/table3").rows.items()}
    assert papers["core1"].pop("parameters_note") == papers["core2"].pop("parameters_note")
    assert papers == {
        "plain": {"parameters": "52M", "test_bleu": 34.5},
        "core1": {"parameters": "21M", "test_bleu": 34.10},
        "core2": {"parameters": "21.2M", "test_bleu": 34.91},
        "decayed": {},
    }
