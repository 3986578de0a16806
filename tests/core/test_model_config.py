"""Kinds of attention, input and output, and the encoder and decoder sections: what follows from which setting.

Models that are refused: refused.yaml. Files: tests/properties, tests/config.
"""

import copy
import pickle
from dataclasses import dataclass, replace

import pytest
import torch

import fullrank as fr
from fullrank.config.load import build, to_yaml
from fullrank.core import kinds, registry
from fullrank.core.errors import ConfigError
from fullrank.core.section import key
from fullrank.files import parse_yaml

SIZES = {"vocab_size": 20, "hidden_size": 12, "num_attention_heads": 3}
PAIRS = {"kind": "multilinear", "rank": 5}
SEEING = PAIRS | {"causal": "as_published"}


def model(**sections):
    return fr.ModelConfig.from_dict(SIZES | sections)


def test_what_is_not_said_is_as_in_the_model():
    plain = model(attention={"mix": "position_wise"}, num_hidden_layers=3, position="learned")
    for part in (plain.get_encoder_config(), plain.get_decoder_config()):
        assert part == plain
    assert plain.get_cross_config() == replace(plain, position="none")
    assert (plain.encoder, plain.decoder) == (None, None)
    assert plain.problems_of_translation() == []


def test_each_place_has_its_own():
    config = model(
        attention={"mix": "position_independent"},
        encoder={"num_hidden_layers": 4, "vocab_size": 30, "attention": {"normalize": "sigsoftmax"}},
        decoder={"num_hidden_layers": 2, "attention": {"mix": "position_wise"}, "cross": PAIRS},
    )
    encoder, decoder, cross = config.get_encoder_config(), config.get_decoder_config(), config.get_cross_config()
    assert (encoder.num_hidden_layers, encoder.vocab_size, encoder.attention.normalize) == (4, 30, "sigsoftmax")
    assert encoder.attention.mix == "none"  # a section of its own is not laid on the model's
    assert (decoder.num_hidden_layers, decoder.vocab_size, decoder.attention.mix) == (2, 20, "position_wise")
    assert (cross.attention.kind, cross.position) == ("multilinear", "none")
    assert all(part.encoder is part.decoder is None for part in (encoder, decoder, cross))
    assert model(attention={"mix": "average"}, encoder={}, decoder={}).get_cross_config().attention.mix == "average"


def test_cross_attention_scores_by_content():
    """Cross-attention has a dot-product score unless `cross` says otherwise."""
    for score, position in (("relative", "relative"), ("dense_synthesizer", "none"), ("random_synthesizer", "none")):
        config = model(position=position, attention={"score": score, "mix": "position_wise"}, encoder={})
        assert config.get_cross_config().attention == fr.AttentionConfig(mix="position_wise")
        assert config.get_decoder_config().attention.score == score


def test_as_published_is_asked_of_the_decoder():
    """Only the part that predicts must say that its perplexity is none of next tokens; others see all tokens anyway."""
    for sections in ({"encoder": {"attention": SEEING}}, {"decoder": {"cross": SEEING}}):
        config = model(**sections)
        assert not config.sees_future
        assert not config.get_encoder_config().sees_future
        assert not config.get_cross_config().sees_future
    admitted = SEEING | {"not_next_token_perplexity": True}
    assert model(decoder={"attention": admitted}).sees_future
    assert model(attention=admitted, encoder={}).sees_future
    assert not model(attention=SEEING, decoder={"attention": PAIRS}).sees_future
    assert not model(attention=admitted, decoder={"attention": {}}).sees_future


@pytest.mark.parametrize(
    ("sections", "position"),
    [
        ({}, "rotary"),
        ({"encoder": {}, "decoder": {"cross": PAIRS}}, "rotary"),
        ({"head_dim": 5}, "sinusoidal"),
        ({"attention": PAIRS}, "sinusoidal"),
        ({"attention": PAIRS, "layers": [{"at": [0, 1], "attention": {}}], "num_hidden_layers": 2}, "sinusoidal"),
        ({"attention": {"score": "dense_synthesizer"}}, "sinusoidal"),
        ({"decoder": {"attention": {"score": "random_synthesizer"}}}, "sinusoidal"),
    ],
)
def test_the_default_position_is_rotary_where_there_is_something_to_rotate(sections, position):
    made = model(**sections)
    assert made.position == made.to_dict()["position"] == position
    with torch.device("meta"):  # it can be built
        if "encoder" in sections or "decoder" in sections:
            fr.Translator(made)
        else:
            fr.LanguageModel(made)


