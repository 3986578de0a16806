"""Rows of the ledger: settings that differ from a recipe, and runs of fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finetuned_runs import make_run

from fullrank.config.recipe import resolve_any
from fullrank.core.errors import InputError
from fullrank.experiments.ledger import row_of
from fullrank.reporting.ledger import differences

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


@pytest.mark.parametrize("damage", [{"training": {"kind": "x"}}, {"recipe": None}, {"row": ["b"]}, {"final": 3}])
def test_a_damaged_result_is_named(tmp_path: Path, damage: dict[str, object]) -> None:
    file = make_run(tmp_path / "run", 0.5) / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | damage), encoding="utf-8")
    with pytest.raises(InputError, match=r"result\.json: damaged: it lacks .* writes it again"):
        row_of(file.parent)


def test_a_run_of_fine_tuning_is_a_row_too(tmp_path: Path) -> None:
    row = row_of(make_run(tmp_path / "run", 0.5, seed=2, row="b", model={"pretrained": str(tmp_path)}))
    assert (row["task"], row["seed"], row["flops_per_token"]) == ("glue/cola", 2, None)
    assert row["final"]["dev"]["matthews_correlation"] == 0.5
    assert (row["slice"], row["examples"]) == ({"train": True, "dev": False}, {"train": 2000, "dev": 1043})
    assert row["sha256"] == {"train": "aa", "dev": "bb"}
    assert row["protocols"]["dev"]["words"] == "development split, fp32, at most 128 tokens"
    assert row["environment"]["transformers"] == "5.23.0"
