"""Run folders: where they lie, when they may be used, and that a corpus is found again from anywhere."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from fullrank.config.load import load, select_rows, tables
from fullrank.config.run import RunConfig, TrainConfig
from fullrank.core.errors import InputError
from fullrank.experiments import run as run_module
from fullrank.experiments.run_folder import cells, claim, open_run

TABLE = "mixhead/table6"
IDENTITY = {"name": "x", "recipe": TABLE, "row": "plain", "scale": "tiny", "paper": None, "vocabulary": "v"}


def test_a_folder_is_claimed_once_and_found_again(tmp_path):
    assert claim(tmp_path / "run", RunConfig(), IDENTITY) is False
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert claim(tmp_path / "run", RunConfig(), IDENTITY) is True
    config, identity = open_run(tmp_path / "run")
    assert config == RunConfig()
    assert identity == IDENTITY
    with pytest.raises(InputError, match=r"train\.seed is 1 there, 2 here"):
        claim(tmp_path / "run", RunConfig(train=TrainConfig(seed=2)), IDENTITY)
    for changed in ({"vocabulary": "w"}, {"text": {"train": "changed"}}):
        with pytest.raises(InputError, match="another text or vocabulary"):
            claim(tmp_path / "run", RunConfig(), IDENTITY | changed)


def test_all_rows_of_a_seed_come_before_the_next_seed():
    planned = cells(TABLE, ["plain", "b"], "small", [1, 2], ["train.batch_size=8"], out=Path("here"))
    assert [itemgetter("row", "seed", "folder")(cell.describe()) for cell in planned] == [
        ("plain", 1, "here/plain-small-seed1"),
        ("b", 1, "here/b-small-seed1"),
        ("plain", 2, "here/plain-small-seed2"),
        ("b", 2, "here/b-small-seed2"),
    ]
    assert all(cell.resolved.config.train.batch_size == 8 for cell in planned)
    (cell,) = cells(TABLE, ["b"], overrides=["train.seed=7"])
    assert itemgetter("row", "seed", "finished")(cell.describe()) == ("b", 7, False)


def test_the_papers_seeds_are_trained_at_its_own_scale(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "seeds: [26]\nscales: {paper: {}, tiny: {train.steps: 3}}\n"
        "rows: {a: , b: {seeds: 3, paper: {test: 1}}, c: {seeds: [4, 9]}}\n"
    )

    def planned(*words: Any) -> list[tuple[str, int]]:
        return [itemgetter("row", "seed")(cell.describe()) for cell in cells(str(file), ["a", "b", "c"], *words)]

    expected = [("a", 26), ("b", 1), ("c", 4), ("b", 2), ("c", 9), ("b", 3)]
    assert planned() == planned("paper") == expected
    assert planned("tiny") == [("a", 1), ("b", 1), ("c", 1)]
    assert planned(None, [5]) == [("a", 5), ("b", 5), ("c", 5)]
    child = tmp_path / "child.yaml"
    child.write_text("extends: mine.yaml\nrows: {d: }\n")
    assert load(str(child)).seeds_of("d") == [26]


def test_rows_that_only_some_parts_of_a_table_have():
    rows = select_rows(tables("mixhead/table1"), ["b", "random"])
    assert rows["mixhead/table1-vanilla"] == ["b"]
    assert rows["mixhead/table1-synthesizer"] == ["b", "random"]
    assert list(select_rows(tables("mixhead/table1"), ["random"])) == ["mixhead/table1-synthesizer"]
    assert list(tables("mixhead/table4")) == ["mixhead/table4", "mixhead/table4-long"]
    papers = select_rows(tables("mixhead/table1"), of_paper=True)
    assert "random" not in papers["mixhead/table1-synthesizer"]
    assert len(papers["mixhead/table1-synthesizer"]) == 6
    assert select_rows({"a single configuration": []}) == {"a single configuration": []}


@pytest.mark.parametrize(
    ("flags", "precision", "device", "warned"),
    [
        ("fpu avx2 avx512f", "bf16", "cpu", True),
        ("avx512_bf16 avx2", "bf16", "cpu", False),
        ("", "bf16", "cpu", False),  # not Linux on x86: nothing is known
    ],
)
def test_slow_bf16_is_named(flags, precision, device, warned, monkeypatch):
    monkeypatch.setattr(run_module, "read_cpuinfo", {"flags": flags}.__getitem__)
    remark = run_module.remark_on_precision(precision, torch.device(device))
    assert ("train.precision=fp32" in remark) == warned
    assert bool(remark) == warned
