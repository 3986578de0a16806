"""The typed configuration: defaults, what is resolved, the round trip through YAML, and the schema for editors."""

import json
from pathlib import Path
from typing import get_args

import pytest
from drawn_configurations import OTHERS, accepted

import fullrank as fr
from fullrank.config.finetune import FinetuneTrainConfig
from fullrank.config.load import build, to_yaml
from fullrank.config.run import RunConfig
from fullrank.config.schema import finetune_schema, json_schema
from fullrank.core import kinds, registry
from fullrank.core.errors import ConfigError
from fullrank.core.section import Slot, hints_of, iterate_keys
from fullrank.files import parse_yaml
from schema_accepts import accepts

DRAWN = [*accepted(Path("here"), 1, 120), *accepted(Path("here"), 2, 120, OTHERS)]


def test_a_saved_configuration_is_the_same_configuration():
    assert len(DRAWN) > 80
    for raw in DRAWN:
        config = build(raw)
        saved = to_yaml(config)
        assert build(parse_yaml(saved, "saved")) == config
        assert to_yaml(build(parse_yaml(saved, "saved"))) == saved
        assert build(json.loads(json.dumps(config.to_dict()))) == config


def test_a_saved_configuration_states_every_key():
    saved = RunConfig().to_dict()
    unset = ("model.encoder.", "model.decoder.", "eval.valid.", "eval.test.")
    model = RunConfig().model
    keys_of_kind = {f"model.{name}.": hints_of(type(getattr(model, name))) for name in ("attention", "input", "output")}
    expected = [key for key in iterate_keys(RunConfig) if not key.startswith(unset)]
    for section, keys in keys_of_kind.items():  # of the kind that is the default
        expected = [key for key in expected if not key.startswith(section) or key.removeprefix(section) in keys]
    assert expected == [key for key in iterate_keys(RunConfig) if _has(saved, key)]
    assert parse_yaml(to_yaml(RunConfig()), "saved") == saved


def _has(nested, key):
    head, _, rest = key.partition(".")
    return head in nested and (not rest or (nested[head] is not None and _has(nested[head], rest)))


def test_the_schema_accepts_what_the_program_accepts():
    schema = json_schema()
    for raw in DRAWN:
        assert accepts(schema, raw, schema), raw
        assert accepts(schema, build(raw).to_dict(), schema), raw


@pytest.mark.parametrize(
    "raw",
    [
        {"model": {"hiden_size": 3}},
        {"model": {"position": "leaned"}},
        {"model": {"attention": {"mix": "position_wize"}}},
        {"model": {"output": {"kind": "mixture_of_softmaxes", "latent": "perhaps"}}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_program_refuses(raw):
    schema = json_schema()
    assert not accepts(schema, raw, schema)
    with pytest.raises(ConfigError):
        build(raw)


TUNED = {"model": {"pretrained": "gpt2"}, "data": {"train": "book.txt"}}


@pytest.mark.parametrize(
    ("raw", "fits"),
    [
        (TUNED | {"train": {"adapter": {"kind": "lora", "r": 4}}}, True),
        ({"model": {"pretrained": "bert"}, "data": {"name": "glue/cola"}}, True),
        (TUNED | {"train": {"adapter": {"kind": "ia3"}}}, False),
        ({"data": {"name": "glue/cula"}, "train": {"task_rate": 3}}, False),
    ],
    ids=str,
)
def test_the_schema_of_fine_tuning_has_tasks_and_texts(raw, fits):
    schema = finetune_schema()
    assert accepts(schema, raw, schema) == fits


def test_the_schema_names_registered_stages():
    @registry.register("mix", "for_the_schema")
    class Mixing:
        pass

    try:
        assert "for_the_schema" in json.dumps(json_schema())
    finally:
        registry.unregister("mix", "for_the_schema")


@pytest.mark.parametrize("schema", [json_schema, finetune_schema], ids=["run", "finetuning"])
def test_every_key_has_a_description(schema):
    content = schema()
    roots = [content] if "properties" in content else []
    for section in (*roots, *content["$defs"].values()):
        assert section["description"]
        for name, key in section["properties"].items():
            assert len(key["description"]) > 3, name


def _slots(hint):
    yield from (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Slot))
    for inner in get_args(hint):
        yield from _slots(inner)


def test_built_in_stages_are_those_that_are_registered():
    """Their names and options are declared beside the keys, so that checking them needs no torch."""
    sections = [fr.ModelConfig, *kinds.AttentionConfig.MEMBERS, fr.TrainConfig, FinetuneTrainConfig]
    slots = [slot for section in sections for hint in hints_of(section).values() for slot in _slots(hint)]
    names = {"score", "normalize", "mix", "position", "activation", "initializer", "schedule"}
    assert {slot.name for slot in slots} >= names
    for slot in slots:
        assert slot.built_in.keys() <= set(registry.names(slot.name))
        for name, options in slot.built_in.items():
            assert getattr(registry.lookup(slot.name, name), "Config", None) is options
    for union in (fr.AttentionConfig, fr.InputConfig, fr.OutputConfig):
        assert {member.kind for member in union.MEMBERS} <= set(registry.names(union.SLOT))
