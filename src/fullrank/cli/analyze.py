"""The verb analyze: every measurement as a verb of its own, whose options are the keyword parameters of its function."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperGroup
from typer.main import get_command

from fullrank.cli.app import app, examples, load_modules, verb
from fullrank.cli.options import Choice, Json, Models, TextOptions, check_models, expand, set_parameters
from fullrank.cli.output import drop_missing, exclude, say, tell
from fullrank.core.errors import InputError
from fullrank.records import Measurement, describe_measurements, find_measurement

if TYPE_CHECKING:
    from fullrank.experiments.analyze import Measured

Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Draw the figures into this folder, PNG and SVG.")]


class MeasurementGroup(TyperGroup):
    """A verb for each measurement; those of a module that `--import` names among them."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted({*super().list_commands(context), *describe_measurements()})

    def get_command(self, context: Any, name: str) -> Any:
        """A verb as the list of all verbs shows it: nothing is imported for it."""
        known = super().get_command(context, name)
        line = describe_measurements().get(name)
        if known is not None or line is None:
            return known
        listed = typer.Typer(add_completion=False)
        listed.command(name, help=line)(lambda: None)
        return get_command(listed)

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        name = words[0]
        if name.startswith("-") or super().get_command(context, name) is not None:
            return super().resolve_command(context, words)
        check_models(list(itertools.takewhile(lambda word: not word.startswith("-"), words[1:])))
        load_modules(_find_modules(words))
        return name, build_command(find_measurement(name)), words[1:]


def _find_modules(words: list[str]) -> list[str]:
    """Modules that `--import MODULE` and `--import=MODULE` name: the verb may be in one of them."""
    given = [after for word, after in itertools.pairwise(words) if word == "--import"]
    return given + [word.removeprefix("--import=") for word in words if word.startswith("--import=")]


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
    """The verb of a measurement: shared options, and one for each keyword parameter of its function."""

    def run(names: Models, texts: TextOptions, out: Out = None, json: Json = False, **options: Any) -> None:
        show_measured(_measure(measurement, names, texts, options), out, json=json)

    command = expand(run)
    shared = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "options"]
    usual = [p.replace(default=measurement.texts) if p.name == "texts" else p for p in shared]
    own = [p.replace(annotation=_option_type(name, p.annotation)) for name, p in measurement.options.items()]
    set_parameters(command, [*usual, *own])
    command.__doc__ = measurement.help
    verbs = typer.Typer(add_completion=False, rich_markup_mode="rich")
    verb(f"fullrank analyze {measurement.name} runs/mine --json", name=measurement.name, group=verbs)(command)
    return get_command(verbs)


def _option_type(name: str, annotation: Any) -> Any:
    """The type of a parameter as an option; a string of `Annotated[type, "help"]` is its help."""
    if annotation is inspect.Parameter.empty:
        raise InputError(f"measurement: its parameter {name} needs a type, such as {name}: int = 1")
    if get_origin(annotation) is Annotated:
        kind, *notes = get_args(annotation)
        texts = [note for note in notes if isinstance(note, str)]
        return Annotated[kind, typer.Option(help=texts[0])] if texts else annotation
    return annotation


def _measure(measurement: Measurement, names: list[str], texts: TextOptions, options: dict[str, Any]) -> Measured:
    from fullrank.experiments.analyze import measure_models

    return measure_models(measurement, names, texts.to_reading(), **options)


def show_measured(
    measured: Measured,
    out: Path | None,
    *,
    json: bool,
    lines: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print what was measured, and draw its figures into `out`. lines, extra: what stands below, and in the JSON."""
    from fullrank.render.figures import save_plots
    from fullrank.render.tables import build_grid

    files = [] if out is None else save_plots(measured.plots, measured.records, out, measured.name)
    grids = [build_grid(table, measured.records) for table in measured.tables]
    content = {**measured.to_dict(), **(extra or {}), "files": [str(file) for file in files]}
    tell(content, [*(grid for grid in grids if grid.rows), *measured.sources, *lines, *files], json=json)


@verb("fullrank analyze heads runs/plain runs/cross_head --out figures", group=analyze)
def heads(names: Models, texts: TextOptions, out: Out = None, json: Json = False) -> None:
    """Each head ablated in turn: the change of perplexity by layer and head (Skip Cross-head Table 3).

    A head is ablated where heads are merged: its output is zero; other heads go on reading its weights where they are mixed.
    Deviation: over the heads of a layer; of several models its change from the first one.
    Similarity: mean linear CKA of the outputs of two heads. --json has 95 % intervals over segments.
    An encoder predicts masked tokens, 15 % of each segment. Of a run of GLUE it is the change of the task's metric on the
    development split.
    """
    from fullrank.experiments.analyze import is_finetuned, measure_task_heads

    if any(map(is_finetuned, names)):
        if len(names) > 1:
            raise InputError(f"MODEL: a fine-tuned run is measured alone, given {len(names)} models")
        exclude(
            "MODEL (a fine-tuned run)", "reads its own development split",
            drop_missing({"text": texts.text, "segment_length": texts.segment_length, "out": out}),
        )  # fmt: skip
        show_measured(measure_task_heads(names[0], device=texts.device, say=say), None, json=json)
        return
    texts = replace(texts, texts=texts.texts or 16)
    show_measured(_measure(find_measurement("heads"), names, texts, {}), out, json=json)


@verb(
    "fullrank analyze context my.yaml model.memory_length=256 --json",
    "fullrank analyze context runs/mine --phase skip_retain --out figures",
    group=analyze,
)
def context(
    choice: Choice,
    phase: Annotated[
        str | None, typer.Option(metavar="NAME", help="A phase of train.phases; the first that skips.")
    ] = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Reach of each layer's memory under Skip-Retain: its exact distribution, beside the paper's Eq. 6.

    Layers are counted from 0; the reach is in tokens before the first query of a segment.
    """
    from fullrank.config.recipe import resolve
    from fullrank.experiments.analyze import measure_reach

    measured, remark = measure_reach(resolve(choice.config, choice.row, choice.scale, choice.settings), phase)
    show_measured(measured, out, json=json, lines=[remark])
