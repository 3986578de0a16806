"""The keys of adaptive layers: what follows from what, what is refused, and that nothing is lost on the way to a file."""

from __future__ import annotations

from typing import Any

import pytest

import fullrank as fr
from fullrank.config.load import apply_overrides, build, parse_yaml, to_yaml
from fullrank.config.schema import json_schema
from fullrank.core.errors import ConfigError

CLUSTERS: dict[str, Any] = {"kind": "adaptive", "cutoffs": [10, 30], "div_val": 2}


def raw(model: dict[str, Any] | None = None, **output: Any) -> dict[str, Any]:
    settings = {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2, "input": CLUSTERS}
    return {"model": settings | {"output": {"kind": "adaptive"} | output} | (model or {})}


@pytest.mark.parametrize(
    ("given", "form", "bias", "projections"),
    [
        ({}, "transformer_xl", True, False),
        ({"tied": True}, "fairseq", False, True),
        ({"tied": True, "bias": True}, "transformer_xl", True, True),
        ({"bias": False}, "fairseq", False, False),
        ({"form": "fairseq"}, "fairseq", False, False),
        ({"form": "transformer_xl", "tied": True}, "transformer_xl", True, True),
        ({"form": "fairseq", "bias": True}, "fairseq", True, False),
        ({"form": "transformer_xl", "bias": False}, "transformer_xl", False, False),
        ({"tied": True, "tied_projections": False}, "fairseq", False, False),
    ],
    ids=str,
)
def test_form_bias_and_ties_follow_from_each_other(
    given: dict[str, Any], form: str, bias: bool, projections: bool
) -> None:
    config = build(raw(**given))
    output = config.model.output
    assert (output.form, output.bias, output.tied_projections) == (form, bias, projections)
    assert build(parse_yaml(to_yaml(config), "saved")) == config


def test_other_outputs_have_no_form() -> None:
    assert (fr.OutputConfig().form, fr.OutputConfig().bias) == (None, True)
    assert (fr.OutputConfig(tied=True).tied_projections, fr.OutputConfig(tied=True).bias) == (None, False)


def test_what_the_output_leaves_open_is_the_inputs() -> None:
    output = build(raw(tied=True)).model.output
    assert (output.cutoffs, output.div_val) == ([10, 30], 2)
    output = build(raw(cutoffs=[50], div_val=4)).model.output
    assert (output.cutoffs, output.div_val) == ([50], 4)
    alone = build(raw({"input": {"kind": "token"}}, cutoffs=[50])).model.output
    assert (alone.cutoffs, alone.div_val) == ([50], 1)


def test_cutoffs_may_be_a_tuple_and_come_from_the_command_line() -> None:
    assert fr.InputConfig(kind="adaptive", cutoffs=(3, 5)).cutoffs == [3, 5]  # type: ignore[arg-type]
    config = build(apply_overrides(raw(), ["model.input.cutoffs=[7, 9, 20]", "model.output.form=fairseq"]))
    assert config.model.input.cutoffs == config.model.output.cutoffs == [7, 9, 20]


@pytest.mark.parametrize(
    ("model", "output", "message"),
    [
        ({"input": {"kind": "adaptive"}}, {"cutoffs": [5]}, r"model\.input\.cutoffs: an adaptive layer needs"),
        ({"input": {**CLUSTERS, "cutoffs": [30, 10]}}, {}, r"model\.input\.cutoffs: .*increase strictly.*given \[30, 10\]"),
        ({"input": {**CLUSTERS, "cutoffs": [10, 10]}}, {}, r"model\.input\.cutoffs: .*increase strictly"),
        ({"input": {**CLUSTERS, "cutoffs": [0, 10]}}, {}, r"model\.input\.cutoffs: ids above 0"),
        ({"input": {**CLUSTERS, "cutoffs": [10, 100]}}, {"cutoffs": [5]}, r"model\.input\.cutoffs: below .* 100"),
        ({"input": {**CLUSTERS, "div_val": 5}}, {"div_val": 1},
         r"model\.input\.div_val: the last of 3 clusters would have 16 / 5\^2 < 1 dimensions"),
        ({"input": {**CLUSTERS, "div_val": 0}}, {"div_val": 1}, r"model\.input\.div_val: a positive whole number.*given 0"),
        ({"input": {"kind": "token", "cutoffs": [5]}}, {"cutoffs": [5]}, r"model\.input\.cutoffs: goes with .*adaptive"),
        ({}, {"kind": "softmax", "cutoffs": [5]}, r"model\.output\.cutoffs: goes with .*adaptive"),
        ({}, {"cutoffs": [5, 4]}, r"model\.output\.cutoffs: .*increase strictly"),
        ({}, {"cutoffs": [5, 120]}, r"model\.output\.cutoffs: below model\.vocab_size 100"),
        ({}, {"div_val": 5}, r"model\.output\.div_val: the last of 3 clusters"),
        ({"input": {"kind": "token"}}, {}, r"model\.output\.cutoffs: an adaptive layer needs"),
        ({"input": {"kind": "token"}}, {"cutoffs": [5], "tied": True}, r"model\.output\.tied: .*model\.input has kind 'token'"),
        ({}, {"cutoffs": [5], "tied": True}, r"model\.output\.tied: .*has cutoffs \[10, 30\] and div_val 2"),
        ({}, {"div_val": 4, "tied": True}, r"model\.output\.tied: .*div_val 4; model\.input has"),
        ({}, {"tied_projections": True}, r"model\.output\.tied_projections: goes with `model\.output\.tied: true`"),
        ({}, {"form": "facebook"}, r"model\.output\.form: .*'fairseq' or 'transformer_xl'.*given 'facebook'"),
        ({}, {"tail_dropout": 1.0}, r"model\.output\.tail_dropout: a probability below 1, given 1\.0"),
        ({}, {"div_val": 1, "tail_dropout": 0.1}, r"model\.output\.tail_dropout: .*with div_val 1 a tail has only one"),
        ({}, {"cutof": [3]}, r"unknown key 'model\.output\.cutof'; did you mean 'model\.output\.cutoffs'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(model: dict[str, Any], output: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(raw(model, **output))


def test_a_vocabulary_that_is_not_known_yet_is_checked_when_it_is() -> None:
    import dataclasses

    config = build(raw({"vocab_size": None})).model
    assert dataclasses.replace(config, vocab_size=31).vocab_size == 31
    with pytest.raises(ConfigError, match=r"model\.input\.cutoffs: below model\.vocab_size 30"):
        dataclasses.replace(config, vocab_size=30)


def test_a_softmax_is_not_tied_to_an_adaptive_input() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.output\.tied: a softmax is tied to `model\.input\.kind: token` only"
    ):
        fr.LanguageModel(build(raw({"output": {"kind": "softmax", "tied": True}})).model)


def test_the_schema_names_the_keys() -> None:
    definitions = json_schema()["$defs"]
    assert "adaptive" in definitions["InputConfig"]["properties"]["kind"]["enum"]
    output = definitions["OutputConfig"]["properties"]
    assert "adaptive" in output["kind"]["enum"]
    assert {"cutoffs", "div_val", "form", "tied_projections", "tail_dropout"} <= set(output)
    assert ["fairseq", "transformer_xl"] in [choice.get("enum") for choice in output["form"]["anyOf"]]
