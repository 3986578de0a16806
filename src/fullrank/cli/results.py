"""Verbs of a campaign: queue, search, and the ledger of what it found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

from fullrank.cli.app import app, verb
from fullrank.cli.options import Config, Json, Number, Overrides, Quiet, Row, Scale, Source, read_seeds, with_source
from fullrank.cli.output import exclude, say, show_progress, table_of, tell
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


@verb(
    "fullrank search my.yaml --set train.learning_rate=1e-4,3e-4,6e-4 --set model.dropout.residual=0.1,0.3 "
    '--budget "120 minutes" --out runs/rates',
    "fullrank search mixhead/table1-vanilla --row b --set train.learning_rate=1e-4..3e-3 --random 8 --epochs 4 "
    "--out runs/drawn",
)
def search(
    config: Config,
    values: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=A,B,C", help="A key and its values; LOW..HIGH is a range, with --random."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the search and its runs.")],
    overrides: Overrides = None,
    row: Row = None,
    scale: Scale = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TIME", help="Time of the whole search, as '90 minutes' or '2 hours'."),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", help="Length of a full training; the configuration's if not given.")
    ] = None,
    eta: Annotated[int, Number("--eta", min=2, help="One of so many combinations goes on after a rung.")] = 2,
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="N", help="Seeds 1 to N of each combination, or a list (1,5 or 26,).")
    ] = "1",
    draws: Annotated[int | None, Number("--random", min=2, help="N random combinations in place of all.")] = None,
    cores: Annotated[int, Number("--cores", help="Trainings at a time, each on a core of its own.")] = 1,
    source: Source = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Search for the best values of a few keys: all combinations train a little, and the better ones go on.

    The best one trains to the end and is measured on test text, no other one is. A stopped search goes on when it is started
    again; nothing is trained twice. The winner's configuration is OUT/winner.yaml.
    """
    from fullrank.experiments.queue import cores_for
    from fullrank.experiments.search import Request, budget_in_words, minutes_of, outcome_of
    from fullrank.experiments.search import search as search_in

    if budget is not None:
        exclude("--budget", "decides the length of a full training", {"--epochs": epochs})
    request = Request(
        config, values, with_source(overrides, source), row, scale, read_seeds(seeds) or [1], eta, epochs,
        None if budget is None else minutes_of(budget), draws,
    )  # fmt: skip
    content = search_in(request, out, cores_for(cores), say=silent if quiet else say)
    keys, winner = list(content["winner"]["settings"]), content["winner"]
    shares = [f"nll at {share * content['epochs']:.3g} epochs" for share in content["shares"]]
    rows: list[list[str | Text]] = []
    for arm in sorted(content["arms"], key=lambda arm: (-len(arm["nll"]), (arm["nll"] or [None])[-1] or float("inf"))):
        nll = ["-" if value is None else f"{value:.4f}" for value in arm["nll"]]
        rows.append(
            [*(str(arm["settings"][key]) for key in keys), outcome_of(arm), *nll, *[""] * (len(shares) - len(nll))]
        )
    table = table_of([*keys, "outcome", *shares], rows, left=len(keys) + 1)
    final = "  ".join(f"{split} {nll:.4f}" for split, nll in winner["nll"].items())
    words = f"winner, nats per token: {final}   {', '.join(winner['folders'])}   {out / 'winner.yaml'}"
    tell(content, [table, budget_in_words(content), words], json=json)


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
