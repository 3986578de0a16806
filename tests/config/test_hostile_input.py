"""Numbers that compare like none (NaN, infinities, endless sizes) and recipes of another shape: refused, with their key."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullrank.config.load import apply_overrides, build, parse_yaml
from fullrank.config.recipe import parse, resolve
from fullrank.core.errors import ConfigError, InputError

NO_NUMBERS = [
    *(f"train.{key}={value}" for value in (".nan", ".inf", "-.inf") for key in (
        "learning_rate", "epochs", "eps", "momentum", "weight_decay", "warmup_from", "min_learning_rate", "orthogonality",
        "overlap", "plateau_factor", "max_grad_norm", "label_smoothing", "ema_decay", "swa_start")),
    *(f"model.{key}={value}" for value in (".nan", ".inf") for key in (
        "layer_norm_eps", "rope_theta", "dropout.residual", "attention.cross_head")),
    "eval.every_epochs=.inf", "eval.every_epochs=.nan", "train.betas=[0.9, .nan]", "train.betas=[.inf, 0.9]",
]  # fmt: skip
OUT_OF_BOUNDS = [
    "train.momentum=1", "train.betas=[0.9, 1]", "train.betas=[-0.1, 0.9]", "train.eps=0", "train.seed=-1",
    f"train.seed={2**63}", "train.threads=0", "train.threads=1025", "train.threads=100000000",
    f"train.segment_length={2**31}", f"train.batch_size={2**31}", f"eval.segment_length={2**31}",
    f"eval.batch_size={2**31}", f"train.steps={2**63}", f"model.hidden_size={2**31}", f"model.vocab_size={10**30}",
    f"model.num_hidden_layers={2**40}", f"data.max_tokens={2**63}", f"train.warmup_steps={2**63}",
]  # fmt: skip


@pytest.mark.parametrize("override", NO_NUMBERS + OUT_OF_BOUNDS)
def test_a_number_outside_its_range_is_named(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(apply_overrides({}, [override]))
    assert [line.split(":")[0] for line in caught.value.problems] == [override.split("=")[0]]


def test_the_ends_of_ranges_are_allowed() -> None:
    words = [f"train.seed={2**63 - 1}", "train.threads=1024", "train.betas=[0, 0.999]", "train.momentum=0",
             f"train.segment_length={2**31 - 1}", "train.tokens=300000000000"]  # fmt: skip
    train = build(apply_overrides({}, words)).train
    assert (train.seed, train.threads, train.tokens) == (2**63 - 1, 1024, 300_000_000_000)
    assert build(apply_overrides({}, ["train.seed=0"])).train.seed == 0


@pytest.mark.parametrize("override", ["train=3", "train=steps", "train=[steps]", "model=x", "train=true", "data=[1]"])
def test_an_override_of_a_section_by_something_else(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{key}: a section of keys, given"):
        build(apply_overrides({}, [override]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: [a, b]", r"mine: rows: a mapping, given \['a', 'b'\]"),
        ("rows:", "`rows` names no row"),
        ("rows: {}", "`rows` names no row"),
        ("rows: {a: hello}", "rows.a: a section of keys, given 'hello'"),
        ("rows: {a: {set: 3}}", "rows.a.set: a mapping, given 3"),
        ("rows: {a: {paper: [1]}}", "rows.a.paper: a mapping, given"),
        ("rows: {a: }\nbase: 4", "mine: base: a mapping, given 4"),
        ("rows: {a: }\nscales: [tiny]", r"mine: scales: a mapping .*given \['tiny'\]"),
        ("rows: {a: }\nscales: {tiny: 5}", "mine: scales: a mapping .*given .*5"),
        (
            "rows: {a: }\nscales: {1: {}, huge: {}}",
            "scales: a mapping with the keys 'paper' or 'small' or 'tiny', given",
        ),
        ("rows: {a: {scales: [tiny]}}", r"rows.a.scales: a mapping .*given \['tiny'\]"),
        ("rows: {a: {scales: {tiny: 5}}}", "rows.a.scales: a mapping .*given .*5"),
        ("rows: {a: {scales: {huge: {}}}}", "scales: a mapping with the keys 'paper' or 'small' or 'tiny', given"),
        ("rows: {a: }\n1: 2\nzzz: 3", "1: keys should be strings"),
        ("rows: {a: {1: 2, z: 3}}", "unknown key 'rows.a.z'|keys should be strings"),
    ],
)
def test_recipes_of_another_shape(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse("mine", parse_yaml(text, "mine"))


def test_a_row_may_be_called_by_a_number(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("rows: {1: {set: {train.seed: 5}}}\n", encoding="utf-8")
    assert resolve(str(file), "1").config.train.seed == 5


@pytest.mark.parametrize("text", ["a: 2024-02-30", "a: " + "9" * 5000, "[" * 3000])
def test_yaml_that_breaks_its_reader(text: str) -> None:
    with pytest.raises(InputError, match="here: not valid YAML"):
        parse_yaml(text, "here")


def test_a_key_that_is_a_fraction() -> None:
    with pytest.raises(ConfigError, match="keys should be strings"):
        build(parse("mine", {1.5: 2}).base)
