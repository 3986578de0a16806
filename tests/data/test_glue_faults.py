"""Faults of files of GLUE: one clear message each, with file, line and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullrank.config.glue import GLUE
from fullrank.core.errors import FullRankError, InputError
from fullrank.data.glue import load_glue

RTE = "index\tsentence1\tsentence2\tlabel\n"
STSB = "index\tsentence1\tsentence2\tscore\n"
MNLI = "index\tsentence1\tsentence2\tgold_label\n"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"

# name: task, file, its text, message
FILES = {
    "empty": ("rte", "dev.tsv", "", r"dev\.tsv is empty"),
    "header only": ("rte", "dev.tsv", RTE, r"dev\.tsv holds no rows"),
    "no label column": (
        "rte", "dev.tsv", "index\tsentence1\tsentence2\n0\ta\tb\n",
        r"no column 'label'; expected are sentence1, sentence2, label, found are index, sentence1, sentence2",
    ),
    "commas": ("stsb", "dev.tsv", "sentence1,sentence2,score\na,b,5\n", r"no column 'sentence1', .*sentence1,sentence2,score"),
    "cut in a line": (
        "rte", "dev.tsv", RTE + "0\ta\tb\tentailment\n1\ta\tb",
        r"dev\.tsv, line 3: 3 fields, expected are 4 \(index, sentence1, sentence2, label\); the file is cut short",
    ),
    "cut in a label": (
        "rte", "dev.tsv", RTE + "0\ta\tb\tentailment\n1\ta\tb\tentail",
        r"line 3: the label is 'entail'; allowed: entailment, not_entailment",
    ),
    "a test file as dev": ("cola", "dev.tsv", "index\tsentence\n0\tSo.\n", r"no column 'label'"),
    "label out of range": ("cola", "dev.tsv", "gj04\t2\t\tFine.\n", r"line 1: the label is '2'; allowed: 0, 1 \(unacceptable"),
    "label of no number": ("sst2", "dev.tsv", "sentence\tlabel\ngood\tyes\n", r"line 2: the label is 'yes'; allowed: 0, 1"),
    "an id where names stand": (
        "mnli", "train.tsv", MNLI + "0\ta\tb\t0\n", r"line 2: the label is '0'; allowed: entailment, neutral, contradiction",
    ),
    "unlabelled": ("qqp", "dev.tsv", QQP + "0\t1\t2\ta\tb\t-1\n", r"label is '-1' \(as in an unlabelled split\)"),
    "score too great": ("stsb", "dev.tsv", STSB + "0\ta\tb\t5.001\n", r"label is '5\.001'; allowed: a number from 0 to 5"),
    "score nan": ("stsb", "dev.tsv", STSB + "0\ta\tb\tnan\n", r"label is 'nan'"),
    "JSON cut": (
        "rte", "dev.jsonl", '{"sentence1": "a", "sentence2": "b", "label": 1}\n{"sentence1"', r"line 2: not a JSON object",
    ),
    "JSON key": (
        "qnli", "dev.jsonl", '{"sentence": "a", "label": 1}\n',
        r"dev\.jsonl, line 1: no column 'question'; expected are question, sentence, label, found are sentence, label",
    ),
    "JSON type": ("cola", "dev.jsonl", '{"sentence": 5, "label": 1}\n', r"line 1: sentence is 5, a text is wanted"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_faults_of_files(tmp_path, case):
    task, name, text, message = FILES[case]
    path = tmp_path / GLUE[task].folder / name
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        load_glue(task, Path(name).stem, tmp_path)
    said = str(caught.value)
    assert str(path) in said
    assert "\n" not in said
    assert len(said) < 400 + len(str(path))


def test_not_utf8_names_the_line(tmp_path):
    (tmp_path / "dev.tsv").write_bytes(b"gj04\t1\t\tFine.\ngj04\t1\t\tCaf\xe9.\n")
    with pytest.raises(
        InputError, match=r"dev\.tsv is not UTF-8 text: line 2 has the byte 0xe9 at offset .* \(convert the file"
    ):
        load_glue("cola", "dev", tmp_path)
    (tmp_path / "dev.tsv").write_bytes("gj04\t1\t\tFine.\n".encode("utf-16"))
    with pytest.raises(InputError, match="line 1 has the byte 0xff"):
        load_glue("cola", "dev", tmp_path)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(
        InputError, match=r"data\.dir: no such folder: .*nowhere; give the folder that holds CoLA/train\.tsv"
    ):
        load_glue("cola", "train", tmp_path / "nowhere")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match=r"file is a file; give the folder that holds MNLI/dev_matched\.tsv"):
        load_glue("mnli", "dev", tmp_path / "file")
    (tmp_path / "CoLA").mkdir()
    (tmp_path / "CoLA" / "test.tsv").write_text("x", encoding="utf-8")
    with pytest.raises(
        InputError,
        match=r"GLUE CoLA: no file CoLA/train\.tsv in .*; found there: test\.tsv\. Without a folder .*nyu-mll/glue",
    ):
        load_glue("cola", "train", tmp_path)
    (tmp_path / "CoLA" / "train.tsv").mkdir()
    with pytest.raises(InputError, match=r"no file CoLA/train\.tsv"):
        load_glue("cola", "train", tmp_path)


@pytest.mark.parametrize(
    ("task", "split", "message"),
    [
        ("colla", "dev", "'colla'; did you mean 'cola'"),
        ("superglue", "dev", "'superglue'.*cola, mnli"),
        ("cola", "valid", "'valid'.*dev, test, train"),
        ("mnli", "dev_mismatch", "did you mean 'dev_mismatched'"),
        ("rte", "ax", "'ax'"),
    ],
)
def test_unknown_names(tmp_path, task, split, message):
    with pytest.raises(InputError, match=message):
        load_glue(task, split, tmp_path)


def test_torn_lines_of_the_older_qqp_are_left_out_and_told(tmp_path):
    rows = [f"{i}\t1\t2\tq{i}\tr\t{i % 2}" for i in range(300)]
    torn = ["7\t1\t2\tWas he a real", '"\tWas Muhammad a real historical figure?\t0']
    path = tmp_path / "QQP" / "train.tsv"
    path.parent.mkdir()
    path.write_text(QQP + "\n".join([*rows[:7], *torn, *rows[7:]]) + "\n", encoding="utf-8")
    told: list[str] = []
    found = load_glue("qqp", "train", tmp_path, report=told.append)
    assert (len(found), found.left_out) == (300, 2)
    assert found.ids == [str(i) for i in range(300)]
    assert found.require_labels().tolist() == [i % 2 for i in range(300)]
    assert any("2 torn lines" in line for line in told)
    path.write_text(QQP + "\n".join([*rows, *torn * 51]) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 302: 4 fields, expected are 6"):
        load_glue("qqp", "train", tmp_path)


def test_both_releases_of_qqp_are_whole():
    task = GLUE["qqp"]
    assert task.is_published("train", 363_846)
    assert task.is_published("train", 363_849)
    assert not task.is_published("train", 363_847)
    assert not task.is_published("dev", 0)


bits = st.one_of(
    st.sampled_from(
        ["0", "1", "entailment", "neutral", "5.0", "nan", "\t", "\n", "\r\n", '"', "label", "sentence1", "{", "}"]
    ),
    st.text(max_size=6),
)


@given(task=st.sampled_from(sorted(GLUE)), headed=st.booleans(), parts=st.lists(bits, max_size=30), jsonl=st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_gives_rows_or_one_line_of_explanation(tmp_path, task, headed, parts, jsonl):
    """Never another exception, and what is accepted has as many labels as sentences."""
    info = GLUE[task]
    header = "\t".join((*info.sentences, info.label_column)) + "\n" if headed else ""
    for name in ("train.tsv", "train.jsonl"):
        (tmp_path / name).unlink(missing_ok=True)
    path = tmp_path / ("train.jsonl" if jsonl else "train.tsv")
    path.write_bytes((header + "".join(parts)).encode("utf-8", "surrogatepass"))
    try:
        found = load_glue(task, "train", tmp_path)
    except FullRankError as error:
        refused = error
    else:
        assert len(found.first) == len(found.require_labels()) == len(found.ids) > 0
        assert found.second is None or len(found.second) == len(found)
        return
    assert isinstance(refused, InputError)
    assert str(path) in str(refused)
