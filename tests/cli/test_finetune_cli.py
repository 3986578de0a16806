"""`fullrank finetune` and what other verbs do with its runs and recipes: a tiny encoder, tiny files, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from finetune_files import SETTINGS, write_cola, write_encoder, write_rte

from fullrank.cli import main
from fullrank.config.finetune import GLUE
from fullrank.evaluation.tasks import glue_scores
from fullrank.experiments.finetuning import ExampleObjective


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Place(NamedTuple):
    """Folders of encoder and files; `say` runs the command in this process."""

    encoder: Path
    glue: Path
    capture: pytest.CaptureFixture[str]

    def say(self, *words: object) -> Said:
        code = 0
        self.capture.readouterr()
        try:
            main([str(word) for word in words])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        found = self.capture.readouterr()
        return Said(code, found.out, found.err)

    def given(self, *more: str) -> list[str]:
        return [f"model.pretrained={self.encoder}", *SETTINGS, *more]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("finetune")
    glue = folder / "glue"
    write_cola(glue)
    write_rte(glue)
    return write_encoder(folder / "encoder"), glue


@pytest.fixture
def place(files, capsys, monkeypatch) -> Place:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    return Place(*files, capsys)


def write_config(path: Path, place: Place, **sections: dict[str, Any]) -> Path:
    """A configuration as a user writes it."""
    raw = {
        "model": {"pretrained": str(place.encoder)},
        "data": {"name": "glue/cola", "dir": str(place.glue), "max_length": 16},
        "train": {"steps": 6, "batch_size": 8, "learning_rate": 5e-3, "device": "cpu", "threads": 1, "log_every_steps": 2,
                  "keep_model": False},
    }  # fmt: skip
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def matthews(guessed: np.ndarray, right: np.ndarray) -> float:
    return glue_scores(GLUE["cola"], guessed, right)["matthews_correlation"]


def test_rows_and_seeds_in_one_command(place, tmp_path):
    found = place.say(
        "reproduce", "mixhead/table5", "--scale", "small", "--rows", "cola-plain,cola-b", "--seeds", 2,
        "--out", tmp_path / "runs", "--from", place.glue, *place.given("train.steps=4", "train.precision=fp32"), "--json",
    )  # fmt: skip
    assert found.code == 0, found.err
    runs = {(run["row"], run["seed"]): run for run in found.json["runs"]}
    assert {(*key, run["baseline"]) for key, run in runs.items()} == {
        ("cola-plain", 1, None), ("cola-plain", 2, None), ("cola-b", 1, "cola-plain"), ("cola-b", 2, "cola-plain"),
    }  # fmt: skip
    assert all(run["is_slice"] for run in runs.values())
    assert (tmp_path / "runs" / "report.html").is_file()
    scores = {
        (record["labels"]["row"], record["labels"]["seed"]): record["value"]
        for record in found.json["records"]
        if record["measure"] == "matthews_correlation" and "seed" in record["labels"]
    }
    papers = [record for record in found.json["records"] if record["measure"] == "matthews_correlation_paper"]
    assert (52.6, "test server") in [(paper["value"], paper["protocol"]) for paper in papers]
    for key, run in runs.items():  # the score is that of the predictions that were kept
        folder = Path(run["folder"])
        table = np.loadtxt(folder / "predictions-dev.tsv", skiprows=1)
        assert scores[key] == pytest.approx(100 * matthews(table[:, 2], table[:, 1]))
        parameters = json.loads((folder / "result.json").read_text())["parameters"]
        assert parameters["mixing"] == (key[0] == "cola-b") * 2 * (4 * 4 + 4 * 4)  # H^2 of B and D H of W in two layers
    again = place.say("report", tmp_path / "runs", "--out", tmp_path / "again.html")
    assert again.code == 0, again.err


@pytest.mark.full
def test_a_run_that_died_goes_on_as_if_it_had_not(place, tmp_path, monkeypatch):
    """With dropout, mixing and cross-head: figures, every line of metrics and predictions are the same."""
    path = write_config(
        tmp_path / "my.yaml", place,
        model={"attention": {"mix": "position_wise", "cross_head": 0.3}},
        train={"steps": 10, "save_every_steps": 4},
        eval={"every_steps": 4},
    )  # fmt: skip
    whole, died = tmp_path / "whole", tmp_path / "died"
    assert place.say("finetune", path, "--out", whole, "--quiet").code == 0
    calls = 0
    step = ExampleObjective.__call__

    def dies(self: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise RuntimeError("the machine went down")
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(ExampleObjective, "__call__", dies)
        found = place.say("finetune", path, "--out", died, "--quiet")
    assert found.code == 1
    assert "the machine went down" in found.err
    assert not (died / "result.json").exists()
    listed = place.say("report", died, "--out", tmp_path / "died.html")
    assert "not finished" in listed.out
    assert place.say("train", died, "--quiet").code == 0  # which hands a run of fine-tuning over
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, died)]
    for key in ("final", "best", "steps", "tokens_seen", "sha256", "parameters", "examples", "epochs"):
        assert results[0][key] == results[1][key], key
    for name in ("metrics.jsonl", "predictions-dev.tsv"):
        assert (whole / name).read_bytes() == (died / name).read_bytes(), name


@pytest.mark.parametrize(("recipe", "row"), [("mixhead/table5", "mnli-b"), ("mixhead/table6", "plain")])
def test_a_table_is_tried_without_any_file(place, tmp_path, recipe, row):
    """Scale tiny: invented sentences and random weights, and the report says so."""
    words = ("finetune", recipe, "--scale", "tiny", "--row", row, "train.steps=2", "data.max_train=40", "data.max_eval=20",
             "train.epochs=null", "train.keep_model=false", "--out", tmp_path / "run", "--quiet")  # fmt: skip
    found = place.say(*words)
    assert found.code == 0, found.err
    assert "(invented)" in found.out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["task"] == ("squad" if recipe.endswith("6") else "glue/mnli") + " (invented)"
    assert set(result["final"]) == ({"dev"} if recipe.endswith("6") else {"dev", "dev_mismatched"})
    given = place.say(*words[:-3], "data.dir=x", "--out", tmp_path / "other")
    assert given.code == 2
    assert "data.invented: goes with `data.dir: null`" in given.err
