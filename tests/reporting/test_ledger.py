"""Rows of the ledger: settings that differ from a recipe, and runs of fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finetuned_runs import make_run

from fullrank.config.recipe import resolve_any
from fullrank.core.errors import InputError
from fullrank.experiments.ledger import row_of
from fullrank.reporting.ledger import add_rows, differences, read_ledger, sealed
from fullrank.reporting.result_pages import make_pages

ROW = ("mixhead/table1-vanilla", "b", "small")


def test_only_settings_that_differ_from_the_recipe_are_named() -> None:
    config = resolve_any(*ROW, ["train.epochs=2", "train.learning_rate=1e-3", "train.seed=4", "data.dir=/texts"]).config
    assert differences(config, *ROW) == {"train.epochs": 2.0, "train.tokens": None}
    taught = resolve_any(*ROW, ["train.distill.run=/runs/teacher", "train.distill.weight=0.4"]).config
    assert differences(taught, *ROW) == {"train.distill.weight": 0.4, "train.distill.temperature": 1.0}
    other = resolve_any(ROW[0], "plain", "small").config
    assert differences(other, *ROW) == {"model.attention.mix": {"name": "none"}} or differences(other, *ROW) == {
        "model.attention.mix": "none"
    }


def test_a_configuration_without_a_recipe_has_no_settings_to_compare() -> None:
    assert differences(resolve_any(*ROW).config, "gone.yaml", None, None) is None


def test_a_training_that_was_taken_over_is_named_with_its_machine(tmp_path: Path) -> None:
    origin = {
        "folder": "/runs/x",
        "recipe": "/home/my.yaml",
        "row": "plain",
        "environment": {"cpu": "fast", "commit": "c"},
    }
    row = row_of(make_run(tmp_path / "run", 0.5, row="b", training=origin))
    assert row["training"] == {"recipe": "my.yaml", "row": "plain"}
    assert row["environment"] == {"cpu": "fast", "commit": "c"}


DAMAGE: list[tuple[dict[str, object], str]] = [
    ({"training": {"kind": "x"}}, r"training\.recipe: missing"),
    ({"recipe": None}, "recipe: a text, given None"),
    ({"row": ["b"]}, r"row: a text, given \['b'\]"),
    ({"final": 3}, "final: a mapping, given 3"),
    ({"final": {"dev": {"f1": []}}}, r"final\.dev\.f1: a number"),
    ({"seed": "one"}, "seed: 0 or a positive whole number"),
    ({"protocols": {"dev": "words"}}, r"protocols\.dev: a section of keys, given 'words'"),
]


@pytest.mark.parametrize(("damage", "fault"), DAMAGE)
def test_a_damaged_result_is_named(tmp_path: Path, damage: dict[str, object], fault: str) -> None:
    file = make_run(tmp_path / "run", 0.5) / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | damage), encoding="utf-8")
    with pytest.raises(InputError, match=rf"result\.json: damaged \({fault}.*writes it again"):
        row_of(file.parent)


@pytest.mark.parametrize("content", ["{}", "[]", '{"layers": 3}', '{"layers": [{"before": 1}]}', "[" * 100_000])
def test_a_damaged_spectrum_is_named(tmp_path: Path, content: str) -> None:
    folder = make_run(tmp_path / "run", 0.5)
    (folder / "analysis").mkdir()
    (folder / "analysis" / "spectrum.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"spectrum\.json: damaged"):
        row_of(folder)


ODD: dict[str, list[object]] = {
    "recipe": [None, ["x"], {}],
    "row": [["b"], {}],
    "scale": [["small"]],
    "seed": [None, -1, "one", 10**30],
    "set": ["x", [1]],
    "corpus": [None, "ptb", []],
    "sha256": ["aa", {"test": []}],
    "protocols": [None, [], {"dev": 3}, {"dev": {"words": []}}, {"dev": {"settings": "x"}}],
    "final": [None, [], {"dev": 0.5}, {"dev": {"f1": "x"}}, {"dev": {"perplexity": {}}}],
    "parameters": ["many"],
    "tokens_seen": ["x", -1, 10**400],
    "wall_seconds": ["x", -1.0, {}],
    "environment": [None, "x", {"commit": []}],
    "training": ["x", {"row": "b"}],
    "curve": [[[1]], [[0, 5.0]], [[1, -5.0]], [["a", 2]], "x"],
    "teacher": ["x", {"name": {}}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ODD.items() for value in values])
def test_an_odd_row_is_refused_by_file_line_and_key(tmp_path: Path, key: str, value: object) -> None:
    """A row whose own checksum is right, as an editor that seals it again would leave it."""
    row = row_of(make_run(tmp_path / "run", 0.5))
    (tmp_path / "ledger.jsonl").write_text(json.dumps(sealed(row)) + "\n", encoding="utf-8")
    assert "other_runs.md): 1" in make_pages(tmp_path)["README.md"]
    (tmp_path / "ledger.jsonl").write_text("\n" + json.dumps(sealed(row | {key: value})) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"ledger\.jsonl: line 2: damaged \({key}[.:]"):
        make_pages(tmp_path)


@pytest.mark.parametrize("key", ["recipe", "seed", "final", "protocols", "environment", "corpus"])
def test_a_row_without_a_key_is_refused(tmp_path: Path, key: str) -> None:
    row = {name: value for name, value in row_of(make_run(tmp_path / "run", 0.5)).items() if name != key}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(sealed(row)) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"line 1: damaged \({key}: missing\)"):
        read_ledger(tmp_path / "ledger.jsonl")


def test_a_row_may_hold_a_line_separator(tmp_path: Path) -> None:
    row = row_of(make_run(tmp_path / "run", 0.5)) | {"recipe": "a\u2028b"}
    assert add_rows(tmp_path / "ledger.jsonl", [row]) == 1
    assert read_ledger(tmp_path / "ledger.jsonl")[0]["recipe"] == "a\u2028b"


def test_a_run_of_fine_tuning_is_a_row_too(tmp_path: Path) -> None:
    row = row_of(make_run(tmp_path / "run", 0.5, seed=2, row="b", model={"pretrained": str(tmp_path)}))
    assert (row["task"], row["seed"], row["flops_per_token"]) == ("glue/cola", 2, None)
    assert row["final"]["dev"]["matthews_correlation"] == 0.5
    assert (row["slice"], row["examples"]) == ({"train": True, "dev": False}, {"train": 2000, "dev": 1043})
    assert row["sha256"] == {"train": "aa", "dev": "bb"}
    assert row["protocols"]["dev"]["words"] == "development split, fp32, at most 128 tokens"
    assert row["environment"]["transformers"] == "5.23.0"
