"""GLUE from the Hugging Face hub, through a stand-in for `datasets`: no test goes to the network."""

from __future__ import annotations

import importlib.util
import sys
import types

import numpy as np
import pytest

from fullrank.core.errors import InputError, RunError
from fullrank.data.glue import GLUE, load_glue

# how the hub names the columns of each task
COLUMNS = {
    "cola": ("sentence",), "sst2": ("sentence",), "mrpc": ("sentence1", "sentence2"), "qqp": ("question1", "question2"),
    "stsb": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis"), "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"), "wnli": ("sentence1", "sentence2"),
}  # fmt: skip
SPLITS = {
    ("rte", "train"): ("rte", "train"), ("rte", "dev"): ("rte", "validation"), ("rte", "test"): ("rte", "test"),
    ("mnli", "dev"): ("mnli", "validation_matched"), ("mnli", "test"): ("mnli", "test_matched"),
    ("mnli", "dev_mismatched"): ("mnli", "validation_mismatched"), ("mnli", "train"): ("mnli", "train"),
    ("mnli", "test_mismatched"): ("mnli", "test_mismatched"), ("mnli", "ax"): ("ax", "test"),
}  # fmt: skip


class Hub(types.ModuleType):
    """A module `datasets` with the same rows for every call, which it keeps."""

    def __init__(self, rows: list[dict] | Exception) -> None:
        super().__init__("datasets")
        self.__spec__ = importlib.util.spec_from_loader("datasets", None)
        self.rows, self.calls = rows, list[tuple]()

    def load_dataset(self, path, name, *, split, revision, cache_dir):
        self.calls.append((path, name, split, revision, cache_dir))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


@pytest.fixture
def hub(monkeypatch):
    def put(rows) -> Hub:
        module = Hub(rows)
        monkeypatch.setitem(sys.modules, "datasets", module)
        return module

    return put


def rows(task: str, labels: list) -> list[dict]:
    names = COLUMNS[task]
    return [{**{name: f"{name} {i}" for name in names}, "label": label, "idx": i + 3} for i, label in enumerate(labels)]


@pytest.mark.parametrize("task", GLUE)
def test_columns_and_labels(hub, tmp_path, task):
    labels = [3.8, 0.0] if task == "stsb" else [1, 0]
    module = hub(rows(task, labels))
    told: list[str] = []
    found = load_glue(task, "train", cache=tmp_path, report=told.append)
    assert found.first == [f"{COLUMNS[task][0]} {i}" for i in range(2)]
    assert found.second == ([f"{COLUMNS[task][1]} {i}" for i in range(2)] if len(COLUMNS[task]) == 2 else None)
    np.testing.assert_allclose(found.known_labels(), labels, rtol=1e-6)
    assert (found.ids, found.path, found.is_slice, len(found.sha256)) == (["3", "4"], None, True, 64)
    ((path, name, split, revision, cache),) = module.calls
    assert (path, name, split, cache) == ("nyu-mll/glue", task, "train", str(tmp_path / "hub"))
    assert len(revision) == 40
    assert told[0].startswith(f"GLUE {GLUE[task].folder}: train from the Hugging Face hub")
    hub(rows(task, labels[::-1]))
    assert load_glue(task, "train").sha256 != found.sha256


@pytest.mark.parametrize("case", SPLITS)
def test_splits(hub, case):
    task, split = case
    module = hub(rows(task, [-1 if split in GLUE[task].test_splits else 0] * 2))
    found = load_glue(task, split)
    assert module.calls[0][1:3] == SPLITS[case]
    assert module.calls[0][4] is None
    assert (found.labels is None) == (split in GLUE[task].test_splits)


def test_a_label_outside(hub):
    hub(rows("mnli", [0, 3]))
    with pytest.raises(
        InputError, match=r"the hub, row 1: the label is 3; allowed: entailment, neutral, contradiction"
    ):
        load_glue("mnli", "train")


def test_no_network_and_no_rows(hub):
    hub(ConnectionError("no network\nat all"))
    with pytest.raises(RunError, match=r"nyu-mll/glue \(ConnectionError: no network at all\)\. Either .*--from DIR .*"):
        load_glue("rte", "dev")
    hub([])
    with pytest.raises(RunError, match="holds no rows of the split dev"):
        load_glue("rte", "dev")


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InputError, match=r"--from DIR .*RTE/train.tsv|RTE/train.tsv .*--from DIR .*pip install 'fullrank\[hf\]'"
    ):
        load_glue("rte", "dev")


def test_rows_of_the_real_library(monkeypatch):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(rows("rte", [1, 0, 1]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **keys: made)
    found = load_glue("rte", "train")
    assert found.known_labels().tolist() == [1, 0, 1]
    assert found.second == ["sentence2 0", "sentence2 1", "sentence2 2"]
