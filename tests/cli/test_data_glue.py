"""`fullrank data` with tasks to fine-tune on, GLUE and SQuAD: listed, read through and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import called

from fullrank.config.finetune import TASKS
from fullrank.config.glue import GLUE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole development split of WNLI, three rows for training, and STS-B without a development split."""
    wnli, stsb = tmp_path / "WNLI", tmp_path / "STS-B"
    for place in (wnli, stsb):
        place.mkdir()
    header = "index\tsentence1\tsentence2\t"
    rows = [f"{i}\ta\tb\t{int(i % 4 == 0)}\n" for i in range(71)]
    (wnli / "dev.tsv").write_text(header + "label\n" + "".join(rows), encoding="utf-8")
    (wnli / "train.tsv").write_text(header + "label\n" + "".join(rows[:4]), encoding="utf-8")
    (stsb / "train.tsv").write_text(header + "score\n0\ta\tb\t1.0\n1\ta\tb\t4.0\n", encoding="utf-8")
    return tmp_path


def test_every_task_is_listed_with_counts_and_the_hub():
    code, out, _ = called("data", "list", "--json")
    assert code == 0
    listed = {entry["name"]: entry for entry in json.loads(out)}
    assert [name for name in listed if name in TASKS] == list(TASKS)
    for name, task in GLUE.items():
        entry = listed[f"glue/{name}"]
        assert entry["published"] == dict(task.sizes)
        assert entry["hub"] == f"nyu-mll/glue, {name}"
        assert entry["unit"] == "rows"
        assert set(entry["files"]) == set(task.splits)
    assert listed["squad"]["published"] == {"train": 87_599, "dev": 10_570}
    assert listed["squad-v2"]["hub"] == "rajpurkar/squad_v2"
    code, out, _ = called("data", "list")
    assert "published: train 8,551, dev 1,043, test 1,063" in out
    assert "files: train CoLA/train.tsv, dev CoLA/dev.tsv, test CoLA/test.tsv" in out
    assert "dev MNLI/dev_matched.tsv, dev_mismatched MNLI/dev_mismatched.tsv" in out


def test_a_task_is_read_through_and_counted(folder):
    code, out, err = called("data", "prepare", "glue/wnli", "--from", folder)
    assert code == 0, err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "GLUE WNLI (slice), Winograd Natural Language Inference: 2 classes, accuracy"
    assert lines[1:] == [
        f"train 4 rows (published 635) not_entailment 75.0 %, entailment 25.0 % {folder / 'WNLI' / 'train.tsv'}",
        f"dev 71 rows (as published) not_entailment 74.6 %, entailment 25.4 % {folder / 'WNLI' / 'dev.tsv'}",
        "not there: test",
    ]
    assert err.splitlines() == [
        f"GLUE WNLI (slice): train has 4 rows, published are 635 ({folder / 'WNLI' / 'train.tsv'})"
    ]
    assert not [path for path in folder.rglob("*") if path.suffix != ".tsv" and path.is_file()], "nothing is written"


def test_in_json(folder):
    code, out, _ = called("data", "prepare", "glue/stsb", "--from", folder, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["name"], found["is_slice"], found["labels"], found["missing"]) == (
        "glue/stsb",
        True,
        None,
        ["dev", "test"],
    )
    train = found["splits"]["train"]
    assert (train["rows"], train["published"], train["labels"]) == (2, 5749, {"mean": 2.5, "deviation": 1.5})
    assert len(train["sha256"]) == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["glue/wnl"], "unknown GLUE task 'wnl'; did you mean 'wnli'?"),
        (["glue"], "one task at a time: glue/cola, glue/sst2"),
        (["cola"], "did you mean 'glue/cola'?"),
        (["glue/wnli", "data.tokens=bpe"], "data.tokens=bpe: glue/wnli is read as it is"),
        (["glue/rte"], "no file RTE/train.tsv"),
    ],
)
def test_faults(folder, words, message):
    code, out, err = called("data", "prepare", *words, "--from", folder)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_damaged_split_is_a_fault_not_a_missing_one(folder):
    path = folder / "WNLI" / "dev.tsv"
    path.write_text(path.read_text(encoding="utf-8")[:-3], encoding="utf-8")
    code, out, err = called("data", "prepare", "glue/wnli", "--from", folder)
    assert (code, out) == (2, "")
    assert "dev.tsv, line 72: 3 fields, expected are 4" in err


def question(number: int, answers: list[str]) -> dict:
    return {
        "id": str(number),
        "question": "Who?",
        "is_impossible": not answers,
        "answers": [{"text": text, "answer_start": 0} for text in answers],
    }


def test_squad_is_read_through_and_counted(tmp_path):
    for split, answers in (("train", [["Anna"], []]), ("dev", [["Anna", "Anna"]])):
        asked = [question(i, found) for i, found in enumerate(answers)]
        articles = [{"title": "t", "paragraphs": [{"context": "Anna came.", "qas": asked}]}]
        content = {"version": "v2.0", "data": articles}
        (tmp_path / f"{split}-v2.0.json").write_text(json.dumps(content), encoding="utf-8")
    code, out, err = called("data", "prepare", "squad-v2", "--from", tmp_path)
    assert code == 0, err
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "SQuAD 2.0 (slice): answers as spans of a context",
        "train 2 questions (published 130,319) on 1 contexts, 1 answers, 1 without an answer "
        f"{tmp_path / 'train-v2.0.json'}",
        f"dev 1 questions (published 11,873) on 1 contexts, 2 answers {tmp_path / 'dev-v2.0.json'}",
    ]
    code, out, _ = called("data", "prepare", "squad-v2", "--from", tmp_path, "--json")
    assert json.loads(out)["splits"]["train"]["impossible"] == 1
    code, out, err = called("data", "prepare", "squad", "--from", tmp_path)
    assert (code, out) == (2, "")
    assert "no train-v1.1.json" in err
