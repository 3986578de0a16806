"""Recipes beside what their papers state (published.yaml): settings, phases, figures and parameters."""

import fnmatch
import math
from pathlib import Path

import pytest
from recipe_counts import config_of, total

from fullrank.config.load import flatten, is_finetuning, list_shipped, load, resolve_any
from fullrank.files import parse_yaml

FILE = Path(__file__).parent / "published.yaml"
PUBLISHED = parse_yaml(FILE.read_text(encoding="utf-8"), FILE.name)
RECIPES = [name for name in list_shipped() if not name.startswith(("demo/", "best/"))]
UNITS = {"M": 1e6, "B": 1e9}
# rows that the paper does not have, in tables that `figures` does not list
OURS = [
    ("mixhead/table1-synthesizer", "without-keys"),
    ("mixhead/table1-synthesizer", "random"),
    ("skip-cross-head/table6", "beta0.3"),
]


def match_rows(case):
    for name in RECIPES:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in case["recipes"]):
            for row in load(name).rows:
                if any(fnmatch.fnmatchcase(row, pattern) for pattern in case["rows"]):
                    yield name, row


def find_setting(settings, key):
    """The value of a key; a section of options as a mapping."""
    inside = {name.removeprefix(f"{key}."): value for name, value in settings.items() if name.startswith(f"{key}.")}
    return inside or settings.get(key)


@pytest.mark.parametrize("case", PUBLISHED["settings"], ids=lambda case: "-".join((*case["recipes"], *case["rows"])))
def test_settings(case):
    expected = {key: value for key, value in flatten(case["set"]).items() if ".score." not in key}
    rows = list(match_rows(case))
    assert rows
    for name, row in rows:
        settings = flatten(resolve_any(name, row, "paper").config.to_dict())
        values = {key: find_setting(settings, key) for key in expected}
        assert values == expected, (name, row)
        score = case["set"].get("model", {}).get("attention.score")
        assert score is None or find_setting(settings, "model.attention.score") == score


def test_baevski_sees_as_many_tokens_an_update():
    train = config_of("mixhead/table1-baevski", "plain").train
    assert 2 * train.batch_size * train.segment_length * train.gradient_accumulation_steps == 8 * 3 * 3072


@pytest.mark.parametrize("name", PUBLISHED["phases"])
def test_phases_and_cross_head(name):
    """Phases end on a plateau at the paper's scale; at small scale the first of two has three quarters of the tokens."""
    rows = [row for row in load(name).rows if row != "transformer-xl"]
    assert PUBLISHED["phases"][name].keys() == {*rows}
    for row in rows:
        phases = PUBLISHED["phases"][name][row]
        for scale in ("paper", "small", "tiny"):
            config = config_of(name, row, scale)
            train = config.train
            equations = []
            for phase in train.phases:
                equation = "drifting" if phase.gaps == "drifting" else phase.skip
                assert phase.skip == "linear" or equation != "drifting"
                equations.append(equation if phase.p is None else f"{equation} {phase.p}")
            assert (equations or ["none"]) == phases, (row, scale)
            assert config.model.attention.cross_head == PUBLISHED["cross_head"].get(name, {}).get(row, 0)
            if scale == "paper":
                plateaus = {(phase.plateau.ppl, phase.plateau.steps) for phase in train.phases if phase.plateau}
                assert plateaus == {(0.01 if name.endswith("table1") else 0.2, 64_000)}
            elif len(equations) == 2:
                share = (train.phases[0].steps or 0) * train.batch_size * train.segment_length / (train.tokens or 1)
                assert 0.73 < share < 0.77


