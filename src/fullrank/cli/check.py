"""Verbs that judge a model: check, diagnose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullrank.cli.app import verb
from fullrank.cli.options import (
    Checkpoint,
    Json,
    Model,
    Number,
    Overrides,
    Row,
    Scale,
    TextOptions,
    suggest_recipes,
)
from fullrank.cli.output import clear_progress, print_json, say, tell
from fullrank.core.errors import InputError

if TYPE_CHECKING:
    from fullrank.checking import Report
    from fullrank.render.blocks import Cell, Grid


@verb(
    "fullrank check mixhead/table1-vanilla --row b",
    "fullrank check runs/mine --json",
    "fullrank check gpt2 --quick",
    "fullrank check --scoring my_eval:score --vocab-size 50",
)
def check(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A recipe, a YAML file, a run folder, a saved model, a Hugging Face model (folder or hub name; also an "
            "export or an injected model; hf:TYPE: a small one of a model type), or python:MODULE:FUNCTION.",
            autocompletion=suggest_recipes,
        ),
    ] = None,
    overrides: Overrides = None,
    row: Row = None,
    scale: Scale = None,
    full: Annotated[
        bool, typer.Option("--full", help="Check a configuration at its own sizes instead of tiny ones; can take long.")
    ] = False,
    checkpoint: Checkpoint = "best",
    length: Annotated[int | None, Number(min=3, help="Tokens of the texts, about 67 by default.")] = None,
    vocab_size: Annotated[
        int | None, Number(min=2, help="Token ids that it knows, where a model does not say it.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Without compiling, training and rare code paths: a second or two.")
    ] = False,
    scoring: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="In place of a model: is the perplexity true that is made of this function, which returns the nll of a text? "
            "It gets random token ids (--vocab-size).",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check that no token depends on later ones, and that all ways to compute a model agree.

    The code path, the positions and the layer that leak are named. --json states what each check looked at, and why its
    tolerance. Exit status 1 if one fails.
    """
    from fullrank.experiments.check import check_named, check_scoring_named

    if scoring is not None:
        if name is not None:
            raise InputError(f"{name}: a model, and --scoring {scoring} is a function; check them one at a time")
        report = check_scoring_named(scoring, vocab_size, length)
    elif name is None:
        raise InputError(
            "MODEL: give what to check, such as a recipe, a run folder, gpt2, hf:llama or python:MODULE:FUNCTION; or "
            "--scoring"
        )
    else:
        report = check_named(
            name, row=row, scale=scale, overrides=overrides or (), full=full, checkpoint=checkpoint, length=length,
            vocab_size=vocab_size, quick=quick, say=say,
        )  # fmt: skip
    tell(report.as_dict(), _report_lines(report), json=json)
    if not report.passes:
        raise typer.Exit(1)


def _report_lines(report: Report) -> Iterator[str | Grid]:
    from fullrank.render.blocks import Cell, Grid, Heading

    about = report.description
    row = f", row {about['row']}, scale {about['scale']}" if about.get("row") else ""
    if "parameters" in about:
        yield f"{about['name']}{row}: {about['source']}, {about['parameters']:,} parameters"
        yield f"texts of {about['length']} random tokens, vocabulary {about['vocab_size']:,}, {about['precision']}"
    else:
        yield f"{about['name']}: {about['source']}, called {about['calls']:,} times"
    if report.shrunk:
        yield f"made small for the check (--full: as it is): {'; '.join(report.shrunk)}"
    headings = [
        Heading("check", left=True),
        Heading("verdict", left=True),
        Heading("largest", "difference"),
        Heading("tolerance"),
    ]
    rows = []
    for finding in report.findings:
        verdict = Cell(finding.verdict, strong=finding.verdict == "fails")
        rows.append([Cell(finding.check), verdict, _show(finding.difference), _show(finding.tolerance)])
    yield Grid(headings, rows)
    for finding in report.findings:
        if finding.verdict == "not applicable" or finding.remark:
            yield f"{finding.check}: {finding.reason if finding.verdict == 'not applicable' else finding.words}"
    yield f"\n{report.headline}"
    if report.layers and about.get("sees_future"):
        yield f"{', '.join(report.layers)}: {about['sees_future']}"


def _show(value: float | None) -> Cell:
    from fullrank.render.blocks import Cell

    return Cell("" if value is None else "0" if value == 0 else f"{value:.1e}")


@verb("fullrank diagnose runs/mine", "fullrank diagnose gpt2 --text book.txt --out gpt2.html")
def diagnose(
    name: Model,
    texts: TextOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; diagnosis.html in a run's folder, or here.")
    ] = None,
    json: Json = False,
) -> None:
    """Which bottleneck a model is in, on one page: small heads, one softmax, short context, redundant heads, parameters.

    Each finding has its figures, the rule behind its verdict, and what to try.
    """
    from fullrank.experiments.diagnose import diagnose as diagnose_model
    from fullrank.render.page import write_page
    from fullrank.render.terminal import print_page

    diagnosis = diagnose_model(name, texts.to_reading())
    folder = Path(name).expanduser() if diagnosis.subject.run is not None else Path()
    page = diagnosis.build_page()
    path = write_page(page, out or folder / "diagnosis.html")
    clear_progress()
    if json:
        print_json({**diagnosis.to_dict(), "page": str(path)})
        return
    print_page(page)
    print(path)
