"""`fullrank data` with tasks to fine-tune on, GLUE and SQuAD: listed, read through and counted."""

import json

import pytest

from cli_runs import called, document


@pytest.fixture
def folder(tmp_path):
    """A whole development split of WNLI, three rows for training, and STS-B without a development split."""
    wnli = tmp_path / "WNLI"
    stsb = tmp_path / "STS-B"
    for task in (wnli, stsb):
        task.mkdir()
    header = "index\tsentence1\tsentence2\t"
    rows = [f"{i}\ta\tb\t{int(i % 4 == 0)}\n" for i in range(71)]
    (wnli / "dev.tsv").write_text(header + "label\n" + "".join(rows), encoding="utf-8")
    (wnli / "train.tsv").write_text(header + "label\n" + "".join(rows[:4]), encoding="utf-8")
    (stsb / "train.tsv").write_text(header + "score\n0\ta\tb\t1.0\n1\ta\tb\t4.0\n", encoding="utf-8")
    return tmp_path


def test_a_task_is_read_through_and_counted(folder):
    code, out, err = called("data", "prepare", "glue/wnli", "--from", folder, "--json")
    assert code == 0, err
    task = json.loads(out)
    assert (task["name"], task["is_slice"]) == ("glue/wnli", True)
    train, dev = task["splits"]["train"], task["splits"]["dev"]
    assert (train["rows"], train["published"], train["is_slice"]) == (4, 635, True)
    assert (dev["rows"], dev["is_slice"], dev["source"]) == (71, False, str(folder / "WNLI" / "dev.tsv"))
    assert [line.startswith("glue/wnli (slice): train has 4 rows") for line in err.splitlines()] == [True]
    assert not [path for path in folder.rglob("*") if path.suffix != ".tsv" and path.is_file()], "nothing is written"


def question(number, answers):
    return {
        "id": str(number),
        "question": "Who?",
        "is_impossible": not answers,
        "answers": [{"text": text, "answer_start": 0} for text in answers],
    }


def test_squad_is_read_through_and_counted(tmp_path):
    for split, answers in (("train", [["Anna"], []]), ("dev", [["Anna", "Anna"]])):
        questions = [question(i, texts) for i, texts in enumerate(answers)]
        articles = [{"title": "t", "paragraphs": [{"context": "Anna came.", "qas": questions}]}]
        content = {"version": "v2.0", "data": articles}
        (tmp_path / f"{split}-v2.0.json").write_text(json.dumps(content), encoding="utf-8")
    task = document("data", "prepare", "squad-v2", "--from", tmp_path)
    assert (task["name"], task["is_slice"]) == ("squad-v2", True)
    counts = ("rows", "published", "source")
    assert [task["splits"]["train"][key] for key in counts] == [2, 130_319, str(tmp_path / "train-v2.0.json")]
    assert [task["splits"]["dev"][key] for key in counts[:2]] == [1, 11_873]
    code, out, err = called("data", "prepare", "squad", "--from", tmp_path)
    assert (code, out) == (2, "")
    assert "train-v1.1.json" in err
