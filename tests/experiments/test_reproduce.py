"""The runs of one command, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullrank.cli import main
from fullrank.core.errors import InputError
from fullrank.experiments.run import cells, inside

TABLE = "mixhead/table6"


def test_all_rows_of_a_seed_come_before_the_next_seed() -> None:
    planned = inside(cells(TABLE, ["all"], "small", 2, ["train.batch_size=8"]), Path("here"))
    assert [(cell.row, cell.seed, str(cell.folder)) for cell in planned] == [
        ("plain", 1, "here/plain-small-seed1"),
        ("b", 1, "here/b-small-seed1"),
        ("plain", 2, "here/plain-small-seed2"),
        ("b", 2, "here/b-small-seed2"),
    ]
    assert all(cell.resolved.config.train.batch_size == 8 for cell in planned)
    (one,) = cells(TABLE, ["b"], overrides=["train.seed=7"])
    assert (one.row, one.seed, one.finished) == ("b", 7, False)


def test_a_row_that_is_named_twice_is_one_run() -> None:
    assert len(cells(TABLE, ["b", "plain", "b"], None, 1)) == 2


@pytest.mark.parametrize(
    ("rows", "seeds", "overrides", "message"),
    [
        ([], 1, [], "--rows: names no row; mixhead/table6 has plain, b"),
        (["c"], 1, [], "--rows: mixhead/table6 has no row 'c'"),
        (["b"], 2, ["train.seed=3"], "train.seed: --seeds N trains seeds 1 to N"),
        (["b"], 0, [], "--seeds: one or more, given 0"),
    ],
)
def test_what_is_refused(rows: list[str], seeds: int, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        cells(TABLE, rows, None, seeds, overrides)
    assert message in str(error.value)


def test_a_folder_that_is_not_a_whole_run_is_not_begun_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("data: {name: glue/cola}\n")
    with pytest.raises(SystemExit) as stopped:
        main(["finetune", str(tmp_path)])
    assert stopped.value.code == 2
    assert "it lacks run.json" in capsys.readouterr().err
