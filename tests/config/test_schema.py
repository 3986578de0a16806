"""The typed configuration: defaults, what is resolved, the round trip through YAML, and the schema for editors."""

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

probability = st.floats(0, 0.99)
positive = st.floats(1e-9, 1e9, allow_nan=False)
count = st.integers(1, 10**9)


def of(slot):
    return st.sampled_from(registry.names(slot))


@st.composite
def raw_configs(draw):
    """Any subset of the keys, each with a value it may have."""
    mixes = st.one_of(
        of("mix"),
        st.fixed_dictionaries(
            {"name": st.just("position_wise")}, optional={"start": st.sampled_from(["identity", "random"])}
        ),
    )
    scores = st.one_of(
        of("score").filter(lambda name: name != "relative"),
        st.fixed_dictionaries({"name": st.just("dense_synthesizer")}, optional={"keep_key_projection": st.booleans()}),
    )
    options = {"clamp_length": st.none() | count, "shared_biases": st.booleans(), "as_published": st.booleans()}
    relative = st.just("relative") | st.fixed_dictionaries({"name": st.just("relative")}, optional=options)
    of_any_output = {"tied": st.booleans(), "bias": st.none() | st.booleans(),
                     "normalize": st.sampled_from(["softmax", "sigsoftmax"])}  # fmt: skip
    mixture = {"mixtures": st.none() | count,
               "latent": st.sampled_from([None, True, "residual"]),
               "latent_dropout": probability}  # fmt: skip
    outputs = st.fixed_dictionaries({}, optional=of_any_output) | st.fixed_dictionaries(
        {"kind": st.just("mixture_of_softmaxes")}, optional=of_any_output | mixture
    )
    heads = draw(st.integers(1, 16))
    model = st.fixed_dictionaries(
        {"num_attention_heads": st.just(heads), "hidden_size": st.integers(1, 64).map(lambda n: n * heads * 2)},
        optional={
            "vocab_size": st.none() | count, "num_hidden_layers": st.integers(1, 10_000),
            "head_dim": st.none() | count.map(lambda n: 2 * n),
            "intermediate_size": st.none() | count, "hidden_act": of("activation"), "mlp_bias": st.booleans(),
            "norm": st.sampled_from(["pre", "post"]), "final_norm": st.none() | st.booleans(), "layer_norm_eps": positive,
            "position": of("position").filter(lambda name: name != "relative"),
            "rope_theta": positive, "scale_embedding": st.booleans(),
            "initializer": of("initializer"),
            "dropout": st.fixed_dictionaries({}, optional={"residual": probability, "locked": st.booleans()}),
            "attention": st.fixed_dictionaries(
                {}, optional={"score": scores, "mix": mixes, "normalize": of("normalize"), "cross_head": st.floats(0, 1),
                             "gate": st.sampled_from(["none", "head"]),
                              "bias": st.booleans()}
            ),
            "output": outputs,
        },
    )  # fmt: skip
    words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
    data = st.fixed_dictionaries(
        {}, optional={"dir": st.none() | words, "train": words | st.lists(words, min_size=1, max_size=3),
                      "lowercase": st.booleans(),
                      "tokens": st.sampled_from(["word", "byte", "character", "bpe", None]), "max_tokens": st.none() | count},
    )  # fmt: skip
    train = st.fixed_dictionaries(
        {draw(st.sampled_from(["steps", "tokens"])): count},
        optional={"learning_rate": positive, "betas": st.tuples(probability, probability).map(list),
                  "seed": st.integers(0, 2**40),
                  "optimizer": of("optimizer"), "schedule": of("schedule"),
                  "max_grad_norm": st.none() | positive,
                  "precision": st.sampled_from(["fp32", "bf16"]), "track": st.lists(st.just("tensorboard"))},
    )  # fmt: skip
    train = train.map(lambda keys: keys | {"momentum": 0.9} if keys.get("optimizer") == "nag" else keys)
    raw = draw(st.fixed_dictionaries({}, optional={"model": model, "data": data, "train": train}))
    if "model" in raw and draw(st.booleans()):  # these two go together only
        raw["model"] |= {"position": "relative"}
        raw["model"]["attention"] = raw["model"].get("attention", {}) | {"score": draw(relative)}
    return raw


@given(raw_configs())
def test_a_saved_configuration_is_the_same_configuration(raw):
    config = build(raw)
    assert build(parse_yaml(to_yaml(config), "saved")) == config
    assert to_yaml(build(parse_yaml(to_yaml(config), "saved"))) == to_yaml(config)
    assert build(json.loads(json.dumps(config.to_dict()))) == config


def test_a_saved_configuration_states_every_key():
    saved = RunConfig().to_dict()
    # sections that most runs do not have
    null = ("model.encoder.", "model.decoder.", "eval.valid.", "eval.test.")
    model = RunConfig().model
    own = {f"model.{name}.": hints_of(type(getattr(model, name))) for name in ("attention", "input", "output")}
    stated = [key for key in iterate_keys(RunConfig) if not key.startswith(null)]
    for section, keys in own.items():  # of its kind
        stated = [key for key in stated if not key.startswith(section) or key.removeprefix(section) in keys]
    assert stated == [key for key in iterate_keys(RunConfig) if _has(saved, key)]
    assert parse_yaml(to_yaml(RunConfig()), "saved") == saved


def _has(nested, key):
    head, _, rest = key.partition(".")
    return head in nested and (not rest or (nested[head] is not None and _has(nested[head], rest)))


@given(raw_configs())
def test_the_schema_accepts_what_the_program_accepts(raw):
    schema = json_schema()
    assert accepts(schema, raw, schema)
    assert accepts(schema, build(raw).to_dict(), schema)


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
        if not slot.name:
            continue
        assert slot.built_in.keys() <= set(registry.names(slot.name))
        for name, options in slot.built_in.items():
            assert getattr(registry.lookup(slot.name, name), "Config", None) is options
    for union in (fr.AttentionConfig, fr.InputConfig, fr.OutputConfig):
        assert {member.kind for member in union.MEMBERS} <= set(registry.names(union.SLOT))
