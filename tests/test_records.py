"""Records and the declarations of measurements."""

import json
import types

import numpy as np
import pytest
import torch

from fullrank import records
from fullrank.core.errors import InputError
from fullrank.records import Column, HeatMap, Lines, Record, Table, measurement


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(records, "_known", {})


def test_records_hold_plain_numbers_and_come_back_from_json():
    record = Record({"layer": np.int64(1)}, "loss", torch.tensor(2.0), interval=np.float32([1.0, 3.0]), note="n")
    content = json.loads(json.dumps(record.to_dict()))
    assert content["value"] == 2.0
    assert type(content["labels"]["layer"]) is int
    assert content["interval"] == [1.0, 3.0]
    assert Record(**content) == record


@pytest.mark.parametrize(("labels", "value", "interval", "message"), [
    ({}, "2.0", None, "value is a number"), ({}, torch.ones(2), None, "value is a number"),
    ({"head": [1, 2]}, 2.0, None, "label head is a word or a number"),
    ({}, 2.0, (1.0, 2.0, 3.0), "interval has two ends"),
])  # fmt: skip
def test_a_record_of_no_single_number_is_refused(labels, value, interval, message):
    with pytest.raises(InputError, match=message):
        Record(labels, "loss", value, interval=interval)


@pytest.mark.parametrize("declared", [
    Table(("row", "layer"), (Column("a", where={"split": "test"}),), title="t"),
    Lines(x="step", series=("row",), marks=(("x", "d"),)),
    HeatMap("head", "layer", "change"),
])  # fmt: skip
def test_declarations_come_back_from_json(declared):
    content = json.loads(json.dumps(records.declaration_to_dict(declared)))
    assert records.declaration_from_dict(content) == declared


def test_a_measurement_is_found_by_name_and_its_options_are_keyword_only_parameters():
    @measurement("mine", needs={"logits"}, table=Table("position"), plot=Lines("position"), texts=3)
    def measure_mine(model, text, *, share: float = 0.5):
        """Help."""
        yield Record({"position": 0}, "mine", share)

    registered = records.find_measurement("mine")
    assert registered.function is measure_mine
    assert registered.texts == 3
    assert registered.help == "Help."
    assert list(registered.options) == ["share"]
    assert registered.options["share"].annotation is float
    assert len(records.check_records("mine", registered.function(None, None))) == 1


def test_wrong_measurements_are_refused():
    with pytest.raises(InputError, match="needs log; a model can have logits"):
        measurement("mine", needs={"log"})
    with pytest.raises(InputError, match="no such measurement"):
        records.find_measurement("mine")
    with pytest.raises(InputError, match="mine: gave NoneType; it has to yield"):
        records.check_records("mine", None)
    measurement("mine")(test_wrong_measurements_are_refused)
    stranger = types.FunctionType(test_wrong_measurements_are_refused.__code__, {"__name__": "other"})
    stranger.__qualname__ = "measure_other"
    for name in ("mine", "spectrum", "context"):
        with pytest.raises(InputError, match=f"measurement {name}: the name is taken"):
            measurement(name)(stranger)
