"""Verbs that judge a model: check, diagnose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullrank.cli.app import verb
from fullrank.cli.options import (
    Checkpoint,
    Device,
    Json,
    Model,
    Number,
    Overrides,
    Row,
    Scale,
    SegmentLength,
    TextFile,
    complete_recipe,
)
from fullrank.cli.output import clear_progress, print_json, say, table_of, tell
from fullrank.core.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from fullrank.checking import Report


@verb(
    "fullrank check mixhead/table1-vanilla --row b",
    "fullrank check runs/mine --json",
    "fullrank check gpt2 --text book.txt",
    "fullrank check --scoring my_eval:score --vocab-size 50",
)
def check(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A recipe, a YAML file, a run folder, a saved model, a Hugging Face model (folder or hub name; also an "
            "export, an injected model, an adapter; hf:TYPE: a small one of a model type), or python:MODULE:FUNCTION.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: Overrides = None,
    row: Row = None,
    scale: Scale = None,
    full: Annotated[
        bool, typer.Option("--full", help="Check a configuration at its own sizes instead of tiny ones; can take long.")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="Text for the last-position test of a trained model; a run has its own."
        ),
    ] = None,
    checkpoint: Checkpoint = "best",
    length: Annotated[
        int | None, typer.Option("--length", min=3, metavar="N", help="Tokens of the texts, about 67 by default.")
    ] = None,
    vocab_size: Annotated[
        int | None, Number("--vocab-size", min=2, help="Token ids that it knows, where a model does not say it.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Without compiling, training, saving and rare code paths: a second or two.")
    ] = False,
    scoring: Annotated[
        str | None,
        typer.Option(
            "--scoring",
            metavar="MODULE:FUNCTION",
            help="In place of a model: is the perplexity true that is made of this function, which returns the nll of a text? "
            "It gets token ids (--vocab-size), or the lines of --text as strings.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check that no token depends on later ones, and that all ways to compute a model agree.

    The code path, the positions and the layer that leak are named, with two lines of Python that show it. --json states
    what each check looked at, and why its tolerance. Exit status 1 if one fails.
    """
    from fullrank.experiments.check import check_named, check_scoring_named

    if scoring is not None:
        report = check_scoring_named(scoring, name, vocab_size=vocab_size, length=length, text=text)
    elif name is None:
        raise InputError(
            "MODEL: give what to check, such as a recipe, a run folder, gpt2, hf:llama or python:MODULE:FUNCTION; or "
            "--scoring"
        )
    else:
        report = check_named(
            name, row=row, scale=scale, overrides=overrides or (), full=full, text=text, checkpoint=checkpoint,
            length=length, vocab_size=vocab_size, quick=quick, say=say,
        )  # fmt: skip
    tell(report.as_dict(), _report_lines(report), json=json)
    if not report.passes:
        raise typer.Exit(1)


_STYLES = {"passes": "green", "fails": "bold red", "not applicable": "dim"}


def _report_lines(report: Report) -> Iterator[str | Table | Text]:
    from rich.text import Text

    about = report.description
    row = f", row {about['row']}, scale {about['scale']}" if about.get("row") else ""
    if "parameters" in about:
        yield f"{about['name']}{row}: {about['source']}, {about['parameters']:,} parameters"
        yield f"texts of {about['length']} random tokens, vocabulary {about['vocab_size']:,}, {about['precision']}"
    else:
        yield f"{about['name']}: {about['source']}, called {about['calls']:,} times"
    if report.shrunk:
        yield f"made small for the check (--full: as it is): {'; '.join(report.shrunk)}"
    rows: list[list[str | Text]] = [
        [
            finding.check,
            Text(finding.verdict, style=_STYLES[finding.verdict]),
            _figure(finding.difference),
            _figure(finding.tolerance),
        ]
        for finding in report.findings
    ]
    yield table_of(("check", "verdict", "largest\ndifference", "tolerance"), rows, left=2)
    for finding in report.findings:
        if finding.verdict == "not applicable" or finding.remark:
            words = finding.reason if finding.verdict == "not applicable" else finding.words
            yield Text(finding.check, style=_STYLES[finding.verdict]).append(f": {words}", style="default")
    yield ""
    yield Text(report.headline, style="bold green" if report.passes else "bold red")
    if report.layers and about.get("sees_future"):
        yield Text(f"{', '.join(report.layers)}: {about['sees_future']}", style="bold red")
    if lines := next((finding.reproduction for finding in report.failures if finding.reproduction), ""):
        yield "Two lines that show it, with the model as `model`; what they print would be 0:"
        yield from (Text(line, style="cyan") for line in lines.splitlines())


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.1e}"


@verb("fullrank diagnose runs/mine", "fullrank diagnose gpt2 --text book.txt --out gpt2.html")
def diagnose(
    name: Model,
    text: TextFile = None,
    segment_length: SegmentLength = None,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page; diagnosis.html in a run's folder, or here.")
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Which bottleneck a model is in, on one page: small heads, one softmax, short context, redundant heads, parameters.

    Each finding has its figures, the rule behind its verdict, and what to try.
    """
    from fullrank.experiments.analyze import Reading
    from fullrank.experiments.diagnose import diagnose as diagnose_model
    from fullrank.files import check_own
    from fullrank.render.page import BEGINNING, write_page
    from fullrank.render.terminal import print_page

    if out is not None:
        check_own(out, BEGINNING, "a report")  # before the model is read
    found = diagnose_model(name, Reading(text, segment_length, checkpoint, device, say))
    folder = Path(name).expanduser() if found.source == "run" else Path()
    page = out or folder / "diagnosis.html"
    built = found.build_page()
    path = write_page(built, page)
    clear_progress()
    if json:
        print_json({**found.to_dict(), "page": str(path)})
        return
    print_page(built)
    print(path)
