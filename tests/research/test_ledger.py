"""The ledger: rows from run folders, and the CSV that holds them."""

import json

from made_rows import RECIPE, make_run

from fullrank.config.load import resolve_any
from fullrank.experiments.measure import EvaluationProtocol
from fullrank.experiments.run import train
from research import LEDGER
from research.ledger import add_runs, read_ledger, row_of, without_empty
from run_files import read_result

ROW = (RECIPE, "b", "small")


def test_a_row_has_the_figures_of_its_run(tmp_path):
    row = row_of(make_run(tmp_path / "run", "train.epochs=2", "data.dir=/texts"))
    assert (row["recipe"], row["row"], row["scale"], row["seed"], row["tokens_seen"]) == (*ROW, 3, 5120)
    assert (row["final.test.perplexity"], row["last.test.perplexity"], row["unigram.test"]) == (90.5, 91.5, 680.25)
    assert (row["corpus"], row["vocabulary"], row["text.test"]) == ("a corpus", "f" * 16, "a" * 16)
    assert (row["protocol.test"], row["commit"], row["precision"]) == ("windows, of 7", "abc", "bf16")
    assert row["settings"] == {"train.epochs": 2.0, "train.tokens": None}
    assert row["curve"] == [[10, 412.35]]
    assert not {"final.test.nll", "next_token", "signature"} & row.keys()


def test_rows_survive_the_file(tmp_path):
    ledger = tmp_path / "ledger.csv"
    runs = [
        make_run(tmp_path / "runs" / name, perplexity=figure) for name, figure in (("one", 90.123456789), ("two", 91.0))
    ]
    assert [add_runs(ledger, runs), add_runs(ledger, runs)] == [2, 0]
    rows = read_ledger(ledger)
    assert [row["final.test.perplexity"] for row in rows] == [90.123456789, 91.0]
    for row, run in zip(rows, runs, strict=True):
        assert without_empty(row) == row_of(run)
        assert float(row["final.test.perplexity"]) == read_result(run)["final"]["test"]["perplexity"]


def test_a_row_is_made_again_from_its_record(tmp_path):
    """Recipe, row, scale, settings and seed train the same model; engines and processor, which change digits, are recorded."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"the {split} text has a few words and a full stop .\n" * 200, "utf-8")
    files = [f"data.{split}={tmp_path}/{split}.txt" for split in ("train", "valid", "test")]
    files += [f"data.cache={tmp_path}/cache", "train.device=cpu"]

    def train_row(folder, words):
        resolved = resolve_any(RECIPE, "b", "tiny", [*words, *files])
        train(resolved, tmp_path / folder, quiet=True)
        return row_of(tmp_path / folder)

    words = ["data.name=text", "model.hidden_size=16", "train.tokens=null", "train.steps=4", "train.seed=5"]
    first = train_row("first", [*words, "model.dropout.attention=0.1"])
    recorded = [f"{name}={json.dumps(value)}" for name, value in first["settings"].items()]
    repeated = train_row("again", [*recorded, f"train.seed={first['seed']}"])
    assert repeated["final.test.perplexity"] == first["final.test.perplexity"]
    assert {name: repeated[name] for name in repeated if name not in ("run", "wall_seconds", "ms_per_step")} == {
        name: first[name] for name in first if name not in ("run", "wall_seconds", "ms_per_step")
    }
    assert first["engines"]
    assert set(first["cpu_flags"].split()) <= {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}


def test_protocols_are_worded_as_in_the_ledger():
    """Runs are pooled where their protocols are the same words."""
    words = {row["protocol.test"] for row in read_ledger(LEDGER)}
    blocks = EvaluationProtocol(kind="blocks", segment_length=128)
    window = EvaluationProtocol(kind="window", segment_length=128, context=64, stride=64)
    memory = EvaluationProtocol(kind="memory", segment_length=32, streams=10, memory_length=32)
    assert {protocol.in_words() for protocol in (blocks, window, memory)} <= words
