"""The verb that averages checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullrank.cli.options import Json
from fullrank.cli.output import print_json


def add_to(app: typer.Typer) -> None:
    app.command(
        epilog="Examples:  [cyan]fullrank average runs/mine --last 5[/cyan]   then "
        "[cyan]fullrank eval runs/mine --checkpoint average[/cyan]",
    )(average)


def average(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, trained with train.keep_checkpoints.")],
    last: Annotated[
        int | None,
        typer.Option("--last", min=1, help="How many of the kept checkpoints, the newest; all if not given."),
    ] = None,
    out: Annotated[
        str, typer.Option("--out", metavar="NAME", help="What --checkpoint calls it: DIR/checkpoints/NAME.")
    ] = "average",
    json: Json = False,
) -> None:
    """Average the weights of a run's last kept checkpoints (train.keep_checkpoints), for `--checkpoint average`."""
    from fullrank.experiments.evaluate import average as of_run

    found = of_run(run, last=last, name=out)
    if json:
        print_json(found)
        return
    steps = ", ".join(f"{step:,}" for step in found["steps"])
    print(f"{run}: the mean of {len(found['steps'])} checkpoints, of step{'s' * (len(found['steps']) > 1)} {steps}")
    print(f"  {found['folder']}   fullrank eval {run} --checkpoint {out}")
