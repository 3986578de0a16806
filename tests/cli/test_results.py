"""`fullrank queue` and `fullrank ledger`: a real training from a plan, and its row; pauses of a run."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from cli_runs import SMALL, call_process, called

import fullrank as fr
from fullrank.analysis.size import size
from fullrank.config.load import apply_overrides, read_yaml
from fullrank.reporting.ledger import sealed


def test_a_plan_is_trained_once_and_its_run_goes_into_the_ledger(config: Path, tmp_path: Path) -> None:
    plan, out, small = tmp_path / "plan.yaml", tmp_path / "runs", tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(apply_overrides(read_yaml(config), SMALL)))
    entry = {
        "table": str(small),
        "seeds": [3],
        "set": {"train.steps": 6, "eval.keep_log_probabilities": True},
        "decides": "nothing",
    }
    plan.write_text(yaml.safe_dump({"trainings": [entry]}, sort_keys=False))
    status, listed, _ = called("queue", plan, "--list", "--json", "--out", out)
    (planned,) = json.loads(listed)["trainings"]
    assert (status, planned["state"], planned["decides"]) == (0, "open", "nothing")
    assert planned["folder"].endswith("-steps=6-keep_log_probabilities=True-seed3")
    done = call_process("queue", plan, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert "1 of 1: " in done.stderr
    (trained,) = json.loads(done.stdout)["trainings"]
    assert (trained["state"], trained["step"], trained["steps"]) == ("finished", 6, 6)
    (row,) = map(json.loads, (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert (row["seed"], row["steps"], row["environment"]["threads"]) == (3, 6, 1)
    for split, figures in row["final"].items():
        file = Path(trained["folder"]) / f"log_probabilities-{split}.npy"
        assert row["log_probabilities"][split] == hashlib.sha256(file.read_bytes()).hexdigest()
        kept = np.load(file)
        assert (kept.shape, kept.dtype) == ((figures["tokens"],), np.float32)
        assert -kept.mean(dtype=np.float64) == pytest.approx(figures["nll"], rel=1e-6)
    status, said, error = called("queue", plan, "--out", out)
    assert (status, error) == (0, "")
    assert said.splitlines()[-1] == "1 of 1 finished"
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 1
    entry["set"] = {"train.steps": 6, "eval.every_steps": 2}  # the folder of the first, the settings of another
    Path(planned["folder"]).rename(planned["folder"].replace("keep_log_probabilities=True", "every_steps=2"))
    plan.write_text(yaml.safe_dump({"trainings": [entry]}, sort_keys=False))
    status, said, error = called("queue", plan, "--out", out)
    assert status == 1
    assert "holds a run with another configuration: eval.every_steps is None there, 2 here, " in error
    listed = called("queue", plan, "--out", out, "--list")[1]
    assert (listed.split()[0], listed.splitlines()[-1]) == ("other", "0 of 1 finished")


def test_a_run_pauses_and_is_measured_when_it_goes_on(run: Path, config: Path, tmp_path: Path) -> None:
    paused = tmp_path / "paused"
    for words in (["train", config, *SMALL, "--out", paused, "--until", 7], ["train", paused, "--until", 12]):
        status, said, error = called(*words)
        assert (status, said) == (0, "")
        assert "paused: paused, and not measured; without --until it goes on" in error
        assert not (paused / "result.json").exists()
    assert called("train", paused)[0] == 0
    assert (paused / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert (paused / "result.json").exists()


def test_a_row_of_the_ledger_says_what_the_run_says(run: Path, tmp_path: Path) -> None:
    ledger, runs = tmp_path / "ledger.jsonl", tmp_path / "runs"
    shutil.copytree(run, runs / "run")
    assert called("ledger", "add", run, "--ledger", ledger)[:2] == (0, f"1 of 1 runs added to {ledger}\n")
    assert called("ledger", "add", runs, run, "--ledger", ledger)[1] == f"0 of 2 runs added to {ledger}\n"
    text = ledger.read_text()
    row, result = json.loads(text), json.loads((run / "result.json").read_text())
    assert row["result"] == hashlib.sha256((run / "result.json").read_bytes()).hexdigest()
    kept = {
        "final",
        "last",
        "best",
        "seed",
        "parameters",
        "steps",
        "epochs",
        "ms_per_step",
        "row",
        "scale",
        "protocols",
    }
    assert {key: row[key] for key in kept} == {key: result[key] for key in kept}
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    valid = [[line["step"], pytest.approx(line["ppl"], rel=1e-4)] for line in lines if line["split"] == "valid"]
    assert row["curve"] == valid != []
    assert (row["tokens_seen"], row["wall_seconds"]) == (result["tokens_seen"], result["wall_seconds"])
    assert row["sha256"] == result["corpus"]["sha256"]
    assert row["recipe"] == "run.yaml"
    model = fr.LanguageModel.load(run).config
    assert row["flops_per_token"] == size(model, 8)["flops_per_token"]
    assert str(run.parent) not in text
    assert "/" not in text.replace("tokens/s", "")


def test_the_spectrum_of_an_analysed_run_is_in_its_row(run: Path, tmp_path: Path) -> None:
    """The row is replaced; other rows stay, also old ones that name no result."""
    analysed, ledger = shutil.copytree(run, tmp_path / "run"), tmp_path / "ledger.jsonl"
    called("ledger", "add", analysed, "--ledger", ledger)
    row = json.loads(ledger.read_text())
    old = [sealed({**row, "result": None, "row": name}) for name in ("a", "b")]
    ledger.write_text("".join(json.dumps(row) + "\n" for row in old) + ledger.read_text())
    status, _, error = called("analyze", "spectrum", analysed, "--texts", "3", "--segment-length", "6")
    assert (status, error) == (0, "")
    assert called("ledger", "add", analysed, "--ledger", ledger)[1] == f"1 of 1 runs added to {ledger}\n"
    *first, row = map(json.loads, ledger.read_text().splitlines())
    assert first == old
    layers = json.loads((analysed / "analysis" / "spectrum.json").read_text())["layers"]
    found = np.mean([layer["after"]["effective_rank"] for layer in layers])
    assert row["final"]["attention"]["effective_rank"] == pytest.approx(found)
    assert row["protocols"]["attention"]["words"].startswith("attention weights over 3 segments of 6 tokens")


def test_a_ledger_that_was_changed_by_hand_is_refused(run: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    called("ledger", "add", run, "--ledger", ledger)
    ledger.write_text(ledger.read_text().replace('"seed": 1', '"seed": 2'))
    status, _, error = called("ledger", "add", run, "--ledger", ledger)
    assert (status, "line 1 does not match its checksum" in error) == (2, True)


def test_a_run_that_has_not_finished_is_refused(tmp_path: Path, run: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "run.json"):
        (tmp_path / "run" / name).write_bytes((run / name).read_bytes())
    assert called("ledger", "add", tmp_path, "--ledger", tmp_path / "l")[1] == f"0 of 0 runs added to {tmp_path}/l\n"
    status, _, error = called("ledger", "add", tmp_path / "run", "--ledger", tmp_path / "l")
    assert (status, "not finished (no result.json)" in error) == (2, True)
