"""The ledger: rows from run folders, and the CSV that holds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_rows import RECIPE, make_run

from fullrank.config.recipe import resolve_any
from fullrank.core.errors import InputError
from fullrank.experiments.run import train
from fullrank.records import Record
from research.ledger import add_runs, differences, find_runs, read_ledger, row_of, without_empty, write_ledger

ROW = (RECIPE, "b", "small")


def test_a_row_has_the_figures_of_its_run(tmp_path: Path) -> None:
    row = row_of(make_run(tmp_path / "run", "train.epochs=2", "data.dir=/texts"))
    assert (row["recipe"], row["row"], row["scale"], row["seed"], row["tokens_seen"]) == (*ROW, 3, 5120)
    assert (row["final.test.perplexity"], row["last.test.perplexity"], row["unigram.test"]) == (90.5, 91.5, 680.25)
    assert (row["corpus"], row["vocabulary"], row["text.test"]) == ("a corpus", "f" * 16, "a" * 16)
    assert (row["protocol.test"], row["commit"], row["precision"]) == ("windows, of 7", "abc", "bf16")
    assert row["settings"] == {"train.epochs": 2.0, "train.tokens": None}
    assert row["curve"] == [[10, 412.35]]
    assert not {"final.test.nll", "next_token", "signature"} & row.keys()


def test_figures_of_a_translation_and_of_a_model_that_sees_later_tokens(tmp_path: Path) -> None:
    figures = {"bleu": 34.5, "bleu_signature": "nrefs:1|tok:13a|version:2.6.0"}
    protocol = {"words": "beam 5", "settings": {"next_token": False}}
    row = row_of(make_run(tmp_path / "run", final={"test": figures}, protocols={"test": protocol}))
    assert (row["final.test.bleu"], row["signature"], row["next_token"]) == (34.5, "nrefs:1|tok:13a", "no")


def test_a_run_that_shares_a_training_has_the_machine_of_that_one(tmp_path: Path) -> None:
    origin = {"recipe": "/home/my.yaml", "row": "plain", "environment": {"cpu": "slow", "commit": "c"}}
    row = row_of(make_run(tmp_path / "run", training=origin))
    assert (row["trained_as"], row["cpu"], row["commit"]) == ("my.yaml plain", "slow", "c")


def test_the_spectrum_of_an_analysed_run_is_in_its_row(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "analysis").mkdir()
    ranks = {("before", 0): 1.0, ("before", 1): 2.0, ("after", 0): 4.0, ("after", 1): 5.0}
    records = [
        Record({"layer": layer, "weights": weights}, "effective rank", rank) for (weights, layer), rank in ranks.items()
    ]
    records.append(Record({"layer": 0, "weights": "before", "head": 0}, "effective rank", 9.0))
    content = {"texts": 3, "segment_length": 6, "text": "a corpus, valid"}
    content["records"] = [record.to_dict() for record in records]
    (folder / "analysis" / "spectrum.json").write_text(json.dumps(content), encoding="utf-8")
    row = row_of(folder)
    assert (row["final.attention.effective_rank"], row["final.attention.effective_rank_before_mixing"]) == (4.5, 1.5)


def test_rows_survive_the_file(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.csv"
    runs = [
        make_run(tmp_path / "runs" / name, perplexity=figure) for name, figure in (("one", 90.123456789), ("two", 91.0))
    ]
    assert find_runs(tmp_path / "runs") == runs
    assert [add_runs(ledger, runs), add_runs(ledger, runs)] == [2, 0]
    rows = read_ledger(ledger)
    assert [row["final.test.perplexity"] for row in rows] == [90.123456789, 91.0]
    for row, run in zip(rows, runs, strict=True):
        assert without_empty(row) == row_of(run)
        assert (
            float(row["final.test.perplexity"])
            == json.loads((run / "result.json").read_text())["final"]["test"]["perplexity"]
        )


def test_a_row_from_a_committed_tree_replaces_one_that_is_not(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.csv"
    old = [
        row_of(make_run(tmp_path / name, *settings)) | {"commit": "abc+changes"}
        for name, settings in (("changed", []), ("other", ["train.epochs=2"]))
    ]
    write_ledger(ledger, old)
    add_runs(ledger, [make_run(tmp_path / "anew", perplexity=88.0)])
    assert [row["commit"] for row in read_ledger(ledger)] == ["abc+changes", "abc"]
    assert [row["final.test.perplexity"] for row in read_ledger(ledger)] == [90.5, 88.0]
    with pytest.raises(InputError, match="uncommitted changes"):
        add_runs(ledger, [make_run(tmp_path / "not committed", commit="abd+changes")])


def test_a_row_is_made_again_from_its_record(tmp_path: Path) -> None:
    """Recipe, row, scale, settings and seed train the same model; engines and processor are recorded, as digits follow them."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"the {split} text has a few words and a full stop .\n" * 200, "utf-8")
    files = [f"data.{split}={tmp_path}/{split}.txt" for split in ("train", "valid", "test")]
    files += [f"data.cache={tmp_path}/cache", "train.device=cpu"]

    def train_row(folder: str, words: Sequence[str]) -> dict[str, Any]:
        resolved = resolve_any(RECIPE, "b", "tiny", [*words, *files])
        train(resolved, tmp_path / folder, quiet=True, say=lambda _: None)
        return row_of(tmp_path / folder)

    words = ["data.name=text", "model.hidden_size=16", "train.tokens=null", "train.steps=4", "train.seed=5"]
    first = train_row("first", [*words, "model.dropout.attention=0.1"])
    recorded = [f"{name}={json.dumps(value)}" for name, value in first["settings"].items()]
    again = train_row("again", [*recorded, f"train.seed={first['seed']}"])
    assert again["final.test.perplexity"] == first["final.test.perplexity"]
    assert {name: again[name] for name in again if name not in ("run", "wall_seconds", "ms_per_step")} == {
        name: first[name] for name in first if name not in ("run", "wall_seconds", "ms_per_step")
    }
    assert first["engines"]
    assert set(first["cpu_flags"].split()) <= {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}


