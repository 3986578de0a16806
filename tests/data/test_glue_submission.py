"""Files for GLUE's test server, read back as the server would, and what is refused before they are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fullrank.config.glue import GLUE
from fullrank.core.errors import InputError
from fullrank.data.glue import Examples, load_glue, submission_rows, write_submission

# file, rows and what may stand in it, as the server's instructions and sample submission have them
SERVER = {
    ("cola", "test"): ("CoLA.tsv", 1063, {"0", "1"}),
    ("sst2", "test"): ("SST-2.tsv", 1821, {"0", "1"}),
    ("mrpc", "test"): ("MRPC.tsv", 1725, {"0", "1"}),
    ("qqp", "test"): ("QQP.tsv", 390_965, {"0", "1"}),
    ("stsb", "test"): ("STS-B.tsv", 1379, None),
    ("mnli", "test"): ("MNLI-m.tsv", 9796, {"entailment", "neutral", "contradiction"}),
    ("mnli", "test_mismatched"): ("MNLI-mm.tsv", 9847, {"entailment", "neutral", "contradiction"}),
    ("mnli", "ax"): ("AX.tsv", 1104, {"entailment", "neutral", "contradiction"}),
    ("qnli", "test"): ("QNLI.tsv", 5463, {"entailment", "not_entailment"}),
    ("rte", "test"): ("RTE.tsv", 3000, {"entailment", "not_entailment"}),
    ("wnli", "test"): ("WNLI.tsv", 146, {"0", "1"}),
}


def predictions(task: str, count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    labels = GLUE[task].labels
    return rng.normal(2.5, 2, count) if labels is None else rng.integers(0, len(labels), count)


@pytest.mark.parametrize("case", SERVER)
def test_files_are_those_of_the_server(tmp_path, case):
    task, split = case
    name, count, allowed = SERVER[case]
    path = write_submission(task, split, predictions(task, count), tmp_path)
    assert path == tmp_path / name
    lines = path.read_bytes().decode("ascii").split("\n")
    assert lines[0] == "index\tprediction"
    assert lines[-1] == ""
    found = [line.split("\t") for line in lines[1:-1]]
    assert [row[0] for row in found] == [str(i) for i in range(count)]
    values = [row[1] for row in found]
    if allowed is not None:
        assert set(values) == allowed
    else:
        assert all(len(value) == 5 and 0 <= float(value) <= 5 for value in values)


def test_classes_have_the_names_of_the_hubs_ids(tmp_path):
    """entailment is 0 in RTE and in MNLI, and 1 in WNLI, as on the hub."""
    given = np.zeros(3000, dtype=int)
    given[1] = 1
    assert write_submission("rte", "test", given, tmp_path).read_text().split("\n")[1:3] == [
        "0\tentailment", "1\tnot_entailment",
    ]  # fmt: skip
    given = np.zeros(1104, dtype=np.int32)
    given[:3] = 2, 1, 0
    assert write_submission("mnli", "ax", given, tmp_path).read_text().split("\n")[1:4] == [
        "0\tcontradiction", "1\tneutral", "2\tentailment",
    ]  # fmt: skip


def test_scores_are_clipped_and_have_three_decimals(tmp_path):
    given = np.full(1379, 2.0, dtype=np.float32)
    given[:4] = -0.5, 7.25, 3.14159, 4.9996
    lines = write_submission("STS-B", "test", given, tmp_path).read_text().split("\n")
    assert lines[1:6] == ["0\t0.000", "1\t5.000", "2\t3.142", "3\t5.000", "4\t2.000"]
    given[0] = -1e-9
    assert write_submission("stsb", "test", given, tmp_path).read_text().split("\n")[1] == "0\t0.000"


def examples(task: str, split: str, ids: list[str]) -> Examples:
    texts = ["x"] * len(ids)
    return Examples(texts, texts, None, ids, GLUE[task], split, is_slice=False, path=Path("wnli.tsv"), sha256="")


def test_ids_of_the_examples_are_written(tmp_path):
    ids = [str(i) for i in range(145, -1, -1)]
    given = np.arange(146) % 2
    path = write_submission("wnli", "test", given, tmp_path, examples("wnli", "test", ids))
    assert submission_rows(GLUE["wnli"], "test", examples("wnli", "test", ids)) == list(range(145, -1, -1))
    lines = path.read_text().splitlines()
    assert lines[1:] == [f"{i}\t{(145 - i) % 2}" for i in range(146)], (
        "the server's order, each with its own prediction"
    )


NO_LABELS = np.zeros(146, dtype=int)
FAULTS = {
    "unknown task": (("wnl", "test", NO_LABELS), "unknown GLUE task 'wnl'; did you mean 'wnli'"),
    "unknown split": (("wnli", "tset", NO_LABELS), "has no split 'tset'; did you mean 'test'"),
    "a split with labels": (("wnli", "dev", NO_LABELS[:71]), r"a submission is of a test split \(test\), not dev"),
    "too few": (("wnli", "test", NO_LABELS[:145]), "145 predictions for the split test; the test server wants .* 146 rows"),
    "none": (("wnli", "test", []), "wnli|WNLI: .*(0 predictions|given is float64)"),
    "logits": (("wnli", "test", np.zeros((146, 2))), r"shape \(146, 2\): one for each row"),
    "real classes": (("wnli", "test", NO_LABELS * 1.0), "class ids, integers; given is float64"),
    "too great": (("wnli", "test", NO_LABELS + 2), r"prediction 0 is 2; allowed: 0 to 1 \(not_entailment, entailment\)"),
    "below": (("wnli", "test", NO_LABELS - 1), "prediction 0 is -1"),
    "nan": (("stsb", "test", np.full(1379, np.nan)), "finite numbers"),
    "text": (("stsb", "test", ["a"] * 1379), "finite numbers"),
    "other examples": (
        ("wnli", "test", NO_LABELS, None, examples("rte", "test", ["0"])),
        "predictions of GLUE WNLI test with examples of RTE test",
    ),
    "a slice": (
        ("wnli", "test", NO_LABELS, None, examples("wnli", "test", ["0", "1"])),
        "the 2 ids of wnli.tsv are not 0 to 145, each once",
    ),
    "an id twice": (
        ("wnli", "test", NO_LABELS, None, examples("wnli", "test", ["0", *map(str, range(145))])),
        "the 146 ids of wnli.tsv are not 0 to 145, each once",
    ),
    "other ids": (
        ("wnli", "test", NO_LABELS, None, examples("wnli", "test", [str(i) for i in range(1, 147)])), "are not 0 to 145",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_faults(tmp_path, case):
    (task, split, given, *rest), message = FAULTS[case]
    with pytest.raises(InputError, match=message):
        write_submission(task, split, given, tmp_path, *rest[1:])
    assert not list(tmp_path.iterdir())


def test_every_test_split_has_its_file() -> None:
    files = {(task.name, split): name for task in GLUE.values() for split, name in task.submission.items()}
    assert files == {case: name for case, (name, _, _) in SERVER.items()}


@pytest.mark.parametrize("task", ["cola", "sst2", "mrpc", "stsb", "qnli", "rte"])
def test_the_real_test_files_fit(corpora, tmp_path, task):
    found = load_glue(task, "test", corpora)
    path = write_submission(task, "test", predictions(task, len(found)), tmp_path, found)
    assert len(path.read_text().splitlines()) == len(found) + 1
