"""Attention, input and output by kind: members, what follows from what, and that files keep everything."""

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
