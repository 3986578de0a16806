"""The command line as a new user meets it: right once and wrong once."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

import fullrank as fr
from cli_runs import SMALL, call, call_process, command, document, environment, succeeds
from fullrank.core.errors import InputError
from fullrank.data import load_tokenizer
from run_files import read_metrics, read_result


@pytest.mark.parametrize(
    ("words", "streams", "status"),
    [
        pytest.param("config validate mixhead/table1-vanilla", "2>&-", 0, marks=pytest.mark.full),
        pytest.param("config validate mixhead/table1-vanilla", ">&- 2>&- <&-", 0, marks=pytest.mark.full),
        pytest.param("config validate nowhere.yaml", "2>&-", 2, marks=pytest.mark.full),
        pytest.param("config validate nowhere.yaml", "2>/dev/full", 2, marks=pytest.mark.full),
        ("recipes list --json", ">/dev/full", 1),
        pytest.param("recipes list --json", "| true", 0, marks=pytest.mark.full),
        ("info mixhead/table5 --row cola-b", "| true", 0),  # with transformers, and Triton where there is one
    ],
)
def test_streams_that_nobody_reads_change_no_exit_status(words, streams, status):
    script = f"set -o pipefail; {shlex.join(command())} {words} {streams}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment())
    assert process.returncode == status
    assert process.stderr == ("fullrank: no space left on the disk\n" if status == 1 else "")


def test_a_run_folder_holds_what_it_promises(run):
    files = {"config.yaml", "metrics.jsonl", "timing.jsonl", "result.json", "report.html", "tokenizer.json"}
    assert files <= {path.name for path in run.iterdir()}
    result = read_result(run)
    assert {"final", "protocol", "seed", "environment", "wall_seconds", "ms_per_step", "parameters"} <= set(result)
    assert result["final"]["test"]["perplexity"] < result["corpus"]["unigram_perplexity"]["test"]
    lines = read_metrics(run)
    assert {line["split"] for line in lines} == {"train", "valid"}
    assert all({"step", "split", "nll", "ppl", "tokens"} <= set(line) for line in lines)


def test_generate_in_python_writes_what_the_command_writes(run):
    process = call("generate", run, "--prompt", "the cats", "--max-new-tokens", 12, "--seed", 3, "--device", "cpu")
    assert process.stderr == "the model reads 8 tokens at once; where the text is longer, its last 4 are read anew\n"
    options = {"max_new_tokens": 12, "seed": 3}
    assert fr.generate(run, "the cats", device_name="cpu", **options) + "\n" == process.stdout
    model = fr.LanguageModel.load(run)
    assert model.trained_length == 8
    assert fr.generate(model, "the cats", tokenizer=load_tokenizer(run), **options) + "\n" == process.stdout
    with pytest.raises(InputError, match="give a LanguageModel and its tokenizer"):
        fr.generate(model, "the cats")


def test_debug_shows_the_traceback_before_the_error():
    plain = call("train", "nowhere.yaml")
    debugged = call("train", "nowhere.yaml", "--debug")
    assert (plain.returncode, debugged.returncode, plain.stderr.count("\n")) == (2, 2, 1)
    assert debugged.stderr.startswith("Traceback")
    assert debugged.stderr.endswith(plain.stderr)


RECIPE = """\
table: A small table
rows:
  plain: {{paper: {{valid: 3.0, test: 3.0}}}}
  b: {{set: {{model.attention.mix: position_wise}}}}
base:
  model: {{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 4}}
  data: {{name: text, train: {text}/train.txt, valid: {text}/valid.txt, test: {text}/test.txt, cache: {text}/cache}}
  train: {{steps: 4, batch_size: 4, segment_length: 8, threads: 1, device: cpu}}
"""


def test_reproduce_trains_what_is_missing_and_sets_the_paper_beside_it(text, tmp_path):
    table = tmp_path / "table.yaml"
    table.write_text(RECIPE.format(text=shutil.copytree(text, tmp_path / "text")), encoding="utf-8")
    words = ["reproduce", table, "--out", tmp_path / "out", "--seeds", "2"]
    first = document(*words, "--rows", "plain", "--quiet")
    assert {run["row"] for run in first["runs"]} == {"plain"}
    planned = document(*words, "--list")
    assert [(cell["row"], cell["seed"], cell["finished"]) for cell in planned] == [
        ("plain", 1, True),
        ("b", 1, False),
        ("plain", 2, True),
        ("b", 2, False),
    ]
    before = (tmp_path / "out" / "plain-seed1" / "result.json").read_bytes()
    shown = succeeds(*words, "--quiet")
    assert "3.00" in shown  # the paper's figure
    assert (tmp_path / "out" / "plain-seed1" / "result.json").read_bytes() == before
    for row, mix in (("plain", "none"), ("b", "position_wise")):
        results = [read_result(tmp_path / "out" / f"{row}-seed{seed}") for seed in (1, 2)]
        assert results[0]["final"] != results[1]["final"]
        assert f"mix: {mix}" in (tmp_path / "out" / f"{row}-seed1" / "config.yaml").read_text(encoding="utf-8")
    (tmp_path / "text" / "train.txt").unlink()  # runs that have begun keep their text
    assert "3.00" in succeeds(*words, "--quiet")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["train.compile=true", "model.num_hidden_layers=1"], marks=pytest.mark.full),
        ["train.precision=bf16"],
        ["train.order=shuffled", "data.tokens=bpe"],
    ],
)
def test_training_options_reach_the_training(settings, config, tmp_path):
    run = call_process if "train.compile=true" in settings else call  # compiling warns, which ends a test
    process = run("train", config, *SMALL, *settings, "train.steps=4", "--out", tmp_path / "run", "--quiet")
    assert process.returncode == 0, process.stderr
    result = read_result(tmp_path / "run")
    assert result["final"]["test"]["nll"] < 10
    assert result["environment"]["precision"] == ("bf16" if "train.precision=bf16" in settings else "fp32")
    assert ("bits_per_byte" in result["final"]["test"]) == ("data.tokens=bpe" in settings)
