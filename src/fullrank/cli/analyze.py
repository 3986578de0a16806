"""Verbs that judge a model: check, diagnose, and analyze.

Every measurement is a verb of its own, whose options are the keyword parameters of its function.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from fullrank.cli.app import (
    Checkpoint,
    Json,
    Model,
    Models,
    Number,
    Overrides,
    Row,
    Scale,
    TextOptions,
    app,
    examples,
    exclude,
    expand,
    print_json,
    set_parameters,
    suggest_recipes,
    tell,
    verb,
)
from fullrank.core.errors import InputError
from fullrank.records import Measurement, describe_measurements, find_measurement

if TYPE_CHECKING:
    from fullrank.checking import Report
    from fullrank.experiments.analyze import Measured
    from fullrank.render.blocks import Grid

Out = Annotated[Path | None, Option(metavar="DIR", help="Draw the figures into this folder, PNG and SVG.")]


class MeasurementGroup(TyperGroup):
    """A verb for each measurement; those of a module that `--import` names among them."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted(describe_measurements())

    def get_command(self, context: Any, name: str) -> Any:
        """Return a verb as the list of all verbs shows it: nothing is imported for it."""
        return TyperCommand(name, help=describe_measurements()[name])

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        return words[0], build_command(find_measurement(words[0])), words[1:]


analyze = typer.Typer(
    cls=MeasurementGroup,
    no_args_is_help=True,
    help="Measurements of a model: the papers' analyses, and your own (--import MODULE).",
    epilog=examples(
        "fullrank analyze spectrum runs/plain runs/b --out figures",
        "fullrank analyze rank gpt2 --text book.txt --contexts 2000 --json",
        "fullrank analyze confidence runs/plain --import my_module",
    ),
)
app.add_typer(analyze, name="analyze")


def build_command(measurement: Measurement) -> Any:
    """Build the verb of a measurement: shared options, and one for each keyword parameter of its function."""

    def run(names: Models, texts: TextOptions, out: Out = None, json: Json = False, **options: Any) -> None:
        from fullrank.experiments.analyze import measure_models

        show_measured(measure_models(measurement, names, texts.to_reading(), **options), out, json=json)

    command = expand(run)
    parameters = inspect.signature(command).parameters
    shared = [parameter for name, parameter in parameters.items() if name not in ("options", "texts")]
    texts = parameters["texts"].replace(default=measurement.texts)
    options = []
    for name, parameter in measurement.options.items():
        options.append(parameter.replace(annotation=_option_type(name, parameter.annotation)))
    set_parameters(command, [*shared, texts, *options])
    command.__doc__ = measurement.help
    verbs = typer.Typer(add_completion=False, rich_markup_mode="rich")
    verb(f"fullrank analyze {measurement.name} runs/mine --json", name=measurement.name, group=verbs)(command)
    return get_command(verbs)


def _option_type(name: str, annotation: Any) -> Any:
    """Return the type of a parameter as an option; a string of `Annotated[type, "help"]` is its help."""
    if annotation is inspect.Parameter.empty:
        raise InputError(f"measurement: its parameter {name} needs a type, such as {name}: int = 1")
    if get_origin(annotation) is Annotated:
        kind, note = get_args(annotation)
        return Annotated[kind, Option(help=note)] if isinstance(note, str) else annotation
    return annotation


def show_measured(measured: Measured, out: Path | None, *, json: bool, report: Path | None = None) -> None:
    """Print what was measured, and draw its figures.

    Args:
        measured: a measurement with its records.
        out: folder of the figures; None draws none.
        json: print JSON in place of tables.
        report: the report of the models, whose path is printed; None without.

    Raises:
        InputError: `out` is a file.
        RunError: `out` cannot be written to.
    """
    from fullrank.render.blocks import build_grid
    from fullrank.render.figures import save_plots

    shown = measured.measurement
    files = [] if out is None else save_plots(shown.plots, measured.records, out, shown.name)
    grids = [build_grid(table, measured.records) for table in shown.tables]
    pages = {} if report is None else {"report": str(report)}
    content = {**measured.to_dict(), **pages, "files": [str(file) for file in files]}
    grids = [grid for grid in grids if grid.rows]
    tell(content, [*grids, *measured.sources, *pages.values(), *files], json=json)


# -- check and diagnose ------------------------------------------------------------------------------------------------


@verb(
    "fullrank check mixhead/table1-vanilla --row b",
    "fullrank check runs/mine --json",
    "fullrank check gpt2 --quick",
    "fullrank check --scoring my_eval:score --vocab-size 50",
)
def check(
    name: Annotated[
        str | None,
        Argument(
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
        bool, Option("--full", help="Check a configuration at its own sizes instead of tiny ones; can take long.")
    ] = False,
    checkpoint: Checkpoint = "best",
    length: Annotated[int | None, Number(min=3, help="Tokens of the texts, about 67 by default.")] = None,
    vocab_size: Annotated[
        int | None, Number(min=2, help="Token ids that it knows, where a model does not say it.")
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Without compiling, training and rare code paths: a second or two.")
    ] = False,
    scoring: Annotated[
        str | None,
        Option(
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
        choices = {"row": row, "scale": scale, "full": full, "quick": quick, "checkpoint": checkpoint != "best"}
        exclude("--scoring", "checks a function", [option for option, value in choices.items() if value])
        report = check_scoring_named(scoring, vocab_size, length)
    elif name is None:
        raise InputError(
            "MODEL: give what to check, such as a recipe, a run folder, gpt2, hf:llama or python:MODULE:FUNCTION; or "
            "--scoring"
        )
    else:
        report = check_named(
            name, row=row, scale=scale, overrides=overrides or (), full=full, checkpoint=checkpoint, length=length,
            vocab_size=vocab_size, quick=quick,
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
        numbers = ["" if x is None else f"{x:.1e}" if x else "0" for x in (finding.difference, finding.tolerance)]
        rows.append([Cell(finding.check), verdict, *map(Cell, numbers)])
    yield Grid(headings, rows)
    for finding in report.findings:
        if finding.verdict == "not applicable" or finding.remark:
            yield f"{finding.check}: {finding.reason if finding.verdict == 'not applicable' else finding.words}"
    yield f"\n{report.headline}"
    if report.layers and about.get("sees_future"):
        yield f"{', '.join(report.layers)}: {about['sees_future']}"


@verb("fullrank diagnose runs/mine", "fullrank diagnose gpt2 --text book.txt --out gpt2.html")
def diagnose(
    name: Model,
    texts: TextOptions,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="The page; diagnosis.html in a run's folder, or here.")
    ] = None,
    json: Json = False,
) -> None:
    """Find the bottleneck of a model, on one page: small heads, one softmax, short context, redundant heads, overfitting.

    Each finding has its figures, the rule behind its verdict, and what to try.
    """
    from fullrank.experiments.diagnose import diagnose as diagnose_model
    from fullrank.render.page import write_page
    from fullrank.render.terminal import print_page

    diagnosis = diagnose_model(name, texts.to_reading())
    folder = Path(name).expanduser() if diagnosis.subject.run is not None else Path()
    page = diagnosis.build_page()
    path = write_page(page, out or folder / "diagnosis.html")
    if json:
        print_json({**diagnosis.to_dict(), "page": str(path)})
        return
    print_page(page)
    print(path)
