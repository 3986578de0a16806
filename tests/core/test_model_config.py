"""The encoder and decoder sections: what follows from what, and files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import fullrank as fr
from fullrank.config.load import build, to_yaml
from fullrank.core.errors import ConfigError
from fullrank.files import parse_yaml

SIZES: dict[str, Any] = {"vocab_size": 20, "hidden_size": 12, "num_attention_heads": 3}
PAIRS: dict[str, Any] = {"kind": "multilinear", "rank": 5}
DECAYED = PAIRS | {"output_map": "decayed"}
SEEING = PAIRS | {"causal": "as_published"}


def model(**sections: Any) -> fr.ModelConfig:
    return fr.ModelConfig.from_dict(SIZES | sections)


# -- what follows from what -------------------------------------------------------------------------------------------


def test_what_is_not_said_is_as_in_the_model() -> None:
    plain = model(attention={"mix": "position_wise"}, num_hidden_layers=3, position="learned")
    for part in (plain.get_encoder_config(), plain.get_decoder_config()):
        assert part == plain
    assert plain.get_cross_config() == replace(plain, position="none")
    assert (plain.encoder, plain.decoder) == (None, None)
    assert plain.problems_of_translation() == []


def test_each_place_has_its_own() -> None:
    found = model(
        attention={"mix": "position_independent"},
        encoder={"num_hidden_layers": 4, "vocab_size": 30, "attention": {"normalize": "sigsoftmax"}},
        decoder={"num_hidden_layers": 2, "attention": {"mix": "position_wise"}, "cross": PAIRS},
    )
    encoder, decoder, cross = found.get_encoder_config(), found.get_decoder_config(), found.get_cross_config()
    assert (encoder.num_hidden_layers, encoder.vocab_size, encoder.attention.normalize) == (4, 30, "sigsoftmax")
    assert encoder.attention.mix == "none"  # a section of its own is not laid on the model's
    assert (decoder.num_hidden_layers, decoder.vocab_size, decoder.attention.mix) == (2, 20, "position_wise")
    assert (cross.attention.kind, cross.position) == ("multilinear", "none")
    assert all(part.encoder is part.decoder is None for part in (encoder, decoder, cross))
    assert model(attention={"mix": "average"}, encoder={}, decoder={}).get_cross_config().attention.mix == "average"


def test_cross_attention_scores_by_content() -> None:
    """Cross-attention has a dot-product score unless `cross` says otherwise."""
    for score, position in (("relative", "relative"), ("dense_synthesizer", "none"), ("random_synthesizer", "none")):
        found = model(position=position, attention={"score": score, "mix": "position_wise"}, encoder={})
        assert found.get_cross_config().attention == fr.AttentionConfig(mix="position_wise")
        assert found.get_decoder_config().attention.score == score


def test_released_cross_leaves_mixing_out_there() -> None:
    for sections in ({"attention": {"mix": "position_wise"}}, {"decoder": {"cross": {"mix": "position_wise"}}}):
        sections["decoder"] = sections.get("decoder", {}) | {"released_cross": True}
        found = model(**sections)
        assert found.get_cross_config().attention.mix == "none"
        assert found.get_decoder_config().attention == found.attention


# -- tokens that see later ones ---------------------------------------------------------------------------------------


def test_as_published_is_asked_of_the_decoder() -> None:
    """Only what predicts has to say that its perplexity is none; nothing is hidden from the others."""
    for sections in ({"encoder": {"attention": SEEING}}, {"decoder": {"cross": SEEING}}):
        found = model(**sections)
        assert not found.sees_future
        assert not found.get_encoder_config().sees_future
        assert not found.get_cross_config().sees_future
    wanted = r"model.decoder.attention.causal: as_published .* model.decoder.attention.not_next_token_perplexity: true"
    with pytest.raises(ConfigError, match=wanted) as error:
        model(decoder={"attention": SEEING})
    assert len(error.value.problems) == 1
    with pytest.raises(ConfigError, match=r"^model.attention.causal: as_published"):
        model(attention=SEEING, encoder={})
    said = SEEING | {"not_next_token_perplexity": True}
    assert model(decoder={"attention": said}).sees_future
    assert model(attention=said, encoder={}).sees_future
    assert not model(attention=SEEING, decoder={"attention": PAIRS}).sees_future
    assert not model(attention=said, decoder={"attention": {}}).sees_future


# -- files ------------------------------------------------------------------------------------------------------------


def test_there_and_back() -> None:
    raw = {
        "model": SIZES | {
            "encoder": {"vocab_size": 30, "attention": {"mix": "position_wise"}},
            "decoder": {"cross": PAIRS, "released_decoding": True},
        },
        "data": {"name": "multi30k-de-en"},
        "train": {"batch_tokens": 100},
    }  # fmt: skip
    config = build(raw)
    assert config.translates
    assert build(parse_yaml(to_yaml(config), "saved")) == config
    assert build(json.loads(json.dumps(config.to_dict()))) == config
    saved = config.to_dict()["model"]
    assert set(saved["encoder"]) == {"num_hidden_layers", "vocab_size", "share_embedding", "attention"}
    assert set(saved["decoder"]) == {"num_hidden_layers", "attention", "cross", "released_cross", "released_decoding"}
    assert saved["encoder"]["attention"].keys() == fr.AttentionConfig().to_dict().keys()
    assert config.model.decoder is not None
    assert config.model.decoder.released_decoding is True


@pytest.mark.parametrize(
    ("sections", "position"),
    [
        ({}, "rotary"),
        ({"position": None}, "rotary"),
        ({"encoder": {}, "decoder": {"cross": PAIRS}}, "rotary"),
        ({"head_dim": 5}, "sinusoidal"),
        ({"attention": PAIRS}, "sinusoidal"),
        ({"attention": DECAYED}, "sinusoidal"),
        ({"attention": {"score": "dense_synthesizer"}}, "sinusoidal"),
        ({"attention": {"score": {"name": "random_synthesizer"}}}, "sinusoidal"),
        ({"encoder": {"attention": PAIRS}}, "sinusoidal"),
        ({"decoder": {"attention": {"score": "random_synthesizer"}}}, "sinusoidal"),
    ],
)
def test_the_default_position_is_rotary_where_there_is_something_to_rotate(sections: Any, position: str) -> None:
    made = model(**sections)
    assert made.position == made.to_dict()["position"] == position
    with torch.device("meta"):  # it can be built
        if "encoder" in sections or "decoder" in sections:
            fr.Translator(made)
        else:
            fr.LanguageModel(made)
