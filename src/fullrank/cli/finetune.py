"""The verb that fine-tunes a pretrained encoder with our attention grafted in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullrank.cli.options import Config, Json, Kernel, Overrides, Row, Scale, Source, with_source
from fullrank.cli.output import say, show_report, silent
from fullrank.core.errors import InputError

if TYPE_CHECKING:
    from fullrank.experiments.finetuning_cells import FineCell


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Examples:  [cyan]fullrank finetune mixhead/table5 --scale small --row cola-b --from glue[/cyan]   "
        "[cyan]fullrank finetune mixhead/table5 --rows cola-plain,cola-b --seeds 5 --from glue[/cyan]   "
        "[cyan]fullrank finetune my.yaml data.name=glue/rte model.attention.mix=position_wise[/cyan]",
    )(finetune)


def finetune(
    config: Config,
    overrides: Overrides = None,
    row: Row = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="A,B", help="Several rows, one after another; `all` for all.")
    ] = None,
    scale: Scale = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Every row with seeds 1 to N; train.seed if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run folder; of several runs, the folder they go into.")
    ] = None,
    source: Source = None,
    kernel: Kernel = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    json: Json = False,
) -> None:
    """Fine-tune a pretrained encoder with our attention grafted in, on GLUE or SQuAD. Goes on where it was stopped.

    Several seeds end in a table: mean, deviation, and by how many percent the deviation changed against the first row.
    """
    from fullrank.cli.training import refuse_half_a_run
    from fullrank.experiments.finetuning import resume
    from fullrank.experiments.finetuning_cells import cells_of
    from fullrank.experiments.run_folder import is_run

    tell = silent if quiet or json else say
    folder = Path(config)
    if folder.is_dir() and is_run(folder):
        if overrides or row or rows or scale or seeds or out or source or kernel != "auto":
            raise InputError(f"{config} is a run folder: it is resumed as it was configured, without further options")
        folders: list[Path] = [folder]
        resume(folder, quiet=quiet, say=tell)
    else:
        refuse_half_a_run(folder)
        if row is not None and rows is not None:
            raise InputError("--row and --rows: give one of them")
        wanted = None if rows is None else [name.strip() for name in rows.split(",") if name.strip()]
        cells = cells_of(config, [row] if row else wanted, scale, seeds, with_source(overrides, source), out)
        tune_cells(config, cells, kernel=kernel, quiet=quiet, tell=tell)
        folders = [cell.folder for cell in cells]
    page = folders[0] / "report.html" if len(folders) == 1 else folders[0].parent / "report.html"
    show_report(folders, page, json=json)


def tune_cells(name: str, cells: Sequence[FineCell], *, kernel: str, quiet: bool, tell: Callable[[str], None]) -> None:
    """Fine-tune one cell after another; what is finished stays, what was stopped goes on."""
    from fullrank.experiments.finetuning import finetune as tune

    for number, cell in enumerate(cells, start=1):
        if len(cells) > 1 and not cell.finished:
            tell(f"{name}: {cell.label} ({number} of {len(cells)}), {cell.folder}")
        tune(cell.resolved, cell.folder, kernel_name=kernel, quiet=quiet or len(cells) > 1, say=tell)


def reproduce_table(
    table: str,
    overrides: list[str],
    *,
    rows: list[str] | None,
    scale: str | None,
    seeds: int,
    out: Path | None,
    kernel: str,
    quiet: bool,
    list_only: bool,
    json: bool,
) -> None:
    """`fullrank reproduce` of a table of fine-tuning."""
    from fullrank.cli.training import print_status
    from fullrank.config.recipe import load
    from fullrank.experiments.finetuning_cells import cells_of

    if not load(table).rows:
        raise InputError(f"{table} is a single configuration, not a table; use `fullrank finetune {table}`")
    cells = cells_of(table, rows or ["all"], scale, seeds, overrides, None)
    if out is not None:
        cells = [dataclasses.replace(cell, folder=out / cell.folder.name) for cell in cells]
    if list_only:
        print_status(
            [(str(cell.resolved.row), cell.resolved.config.train.seed, cell.folder, cell.finished) for cell in cells],
            json,
        )
        return
    tune_cells(table, cells, kernel=kernel, quiet=quiet, tell=silent if quiet else say)
    show_report([cell.folder for cell in cells], cells[0].folder.parent / "report.html", json=json, title=table)
