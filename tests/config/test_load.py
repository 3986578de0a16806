"""YAML in, a checked configuration out: what is accepted, what is refused, and in which words."""

import pytest

from fullrank.config.load import apply_overrides, build, flatten, merge, read_yaml
from fullrank.core.errors import ConfigError, InputError
from fullrank.files import parse_yaml


def problems(text):
    with pytest.raises(ConfigError) as caught:
        build(parse_yaml(text, "here"))
    return list(caught.value.problems)


def test_an_empty_configuration_is_the_default():
    assert build({}) == build({"model": {}, "data": {}, "train": {}, "eval": {}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {hiden_size: 8}", "unknown key 'model.hiden_size'; did you mean 'model.hidden_size'?"),
        ("hidden_size: 8", "unknown key 'hidden_size'; did you mean 'model.hidden_size'?"),
        ("model: {mix: none}", "unknown key 'model.mix'; did you mean 'model.attention.mix'?"),
        ("trian: {}", "unknown key 'trian'; did you mean 'train'?"),
    ],
)  # fmt: skip
def test_unknown_keys(text, message):
    assert problems(text) == [message]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: {hidden_size: big}", ["model.hidden_size", "whole number", "'big'"]),
        ("model: {mlp_bias: perhaps}", ["model.mlp_bias", "true or false", "'perhaps'"]),
        ("train: {learning_rate: fast}", ["train.learning_rate", "number", "'fast'"]),
        ("data: {tokens: letters}", ["data.tokens", "letters", "'character'"]),
        ("model: 3", ["model: a section of keys, given 3"]),
    ],
)
def test_wrong_types_are_named_with_their_key(text, parts):
    found = "\n".join(problems(text))
    for part in parts:
        assert part in found


@pytest.mark.parametrize(
    ("text", "key", "word"),
    [
        ("model: {hidden_size: 0}", "model.hidden_size", "given 0"),
        ("model: {hidden_size: 10, num_attention_heads: 4}", "model.head_dim", "num_attention_heads 4"),
        ("model: {position: rotary, head_dim: 7}", "model.head_dim", "given 7"),
        ("model: {same_length: true}", "model.same_length", "model.memory_length"),
        ("{model: {memory_length: 5}, train: {order: shuffled}}", "train.order", "model.memory_length: 0"),
        ("train: {phases: [{name: a, skip: linear}, {name: b}], steps: 9}", "train.phases.a", "plateau"),
        ("model: {dropout: {residual: 1}}", "model.dropout.residual", "given 1"),
        ("model: {position: relative}", "model.attention.score", "dot_product"),
        ("train: {steps: 3, epochs: 2}", "train", "steps, epochs"),
    ],
)
def test_impossible_values(text, key, word):
    (line,) = problems(text)
    assert line.startswith(f"{key}: ")
    assert word in line


def test_stage_options():
    attention = build(
        parse_yaml("model: {attention: {mix: {name: position_wise, start: random}}}", "here")
    ).model.attention
    assert attention.mix == {"name": "position_wise", "start": "random"}
    for text, message in (
        ("{name: position_wise, strat: random}", "unknown key 'strat'"),
        ("{name: position_wise, start: no}", "start: 'identity' or 'random' or 'uniform', given"),
        ("{name: none, start: random}", "'none' takes no options, given ['start']"),
        ("{name: position_wize}", "'position_wize' is not available; did you mean 'position_wise'?"),
    ):
        assert any(message in line for line in problems(f"model: {{attention: {{mix: {text}}}}}")), text
    assert problems("model: {attention: {mix: {std: 1}}}")[0].startswith("model.attention.mix: '' is not available")


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "+1e-3"])
def test_numbers_as_people_write_them(number):
    assert build(parse_yaml(f"train: {{learning_rate: {number}}}", "here")).train.learning_rate == 0.001
    assert build(apply_overrides({}, [f"train.learning_rate={number}"])).train.learning_rate == 0.001


