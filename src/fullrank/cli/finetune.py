"""The verb that fine-tunes a pretrained encoder with our attention grafted in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullrank.cli.options import Config, Json, Kernel, Overrides, Row, Scale, Source, with_source
from fullrank.cli.output import say, show_report, silent
from fullrank.core.errors import InputError


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
    from fullrank.config.recipe import is_finetuning, resolve_finetune
    from fullrank.experiments.reproduce import cells, inside, reproduce
    from fullrank.experiments.run import resume, train
    from fullrank.experiments.run_folder import is_run, open_any

    tell = silent if quiet or json else say
    folder = Path(config)
    if folder.is_dir() and is_run(folder):
        if overrides or row or rows or scale or seeds or out or source or kernel != "auto":
            raise InputError(f"{config} is a run folder: it is resumed as it was configured, without further options")
        if not is_finetuning(config):
            raise InputError(
                f"{folder}: not a run of fine-tuning, but one on {open_any(folder)[0].data.name}; see `fullrank train`"
            )
        folders: list[Path] = [folder]
        resume(folder, quiet=quiet, say=tell)
    else:
        refuse_half_a_run(folder)
        if row is not None and rows is not None:
            raise InputError("--row and --rows: give one of them")
        wanted = None if rows is None else [name.strip() for name in rows.split(",") if name.strip()]
        given = with_source(overrides, source)
        if not is_finetuning(config, None, scale, given):
            resolve_finetune(config, None, scale, given)  # says what it is instead
        planned = cells(config, [row] if row else wanted, scale, seeds, given)
        if len(planned) == 1:
            folders = [out or planned[0].folder]
            train(planned[0].resolved, folders[0], kernel_name=kernel, quiet=quiet, say=tell)
        else:
            planned = planned if out is None else inside(planned, out)
            folders = [cell.folder for cell in planned]
            reproduce(config, planned, kernel_name=kernel, quiet=True, say=tell)
    page = folders[0] / "report.html" if len(folders) == 1 else folders[0].parent / "report.html"
    show_report(folders, page, json=json)