@pytest.mark.parametrize(("text", "damaged"), [("5120", "many"), ("5120,", ""), ("[[10", "[10"), ('"{}"', "{")])
def test_a_damaged_line_is_named(tmp_path: Path, text: str, damaged: str) -> None:
    ledger = tmp_path / "ledger.csv"
    add_runs(ledger, [make_run(tmp_path / "run")])
    content = ledger.read_text().replace("{}", '"{}"')
    assert text in content
    ledger.write_text(content.replace(text, damaged))
    with pytest.raises(InputError, match=r"ledger\.csv: line 2: damaged"):
        read_ledger(ledger)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", "{", r"result\.json: cannot be read"),
        ("result.json", "{}", r"result\.json .* is damaged \(KeyError"),
        ("metrics.jsonl", '{"step": 1}\n{"st', r"metrics\.jsonl: line 2: no JSON"),
    ],
)
def test_a_damaged_run_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = make_run(tmp_path / "run")
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=message):
        row_of(folder)


def test_a_run_that_has_not_finished_is_refused(tmp_path: Path) -> None:
    (make_run(tmp_path / "run") / "result.json").unlink()
    with pytest.raises(InputError, match="not finished"):
        row_of(tmp_path / "run")


def test_only_settings_that_differ_from_the_recipe_are_named() -> None:
    taught = resolve_any(*ROW, ["train.distill.run=/runs/teacher", "train.distill.weight=0.4", "train.seed=4"]).config
    assert differences(taught, *ROW) == {"train.distill.weight": 0.4, "train.distill.temperature": 1.0}
    assert differences(resolve_any(*ROW).config, "gone.yaml", None, None) is None
