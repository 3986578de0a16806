"""Verbs that train: demo, train, reproduce, finetune."""

from __future__ import annotations

import glob
import logging
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from fullrank.cli.app import (
    Choice,
    Json,
    Kernel,
    Number,
    Overrides,
    Quiet,
    RunOptions,
    Scale,
    Source,
    exclude,
    import_options,
    print_json,
    read_seeds,
    show_report,
    suggest_recipes,
    tell,
    verb,
)
from fullrank.core.errors import InputError
from fullrank.files import is_distributed, is_main_process

if TYPE_CHECKING:
    from fullrank.config.finetune import FinetuneConfig
    from fullrank.config.load import Figure, Resolved
    from fullrank.config.run import RunConfig

logger = logging.getLogger(__name__)


@verb("fullrank demo", "fullrank demo --minutes 2 --out runs/quick")
def demo(
    minutes: Annotated[float, Option(metavar="MINUTES", max=10_000, help="Of the whole demo, with evaluation.")] = 5.0,
    out: Annotated[Path, Option(help="Folder of the runs and the report.")] = Path("runs/demo"),
    seed: Annotated[int, Option(min=0, help="Seed of every model.")] = 1,
    json: Json = False,
) -> None:
    """Train a plain Transformer and its bottleneck-free variants on the built-in text, on equal terms, and compare them.

    Ends with a table and OUT/report.html. A stopped demo goes on when it is started again.
    """
    from fullrank.experiments.demo import run_demo

    tell(run_demo(minutes, out, seed, aside=json), (), json=json)


