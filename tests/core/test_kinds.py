"""Attention, input and output by kind: members, what follows from what, what is refused, and that files keep everything."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import fullrank as fr
from fullrank.config.load import build, to_yaml
from fullrank.core import kinds, registry
from fullrank.core.errors import ConfigError
from fullrank.core.section import key
from fullrank.files import parse_yaml

CLUSTERS: dict[str, Any] = {"kind": "adaptive", "cutoffs": [10, 30], "div_val": 2}
MIXTURE: dict[str, Any] = {"kind": "mixture_of_softmaxes"}
ADAPTIVE: dict[str, Any] = {"kind": "adaptive"}
PAIRS: dict[str, Any] = {"kind": "multilinear", "rank": 5, "cores": 2}
DECAYED: dict[str, Any] = {"kind": "multilinear", "rank": 5, "output_map": "decayed", "decays": 3}
PUBLISHED = {"causal": "as_published", "not_next_token_perplexity": True}


def raw(output: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {"model": {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2, "output": output} | model}


def problems(section: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(section)
    return list(caught.value.problems)


# -- members -----------------------------------------------------------------------------------------------------------


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
def test_kind_decides_the_type(section: Any, member: type) -> None:
    assert type(section) is member
    union = next(base for base in member.__mro__ if base in (fr.AttentionConfig, fr.InputConfig, fr.OutputConfig))
    assert isinstance(section, union)
    assert copy.deepcopy(section) == pickle.loads(pickle.dumps(section)) == dataclasses.replace(section) == section
    assert union.from_dict(section.to_dict()) == section


@pytest.fixture
def own_output() -> Iterator[type]:
    @registry.register("output", "tempered")
    class Tempered:
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Config(fr.OutputConfig):
            kind: str = "tempered"
            temperature: float = key(1.0, "divides the logits")

    yield Tempered.Config
    registry.unregister("output", "tempered")


def test_a_registered_kind_has_the_keys_of_its_config(own_output: type) -> None:
    output = build(raw({"kind": "tempered", "temperature": 2})).model.output
    assert type(output) is own_output
    assert (output.tied, output.bias, output.temperature) == (False, True, 2.0)
    saved = parse_yaml(to_yaml(build(raw({"kind": "tempered"}))), "saved")
    assert build(saved).model.output == fr.OutputConfig(kind="tempered")
    assert "did you mean 'model.output.tied'" in problems(raw({"kind": "tempered", "tide": 2}))[0]
    assert (
        "goes with `model.output.kind: mixture_of_softmaxes`" in problems(raw({"kind": "tempered", "mixtures": 2}))[0]
    )


# -- what follows from what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "resolved"),
    [
        ({}, {"kind": "softmax", "bias": True, "tied": False}),
        (MIXTURE, {"mixtures": 10, "latent": True, "adaptive": False, "bias": True}),
        (MIXTURE | {"mixtures": 3}, {"mixtures": 3, "latent": True}),
        (MIXTURE | {"mixtures": None, "latent": None, "cutoffs": None}, {"mixtures": 10, "latent": True}),
        (MIXTURE | {"latent": "residual"}, {"mixtures": 10, "latent": "residual"}),
        (MIXTURE | {"normalize": "sigsoftmax", "latent_dropout": 0.3}, {"normalize": "sigsoftmax", "latent_dropout": 0.3}),
        (ADAPTIVE, {"form": "transformer_xl", "bias": True, "tied_projections": False, "cutoffs": [10, 30], "div_val": 2}),
        (ADAPTIVE | {"tied": True}, {"form": "fairseq", "bias": False, "tied_projections": True}),
        (ADAPTIVE | {"tied": True, "bias": True}, {"form": "transformer_xl", "tied_projections": True}),
        (ADAPTIVE | {"bias": False}, {"form": "fairseq", "tied_projections": False}),
        (ADAPTIVE | {"form": "fairseq"}, {"form": "fairseq", "bias": False}),
        (ADAPTIVE | {"form": "fairseq", "bias": True}, {"form": "fairseq", "bias": True}),
        (ADAPTIVE | {"form": "transformer_xl", "tied": True}, {"bias": True, "tied_projections": True}),
        (ADAPTIVE | {"form": "transformer_xl", "bias": False}, {"form": "transformer_xl", "bias": False}),
        (ADAPTIVE | {"tied": True, "tied_projections": False}, {"form": "fairseq", "tied_projections": False}),
        (ADAPTIVE | {"cutoffs": [50], "div_val": 4}, {"cutoffs": [50], "div_val": 4}),
    ],
    ids=str,
)  # fmt: skip
def test_outputs_are_resolved_and_survive_a_file(output: dict[str, Any], resolved: dict[str, Any]) -> None:
    _check_resolved(build(raw(output, input=CLUSTERS)), resolved)


def _check_resolved(config: Any, resolved: dict[str, Any]) -> None:
    assert {name: getattr(config.model.output, name) for name in resolved} == resolved
    assert build(parse_yaml(to_yaml(config), "saved")) == config
    assert to_yaml(build(parse_yaml(to_yaml(config), "saved"))) == to_yaml(config)
    assert build(json.loads(json.dumps(config.to_dict()))) == config
    assert dataclasses.replace(config.model, vocab_size=90).output == config.model.output


# -- what is refused ---------------------------------------------------------------------------------------------------

# section -> all of these words are in its one message
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *((raw({}, attention={name: value}), (f"model.attention.{name}: goes with", "multilinear", f"{value!r} with 'weighted'"))
      for name, value in {"cores": 2, "rank": 5, "core_weights": "free", "decays": 4,
                          "not_next_token_perplexity": True}.items()),
    *((raw({}, attention=PAIRS | {name: value}), (f"model.attention.{name}: goes with", "kind: weighted", f"{value!r} with"))
      for name, value in {"normalize": "sigsoftmax", "mix": "average", "cross_head": 0.5}.items()),
    *((raw({name: value}), (f"model.output.{name}: goes with", "kind: mixture_of_softmaxes", f"{value!r} with 'softmax'"))
      for name, value in {"mixtures": 3, "latent_dropout": 0.1}.items()),
    *((raw({name: value}), (f"model.output.{name}: goes with", "kind: adaptive", f"{value!r} with 'softmax'"))
      for name, value in {"cutoffs": [5], "div_val": 2, "form": "fairseq", "tail_dropout": 0.1}.items()),
    (raw(MIXTURE | {"cutoffs": [10]}), ("output.cutoffs: goes with", "adaptive", "[10]")),
    (raw(ADAPTIVE | {"cutoffs": [5], "mixtures": 3}), ("model.output.mixtures: goes with", "given 3 with 'adaptive'")),
    (raw({}, input={"cutoffs": [5]}), ("model.input.cutoffs: goes with", "kind: adaptive", "given [5] with 'token'")),
    # attention
    (raw({}, attention=PAIRS | {"causal": "maybe"}), ("model.attention.causal: 'masked' or 'as_published', given 'maybe'",)),
    (raw({}, attention=PAIRS | {"core_weights": "tight"}), ("core_weights: 'softmax' or 'free', given 'tight'",)),
    (raw({}, attention=PAIRS | {"output_map": "rows"}), ("output_map: 'pairs' or 'decayed', given 'rows'",)),
    *((raw({}, attention=PAIRS | {name: value}), (f"model.attention.{name}: a positive whole number", f"given {value}"))
      for name, value in (("cores", 0), ("cores", True), ("rank", -2), ("rank", 2.5), ("rank", 2**40))),
    (raw({}, attention=DECAYED | {"decays": 0}), ("model.attention.decays: a positive whole number", "given 0")),
    (raw({}, attention=PAIRS | {"decays": 3}), ("model.attention.decays: goes with", "output_map: decayed", "3 with 'pairs'")),
    (raw({}, attention=PAIRS | {"score": "dense_synthesizer"}), ("model.attention.score", "'dense_synthesizer'", "relative")),
    (raw({}, position="relative", attention=PAIRS | {"score": {"name": "relative", "clamp_length": 3}}),
     ("model.attention.score: 'dot_product' or 'relative'", "clamp_length")),
    (raw({}, position="relative", attention=DECAYED | {"score": "relative"}),
     ("model.attention.score: goes with", "output_map: pairs", "given 'relative' with 'decayed'")),
    (raw({}, attention=DECAYED | PUBLISHED), ("model.attention.causal", "output_map: pairs", "with 'decayed'")),
    (raw({}, attention=PAIRS | {"not_next_token_perplexity": True}), ("not_next_token_perplexity: goes with", "as_published")),
    # clusters
    *((raw(ADAPTIVE | {"cutoffs": [5]}, input=CLUSTERS | {"cutoffs": ids}),
       ("model.input.cutoffs: ids above 0 that increase strictly", str(ids))) for ids in ([30, 10], [10, 10], [0, 10])),
    (raw({}, input=CLUSTERS | {"div_val": 0}), ("model.input.div_val: a positive whole number", "given 0")),
    (raw(ADAPTIVE | {"cutoffs": [5, 4]}), ("model.output.cutoffs: ids above 0 that increase strictly",)),
    (raw(ADAPTIVE | {"tied_projections": True}, input=CLUSTERS), ("tied_projections: goes with `model.output.tied: true`",)),
    (raw(ADAPTIVE | {"form": "facebook"}, input=CLUSTERS), ("form: 'fairseq' or 'transformer_xl', given 'facebook'",)),
    (raw(ADAPTIVE | {"div_val": 1, "tail_dropout": 0.1}, input=CLUSTERS), ("tail_dropout: not with", "div_val: 1")),
    *((raw(ADAPTIVE | {"tail_dropout": rate}, input=CLUSTERS), ("tail_dropout: a probability below 1", str(rate)))
      for rate in (1.0, -0.1, float("nan"))),
    (raw(ADAPTIVE | {"cutof": [3]}, input=CLUSTERS), ("'model.output.cutof'; did you mean 'model.output.cutoffs'",)),
    # mixtures
    *((raw(MIXTURE | {"mixtures": value}), ("model.output.mixtures: a positive whole number", repr(value)))
      for value in (0, -2, 2**31, 2.5, True, "many")),
    (raw(MIXTURE | {"latent": False}), ("model.output.latent: True or 'residual', given False",)),
    (raw(MIXTURE | {"normalize": "sparsemax"}), ("model.output.normalize: 'softmax' or 'sigsoftmax'",)),
    (raw(MIXTURE | {"latent_droput": 0.1}), ("unknown key", "did you mean 'model.output.latent_dropout'")),
    (raw({"kind": "mixture"}), ("model.output.kind: 'mixture' is not available", "mixture_of_softmaxes")),
]  # fmt: skip


@pytest.mark.parametrize(("section", "words"), REFUSED, ids=lambda value: str(value)[78:150])
def test_what_is_refused(section: dict[str, Any], words: tuple[str, ...]) -> None:
    (line,) = problems(section)
    for word in words:
        assert word in line


# -- attention in a model ----------------------------------------------------------------------------------------------

WRONG_MODELS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"attention": PAIRS, "position": "rotary"}, ("model.position", "rotary", "sinusoidal, learned, relative or none")),
    ({"attention": PAIRS, "dropout": {"attention": 0.1}}, ("model.dropout.attention", "given 0.1", "model.attention.kind")),
    ({"attention": PAIRS | {"causal": "as_published"}}, ("causal", "'masked'", "not_next_token_perplexity: true")),
    ({"attention": DECAYED, "memory_length": 4, "same_length": True}, ("model.same_length", "output_map", "decayed")),
    ({"attention": PAIRS | PUBLISHED, "memory_length": 4}, ("model.memory_length: 0", "as_published", "with '4'")),
    ({"attention": PAIRS, "memory_length": 4, "memory_start": "zeros"}, ("model.memory_start: empty", "output_map", "pairs")),
    ({"attention": PAIRS, "position": "relative"}, ("model.attention.score", "model.position: relative", "dot_product")),
]  # fmt: skip


@pytest.mark.parametrize(("model", "words"), WRONG_MODELS, ids=str)
def test_models_that_cannot_be(model: dict[str, Any], words: tuple[str, ...]) -> None:
    (line,) = problems(raw({}, **model))
    for word in words:
        assert word in line
