"""GLUE: official files, and the hub, through a stand-in for `datasets`."""

import hashlib
import importlib.util
import sys
import types

import numpy as np
import pytest

from fullrank.config.finetune import GLUE, TaskDataConfig
from fullrank.data.tasks import read_task


def load_glue(task, split, folder=None, cache=None):
    where = {"dir": folder, "cache": cache}
    return read_task(
        TaskDataConfig(name=f"glue/{task}", **{key: str(path) for key, path in where.items() if path}), split
    )


def columns_of(split):
    """First sentences, second ones if there are any, and labels."""
    texts, labels = zip(*split.rows, strict=True)
    first, second = (*map(list, zip(*texts, strict=True)), None)[:2]
    return first, second, list(labels)


def put(path, *rows, mark="", end="\n", last=None):
    """A file of tab-separated values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = mark + end.join("\t".join(row) for row in rows) + (end if last is None else last)
    path.write_bytes(text.encode("utf-8"))
    return path


PAIR = ("index", "sentence1", "sentence2")
MNLI = ("index", "promptID", "genre", "sentence1_parse", "sentence2_parse", "sentence1", "sentence2")
STSB = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score")


def mnli(index, *labels):
    return (str(index), "1", "fiction", "(ROOT a)", "(ROOT b)", f"A {index}", "B", *labels)


# rows as published, expected first and second sentences, labels; of each task and file
OFFICIAL = {
    ("cola", "train", "CoLA/train.tsv"): (
        [("gj04", "1", "", "It's \"so\"."), ("gj04", "0", "*", "\"So it.")],
        (['It\'s "so".', '"So it.'], None, [1, 0]),
    ),
    ("cola", "dev", "CoLA/dev.tsv"): ([("gj04", "0", "*", "Fine")], (["Fine"], None, [0])),
    ("sst2", "train", "SST-2/train.tsv"): (
        [("sentence", "label"), ("good ", "1"), ("bad ", "0")], (["good ", "bad "], None, [1, 0]),
    ),
    ("mrpc", "train", "MRPC/train.tsv"): (
        [("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"), ("1", "7", "8", 'He said "x', "x")],
        (['He said "x'], ["x"], [1]),
    ),
    ("qqp", "train", "QQP/train.tsv"): (
        [("id", "qid1", "qid2", "question1", "question2", "is_duplicate"), ("133273", "213221", "213222", "How?", "", "1")],
        (["How?"], [""], [1]),
    ),
    ("stsb", "dev", "STS-B/dev.tsv"): (
        [STSB, ("4", "g", "f", "2012", "1", "none", "none", "One.", "Two.", "3.800"),
         ("5", "g", "f", "2012", "1", "", "", "T", "U", "0")],
        (["One.", "T"], ["Two.", "U"], [3.8, 0.0]),
    ),
    ("mnli", "train", "MNLI/train.tsv"): (
        [(*MNLI, "label1", "gold_label"), mnli(0, "neutral", "neutral"), mnli(1, "neutral", "entailment"),
         mnli(2, "x", "contradiction")],
        (["A 0", "A 1", "A 2"], ["B"] * 3, [1, 0, 2]),
    ),
    ("mnli", "dev", "MNLI/dev_matched.tsv"): (
        [(*MNLI, "label1", "label2", "gold_label"), mnli(3, "neutral", "neutral", "entailment")], (["A 3"], ["B"], [0]),
    ),
    ("mnli", "dev_mismatched", "MNLI/dev_mismatched.tsv"): (
        [(*MNLI, "label1", "gold_label"), mnli(4, "x", "neutral")], (["A 4"], ["B"], [1]),
    ),
    ("qnli", "train", "QNLI/train.tsv"): (
        [("index", "question", "sentence", "label"), ("0", "Who?", "I", "entailment"), ("1", "Why?", "I", "not_entailment")],
        (["Who?", "Why?"], ["I", "I"], [0, 1]),
    ),
    ("rte", "dev", "RTE/dev.tsv"): (
        [(*PAIR, "label"), ("0", "T", "H", "not_entailment"), ("1", "T", "H", "entailment")],
        (["T", "T"], ["H", "H"], [1, 0]),
    ),
    ("wnli", "train", "WNLI/train.tsv"): (
        [(*PAIR, "label"), ("0", "He did.", "He", "1"), ("1", "It.", "I", "0")],
        (["He did.", "It."], ["He", "I"], [1, 0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("end", "mark"), [("\n", ""), ("\r\n", "\ufeff")], ids=["lf", "crlf with mark"])
@pytest.mark.parametrize("case", OFFICIAL, ids=str)
def test_official_forms(tmp_path, case, end, mark):
    task, split, name = case
    rows, (first, second, labels) = OFFICIAL[case]
    path = put(tmp_path / name, *rows, end=end, mark=mark, last="")  # no line end after the last line
    for folder in (tmp_path, path.parent):
        examples = load_glue(task, split, folder)
        assert columns_of(examples)[:2] == (first, second)
        assert (examples.source, examples.is_slice, len(examples)) == (str(path), True, len(first))
        assert examples.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        np.testing.assert_allclose(columns_of(examples)[2], labels, rtol=1e-7)


# how the hub names the columns of each task
COLUMNS = {
    "cola": ("sentence",), "sst2": ("sentence",), "mrpc": ("sentence1", "sentence2"), "qqp": ("question1", "question2"),
    "stsb": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis"), "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"), "wnli": ("sentence1", "sentence2"),
}  # fmt: skip


class Hub(types.ModuleType):
    """A stand-in for the module `datasets` that gives the same rows to every call and records the calls."""

    def __init__(self, rows):
        super().__init__("datasets")
        self.__spec__ = importlib.util.spec_from_loader("datasets", None)
        self.rows = rows
        self.calls = list[tuple]()

    def load_dataset(self, path, name, *, split, revision, cache_dir):
        self.calls.append((path, name, split, revision, cache_dir))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


@pytest.fixture
def hub(monkeypatch):
    def put(rows):
        module = Hub(rows)
        monkeypatch.setitem(sys.modules, "datasets", module)
        return module

    return put


def hub_rows(task, labels):
    rows = []
    for i, label in enumerate(labels):
        rows.append({name: f"{name} {i}" for name in COLUMNS[task]} | {"label": label, "idx": i + 3})
    return rows


@pytest.mark.parametrize("task", GLUE)
def test_columns_and_labels_of_the_hub(hub, tmp_path, task):
    labels = [3.8, 0.0] if task == "stsb" else [1, 0]
    module = hub(hub_rows(task, labels))
    examples = load_glue(task, "train", cache=tmp_path)
    first, second, read = columns_of(examples)
    assert first == [f"{COLUMNS[task][0]} {i}" for i in range(2)]
    assert second == ([f"{COLUMNS[task][1]} {i}" for i in range(2)] if len(COLUMNS[task]) == 2 else None)
    np.testing.assert_allclose(read, labels, rtol=1e-6)
    assert (examples.source, examples.is_slice, len(examples.sha256)) == ("nyu-mll/glue", True, 64)
    ((path, name, split, revision, cache),) = module.calls
    assert (path, name, split, cache) == ("nyu-mll/glue", task, "train", str(tmp_path / "hub"))
    assert len(revision) == 40
    hub(hub_rows(task, labels[::-1]))
    assert load_glue(task, "train").sha256 != examples.sha256


def test_torn_rows_of_question_pairs_are_left_out(tmp_path):
    """The published file holds questions with a line break, whose two halves are no rows."""
    header = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
    torn = [("1", "1", "2", "How"), ("do I?", "Why?", "0")]
    put(tmp_path / "QQP/train.tsv", header, *torn, ("2", "3", "4", "What?", "Which?", "1"))
    assert columns_of(load_glue("qqp", "train", tmp_path)) == (["What?"], ["Which?"], [1])
