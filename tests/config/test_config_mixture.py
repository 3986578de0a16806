"""The keys of mixtures of softmaxes: what follows from what, what is refused, and that nothing is lost on the way to a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import fullrank as fr
from fullrank.cli import main
from fullrank.config.load import apply_overrides, build, parse_yaml, to_yaml
from fullrank.config.schema import json_schema
from fullrank.core.errors import ConfigError
from fullrank.core.section import known_keys

KEYS = ("mixtures", "components", "latent", "latent_dropout", "latent_dropout_locked", "normalize", "epsilon")
CLUSTERS: dict[str, Any] = {"kind": "adaptive", "cutoffs": [10, 30], "div_val": 2}


def raw(model: dict[str, Any] | None = None, **output: Any) -> dict[str, Any]:
    settings = {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2}
    return {"model": settings | {"output": {"kind": "mixture_of_softmaxes"} | output} | (model or {})}


def test_defaults() -> None:
    """Ten softmaxes with latents where there is a mixture, and nothing of it elsewhere."""
    mixture = fr.OutputConfig(kind="mixture_of_softmaxes")
    assert (mixture.mixtures, mixture.components, mixture.latent) == (10, "softmax", True)
    assert (mixture.latent_dropout, mixture.latent_dropout_locked, mixture.epsilon) == (0, False, 0)
    assert (mixture.normalize, mixture.bias, mixture.adaptive, mixture.form) == ("softmax", True, False, None)
    for kind in ("softmax", "adaptive"):
        other = fr.OutputConfig(kind=kind)
        assert (other.mixtures, other.components, other.latent, other.normalize) == (None, None, None, "softmax")
    assert fr.OutputConfig().kind == "softmax"


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({}, {"mixtures": 10, "components": "softmax", "adaptive": False, "bias": True}),
        ({"mixtures": 3}, {"mixtures": 3, "latent": True}),
        ({"mixtures": None, "components": None, "latent": None}, {"mixtures": 10, "components": "softmax", "latent": True}),
        ({"mixtures": 1, "latent": False}, {"mixtures": 1, "latent": False, "components": "softmax"}),
        ({"latent": False}, {"mixtures": 1, "latent": False, "components": "softmax"}),
        ({"tied": True}, {"bias": False, "tied": True}),
        ({"tied": True, "bias": True}, {"bias": True}),
        ({"cutoffs": [10, 30]}, {"components": "adaptive", "adaptive": True, "div_val": 1, "form": "transformer_xl"}),
        ({"cutoffs": [10, 30], "bias": False}, {"components": "adaptive", "form": "fairseq", "bias": False}),
        ({"cutoffs": [10, 30], "form": "fairseq", "div_val": 2}, {"components": "adaptive", "bias": False, "div_val": 2}),
        ({"cutoffs": []}, {"components": "softmax", "adaptive": False}),
        ({"normalize": "sigsoftmax", "epsilon": 1e-8}, {"normalize": "sigsoftmax", "epsilon": 1e-8}),
        ({"latent_dropout": 0.3, "latent_dropout_locked": True}, {"latent_dropout": 0.3, "latent_dropout_locked": True}),
    ],
    ids=str,
)  # fmt: skip
def test_what_follows_from_what(given: dict[str, Any], resolved: dict[str, Any]) -> None:
    config = build(raw(**given))
    assert {key: getattr(config.model.output, key) for key in resolved} == resolved
    assert build(parse_yaml(to_yaml(config), "saved")) == config
    assert to_yaml(build(parse_yaml(to_yaml(config), "saved"))) == to_yaml(config)
    assert build(json.loads(json.dumps(config.to_dict()))) == config


def test_clusters_are_the_inputs() -> None:
    """With adaptive components, cutoffs and div_val left open are those of an adaptive input, as for `adaptive`."""
    output = build(raw({"input": CLUSTERS}, components="adaptive", tied=True)).model.output
    assert (output.cutoffs, output.div_val, output.tied_projections, output.form) == ([10, 30], 2, True, "fairseq")
    output = build(raw({"input": CLUSTERS}, components="adaptive", cutoffs=[50], div_val=4)).model.output
    assert (output.cutoffs, output.div_val) == ([50], 4)
    assert build(raw({"input": CLUSTERS})).model.output.components == "softmax"
    assert build(raw({"input": CLUSTERS}, cutoffs=[50])).model.output.components == "adaptive"


def test_sigsoftmax_is_for_every_output() -> None:
    for kind in ({"kind": "softmax"}, {"kind": "adaptive", "cutoffs": [10]}, {"kind": "mixture_of_softmaxes"}):
        config = build(raw(normalize="sigsoftmax", **kind))
        assert config.model.output.normalize == "sigsoftmax"
        assert build(parse_yaml(to_yaml(config), "saved")) == config


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"kind": "softmax", "mixtures": 3}, r"model\.output\.mixtures: goes with .*mixture_of_softmaxes.* with 'softmax'"),
        ({"kind": "adaptive", "cutoffs": [5], "mixtures": 3}, r"model\.output\.mixtures: goes with .*given 3 with 'adaptive'"),
        ({"kind": "softmax", "components": "softmax"}, r"model\.output\.components: goes with .*mixture_of_softmaxes"),
        ({"kind": "softmax", "latent": True}, r"model\.output\.latent: goes with .*mixture_of_softmaxes"),
        ({"kind": "softmax", "latent": False}, r"model\.output\.latent: goes with .*mixture_of_softmaxes"),
        ({"kind": "softmax", "latent_dropout": 0.1}, r"model\.output\.latent_dropout: goes with .*mixture_of_softmaxes"),
        ({"kind": "softmax", "latent_dropout_locked": True}, r"model\.output\.latent_dropout_locked: goes with .*mixture_of"),
        ({"kind": "softmax", "epsilon": 1e-8}, r"model\.output\.epsilon: goes with .*mixture_of_softmaxes"),
        ({"mixtures": 0}, r"model\.output\.mixtures: a positive whole number.*given 0"),
        ({"mixtures": -2}, r"model\.output\.mixtures: a positive whole number.*given -2"),
        ({"mixtures": 2**31}, r"model\.output\.mixtures: "),
        ({"mixtures": 2.5}, r"model\.output\.mixtures: "),
        ({"mixtures": True}, r"model\.output\.mixtures: "),
        ({"mixtures": "many"}, r"model\.output\.mixtures: "),
        ({"mixtures": 2, "latent": False}, r"model\.output\.latent: .*given 2 .*model\.output\.mixtures to 1"),
        ({"mixtures": 1, "latent": False, "latent_dropout": 0.1}, r"model\.output\.latent_dropout: goes with `model"),
        ({"components": "sparse"}, r"model\.output\.components: .*'softmax' or 'adaptive'"),
        ({"components": "softmax", "cutoffs": [10]}, r"model\.output\.cutoffs: .*components: adaptive.*\[10\]"),
        ({"components": "adaptive"}, r"model\.output\.cutoffs: an adaptive layer needs"),
        ({"cutoffs": [30, 10]}, r"model\.output\.cutoffs: .*increase strictly"),
        ({"cutoffs": [10, 100]}, r"model\.output\.cutoffs: below model\.vocab_size 100"),
        ({"cutoffs": [10, 30], "tied": True}, r"model\.output\.tied: .*model\.input has kind 'token'"),
        ({"cutoffs": [10], "tied_projections": True}, r"model\.output\.tied_projections: goes with `model\.output\.tied"),
        ({"normalize": "sparsemax"}, r"model\.output\.normalize: .*'softmax' or 'sigsoftmax'"),
        ({"kind": "softmax", "normalize": "sparsemax"}, r"model\.output\.normalize: .*'softmax' or 'sigsoftmax'"),
        ({"latent_dropout": 1.0}, r"model\.output\.latent_dropout: a probability below 1, given 1\.0"),
        ({"latent_dropout": -0.1}, r"model\.output\.latent_dropout: a probability below 1, given -0\.1"),
        ({"latent_dropout": float("nan")}, r"model\.output\.latent_dropout: a probability below 1"),
        ({"epsilon": -1e-8}, r"model\.output\.epsilon: at least 0.*given -1e-08"),
        ({"epsilon": 1.0}, r"model\.output\.epsilon: .*below 1, given 1\.0"),
        ({"epsilon": float("nan")}, r"model\.output\.epsilon: at least 0.*given nan"),
        ({"mixtrues": 3}, r"unknown key 'model\.output\.mixtrues'; did you mean 'model\.output\.mixtures'"),
        ({"latent_droput": 0.1}, r"unknown key .*did you mean 'model\.output\.latent_dropout'"),
        ({"kind": "mixture"}, r"model\.output\.kind: 'mixture' is not available.*mixture_of_softmaxes"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(output: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(raw(**output))


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build(raw(mixtures=0, epsilon=-1.0, latent_dropout=2.0))
    assert len(caught.value.problems) == 3


def test_a_mixture_is_tied_to_what_it_can_be_tied_to() -> None:
    with pytest.raises(ConfigError, match=r"model\.output\.tied: .*`model\.input\.kind: token`"):
        fr.LanguageModel(build(raw({"input": CLUSTERS}, tied=True)).model)
    model = fr.LanguageModel(build(raw({"input": CLUSTERS}, components="adaptive", tied=True, mixtures=2)).model)
    assert not any(name.startswith("output.weights") for name in model.state_dict())


def test_keys_from_the_command_line() -> None:
    words = ["model.output.kind=mixture_of_softmaxes", "model.output.mixtures=4", "model.output.latent_dropout=0.2",
             "model.output.latent_dropout_locked=true", "model.output.epsilon=1e-8", "model.output.normalize=sigsoftmax",
             "model.output.cutoffs=[7, 9]"]  # fmt: skip
    output = build(apply_overrides({"model": {"vocab_size": 100}}, words)).model.output
    assert (output.mixtures, output.latent_dropout, output.latent_dropout_locked) == (4, 0.2, True)
    assert (output.epsilon, output.normalize, output.components) == (1e-8, "sigsoftmax", "adaptive")


def test_replaced_configurations_keep_what_was_resolved() -> None:
    """`dataclasses.replace` hands resolved values back in."""
    for output in ({"mixtures": 3}, {"cutoffs": [10]}, {"mixtures": 1, "latent": False}):
        config = build(raw(**output)).model
        assert dataclasses.replace(config, vocab_size=90).output == config.output


def test_the_schema_names_the_keys() -> None:
    output = json_schema()["$defs"]["OutputConfig"]["properties"]
    assert set(KEYS) <= set(output)
    assert "mixture_of_softmaxes" in output["kind"]["enum"]
    assert output["normalize"]["enum"] == ["softmax", "sigsoftmax"]
    assert ["softmax", "adaptive"] in [choice.get("enum") for choice in output["components"]["anyOf"]]
    assert {f"model.output.{key}" for key in KEYS} <= set(known_keys(fr.RunConfig))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    said = capsys.readouterr()
    return int(stopped.value.code or 0), said.out, said.err


def test_the_command_shows_validates_and_gives_the_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(build(raw(mixtures=4, latent_dropout=0.2, cutoffs=[10], normalize="sigsoftmax"))))
    code, out, _ = run(capsys, "config", "validate", str(file))
    assert (code, "valid" in out) == (0, True)
    code, out, _ = run(capsys, "config", "show", str(file))
    assert code == 0
    assert build(parse_yaml(out, "shown")) == build(parse_yaml(file.read_text(), "written"))
    code, out, _ = run(capsys, "config", "schema")
    assert code == 0
    assert set(KEYS) <= set(json.loads(out)["$defs"]["OutputConfig"]["properties"])
    file.write_text("model:\n  output:\n    kind: mixture_of_softmaxes\n    mixtures: 0\n    epsilon: 2\n")
    code, _, said = run(capsys, "config", "validate", str(file))
    assert code == 2
    assert "model.output.mixtures" in said
    assert "model.output.epsilon" in said
    assert "Traceback" not in said
