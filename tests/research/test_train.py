"""The trainings of a plan: their order, folders and commands, and what is not trained again."""

import json
from pathlib import Path

import pytest
from made_rows import make_row

from research import LEDGER, RESEARCH
from research.ledger import read_ledger
from research.train import Entry, plan_trainings, read_plan

TABLE = "mixhead/table6"
RATE = {"train.learning_rate": 2e-3}


def test_all_rows_of_a_seed_come_before_the_next_seed_and_settings_are_in_the_folders_name(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(json.dumps({"set": {"train": {"batch_size": 8}}, "trainings": [
        {"table": TABLE, "rows": ["plain", "b"], "seeds": [3, 1], "scale": "small"},
        {"table": TABLE, "rows": ["b"], "scale": "small", "set": RATE},
    ]}))  # fmt: skip
    trainings = plan_trainings(read_plan(plan), None, Path("here"), [])
    assert [str(training.folder) for training in trainings] == [
        f"here/mixhead-table6/{name}"
        for name in (
            "plain-small-batch_size=8-seed3", "b-small-batch_size=8-seed3", "plain-small-batch_size=8-seed1",
            "b-small-batch_size=8-seed1", "b-small-batch_size=8-learning_rate=0.002-seed1",
        )
    ]  # fmt: skip
    words = trainings[-1].command[3:]
    assert words[:6] == [
        "train",
        TABLE,
        "train.batch_size=8",
        "train.learning_rate=0.002",
        "train.seed=1",
        "train.threads=1",
    ]


def test_many_settings_make_a_folders_name_no_longer_than_file_systems_allow():
    dropout = {
        f"model.dropout.{name}": 0.1
        for name in ("words", "embedding", "projection", "attention", "activation", "residual")
    }
    entries = [
        Entry(table="best/mixers", rows=["plain"], scale="small", set=dropout | {rate: 2e-3})
        for rate in ("train.learning_rate", "train.min_learning_rate")
    ]
    first, second = (training.folder.name for training in plan_trainings(entries, None, Path("here"), []))
    assert first != second
    assert max(len(first), len(second)) < 100


def test_what_the_ledger_has_is_not_trained_again(tmp_path):
    entry = Entry(table=TABLE, rows=["plain", "b"], seeds=[1, 2], scale="small", set=RATE)
    columns = {"recipe": TABLE, "settings": RATE}
    ledger = [make_row("b", 2, 1.0, **columns), make_row("b", 1, 1.0, recipe=TABLE)]
    states = [training.state for training in plan_trainings([entry], None, tmp_path, ledger)]
    assert states == ["open", "open", "open", "recorded"]


@pytest.mark.parametrize("name", ["plan.yaml", "plan_gpu.yaml"])
def test_the_plans_of_this_repository_can_be_trained(name, tmp_path):
    trainings = plan_trainings(read_plan(RESEARCH / name), None, tmp_path, read_ledger(LEDGER))
    assert trainings
    assert all(training.state in ("open", "recorded") for training in trainings)