@pytest.mark.parametrize("value", ["true", "yes"])
def test_a_boolean_is_not_a_number(value):
    found = problems(f"model: {{num_hidden_layers: {value}}}\ntrain: {{learning_rate: {value}}}")
    assert any("model.num_hidden_layers" in line for line in found)
    assert any("train.learning_rate" in line for line in found)


def test_keys_given_twice():
    with pytest.raises(InputError, match=r"here: not valid YAML: .*key 'steps' is given twice.*line 3"):
        parse_yaml("train:\n  steps: 1\n  steps: 2\n", "here")
    with pytest.raises(InputError, match="key 'model' is given twice"):
        parse_yaml("model: {}\nmodel: {}", "here")
    assert parse_yaml("a: {x: 1}\nb: {x: 2}", "here") == {"a": {"x": 1}, "b": {"x": 2}}


def test_merge_keys():
    assert parse_yaml("base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}", "here")["mine"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("text", ["a: [1", "a: !!python/object:os.system {}", "&a [*b]"])
def test_broken_yaml(text):
    with pytest.raises(InputError, match="here: not valid YAML"):
        parse_yaml(text, "here")


def test_files(tmp_path):
    file = tmp_path / "run.yaml"
    for nothing in ("", "\n\n", "# nothing\n", "---\n", "null", "{}\n"):
        file.write_text(nothing)
        with pytest.raises(InputError, match=r"run\.yaml is empty"):
            read_yaml(file)
    file.write_text("[1, 2]")
    with pytest.raises(
        InputError, match="a configuration is a mapping with sections model, data, train, eval, not a list"
    ):
        read_yaml(file)


def test_dotted_overrides():
    raw = {"model": {"hidden_size": 8, "attention": {"mix": "position_wise"}}, "train": {"steps": 5}}
    before = flatten(raw)
    over = ["model.hidden_size=16", "model.attention.mix.start=random", "train.betas=[0.5, 0.6]", "data.lowercase=true",
            "model.attention.normalize=sigsoftmax", "model.head_dim=null", "data.dir=a=b"]  # fmt: skip
    made = apply_overrides(raw, over)
    assert flatten(raw) == before, "the original is left alone"
    assert made["model"]["hidden_size"] == 16
    assert made["model"]["attention"] == {
        "mix": {"name": "position_wise", "start": "random"},
        "normalize": "sigsoftmax",
    }
    config = build(made)
    assert config.train.betas == (0.5, 0.6)
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
    """`score: relative` is given; only because its section has another fault is the rest checked without it."""
    model = {"position": "relative", "hidden_size": -4, "attention": {"score": "relative", "cross_head": 7}}
    raw = {"model": model, "eval": {"clamp_length": 9, "batch_size": 0}}
    with pytest.raises(ConfigError) as caught:
        build(raw)
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "model.hidden_size", "model.attention.cross_head", "eval.batch_size",
    ]  # fmt: skip


NO_NUMBERS = [
    *(f"train.{key}={value}" for value in (".nan", ".inf") for key in ("learning_rate", "epochs", "weight_decay")),
    *(f"model.{key}=.nan" for key in ("layer_norm_eps", "dropout.residual", "attention.cross_head")),
    "eval.every_epochs=.inf", "train.betas=[0.9, .nan]",
]  # fmt: skip
OUT_OF_BOUNDS = [
    "train.momentum=1", "train.betas=[0.9, 1]", "train.betas=[-0.1, 0.9]", "train.eps=0", "train.seed=-1",
    f"train.seed={2**63}", "train.threads=0", "train.threads=1025", "train.threads=100000000",
    f"train.batch_size={2**31}", f"train.steps={2**63}", f"model.vocab_size={10**30}",
    f"model.num_hidden_layers={2**40}", f"data.max_tokens={2**63}", f"train.warmup_steps={2**63}",
]  # fmt: skip


@pytest.mark.parametrize("override", NO_NUMBERS + OUT_OF_BOUNDS)
def test_a_number_outside_its_range_is_named(override):
    with pytest.raises(ConfigError) as caught:
        build(apply_overrides({}, [override]))
    assert [line.split(":")[0] for line in caught.value.problems] == [override.split("=")[0]]
