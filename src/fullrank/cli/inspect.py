"""Verbs that train nothing: info, recipes, config, data, bench."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fullrank.cli.app import (
    Choice,
    Json,
    Number,
    Overrides,
    Source,
    app,
    describe,
    examples,
    print_json,
    suggest_recipes,
    tell,
    verb,
)
from fullrank.core.errors import InputError
from fullrank.files import Entries

recipes = typer.Typer(
    no_args_is_help=True,
    help="The tables of the papers, row by row, with the paper's figures.",
    epilog=examples("fullrank recipes show mixhead/table1-vanilla"),
)
config = typer.Typer(
    no_args_is_help=True,
    help="Resolve and check configurations; print their schema.",
    epilog=examples("fullrank config show mixhead/table1-vanilla --row b"),
)

data = typer.Typer(
    no_args_is_help=True,
    help="List corpora and prepare them.",
    epilog=examples(
        "fullrank data prepare ptb --from ~/corpora/ptb", "fullrank data prepare glue/cola --from ~/glue_data"
    ),
)

app.add_typer(recipes, name="recipes")
app.add_typer(data, name="data")
app.add_typer(config, name="config")


@verb("fullrank info mixhead/table1-vanilla --row b --json")
def info(
    choice: Choice,
    length: Annotated[
        int | None, Number("--length", help="Sequence length; the training segment's, of translations 25.")
    ] = None,
    json: Json = False,
) -> None:
    """Show parameters by part (total exact), memory and FLOPs per token. Allocates nothing.

    For translation models: encoder, decoder and cross-attention apart; FLOPs for a source and a target of --length tokens each.
    Multi-linear attention is shown beside multi-head attention of the same width, its output map included.
    For fine-tuning: parameters of the pretrained model, and those of the mixing that are injected, without --length.
    """
    from fullrank.config.finetune import FinetuneConfig, TextFinetuneConfig

    resolved = choice.resolve()

    from fullrank.analysis.size import size_of_run

    run = resolved.config
    size = {key: getattr(resolved, key) for key in ("recipe", "row", "scale")}
    if isinstance(run, FinetuneConfig | TextFinetuneConfig):
        from fullrank.experiments.pretrained import measure_pretrained_size

        if length is not None:
            raise InputError("--length: of a pretrained model parameters are counted, not FLOPs; leave it out")
        size |= measure_pretrained_size(run)
    else:
        if run.model.vocab_size is None:
            from fullrank.experiments.run import task_of

            run = task_of(run).prepare().config
        size |= {**size_of_run(run, length), "next_token": run.remark is None, "remark": None}
        if run.remark is not None:
            size["remark"] = f"its perplexity is {run.remark}"
    size["paper"] = resolved.paper
    tell(size, describe_size(size), json=json)


@verb("fullrank recipes list --json", name="list", group=recipes)
def list_recipes(json: Json = False) -> None:
    """List all shipped recipes."""
    from fullrank.config.load import list_shipped, load

    content = []
    lines = []
    for name in list_shipped():
        recipe = load(name)
        rows = list(recipe.rows)
        scales = list(recipe.scales)
        content.append({"name": name, "rows": rows, "paper": recipe.paper, "table": recipe.table, "scales": scales})
        lines.append(f"{name}\n  {recipe.table}\n  rows: {', '.join(rows)}   scales: {', '.join(scales)}")
    tell(content, lines, json=json)


@verb("fullrank recipes show mixhead/table1-vanilla", name="show", group=recipes)
def show_recipe(
    name: Annotated[str, Argument(metavar="NAME", help="A recipe.", autocompletion=suggest_recipes)],
    json: Json = False,
) -> None:
    """Show one recipe: what it is, its rows with the paper's figures, and its settings."""
    from fullrank.config.load import load
    from fullrank.files import format_yaml

    recipe = load(name)
    content = {key: getattr(recipe, key) for key in ("name", "table", "paper", "notes", "rows", "base", "scales")}
    content["rows"] = {name: row.list_stated() for name, row in recipe.rows.items()}
    tell(content, format_yaml(content, width=110).splitlines(), json=json)


@verb("fullrank config show mixhead/table1-vanilla --row b train.steps=100", name="show", group=config)
def show_config(choice: Choice, json: Json = False) -> None:
    """Print the resolved configuration, every value stated."""
    from fullrank.config.load import to_yaml

    resolved = choice.resolve().config
    tell(resolved.to_dict(), to_yaml(resolved).splitlines(), json=json)


@verb("fullrank config schema > fullrank.schema.json", name="schema", group=config)
def show_schema(
    finetune: Annotated[bool, Option("--finetune", help="That of fine-tuning instead.")] = False,
) -> None:
    """Print the JSON schema of a configuration, for editors."""
    from fullrank.config.schema import finetune_schema, json_schema

    print_json(finetune_schema() if finetune else json_schema())


