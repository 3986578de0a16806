"""`fullrank finetune` and what other verbs do with its runs and recipes: a tiny encoder, tiny files, no network."""

import json
from pathlib import Path

import numpy as np
import pytest

from cli_runs import called
from fullrank.config.finetune import GLUE
from fullrank.evaluation.tasks import glue_scores
from run_files import read_result
from tiny_encoder import tiny_encoder, write_cola

SETTINGS = [
    "data.max_length=16", "train.batch_size=8", "train.learning_rate=5e-3", "train.device=cpu", "train.threads=1",
    "train.keep_model=false", "train.steps=4", "train.precision=fp32",
]  # fmt: skip


def test_rows_and_seeds_in_one_command(tmp_path):
    encoder = tiny_encoder(tmp_path / "encoder")
    glue = write_cola(tmp_path / "glue")
    code, out, err = called(
        "reproduce", "mixhead/table5", "--scale", "small", "--rows", "cola-plain,cola-b", "--seeds", 2,
        "--out", tmp_path / "runs", "--from", glue, f"model.pretrained={encoder}", *SETTINGS, "--json",
    )  # fmt: skip
    assert code == 0, err
    content = json.loads(out)
    runs = {(run["row"], run["seed"]): run for run in content["runs"]}
    assert {(*key, run["baseline"]) for key, run in runs.items()} == {
        ("cola-plain", 1, None), ("cola-plain", 2, None), ("cola-b", 1, "cola-plain"), ("cola-b", 2, "cola-plain"),
    }  # fmt: skip
    assert all(run["is_slice"] for run in runs.values())
    assert (tmp_path / "runs" / "report.html").is_file()
    scores = {
        (record["labels"]["row"], record["labels"]["seed"]): record["value"]
        for record in content["records"]
        if record["measure"] == "matthews_correlation" and "seed" in record["labels"]
    }
    papers = [record for record in content["records"] if record["measure"] == "matthews_correlation_paper"]
    assert (52.6, "test server") in [(paper["value"], paper["protocol"]) for paper in papers]
    for key, run in runs.items():  # the score is that of the saved predictions
        folder = Path(run["folder"])
        table = np.loadtxt(folder / "predictions-dev.tsv", skiprows=1)
        assert scores[key] == pytest.approx(
            100 * glue_scores(GLUE["cola"], table[:, 2], table[:, 1])["matthews_correlation"]
        )
        parameters = read_result(folder)["parameters"]
        assert parameters["mixing"] == (key[0] == "cola-b") * 2 * (4 * 4 + 4 * 4)  # H^2 of B and D H of W in two layers


@pytest.mark.parametrize(("recipe", "row"), [("mixhead/table5", "mnli-b"), ("mixhead/table6", "plain")])
def test_a_table_is_tried_without_any_file(tmp_path, recipe, row):
    """Scale tiny: invented sentences and random weights, and the report says so."""
    words = ("finetune", recipe, "--scale", "tiny", "--row", row, "train.steps=2", "data.max_train=40", "data.max_eval=20",
             "train.epochs=null", "--out", tmp_path / "run", "--quiet")  # fmt: skip
    code, out, err = called(*words)
    assert (code, err) == (0, ""), err
    assert "(invented)" in out
    result = read_result(tmp_path / "run")
    assert result["task"] == ("squad" if recipe.endswith("6") else "glue/mnli") + " (invented)"
    assert set(result["final"]) == ({"dev"} if recipe.endswith("6") else {"dev", "dev_mismatched"})