CLUSTERS = {"kind": "adaptive", "cutoffs": [10, 30], "div_val": 2}
MIXTURE = {"kind": "mixture_of_softmaxes"}
ADAPTIVE = {"kind": "adaptive"}


def raw(output, **model):
    return {"model": {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2, "output": output} | model}


def problems(section):
    with pytest.raises(ConfigError) as caught:
        build(section)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("section", "member"),
    [
        (fr.AttentionConfig(), kinds.WeightedConfig),
        (fr.AttentionConfig(kind="multilinear", cores=2, rank=40), kinds.MultiLinearConfig),
        (fr.InputConfig(), kinds.TokenConfig),
        (fr.InputConfig(kind="adaptive", cutoffs=[3]), kinds.AdaptiveInputConfig),
        (fr.OutputConfig(), kinds.SoftmaxConfig),
        (fr.OutputConfig(kind="adaptive"), kinds.AdaptiveConfig),
        (fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=3), kinds.MixtureConfig),
    ],
    ids=repr,
)
def test_kind_decides_the_type(section, member):
    assert type(section) is member
    union = next(base for base in member.__mro__ if base in (fr.AttentionConfig, fr.InputConfig, fr.OutputConfig))
    assert copy.deepcopy(section) == pickle.loads(pickle.dumps(section)) == replace(section) == section
    assert union.from_dict(section.to_dict()) == section


@pytest.fixture
def tempered():
    @registry.register("output", "tempered")
    class Tempered:
        @dataclass(frozen=True, kw_only=True)
        class Config(fr.OutputConfig):
            kind: str = "tempered"
            temperature: float = key(1.0, "divides the logits")

    yield Tempered.Config
    registry.unregister("output", "tempered")


def test_a_registered_kind_has_the_keys_of_its_config(tempered):
    output = build(raw({"kind": "tempered", "temperature": 2})).model.output
    assert type(output) is tempered
    assert (output.tied, output.bias, output.temperature) == (False, True, 2.0)
    saved = parse_yaml(to_yaml(build(raw({"kind": "tempered"}))), "saved")
    assert build(saved).model.output == fr.OutputConfig(kind="tempered")
    assert "did you mean 'model.output.tied'" in problems(raw({"kind": "tempered", "tide": 2}))[0]
    (problem,) = problems(raw({"kind": "tempered", "mixtures": 2}))
    assert "goes with `model.output.kind: mixture_of_softmaxes`" in problem


@pytest.mark.parametrize(
    ("output", "resolved"),
    [
        ({}, {"kind": "softmax", "bias": True, "tied": False}),
        (MIXTURE, {"mixtures": 10, "latent": True, "adaptive": False, "bias": True}),
        (MIXTURE | {"mixtures": None, "latent": None, "cutoffs": None}, {"mixtures": 10, "latent": True}),
        (ADAPTIVE, {"form": "transformer_xl", "bias": True, "tied_projections": False, "cutoffs": [10, 30], "div_val": 2}),
        (ADAPTIVE | {"cutoffs": []}, {"cutoffs": [], "div_val": 2}),
        (ADAPTIVE | {"tied": True}, {"form": "fairseq", "bias": False, "tied_projections": True}),
        (ADAPTIVE | {"bias": False}, {"form": "fairseq", "tied_projections": False}),
        (ADAPTIVE | {"form": "transformer_xl", "tied": True}, {"bias": True, "tied_projections": True}),
        (ADAPTIVE | {"tied": True, "tied_projections": False}, {"form": "fairseq", "tied_projections": False}),
    ],
    ids=str,
)  # fmt: skip
def test_outputs_are_resolved(output, resolved):
    config = build(raw(output, input=CLUSTERS)).model
    assert {name: getattr(config.output, name) for name in resolved} == resolved
    assert replace(config, vocab_size=90).output == config.output
