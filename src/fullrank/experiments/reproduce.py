"""Several runs of one recipe: rows and seeds, one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.recipe import Resolved, load, resolve_any
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError, suggest
from fullrank.experiments.run import train
from fullrank.experiments.run_folder import default_folder
from fullrank.experiments.task import Say


@dataclass(frozen=True)
class Cell:
    """One run of a table: a row with a seed, and its folder."""

    resolved: Resolved[RunConfig | FinetuneConfig]
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def row(self) -> str:
        """The row; of a single configuration the name of its data."""
        return self.resolved.row or self.resolved.config.data.name

    @property
    def seed(self) -> int:
        return self.resolved.config.train.seed


def cells(
    name: str,
    rows: Sequence[str] | None = None,
    scale: str | None = None,
    seeds: int | None = None,
    overrides: Sequence[str] = (),
) -> list[Cell]:
    """The runs of a recipe: all rows of a seed, then the next seed, so that finished rows can be compared early.

    rows: None is the first one, or a single configuration; `all` is each. seeds: 1 .. `seeds`; None: the configuration's own.
    Raises InputError for an unknown recipe, row or scale, and for a seed given twice.
    """
    known = list(load(name).rows)
    chosen: Sequence[str | None] = [None]
    if rows is not None:
        if not known:
            raise InputError(f"{name} is a single configuration; it has no rows")
        chosen = known if list(rows) == ["all"] else _chosen_rows(name, known, rows)
    if seeds is not None and seeds < 1:
        raise InputError(f"--seeds: one or more, given {seeds}")
    if seeds is not None and any(text.partition("=")[0].strip() == "train.seed" for text in overrides):
        raise InputError("train.seed: --seeds N trains seeds 1 to N; give one of the two")
    planned = []
    for seed in [None] if seeds is None else range(1, seeds + 1):
        own = [] if seed is None else [f"train.seed={seed}"]
        for row in chosen:
            resolved = resolve_any(name, row, scale, [*own, *overrides])
            planned.append(Cell(resolved, default_folder(resolved)))
    return planned


def inside(planned: Sequence[Cell], out: Path) -> list[Cell]:
    """The same runs in the folder `out`."""
    return [dataclasses.replace(cell, folder=out / cell.folder.name) for cell in planned]


def reproduce(
    name: str, planned: Sequence[Cell], *, kernel_name: str = "auto", quiet: bool = False, say: Say = print
) -> None:
    """Train the runs that are not finished; one that was stopped is resumed."""
    for number, cell in enumerate(planned, start=1):
        if not cell.finished:
            say(f"{name}: row {cell.row}, seed {cell.seed} ({number} of {len(planned)}), {cell.folder}")
        tell = _silent if cell.finished else say
        train(cell.resolved, cell.folder, kernel_name=kernel_name, quiet=quiet, say=tell)


def _silent(text: str) -> None:
    """Say nothing."""


def _chosen_rows(name: str, known: Collection[str], rows: Sequence[str]) -> list[str]:
    """The rows that are asked for, each once; InputError for an unknown one, and for none."""
    wanted = list(dict.fromkeys(rows))
    if not wanted:
        raise InputError(f"--rows: names no row; {name} has {', '.join(known)}")
    for row in wanted:
        if row not in known:
            raise InputError(f"--rows: {name} has no row '{row}'; {suggest(row, known)}")
    return wanted