@verb("fullrank config validate my.yaml", name="validate", group=config)
def validate_config(choice: Choice, json: Json = False) -> None:
    """Check a configuration (every row and scale of a recipe) and report all errors at once."""
    from fullrank.config.load import load
    from fullrank.core.errors import ConfigError
    from fullrank.experiments.run import task_of

    recipe = load(choice.config)
    rows = [choice.row] if choice.row or not recipe.rows else list(recipe.rows)
    scales = [choice.scale] if choice.scale or not recipe.scales else list(recipe.scales)
    problems: dict[str, None] = {}
    for row, scale in itertools.product(rows, scales):
        try:
            run = replace(choice, row=row, scale=scale).resolve().config
            task_of(run).check()
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
        except InputError as error:
            problems[str(error)] = None
    if json:
        print_json({"valid": not problems, "problems": list(problems)})
        raise typer.Exit(2 if problems else 0)
    if problems:
        raise ConfigError(*problems)
    print(f"{choice.config}: valid")


def describe_size(size: Entries) -> list[str]:
    """Describe the size of a model, from `size_of_run` or `measure_pretrained_size` and its recipe, in lines."""
    row = f", row {size['row']}, scale {size['scale']}" if size["row"] else ""
    memory = size.get("memory", {})
    decoding = size.get("bytes", {})
    content = {
        "parameters": {part: count for part, count in size["parameters"].items() if count},
        "the paper": size["paper"],
        **{key: size.get(key) for key in ("task", "encoder", "model", "attention")},
        "FLOPs per token": size.get("flops_per_token"),
        "memory of training in MiB": {part: count / 2**20 for part, count in memory.items()},
        "memory of decoding in KiB": {
            part.removesuffix("_fp32"): count / 2**10
            for part, count in decoding.items()
            if count and part not in ("weights_fp32", "training_adam_fp32")
        },
        "remark": size.get("remark"),
    }
    return [f"{size['recipe']}{row}", *describe(content)]


# -- corpora -----------------------------------------------------------------------------------------------------------


@verb("fullrank data list", name="list", group=data)
def list_data(json: Json = False) -> None:
    """List the known corpora: tokens, published counts, terms, source."""
    from fullrank.config.run import list_corpora

    corpora = [dataclasses.asdict(corpus) for corpus in list_corpora().values()]
    lines = []
    for corpus in corpora:
        about = {key: value for key, value in corpus.items() if key not in ("name", "sha256")}
        lines += [corpus["name"], *(f"  {line}" for line in describe(about))]
    tell(corpora, lines, json=json)


@verb(
    "fullrank data prepare ptb --from ~/corpora/ptb",
    "fullrank data prepare glue/cola --from ~/glue_data",
    name="prepare",
    group=data,
)
def prepare_data(
    name: Annotated[str, Argument(metavar="CORPUS", help="A corpus (`fullrank data list`).")],
    overrides: Overrides = None,
    source: Source = None,
    to: Annotated[
        Path | None, Option("--to", metavar="DIR", help="Where prepared corpora are kept (data.cache).")
    ] = None,
    json: Json = False,
) -> None:
    """Find or download a corpus, verify its counts, and store it as token ids.

    Of a task to fine-tune on (glue/cola, squad) every split is read and counted; token ids are those of its model.
    """
    from fullrank.config.load import apply_overrides, build_any
    from fullrank.config.run import has_pairs

    words = Choice(name, overrides, source=source).settings
    if to is not None:
        words.append(f"data.cache={to}")
    raw: dict[str, Any] = {"data": {"name": name}}
    if has_pairs(name):
        raw["train"] = {"batch_tokens": 1}  # a run of translation has to say it; nothing is trained here
    config = build_any(apply_overrides(raw, words))

    from fullrank.experiments.run import task_of

    task = task_of(config).prepare()
    about = task.describe()
    if "label" in about:
        about = {"folder": str(task.corpus.folder), **about}
    shown = {key: value for key, value in about.items() if key not in ("name", "label", "sha256", "fingerprint")}
    tell(about, [about.get("label", name), *describe(shown)], json=json)


# -- benchmarks --------------------------------------------------------------------------------------------------------

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"  # beside src/; not part of an installed package


@verb(
    "fullrank bench --help",
    "fullrank bench mixing --plot figures",
    "fullrank bench relative --lengths 128,512 --json",
    passes_options=True,
)
def bench(context: typer.Context) -> None:
    """Measure mechanisms against their peers, interleaved in one run: ratios of time and of peak memory."""
    if not (BENCHMARKS / "bench.py").is_file():
        raise InputError(
            "bench: the benchmarks are in the folder benchmarks/ of the source of fullrank, not in the installed package; "
            "get the source and run `pip install -e .` in it"
        )
    sys.path.insert(0, str(BENCHMARKS))
    typer.main.get_command(importlib.import_module("bench").app)(
        context.args, prog_name="fullrank bench", standalone_mode=False
    )
