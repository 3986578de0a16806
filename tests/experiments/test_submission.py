"""The archive for GLUE's test server: from a run that was trained, of all eleven files, and what is refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fullrank.cli import main
from fullrank.config.glue import GLUE
from fullrank.config.load import build_any, to_yaml
from fullrank.core.errors import InputError
from fullrank.data.glue import write_submission
from fullrank.experiments.submission import pack
from tiny_encoder import WORDS, tiny_encoder

# the server's files and their rows (gluebenchmark.com, FAQ and sample submission)
SERVER = {"AX": 1104, "CoLA": 1063, "MNLI-m": 9796, "MNLI-mm": 9847, "MRPC": 1725, "QNLI": 5463, "QQP": 390_965, "RTE": 3000,
          "SST-2": 1821, "STS-B": 1379, "WNLI": 146}  # fmt: skip


def run_on(folder: Path, task: str) -> Path:
    """A folder as a run on the task leaves it, with predictions of its test sets."""
    folder.mkdir(parents=True)
    config = build_any({"data": {"name": f"glue/{task}"}, "eval": {"test": True}})
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "run.json").write_text("{}")
    draw, labels = np.random.default_rng(0), GLUE[task].labels
    for split in GLUE[task].submission:
        count = GLUE[task].sizes[split]
        given = draw.uniform(0, 5, count) if labels is None else draw.integers(0, len(labels), count)
        write_submission(task, split, given, folder / "submission")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    return {task: run_on(place / task, task) for task in GLUE}


def test_all_tasks_make_the_eleven_files(runs: dict[str, Path], tmp_path: Path) -> None:
    files, missing = pack(list(runs.values()), tmp_path / "glue.zip")
    assert missing == {}
    with zipfile.ZipFile(tmp_path / "glue.zip") as archive:
        assert archive.namelist() == sorted(f"{name}.tsv" for name in SERVER)  # at the root, nothing else
        for name, count in SERVER.items():
            lines = archive.read(f"{name}.tsv").decode("ascii").splitlines()
            assert lines[0] == "index\tprediction"
            assert [line.split("\t")[0] for line in lines[1:]] == list(map(str, range(count)))
        diagnostic = {line.split("\t")[1] for line in archive.read("AX.tsv").decode().splitlines()[1:]}
    assert diagnostic == {"entailment", "neutral", "contradiction"}
    assert files["AX.tsv"] == files["MNLI-mm.tsv"] == runs["mnli"]
    for given, name in (((runs["rte"], runs["mrpc"]), "one.zip"), ((runs["mrpc"], runs["rte"]), "other.zip")):
        pack(given, tmp_path / name)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "other.zip").read_bytes()


def test_a_run_that_was_trained_and_files_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(1)
    folder = tmp_path / "glue" / "WNLI"
    folder.mkdir(parents=True)
    for split, count in (("train", 8), ("dev", 4), ("test", 146)):
        rows = ["index\tsentence1\tsentence2" + ("" if split == "test" else "\tlabel")]
        for i in range(count):
            rows.append(
                "\t".join([str(i), *map(str, draw.choice(WORDS, 2)), *([] if split == "test" else [str(i % 2)])])
            )
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    encoder, run, out = tiny_encoder(tmp_path / "encoder"), tmp_path / "run", tmp_path / "out.zip"
    config = {
        "model": {"pretrained": str(encoder)}, "data": {"name": "glue/wnli", "dir": str(tmp_path / "glue"), "max_length": 16},
        "train": {"steps": 1, "device": "cpu", "keep_model": False}, "eval": {"test": True},
    }  # fmt: skip
    (tmp_path / "my.yaml").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=r"^0?$"):
        main(["finetune", str(tmp_path / "my.yaml"), "--out", str(run), "--quiet"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^0?$"):
        main(["submit", str(run), "--out", str(out), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["files"] == {"WNLI.tsv": str(run)}
    assert said["missing"] == {
        "AX.tsv": "mnli", "CoLA.tsv": "cola", "MNLI-m.tsv": "mnli", "MNLI-mm.tsv": "mnli", "MRPC.tsv": "mrpc",
        "QNLI.tsv": "qnli", "QQP.tsv": "qqp", "RTE.tsv": "rte", "SST-2.tsv": "sst2", "STS-B.tsv": "stsb",
    }  # fmt: skip
    with zipfile.ZipFile(out) as archive:
        assert archive.read("WNLI.tsv") == (run / "submission" / "WNLI.tsv").read_bytes()
    with pytest.raises(SystemExit, match=r"^0?$"):
        main(["submit", str(run), "--out", str(out)])
    assert "missing: AX.tsv (mnli), CoLA.tsv (cola)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("index", "id", 1), "the first line is 'id\\\\tprediction'"),
        (
            lambda text: text.replace("\n7\t", "\n77\t"),
            r"line 9 is '77\\t\d', the server wants 7 and 0, 1; train it with",
        ),
        (lambda text: text.rsplit("\n", 2)[0], "145 rows, the server wants 146"),
        (lambda text: text.replace("\n0\t", "\n0\tentailment"), "the server wants 0 and 0, 1"),
    ],
)
def test_a_file_that_the_server_would_refuse(runs: dict[str, Path], tmp_path: Path, change, message: str) -> None:
    path = runs["wnli"] / "submission" / "WNLI.tsv"
    whole = path.read_text()
    path.write_text(change(whole))
    try:
        with pytest.raises(InputError, match=message):
            pack([runs["wnli"]], tmp_path / "glue.zip")
    finally:
        path.write_text(whole)
    assert not list(tmp_path.iterdir())


def test_runs_that_cannot_be_packed(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"CoLA.tsv: predicted by both .*; give one run of each task"):
        pack([runs["cola"], runs["cola"]], tmp_path / "glue.zip")
    with pytest.raises(InputError, match="no such folder"):
        pack([tmp_path / "nowhere"], tmp_path / "glue.zip")
    (runs["rte"] / "submission" / "RTE.tsv").rename(tmp_path / "RTE.tsv")
    with pytest.raises(InputError, match=r"no submission/RTE.tsv; train it with eval.test=true"):
        pack([runs["rte"]], tmp_path / "glue.zip")
    (tmp_path / "RTE.tsv").rename(runs["rte"] / "submission" / "RTE.tsv")
    text = (runs["stsb"] / "submission" / "STS-B.tsv").read_text()
    (runs["stsb"] / "submission" / "STS-B.tsv").write_text(text.replace("\n3\t", "\n3\t9"))
    with pytest.raises(InputError, match="the server wants 3 and a number from 0 to 5"):
        pack([runs["stsb"]], tmp_path / "glue.zip")
    (runs["stsb"] / "submission" / "STS-B.tsv").write_text(text)
