"""The runs of one command, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fullrank.config.recipe import load, select_rows, tables
from fullrank.core.errors import InputError
from fullrank.experiments.run import cells

TABLE = "mixhead/table6"


def test_all_rows_of_a_seed_come_before_the_next_seed() -> None:
    planned = cells(TABLE, ["plain", "b"], "small", [1, 2], ["train.batch_size=8"], out=Path("here"))
    assert [(cell.row, cell.seed, str(cell.folder)) for cell in planned] == [
        ("plain", 1, "here/plain-small-seed1"),
        ("b", 1, "here/b-small-seed1"),
        ("plain", 2, "here/plain-small-seed2"),
        ("b", 2, "here/b-small-seed2"),
    ]
    assert all(cell.resolved.config.train.batch_size == 8 for cell in planned)
    (one,) = cells(TABLE, ["b"], overrides=["train.seed=7"])
    assert (one.row, one.seed, one.finished) == ("b", 7, False)


def test_the_papers_seeds_are_trained_at_its_own_scale(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "seeds: [26]\nscales: {paper: {}, tiny: {train.steps: 3}}\n"
        "rows: {a: , b: {seeds: 3, paper: {test: 1}}, c: {seeds: [4, 9]}}\n"
    )

    def planned(*words: Any) -> list[tuple[str, int]]:
        return [(cell.row, cell.seed) for cell in cells(str(file), ["a", "b", "c"], *words)]

    stated = [("a", 26), ("b", 1), ("c", 4), ("b", 2), ("c", 9), ("b", 3)]
    assert planned() == planned("paper") == stated
    assert planned("tiny") == [("a", 1), ("b", 1), ("c", 1)]
    assert planned(None, [5]) == [("a", 5), ("b", 5), ("c", 5)]
    child = tmp_path / "child.yaml"
    child.write_text("extends: mine.yaml\nrows: {d: }\n")
    assert load(str(child)).seeds_of("d") == [26]


def test_rows_that_only_some_parts_of_a_table_have() -> None:
    known = select_rows(tables("mixhead/table1"), ["b", "random"])
    assert known["mixhead/table1-vanilla"] == ["b"]
    assert known["mixhead/table1-synthesizer"] == ["b", "random"]
    assert list(select_rows(tables("mixhead/table1"), ["random"])) == ["mixhead/table1-synthesizer"]
    assert tables("mixhead/table4") == ["mixhead/table4", "mixhead/table4-long"]
    papers = select_rows(tables("mixhead/table1"), of_paper=True)
    assert "random" not in papers["mixhead/table1-synthesizer"]
    assert len(papers["mixhead/table1-synthesizer"]) == 6
    with pytest.raises(InputError, match="has no row 'c'"):
        select_rows(tables("mixhead/table1"), ["c"])
    with pytest.raises(InputError, match="--paper-rows: the paper has figures of no such row"):
        select_rows(tables("mixhead/table1"), ["random"], of_paper=True)


def test_what_is_refused() -> None:
    for rows, message in (([], "--rows: names no row; mixhead/table6 has plain, b"), (["c"], "has no row 'c'")):
        with pytest.raises(InputError, match=message):
            select_rows([TABLE], rows)
    with pytest.raises(InputError, match=r"train.seed: --seeds says which seeds are trained; give one of the two"):
        cells(TABLE, ["b"], None, [1, 2], ["train.seed=3"])
