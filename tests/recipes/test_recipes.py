"""All recipes together: tables, trainings that rows share; every table end to end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli_runs import document
from fullrank.config.load import flatten, list_shipped, load, resolve_any, select_rows, tables
from fullrank.config.run import PROTOCOL_KEYS
from fullrank.experiments.measure import validation_protocol
from fullrank.seal import MOVABLE

RECIPES = [name for name in list_shipped() if not name.startswith(("demo/", "best/"))]
TABLES = sorted({re.sub(r"(/table\d+)-.*", r"\1", name) for name in RECIPES})


def test_the_papers_tables_are_all_there():
    """25 tables: 24 have recipes; Table 3 of Skip Cross-head ablates the heads of a trained model (`analyze heads`)."""
    numbers = {
        "mixhead": range(1, 11),
        "mos": (1, 2),
        "skip-cross-head": (1, 2, *range(4, 11)),
        "tensorized": (1, 2, 3),
    }
    assert sorted(f"{paper}/table{n}" for paper, table_numbers in numbers.items() for n in table_numbers) == TABLES
    assert sorted(name for table in TABLES for name in tables(table)) == RECIPES


def describe_training(config):
    """What is trained, and by which figures during training: equal where only final figures differ."""
    final = tuple(f"eval.{key}" for key in ("valid", "test", *PROTOCOL_KEYS)) if config.task == "language_model" else ()
    protocol = validation_protocol(config) if final else None
    settings = {key: value for key, value in flatten(config.to_dict()).items() if key not in MOVABLE}
    return repr(({key: value for key, value in settings.items() if not (final and key.startswith(final))}, protocol))


def test_rows_and_the_trainings_that_they_share():
    """As the papers' tables repeat each other: the same model in a table of models and in those of ablations."""
    by_training = {}
    for name in list_shipped():
        for row in load(name).rows if "paper" in load(name).scales else ():
            by_training.setdefault(describe_training(resolve_any(name, row, "paper").config), set()).add((name, row))
    groups = {frozenset(group) for group in by_training.values() if len(group) > 1}
    mixes = ("plain", "a", "b")
    t7, t8, t9, t10 = (f"mixhead/table{n}" for n in (7, 8, 9, 10))
    five, six, seven, eight, nine = (f"skip-cross-head/table{n}" for n in (5, 6, 7, 8, 9))
    tasks = ("mrpc", "cola", "sst2", "mnli", "qnli", "qqp")
    expected = [
        *([("mixhead/table1-baevski", mix), (t10, f"d128-{mix}")] for mix in mixes),
        *([(t7, mix), (t8, f"h8-{mix}"), (t9, f"n512-{mix}"), (t10, f"d64-{mix}")] for mix in mixes),
        [(five, "plain"), (six, "plain"), (nine, "plain")],
        [(five, "cross-head"), (six, "beta0.1")],
        [(five, "phase1"), (eight, "eq1")],
        [(five, "phase1-phase2"), (nine, "eq1")],
        *([(seven, eq), (eight, eq)] for eq in ("eq2-p0.1", "eq5-p0.1")),
        [("skip-cross-head/table1", "context1600"), ("skip-cross-head/table1", "context3800")],  # measured twice
        [("skip-cross-head/table2", "context640"), ("skip-cross-head/table2", "context2000")],
        [
            ("mixhead/table1-transformer-xl", "plain"),
            ("skip-cross-head/table2", "transformer-xl"),
            ("tensorized/table2-wikitext103", "transformer-xl"),
        ],
        *([("mos/table1-ptb", f"k10{width}"), ("mos/table2", f"k10{width}")] for width in ("", "-d300")),
        *([("mixhead/table5", f"{task}-plain"), ("skip-cross-head/table4", f"{task}-plain")] for task in tasks),
        [("best/ptb", "pre-norm"), ("best/ptb-cures", "plain")],
        [("best/ptb", "mos"), ("best/ptb-cures", "mos")],
    ]
    assert groups == set(map(frozenset, expected))


@pytest.mark.full
@pytest.mark.parametrize("table", TABLES)
def test_every_table_end_to_end(table, tmp_path):
    """One row of each recipe, two updates: trained, measured by the protocol of each split, set beside the paper's figures."""
    rows = ",".join(dict.fromkeys(selected[0] for selected in select_rows(tables(table), of_paper=True).values()))
    words = ("--scale", "tiny", "--rows", rows, "--paper-rows", "--out", tmp_path, "--quiet")
    result = document("reproduce", table, *words, "train.steps=2", "train.device=cpu")
    page = Path(result["report"]).read_text(encoding="utf-8")
    assert all(f"Notes of {name}" in page for name in tables(table))
    assert set(result["notes"]) == set(tables(table))
    if "rows" in result:
        assert {row["recipe"] for row in result["rows"]} == set(tables(table))
        assert all(row["paper"] and row["protocols"] for row in result["rows"])
