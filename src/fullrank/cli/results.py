"""Verbs of a campaign: queue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullrank.cli.app import app
from fullrank.cli.options import Json, Quiet
from fullrank.cli.output import say, silent, tell


@app.command(
    epilog="Examples:  [cyan]fullrank queue plan.yaml --from corpora[/cyan]   [cyan]fullrank queue plan.yaml --list[/cyan]"
    "   [cyan]kill -TSTP PID[/cyan] (pauses it with its trainings; [cyan]kill -CONT PID[/cyan] goes on)"
)
def queue(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="Tables, rows, seeds and settings to be trained.")],
    cores: Annotated[int, typer.Option("--cores", min=1, help="Trainings at a time, each on a core of its own.")] = 1,
    list_only: Annotated[bool, typer.Option("--list", help="Only list what is finished and what is not.")] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="ROOT", help="A folder that holds corpora in subfolders (ptb, ...)."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run folders; runs if not given.")] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train rows and seeds of a plan one after another, each in a process with one thread, at low priority.

    A stopped queue goes on when it is started again; a training that fails is reported, and the next one begins.
    """
    from fullrank.config.plan import read_plan
    from fullrank.experiments.queue import as_json, cores_for, in_lines, progress, train_all, trainings_of

    planned = trainings_of(read_plan(plan), source, out)
    own = cores_for(cores)
    try:
        if not list_only:
            train_all(planned, own, lambda folder: None, say=silent if quiet else say)
    finally:
        states = [progress(training.cell) for training in planned]
        tell(as_json(planned, states, cores), in_lines(planned, states, cores), json=json)