@verb(
    "fullrank init book.txt",
    "fullrank init book.txt --tokens word --minutes 30 --out words.yaml",
    "fullrank init corpus/train --task translation --source de --target en",
)
def init(
    texts: Annotated[
        list[str],
        Argument(
            metavar="TEXT", help="Text files, folders or patterns; for translation a prefix of two files, or both."
        ),
    ],
    out: Annotated[Path, Option(help="The file to write.")] = Path("my.yaml"),
    task: Annotated[Literal["lm", "translation"], Option(help="What is trained.")] = "lm",
    tokens: Annotated[
        Literal["character", "word", "bpe", "byte"] | None, Option(help="By the amount of text if not given.")
    ] = None,
    size: Annotated[
        Literal["tiny", "small", "medium", "large"] | None,
        Option(help="The largest that the time can train if not given."),
    ] = None,
    minutes: Annotated[float, Option(metavar="MINUTES", help="Of training on this machine, with evaluation.")] = 5.0,
    source: Annotated[str | None, Option(help="Translation: suffix of the source files.")] = None,
    target: Annotated[str | None, Option(help="Translation: suffix of the target files.")] = None,
    force: Annotated[bool, Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a configuration with comments for your own text: size, rate, batch, dropout and steps by rules.

    A few training steps are timed, so that `fullrank train` takes the minutes asked for.
    """
    from fullrank.experiments.init import write_configuration

    write_configuration(
        texts, out, task=task, tokens=tokens, size=size, minutes=minutes, languages=(source, target), force=force
    )
    print(out.read_text(encoding="utf-8"), end="")


@verb(
    "fullrank train book.txt  # five minutes by the rules of init",
    "fullrank train mixhead/table1-vanilla --row b --scale tiny",
    "fullrank train my.yaml train.steps=500 --out runs/mine",
    "fullrank train runs/mine  # resumes",
    "fullrank train other.yaml --from-run runs/mine",
)
def train(
    context: typer.Context,
    choice: Choice,
    options: RunOptions,
    from_run: Annotated[
        Path | None,
        Option(metavar="DIR", help="Begin with weights and vocabulary of a finished run (train.start)."),
    ] = None,
    procs: Annotated[int, Number(help="Processes that train together on this machine.")] = 1,
    until: Annotated[
        int | None, Number(metavar="STEP", help="Pause after this update, saved and not measured; later go on.")
    ] = None,
) -> None:
    """Train a recipe or a YAML file. Given a run folder, resume it exactly where it stopped.

    Given a text (a file, a folder, a pattern), write the configuration that `fullrank init` would, in
    five minutes' size, and train it.

    --from-run begins a training with the weights and the vocabulary of a finished run.

    On several machines: torchrun -m fullrank train ... Each process reads its share of every batch.
    A configuration of fine-tuning is trained as by `fullrank finetune`.
    """
    from fullrank.config.finetune import FinetuneConfig
    from fullrank.experiments.run_folder import default_folder, reopen, start_from_run

    # what can be refused is refused before torch is imported, and once for all processes
    argument = choice.config
    if _is_text(argument):
        if choice.row is not None or choice.scale is not None:
            raise InputError(f"--row, --scale: of a recipe, and {argument} is a text; leave them out")
        choice = replace(choice, config=_write_configuration(argument))
    folder = Path(choice.config)
    kernel = options.kernel
    changes = [choice.settings, choice.row, choice.scale, options.out, from_run, kernel != "auto"]
    if _resumes(folder, changes):
        resolved, kernel = reopen(folder)
    else:
        start = [] if from_run is None else [f"train.start={from_run}"]
        resolved = replace(choice, overrides=[*(choice.overrides or []), *start]).resolve()
        folder = options.out or default_folder(resolved)
        _check_files(resolved, folder)
        resolved = start_from_run(resolved)
    config = resolved.config
    if until is not None and isinstance(config, FinetuneConfig):
        raise InputError(f"--until: fine-tuning is not paused; leave out --until {until}")
    if procs > 1 and not is_distributed():
        from fullrank.training.device import launch

        words = [choice.config if word == argument else word for word in context.obj]
        raise typer.Exit(launch(procs, [words[0], *import_options(), *words[1:]]))
    from fullrank.comparison.page import write_report
    from fullrank.experiments.run import train as train_model

    result = train_model(resolved, folder, kernel_name=kernel, quiet=options.quiet, until=until)
    if not is_main_process():
        return
    if not result:
        logger.info(f"{folder}: paused, and not measured; without --until it goes on")
        tell({"folder": str(folder), "paused": until}, (), json=options.json)
        return
    page = folder / "report.html"
    if options.json and not isinstance(config, FinetuneConfig):
        write_report([folder], page)
        print_json({"folder": str(folder), **result})
        return
    show_report([folder], page, json=options.json)
    if not (options.json or isinstance(config, FinetuneConfig) or config.translates or config.masks):
        modules = "".join(f" {word}" for word in import_options())
        print(f"next: fullrank generate {shlex.quote(str(folder))}{modules} --prompt ...")


def _is_text(name: str) -> bool:
    """Return whether a name is that of a text or of texts, and of no configuration, run folder or recipe."""
    path = Path(name)
    if path.is_dir():
        holds_runs = (path / "config.yaml").exists() or any(path.rglob("run.json"))
        return not holds_runs and any(path.rglob("*.txt"))
    return path.suffix == ".txt" or (glob.has_magic(name) and bool(glob.glob(name)))


def _write_configuration(text: str) -> str:
    """Write the configuration that `init` would into the working directory; one that is there is kept."""
    stem = re.sub(r"[^\w.-]+", "-", Path(text).stem or Path(text).resolve().name).strip("-") or "my"
    out = Path(f"{stem}.yaml")
    if out.exists():
        logger.info(f"{out} is there already, and is trained as it is; delete it to have it written anew")
    else:
        from fullrank.experiments.init import write_configuration

        write_configuration([text], out)
    return str(out)


def _check_files(resolved: Resolved[RunConfig | FinetuneConfig], folder: Path) -> None:
    """Check the files of a new training: InputError before torch is imported. The text of a run that has begun is kept."""
    from fullrank.data.corpora import check_data
    from fullrank.seal import is_run

    if not is_run(folder):
        check_data(resolved.config.data)


@verb(
    "fullrank reproduce mixhead/table1-vanilla --scale tiny",
    "fullrank reproduce mixhead/table1 --scale small --rows plain,b --seeds 3",
    "fullrank reproduce mixhead/figure3 --scale small",
    "fullrank reproduce mos/table2 --paper-rows --list",
)
def reproduce(
    table: Annotated[
        str,
        Argument(
            metavar="TABLE",
            help="A table, with all of its backbones, a figure, or a recipe with rows.",
            autocompletion=suggest_recipes,
        ),
    ],
    overrides: Overrides = None,
    rows: Annotated[str | None, Option(metavar="A,B", help="These rows, one after another.")] = None,
    paper_rows: Annotated[bool, Option("--paper-rows", help="Only rows of which the paper has figures.")] = False,
    scale: Scale = None,
    seeds: Annotated[
        str | None,
        Option(
            metavar="N",
            help="Seeds 1 to N, or a list (1,5; one alone as 26,). If not given, the paper's at paper scale, else one.",
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of the runs and the report; runs/TABLE if not given.")] = None,
    source: Source = None,
    kernel: Kernel = "auto",
    quiet: Quiet = False,
    list_only: Annotated[bool, Option("--list", help="Only list what is finished.")] = False,
    json: Json = False,
) -> None:
    """Train the rows of a paper's table, then print it with the paper's figures beside ours.

    A stopped command goes on when it is given again. A figure (mixhead/figure1, mixhead/figure3, skip-cross-head/table3)
    trains rows of tables, then measures them as `fullrank analyze` does.
    """
    from fullrank.config.load import read_figures, select_rows, tables
    from fullrank.experiments.run_folder import cells

    recipes = tables(table)
    if not any(recipes.values()):
        raise InputError(f"{table} is a single configuration, not a table; use `fullrank train {table}`")
    names = None if rows is None else [name.strip() for name in rows.split(",") if name.strip()]
    figure = read_figures().get(table)
    selected_rows = select_rows(recipes, names, of_paper=paper_rows)
    settings = Choice(table, overrides, source=source).settings
    planned = []
    for recipe, recipe_rows in selected_rows.items():
        folder = out if out is None or len(recipes) == 1 else out / Path(recipe).name
        planned += cells(recipe, recipe_rows, scale, read_seeds(seeds), settings, out=folder)
    for cell in planned:
        _check_files(cell.resolved, cell.folder)
    if list_only:
        status = [cell.describe() for cell in planned]
        lines = [
            f"{'finished' if cell['finished'] else 'open':<9} {cell['row']:<16} seed {cell['seed']}  {cell['folder']}"
            for cell in status
        ]
        tell(status, lines, json=json)
        return

    from fullrank.experiments.run import reproduce as train_table

    train_table(table, planned, kernel_name=kernel, quiet=quiet)
    folders = [cell.folder for cell in planned]
    parent = planned[0].folder.parent
    report_folder = out or parent.with_name(table.replace("/", "-"))
    if figure is not None:
        _show_figure(table, figure, folders, report_folder, json=json)
    elif len(selected_rows) > 1:
        show_report(folders, report_folder / "report.html", json=json, title=table, table=table)
    else:
        show_report(folders, parent / "report.html", json=json, title=next(iter(selected_rows)))


def _show_figure(name: str, figure: Figure, folders: Sequence[Path], out: Path, *, json: bool) -> None:
    """Measure trained rows, print the table and write its pictures and the report of the rows into `out`."""
    from fullrank.cli.analyze import show_measured
    from fullrank.comparison.page import write_report
    from fullrank.experiments.analyze import Reading, measure_models
    from fullrank.records import find_measurement

    logger.info(f"measuring {figure.measurement} ...")
    measurement = find_measurement(figure.measurement)
    measured = measure_models(measurement, list(map(str, folders)), Reading(texts=figure.texts))
    page = out / "report.html"
    write_report(folders, page, figure.title, name)
    show_measured(measured, out, json=json, report=page)


def _resumes(folder: Path, options: Sequence[object]) -> bool:
    """Return whether the configuration is a folder, whose run is then resumed; InputError for a run with `options`."""
    from fullrank.seal import is_run

    if is_run(folder) and any(options):
        raise InputError(
            f"{folder} is a run folder: it is resumed as it was configured, without further options. `fullrank train CONFIG "
            f"--from-run {folder}` begins another training with its weights"
        )
    return folder.is_dir()


@verb(
    "fullrank finetune gpt2 --text book.txt model.attention.mix=position_wise",
    "fullrank finetune gpt2 --text book.txt model.attention.mix=position_wise --peft lora train.learning_rate=2e-4",
    "fullrank finetune mixhead/table5 --scale small --row cola-b --from glue",
    "fullrank finetune my.yaml data.name=glue/rte model.attention.mix=position_wise",
)
def finetune(
    context: typer.Context,
    choice: Choice,
    options: RunOptions,
    text: Annotated[
        Path | None,
        Option("--text", metavar="FILE", help="Train a causal model, which CONFIG names, on this text."),
    ] = None,
    peft: Annotated[
        Literal["lora"] | None,
        Option("--peft", help="Train an adapter in place of all parameters (train.adapter)."),
    ] = None,
    plain: Annotated[
        bool, Option("--plain/--no-plain", help="With --text: train the model without what is injected, too.")
    ] = True,
    seeds: Annotated[str | None, Option(metavar="N", help="With --text: seeds 1 to N, or a list.")] = None,
) -> None:
    """Fine-tune a pretrained model, with our attention injected: an encoder on GLUE or SQuAD, a causal model on your text.

    With --text CONFIG is a model of Hugging Face. It is trained with what is injected and plain, on as many tokens; the page
    compares both with the model before training.
    A stopped command goes on when it is given again, and `fullrank finetune DIR` goes on with a run. Rows and seeds of a table
    are trained by `fullrank reproduce`.
    """
    from fullrank.config.load import is_finetuning

    if peft is not None:
        choice = replace(choice, overrides=[*(choice.overrides or []), f"train.adapter.kind={peft}"])
    if text is not None:
        _finetune_on_text(choice, options, text, seeds, plain=plain)
        return
    if seeds is not None or not plain:
        raise InputError("--seeds, --no-plain: go with --text FILE; `fullrank reproduce` trains seeds of a table")
    if not is_finetuning(choice.config, choice.scale, choice.settings):
        raise InputError(
            "data.name: fine-tuning is on a task of GLUE or SQuAD, as in data.name=glue/cola, or of a pretrained model on a "
            "text: fullrank finetune MODEL --text FILE; `fullrank train` trains from the beginning"
        )
    train(context, choice, options)


def _finetune_on_text(choice: Choice, options: RunOptions, text: Path, seeds: str | None, *, plain: bool) -> None:
    """Train a pretrained causal model on a text, plain and with what is injected, and compare the runs."""
    from fullrank.config.load import resolve_arms
    from fullrank.experiments.run_folder import Cell
    from fullrank.seal import is_run

    if is_run(Path(choice.config)):
        raise InputError(
            f"--text: goes with a model of Hugging Face, given the run {choice.config}; of a fine-tuned one that is "
            f"{choice.config}/model. `fullrank train CONFIG --from-run {choice.config}` goes on with a model of ours"
        )
    exclude("--text", "trains a model", [name for name in ("row", "scale") if getattr(choice, name)])
    arms = []
    for seed in read_seeds(seeds) or (None,):
        seeded = [] if seed is None else [f"train.seed={seed}"]
        arms += resolve_arms(choice.config, text, [*choice.settings, *seeded], plain=plain)
    title = arms[0].recipe
    folder = options.out or Path("runs") / title
    planned = [Cell(arm, folder / f"{arm.row}-seed{arm.config.train.seed}") for arm in arms]
    for cell in planned:
        _check_files(cell.resolved, cell.folder)

    from fullrank.experiments.run import reproduce as train_arms

    train_arms(title, planned, kernel_name=options.kernel, quiet=options.quiet)
    show_report([cell.folder for cell in planned], folder / "report.html", json=options.json, title=title)
