"""GLUE: official files, those of others, the hub (through a stand-in for `datasets`), and the real files."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from fullrank.config.glue import GLUE, glue_task
from fullrank.core.errors import InputError, RunError
from fullrank.data.glue import load_glue


def put(path: Path, *rows: tuple[str, ...], mark: str = "", end: str = "\n", last: str | None = None) -> Path:
    """A file of tab-separated values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = mark + end.join("\t".join(row) for row in rows) + (end if last is None else last)
    path.write_bytes(text.encode("utf-8"))
    return path


PAIR = ("index", "sentence1", "sentence2")
MNLI = ("index", "promptID", "genre", "sentence1_parse", "sentence2_parse", "sentence1", "sentence2")
STSB = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score")


def mnli(index: int, *labels: str) -> tuple[str, ...]:
    return (str(index), "1", "fiction", "(ROOT a)", "(ROOT b)", f"A {index}", "B", *labels)


# rows as published, expected first and second sentences, labels, ids; of each task and file
OFFICIAL = {
    ("cola", "train", "CoLA/train.tsv"): (
        [("gj04", "1", "", "It's \"so\"."), ("gj04", "0", "*", "\"So it.")],
        (['It\'s "so".', '"So it.'], None, [1, 0], ["0", "1"]),
    ),
    ("cola", "dev", "CoLA/dev.tsv"): ([("gj04", "0", "*", "Fine")], (["Fine"], None, [0], ["0"])),
    ("cola", "test", "CoLA/test.tsv"): (
        [("index", "sentence"), ("0", "Bill whistled."), ("1", "So")], (["Bill whistled.", "So"], None, None, ["0", "1"]),
    ),
    ("sst2", "train", "SST-2/train.tsv"): (
        [("sentence", "label"), ("good ", "1"), ("bad ", "0")], (["good ", "bad "], None, [1, 0], ["0", "1"]),
    ),
    ("mrpc", "train", "MRPC/train.tsv"): (
        [("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"), ("1", "7", "8", 'He said "x', "x")],
        (['He said "x'], ["x"], [1], ["0"]),
    ),
    ("mrpc", "test", "MRPC/test.tsv"): (
        [("index", "#1 ID", "#2 ID", "#1 String", "#2 String"), ("0", "7", "8", "a", "b")], (["a"], ["b"], None, ["0"]),
    ),
    ("qqp", "train", "QQP/train.tsv"): (
        [("id", "qid1", "qid2", "question1", "question2", "is_duplicate"), ("133273", "213221", "213222", "How?", "", "1")],
        (["How?"], [""], [1], ["133273"]),
    ),
    ("stsb", "dev", "STS-B/dev.tsv"): (
        [STSB, ("4", "g", "f", "2012", "1", "none", "none", "One.", "Two.", "3.800"),
         ("5", "g", "f", "2012", "1", "", "", "T", "U", "0")],
        (["One.", "T"], ["Two.", "U"], [3.8, 0.0], ["4", "5"]),
    ),
    ("mnli", "train", "MNLI/train.tsv"): (
        [(*MNLI, "label1", "gold_label"), mnli(0, "neutral", "neutral"), mnli(1, "neutral", "entailment"),
         mnli(2, "x", "contradiction")],
        (["A 0", "A 1", "A 2"], ["B"] * 3, [1, 0, 2], ["0", "1", "2"]),
    ),
    ("mnli", "dev", "MNLI/dev_matched.tsv"): (
        [(*MNLI, "label1", "label2", "gold_label"), mnli(3, "neutral", "neutral", "entailment")], (["A 3"], ["B"], [0], ["3"]),
    ),
    ("mnli", "dev_mismatched", "MNLI/dev_mismatched.tsv"): (
        [(*MNLI, "label1", "gold_label"), mnli(4, "x", "neutral")], (["A 4"], ["B"], [1], ["4"]),
    ),
    ("mnli", "test", "MNLI/test_matched.tsv"): ([MNLI, mnli(0)], (["A 0"], ["B"], None, ["0"])),
    ("mnli", "test_mismatched", "MNLI/test_mismatched.tsv"): ([MNLI, mnli(9)], (["A 9"], ["B"], None, ["9"])),
    ("mnli", "ax", "AX/AX.tsv"): ([PAIR, ("0", "The cat.", "No cat.")], (["The cat."], ["No cat."], None, ["0"])),
    ("mnli", "ax", "diagnostic/diagnostic.tsv"): ([PAIR, ("0", "A cat.", "No.")], (["A cat."], ["No."], None, ["0"])),
    ("qnli", "train", "QNLI/train.tsv"): (
        [("index", "question", "sentence", "label"), ("0", "Who?", "I", "entailment"), ("1", "Why?", "I", "not_entailment")],
        (["Who?", "Why?"], ["I", "I"], [0, 1], ["0", "1"]),
    ),
    ("rte", "dev", "RTE/dev.tsv"): (
        [(*PAIR, "label"), ("0", "T", "H", "not_entailment"), ("1", "T", "H", "entailment")],
        (["T", "T"], ["H", "H"], [1, 0], ["0", "1"]),
    ),
    ("wnli", "train", "WNLI/train.tsv"): (
        [(*PAIR, "label"), ("0", "He did.", "He", "1"), ("1", "It.", "I", "0")],
        (["He did.", "It."], ["He", "I"], [1, 0], ["0", "1"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("end", "mark"), [("\n", ""), ("\r\n", "\ufeff")], ids=["lf", "crlf with mark"])
@pytest.mark.parametrize("case", OFFICIAL, ids=str)
def test_official_forms(tmp_path, case, end, mark):
    task, split, name = case
    rows, (first, second, labels, ids) = OFFICIAL[case]
    path = put(tmp_path / name, *rows, end=end, mark=mark, last="")  # no line end after the last line
    for folder in (tmp_path, path.parent):
        found = load_glue(task, split, folder)
        assert (found.first, found.second, found.ids) == (first, second, ids)
        assert (found.path, found.is_slice, len(found)) == (path, True, len(first))
        assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        if labels is None:
            assert found.labels is None
            with pytest.raises(InputError, match=f"{split} has no labels"):
                found.require_labels()
        else:
            assert found.require_labels().dtype == (np.float32 if task == "stsb" else np.int64)
            np.testing.assert_allclose(found.require_labels(), labels, rtol=1e-7)


def test_halves_of_pairs_in_json_are_mended(tmp_path):
    (tmp_path / "dev.jsonl").write_text('{"sentence": "so \\ud83d good \\ud83d\\ude00", "label": 1, "idx": 0}\n')
    assert load_glue("sst2", "dev", tmp_path).first == ["so \ufffd good \U0001f600"]


def test_every_split_of_every_task_has_its_official_form_above():
    assert {task for task, *_ in OFFICIAL} == set(GLUE)
    assert {split for task, split, _ in OFFICIAL if task == "mnli"} == set(GLUE["mnli"].splits)


@pytest.mark.parametrize(
    "inner",
    ["", "COLA", "glue/CoLA", "glue_data/cola"],
    ids=lambda inner: inner or "itself",
)
def test_folders(tmp_path, inner):
    put(tmp_path / inner / "dev.tsv", ("gj04", "1", "", "Yes."))
    assert load_glue("cola", "dev", tmp_path).first == ["Yes."]


def test_the_tasks_own_folder_goes_first_and_another_tasks_is_left_alone(tmp_path):
    put(tmp_path / "dev.tsv", ("gj04", "1", "", "Outside."))
    put(tmp_path / "CoLA" / "dev.tsv", ("gj04", "1", "", "Inside."))
    put(tmp_path / "SST-2" / "dev.tsv", ("sentence", "label"), ("Other.", "1"))
    assert load_glue("cola", "dev", tmp_path).first == ["Inside."]
    assert load_glue("sst2", "dev", tmp_path).first == ["Other."]
    with pytest.raises(InputError, match=r"no file WNLI/dev.tsv in .*SST-2 \(the folder of another task\)"):
        load_glue("wnli", "dev", tmp_path / "SST-2")


def test_a_slice_is_taken_only_without_the_whole_file_and_is_told(tmp_path):
    told: list[str] = []
    header = ("index", "sentence1", "sentence2", "gold_label")
    put(tmp_path / "glue" / "MNLI" / "dev.slice.tsv", header, ("0", "a", "b", "neutral"))
    part = load_glue("mnli", "dev", tmp_path, report=told.append)
    assert (part.first, part.is_slice) == (["a"], True)
    assert ["9,815" in line for line in told] == [True]
    rows = [(str(i), f"s{i}", "h", "entailment") for i in range(9_815)]
    put(tmp_path / "MNLI" / "dev_matched.tsv", header, *rows)
    told.clear()
    whole = load_glue("mnli", "dev", tmp_path, report=told.append)
    assert (len(whole), whole.is_slice, told) == (9_815, False, [])
    put(tmp_path / "MNLI" / "dev_matched.slice.tsv", header, *rows)
    (tmp_path / "MNLI" / "dev_matched.tsv").unlink()
    assert load_glue("mnli", "dev", tmp_path).is_slice, "its name says so"


def test_json_lines_as_on_the_hub(tmp_path):
    rows = [
        {"sentence1": "a\u2028\tb", "sentence2": 'c"', "label": 1, "idx": 5},
        {"sentence1": "", "sentence2": "d", "label": 0, "idx": 6},
    ]
    (tmp_path / "RTE").mkdir()
    for name in ("train.jsonl", "validation.jsonl", "test.jsonl"):
        written = [{**row, "label": -1} for row in rows] if name == "test.jsonl" else rows
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in written)
        (tmp_path / "RTE" / name).write_text(text, encoding="utf-8")
    for split in ("train", "dev", "test"):
        found = load_glue("RTE", split, tmp_path)
        assert (found.first, found.second, found.ids) == (["a\u2028\tb", ""], ['c"', "d"], ["5", "6"])
        assert found.labels is None if split == "test" else found.require_labels().tolist() == [1, 0]
    (tmp_path / "STS-B").mkdir()
    (tmp_path / "STS-B" / "dev.jsonl").write_text(
        '{"sentence1": "x", "sentence2": "y", "label": 2}\n', encoding="utf-8"
    )
    assert load_glue("stsb", "dev", tmp_path).require_labels().tolist() == [2.0]
    (tmp_path / "MNLI").mkdir()
    (tmp_path / "MNLI" / "train.jsonl").write_text('{"premise": "x", "hypothesis": "y", "label": "neutral"}')
    assert load_glue("mnli", "train", tmp_path).require_labels().tolist() == [1]


def test_a_part_of_the_examples(tmp_path):
    header = ("index", "sentence1", "sentence2", "label")
    rows = [(str(i + 10), f"s{i}", f"h{i}", str(i % 2)) for i in range(71)]
    put(tmp_path / "WNLI" / "dev.tsv", header, *rows)
    whole = load_glue("wnli", "dev", tmp_path)
    part = whole.take(np.array([4, 1]))
    assert (part.first, part.second, part.ids) == (["s4", "s1"], ["h4", "h1"], ["14", "11"])
    assert part.require_labels().tolist() == [0, 1]
    assert (whole.is_slice, part.is_slice, whole.take(range(70, -1, -1)).is_slice) == (False, True, False)
    assert whole.take([0] * 71).is_slice


def test_names_of_tasks():
    assert {glue_task(name) for name in ("SST-2", "sst-2", "sst2", "SST2")} == {GLUE["sst2"]}


PUBLISHED = {
    "cola": (8551, 1043, 1063), "sst2": (67349, 872, 1821), "mrpc": (3668, 408, 1725), "rte": (2490, 277, 3000),
    "stsb": (5749, 1500, 1379), "qnli": (None, 5463, 5463),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_files_are_the_published_ones(corpora, name):
    for split, count in zip(("train", "dev", "test"), PUBLISHED[name], strict=True):
        found = load_glue(name, split, corpora)
        if count is None:
            assert (len(found), found.is_slice) == (8999, True)
            continue
        assert (len(found), found.is_slice, found.left_out) == (count, False, 0)
        if split == "test":
            assert found.ids == [str(i) for i in range(count)]


def test_real_labels_are_those_of_independent_reading(corpora):
    """Shares of labels, counted by the csv module; CoLA's are known from its paper: about 70 % acceptable."""

    def column(name: str, at: int, skip: int = 1) -> list[str]:
        with (corpora / "glue" / name).open(encoding="utf-8-sig", newline="") as file:
            return [row[at] for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)][skip:]

    cola = load_glue("cola", "train", corpora)
    assert cola.require_labels().tolist() == [int(label) for label in column("CoLA/train.tsv", 1, 0)]
    assert cola.first == column("CoLA/train.tsv", 3, 0)
    assert 0.70 < cola.require_labels().mean() < 0.71
    mrpc = load_glue("mrpc", "dev", corpora)
    assert (mrpc.first, mrpc.second) == (column("MRPC/dev.tsv", 3), column("MRPC/dev.tsv", 4))
    assert mrpc.require_labels().sum() == 279  # the baseline of BERT's papers: 279 / 408 = 68.4 %
    stsb = load_glue("stsb", "dev", corpora)
    np.testing.assert_allclose(stsb.require_labels(), [float(x) for x in column("STS-B/dev.tsv", 9)], rtol=1e-6)
    assert stsb.second == column("STS-B/dev.tsv", 8)
    rte = load_glue("rte", "dev", corpora)
    assert [GLUE["rte"].labels[i] for i in rte.require_labels()] == column("RTE/dev.tsv", 3)  # type: ignore[index]
    assert int((rte.require_labels() == 0).sum()) == 146  # 146 / 277 = 52.7 %, the majority class


# how the hub names the columns of each task
COLUMNS = {
    "cola": ("sentence",), "sst2": ("sentence",), "mrpc": ("sentence1", "sentence2"), "qqp": ("question1", "question2"),
    "stsb": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis"), "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"), "wnli": ("sentence1", "sentence2"),
}  # fmt: skip
HUB_SPLITS = {
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


def hub_rows(task: str, labels: list) -> list[dict]:
    names = COLUMNS[task]
    return [{**{name: f"{name} {i}" for name in names}, "label": label, "idx": i + 3} for i, label in enumerate(labels)]


@pytest.mark.parametrize("task", GLUE)
def test_columns_and_labels_of_the_hub(hub, tmp_path, task):
    labels = [3.8, 0.0] if task == "stsb" else [1, 0]
    module = hub(hub_rows(task, labels))
    found = load_glue(task, "train", cache=tmp_path)
    assert found.first == [f"{COLUMNS[task][0]} {i}" for i in range(2)]
    assert found.second == ([f"{COLUMNS[task][1]} {i}" for i in range(2)] if len(COLUMNS[task]) == 2 else None)
    np.testing.assert_allclose(found.require_labels(), labels, rtol=1e-6)
    assert (found.ids, found.path, found.is_slice, len(found.sha256)) == (["3", "4"], None, True, 64)
    ((path, name, split, revision, cache),) = module.calls
    assert (path, name, split, cache) == ("nyu-mll/glue", task, "train", str(tmp_path / "hub"))
    assert len(revision) == 40
    hub(hub_rows(task, labels[::-1]))
    assert load_glue(task, "train").sha256 != found.sha256


def test_splits_of_the_hub(hub):
    for (task, split), names in HUB_SPLITS.items():
        module = hub(hub_rows(task, [-1 if split in GLUE[task].test_splits else 0] * 2))
        found = load_glue(task, split)
        assert module.calls[0][1:3] == names
        assert (found.labels is None) == (split in GLUE[task].test_splits)


def test_a_label_outside(hub):
    hub(hub_rows("mnli", [0, 3]))
    with pytest.raises(InputError, match=r"row 1: the label is 3; allowed: entailment, neutral, contradiction"):
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
    made = datasets.Dataset.from_list(hub_rows("rte", [1, 0, 1]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **keys: made)
    found = load_glue("rte", "train")
    assert found.require_labels().tolist() == [1, 0, 1]
    assert found.second == ["sentence2 0", "sentence2 1", "sentence2 2"]
