"""Verbs that train nothing: info, recipes, config; `data` is in a file of its own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Annotated, Any

import typer

from fullrank.cli.app import app, examples, verb
from fullrank.cli.data import data
from fullrank.cli.options import Choice, Json, Number, suggest_recipes
from fullrank.cli.output import describe, print_json, say, tell

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
    """Parameters by part (total exact), memory and FLOPs per token. Allocates nothing.

    For translation models: encoder, decoder and cross-attention apart; FLOPs for a source and a target of --length tokens each.
    Multi-linear attention is shown beside multi-head attention of the same width, its output map included.
    For fine-tuning: the pretrained encoder, and the mixing parameters that are injected.
    """
    from fullrank.config.finetune import FinetuneConfig

    resolved = choice.resolve()
    if getattr(resolved.config.model, "vocab_size", 0) is None:  # the data have it
        from fullrank.data.sources import check_data

        check_data(resolved.config.data)

    from fullrank.analysis.size import size_of_run

    run, size = resolved.config, {key: getattr(resolved, key) for key in ("recipe", "row", "scale")}
    if isinstance(run, FinetuneConfig):
        from fullrank.experiments.pretrained import measure_pretrained_size

        size |= {**measure_pretrained_size(run), "paper": resolved.paper}
        tell(size, describe_size(size), json=json)
        return
    if run.model.vocab_size is None:
        from fullrank.experiments.run import with_vocabulary

        run = with_vocabulary(run, say)
    remark = None if run.remark is None else f"its perplexity is {run.remark}"
    size |= {**size_of_run(run, length), "paper": resolved.paper, "next_token": remark is None, "remark": remark}
    tell(size, describe_size(size), json=json)


@verb("fullrank recipes list --json", name="list", group=recipes)
def list_recipes(json: Json = False) -> None:
    """All shipped recipes."""
    from fullrank.config.recipe import load, shipped

    content, lines = [], []
    for name in shipped():
        recipe = load(name)
        rows, scales = list(recipe.rows), list(recipe.scales)
        content.append({"name": name, "rows": rows, "paper": recipe.paper, "table": recipe.table, "scales": scales})
        lines.append(f"{name}\n  {recipe.table}\n  rows: {', '.join(rows)}   scales: {', '.join(scales)}")
    tell(content, lines, json=json)


@verb("fullrank recipes show mixhead/table1-vanilla", name="show", group=recipes)
def show_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe.", autocompletion=suggest_recipes)],
    json: Json = False,
) -> None:
    """One recipe: what it is, its rows with the paper's figures, and its settings."""
    import yaml

    from fullrank.config.recipe import load

    recipe = load(name)
    content = {key: getattr(recipe, key) for key in ("name", "table", "paper", "notes", "rows", "base", "scales")}
    tell(content, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110).splitlines(), json=json)


@verb("fullrank config show mixhead/table1-vanilla --row b train.steps=100", name="show", group=config)
def show_config(choice: Choice, json: Json = False) -> None:
    """The resolved configuration, every value stated."""
    from fullrank.config.load import to_yaml

    resolved = choice.resolve().config
    tell(resolved.to_dict(), to_yaml(resolved).splitlines(), json=json)


@verb("fullrank config schema > fullrank.schema.json", name="schema", group=config)
def show_schema(
    finetune: Annotated[bool, typer.Option("--finetune", help="That of fine-tuning instead.")] = False,
) -> None:
    """The JSON schema of a configuration, for editors."""
    from fullrank.config.schema import finetune_schema, json_schema

    print_json(finetune_schema() if finetune else json_schema())


@verb("fullrank config validate my.yaml", name="validate", group=config)
def validate_config(choice: Choice, json: Json = False) -> None:
    """Check a configuration (every row and scale of a recipe) and report all errors at once."""
    from fullrank.config.recipe import load
    from fullrank.core.errors import ConfigError, InputError
    from fullrank.experiments.run import task_of

    recipe = load(choice.config)
    rows = [choice.row] if choice.row or not recipe.rows else list(recipe.rows)
    scales = [choice.scale] if choice.scale or not recipe.scales else list(recipe.scales)
    problems: dict[str, None] = {}
    for row, scale in itertools.product(rows, scales):
        try:
            run = replace(choice, row=row, scale=scale).resolve().config
            task_of(run).check(run)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
        except InputError as error:
            problems[str(error)] = None
    if json:
        print_json({"valid": not problems, "problems": list(problems)})
        raise typer.Exit(2 if problems else 0)
    if problems:
        raise ConfigError(*problems)
    print(f"{choice.config}: valid" + (f" ({len(rows)} rows, {len(scales)} scales)" if recipe.rows else ""))


def describe_size(size: dict[str, Any]) -> list[str]:
    """The lines about a model, from `size_of_run` or `measure_pretrained_size` and its recipe."""
    row = f", row {size['row']}, scale {size['scale']}" if size["row"] else ""
    content: dict[str, Any] = {"parameters": {part: count for part, count in size["parameters"].items() if count}}
    content["the paper"] = size["paper"]
    if "encoder" in size:
        content |= {key: size[key] for key in ("task", "encoder", "model", "attention")}
        return [f"{size['recipe']}{row}", *describe(content)]
    content["FLOPs per token"] = size["flops_per_token"]
    content["memory of training in MiB"] = {part: count / 2**20 for part, count in size["memory"].items()}
    content["memory of decoding in KiB"] = {
        part.removesuffix("_fp32"): count / 2**10
        for part, count in size["bytes"].items()
        if count and part not in ("weights_fp32", "training_adam_fp32")
    }
    return [f"{size['recipe']}{row}", *describe(content), *filter(None, [size["remark"]])]
