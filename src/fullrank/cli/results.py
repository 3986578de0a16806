"""Verbs of a campaign: queue, and the ledger of what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullrank.cli.app import app, verb
from fullrank.cli.options import Json, Number, Quiet
from fullrank.cli.output import say, show_progress, tell
from fullrank.core.errors import InputError
from fullrank.files import silent

ledger_app = typer.Typer(help="The ledger of finished runs, and the result pages made from it.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")
LEDGER = Path("docs/results/ledger.jsonl")


@verb(
    "fullrank queue plan.yaml --from corpora",
    "fullrank queue plan.yaml --list",
    "kill -TSTP PID  # pauses it with its trainings",
    "kill -CONT PID  # goes on",
)
def queue(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="Tables, rows, seeds and settings to be trained.")],
    cores: Annotated[int, Number("--cores", help="Trainings at a time, each on a core of its own.")] = 1,
    list_only: Annotated[bool, typer.Option("--list", help="Only list what is finished and what is not.")] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="ROOT", exists=True, help="A folder that holds corpora in subfolders (ptb, ...)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the run folders.")] = Path("runs"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train rows and seeds of a plan one after another, each in a process with one thread, at low priority.

    A stopped queue goes on when it is started again; a training that fails is reported, and the next one begins.
    """
    import asyncio  # a long import, for this verb alone

    from fullrank.config.load import read_yaml
    from fullrank.config.plan import PlanFile
    from fullrank.experiments.ledger import row_of
    from fullrank.experiments.queue import cores_for, in_lines, listing, train_all, trainings_of
    from fullrank.reporting.ledger import add_rows, read_ledger

    content = PlanFile.of_file(read_yaml(plan), plan)
    book, own = plan.parent / content.ledger, cores_for(cores)
    planned = trainings_of(content, source, out, read_ledger(book))

    def record(folder: Path) -> None:
        add_rows(book, [row_of(folder)])

    try:
        if not list_only:
            loud = (silent, silent) if quiet else (say, show_progress)
            asyncio.run(train_all(planned, own, record, say=loud[0], progress=loud[1]))
    finally:
        state = listing(planned, cores)
        tell(state, in_lines(state, cores), json=json)


@verb("fullrank ledger add runs/mixhead-table1-vanilla/*", group=ledger_app)
def add(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Run folders, or folders that hold them.")],
    ledger: Annotated[Path, typer.Option("--ledger", help="The ledger, a file with a line for each run.")] = LEDGER,
    json: Json = False,
) -> None:
    """Add finished runs to the ledger; a run that it has keeps its line, which is replaced where it changed.

    Of a folder that holds runs, those that are not finished are left out.
    """
    from fullrank.experiments.ledger import row_of
    from fullrank.reporting.ledger import add_rows
    from fullrank.reporting.runs import find_runs

    held = [(folder, run) for folder in folders for run in find_runs(folder) or [folder]]
    runs = [run for folder, run in held if run == folder or (run / "result.json").is_file()]
    added = add_rows(ledger, [row_of(run) for run in runs])
    words = f"{added} of {len(runs)} runs added to {ledger}"
    tell({"ledger": str(ledger), "runs": len(runs), "added": added}, [words], json=json)


@verb("fullrank ledger pages", "fullrank ledger pages --check", group=ledger_app)
def pages(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of ledger.jsonl, claims/ and the pages.")
    ] = LEDGER.parent,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a page was edited by hand.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Evaluate again the checkpoints of rows whose runs lie in --runs.")
    ] = False,
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="With --verify: where run folders lie.")] = Path(
        "runs"
    ),
    json: Json = False,
) -> None:
    """Make the result pages from the ledger: for each paper a verdict on every claim, and all runs.

    A checksum finds damage, and no forger. --verify fails where a checkpoint gives other figures than its row.
    """
    from fullrank.reporting.ledger import read_ledger
    from fullrank.reporting.result_pages import write_pages

    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the one that holds ledger.jsonl")
    if verify:
        from fullrank.experiments.ledger import verify as verify_rows

        rows = read_ledger(folder / "ledger.jsonl")
        verified, different = verify_rows(rows, runs, silent)
        if different:
            raise InputError("\n".join(different))
        say(f"{verified} of {len(rows)} rows have a run in {runs}, whose checkpoint gives their figures again")
    changed = write_pages(folder, check=check)
    words = [f"written: {', '.join(changed)}"] if changed else [f"{folder}: every page is what the ledger says"]
    tell({"folder": str(folder), "written": changed}, words, json=json)
