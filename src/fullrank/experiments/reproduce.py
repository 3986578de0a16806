"""A table of a paper, trained again: row by row and seed by seed, then the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank.config.recipe import load, resolve
from fullrank.core.errors import InputError, suggest
from fullrank.experiments.run import train
from fullrank.experiments.run_folder import default_folder


@dataclass(frozen=True)
class Cell:
    """One training of a table: a row with a seed, and its folder."""

    row: str
    seed: int
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()


def cells(name: str, rows: Sequence[str] | None, scale: str | None, seeds: int, out: Path | None) -> list[Cell]:
    """Every training of the table, seeds 1 .. `seeds`, in the order in which they run: all rows of a seed, then the next.

    Raises InputError for an unknown recipe, row or scale.
    """
    known = load(name).rows
    if not known:
        raise InputError(f"{name} is a single configuration, not a table; use `fullrank train {name}`")
    if seeds < 1:
        raise InputError(f"--seeds: one or more, given {seeds}")
    wanted = chosen_rows(name, known, rows or list(known))
    found = []
    for seed in range(1, seeds + 1):
        for row in wanted:
            folder = default_folder(resolve(name, row, scale, [f"train.seed={seed}"]))
            found.append(Cell(row, seed, out / folder.name if out else folder))
    return found


def chosen_rows(name: str, known: Collection[str], rows: Sequence[str]) -> list[str]:
    """The rows that are asked for, each once; InputError for one that the recipe `name` does not have, and for none."""
    wanted = list(dict.fromkeys(rows))
    if not wanted:
        raise InputError(f"--rows: names no row; {name} has {', '.join(known)}")
    for row in wanted:
        if row not in known:
            raise InputError(f"--rows: {name} has no row '{row}'; {suggest(row, known)}")
    return wanted


def reproduce(
    name: str,
    table: Sequence[Cell],
    scale: str | None,
    overrides: Sequence[str],
    *,
    kernel_name: str = "auto",
    quiet: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Train the cells that are not finished; a cell that was stopped goes on where it was.

    Raises InputError for an override of `train.seed`, which is the table's own.
    """
    if any(text.partition("=")[0].strip() == "train.seed" for text in overrides):
        raise InputError("train.seed: a table trains seeds 1 to N; choose N with --seeds")
    for number, cell in enumerate(table, start=1):
        if not cell.finished:
            say(f"{name}: row {cell.row}, seed {cell.seed} ({number} of {len(table)}), {cell.folder}")
        resolved = resolve(name, cell.row, scale, [f"train.seed={cell.seed}", *overrides])
        train(
            resolved,
            cell.folder,
            kernel_name=kernel_name,
            quiet=quiet,
            say=say if not cell.finished else lambda text: None,
        )