@pytest.mark.parametrize("name", RECIPES)
def test_figures(name):
    """The figures of `figures` agree to the digit; in other tables every row has the splits that the paper states."""
    published = {row: dict(content.paper or {}) for row, content in load(name).rows.items()}
    for figures in published.values():
        figures.pop("parameters_note", None)
    if name in PUBLISHED["figures"]:
        assert {row: figures for row, figures in published.items() if figures} == PUBLISHED["figures"][name]
        return
    unit = "_bits_per_character" if name == "skip-cross-head/table1" else ""
    for row, figures in published.items():
        if (name, row) in OURS:
            assert figures == {}
        elif not is_finetuning(name):
            test_only = name == "skip-cross-head/table10" or row == "transformer-xl"
            splits = ("test",) if test_only else ("valid", "test")
            assert {f"{split}{unit}" for split in splits} <= figures.keys()


def test_changes_of_deviations_follow_from_the_printed_ones():
    """Skip Cross-head Table 4, in percent."""
    figures = PUBLISHED["figures"]["skip-cross-head/table4"]
    changes = {
        "mrpc": [9.3, -7.9], "cola": [-10.6], "sst2": [-42.3], "mnli": [-53.8], "qnli": [-28.7], "qqp": [-46.1, -31.8],
    }  # fmt: skip
    for task, printed in changes.items():
        pairs = zip(figures[f"{task}-plain"].values(), figures[f"{task}-beta0.1"].values(), strict=True)
        assert [100 * (other / base - 1) for (_, base), (_, other) in pairs] == pytest.approx(printed, abs=0.06)


@pytest.mark.parametrize("name", [name for name in RECIPES if not is_finetuning(name)])
def test_published_totals_are_met_or_explained(name):
    """To the digits that the paper gives; where they are not met, and only there, the recipe says why."""
    wrong = []
    for row, content in load(name).rows.items():
        paper = content.paper or {}
        if "extra_parameters" in paper:
            assert total(name, row) - total(name, "plain") == paper["extra_parameters"]
        if "parameters" not in paper:
            assert "parameters_note" not in paper
            continue
        number = paper["parameters"][:-1]
        unit = UNITS[paper["parameters"][-1]]
        decimals = len(number.partition(".")[2])
        met = round(total(name, row) / unit, decimals) == float(number)
        if met == ("parameters_note" in paper):
            wrong.append(f"{row}: {total(name, row):,} and {paper}")
    assert not wrong


# Totals by the published value of a setting, where the paper's total takes another, inferred value: the notes tell which.
@pytest.mark.parametrize(
    ("name", "published", "parameters", "paper"),
    [
        ("mixhead/table2-transformer-xl", "model.intermediate_size=2100", 54_744_478, "40M"),
        ("mixhead/table3-transformer-xl", "model.input.cutoffs=[60000,100000,640000]", 357_812_082, "294M"),
        ("mixhead/table3-baevski", "model.input.cutoffs=[20000,60000]", 280_580_096, "330M"),
        ("mixhead/table1-synthesizer", "model.attention.score=dense_synthesizer", 231_196_672, "248M"),
    ],
)
def test_published_values_that_do_not_fit(name, published, parameters, paper):
    assert load(name).rows["plain"].paper["parameters"] == paper
    assert total(name, "plain", "paper", (published,)) == parameters
    assert f"{parameters:,}" in load(name).notes or f"{parameters / 1e6:.1f}M" in load(name).notes


TOKENS = {  # of Transformer-MoS with <sos>, and in the usual convention
    "mos/table1-ptb": {"valid": (77_130, 73_760), "test": (86_191, 82_430)},
    "mos/table1-wikitext2": {"valid": (221_406, 217_646), "test": (249_927, 245_569)},
    "mos/table2": {"test": (86_191, 82_430)},
}


@pytest.mark.parametrize("name", TOKENS)
def test_notes_convert_to_the_usual_convention(name):
    """exp(ln(ppl) N / (N - lines)): what the same probability of the text is per usual token."""
    for figures in PUBLISHED["figures"][name].values():
        for split, (ours, usual) in TOKENS[name].items():
            assert f"{math.exp(math.log(figures[split]) * ours / usual):.1f}" in load(name).notes
