"""YAML in, a checked configuration out; what is refused stands in tests/errors.yaml."""

import pytest

from fullrank.config.load import apply_overrides, build, flatten, merge
from fullrank.core.errors import ConfigError
from fullrank.files import parse_yaml


def test_an_empty_configuration_is_the_default():
    assert build({}) == build({"model": {}, "data": {}, "train": {}, "eval": {}})


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "+1e-3"])
def test_numbers_as_people_write_them(number):
    assert build(parse_yaml(f"train: {{learning_rate: {number}}}", "here")).train.learning_rate == 0.001
    assert build(apply_overrides({}, [f"train.learning_rate={number}"])).train.learning_rate == 0.001


def test_merge_keys():
    assert parse_yaml("base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}", "here")["mine"] == {"x": 1, "y": 3}


def test_dotted_overrides():
    raw = {"model": {"hidden_size": 8, "attention": {"mix": "position_wise"}}, "train": {"steps": 5}}
    before = flatten(raw)
    over = ["model.hidden_size=16", "model.attention.mix.start=random", "train.betas=[0.5, 0.6]", "data.lowercase=true",
            "model.attention.normalize=sigsoftmax", "model.head_dim=null", "data.dir=a=b"]  # fmt: skip
    changed = apply_overrides(raw, over)
    assert flatten(raw) == before, "the original is left alone"
    assert changed["model"]["hidden_size"] == 16
    assert changed["model"]["attention"] == {
        "mix": {"name": "position_wise", "start": "random"},
        "normalize": "sigsoftmax",
    }
    config = build(changed)
    assert config.train.betas == [0.5, 0.6]
    assert config.train.steps == 5
    assert config.data.lowercase is True
    assert config.data.dir == "a=b"
    assert config.model.head_dim == 2  # null: resolved from the other sizes
    assert apply_overrides({}, ["train.seed=1", "train.seed=2"]) == {"train": {"seed": 2}}


@pytest.mark.parametrize("end", ["steps=7", "epochs=2", "tokens=100"])
def test_a_new_end_of_training_replaces_the_old_one(end):
    train = build(apply_overrides({"train": {"steps": 5, "seed": 3}}, [f"train.{end}"])).train
    key, _, value = end.partition("=")
    ends = ("steps", "epochs", "tokens")
    assert {k: getattr(train, k) for k in ends} == dict.fromkeys(ends) | {key: int(value)}
    assert train.seed == 3


def test_merging_and_flattening():
    base = {"a": {"x": 1, "y": {"z": 2}}, "b": 3}
    assert merge(base, {"a": {"y": {"w": 4}}, "b": {"c": 5}}) == {"a": {"x": 1, "y": {"z": 2, "w": 4}}, "b": {"c": 5}}
    assert base == {"a": {"x": 1, "y": {"z": 2}}, "b": 3}
    assert flatten(base) == {"a.x": 1, "a.y.z": 2, "b": 3}
    assert merge({}, {"a.b.c": 1}) == {"a": {"b": {"c": 1}}}


def test_a_faulty_section_is_not_blamed_for_its_defaults():
    """A faulty section is left out when the rest is checked; that `score: relative` is then missing is no fault."""
    model = {"position": "relative", "hidden_size": -4, "attention": {"score": "relative", "cross_head": 7}}
    raw = {"model": model, "eval": {"clamp_length": 9, "batch_size": 0}}
    with pytest.raises(ConfigError) as refusal:
        build(raw)
    assert [line.partition(":")[0] for line in refusal.value.problems] == [
        "model.hidden_size", "model.attention.cross_head", "eval.batch_size",
    ]  # fmt: skip
