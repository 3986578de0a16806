"""Verbs that train nothing: info, recipes, config, and `data` from `corpora`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullrank.cli.corpora import data
from fullrank.cli.options import Config, Json, Overrides, Row, Scale, Source, with_source
from fullrank.cli.output import print_json, say

if TYPE_CHECKING:
    from fullrank.config.run import RunConfig

recipes = typer.Typer(
    no_args_is_help=True,
    help="The tables of the papers, row by row, with the paper's figures.",
    epilog="Example:  [cyan]fullrank recipes show mixhead/table1-vanilla[/cyan]",
)
config = typer.Typer(
    no_args_is_help=True,
    help="Configurations: resolved, as a schema, checked.",
    epilog="Example:  [cyan]fullrank config show mixhead/table1-vanilla --row b[/cyan]",
)


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example:  [cyan]fullrank info mixhead/table1-vanilla --row b --json[/cyan]")(info)
    app.add_typer(recipes, name="recipes")
    app.add_typer(data, name="data")
    app.add_typer(config, name="config")


def info(
    name: Config,
    overrides: Overrides = None,
    row: Row = None,
    scale: Scale = None,
    source: Source = None,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Sequence length; the training segment's, of translations 25.")
    ] = None,
    json: Json = False,
) -> None:
    """Parameters by part (total exact), memory and FLOPs per token. Allocates nothing.

    Translation models: of encoder, decoder and cross-attention, too; FLOPs for a source and a target of --length tokens each.
    Multi-linear attention is shown beside multi-head attention of the same width, its output map included.
    Of fine-tuning: the pretrained encoder as its configuration has it, and the mixing parameters that are grafted in.
    """
    from fullrank.analysis.size import size_of_run
    from fullrank.cli.sizes import encoder_lines, lines_of
    from fullrank.config.recipe import is_finetuning, resolve, resolve_finetune

    given = with_source(overrides, source)
    if is_finetuning(name, row, scale, given):
        from fullrank.experiments.models import pretrained_size

        tuned = resolve_finetune(name, row, scale, given)
        about = {"recipe": tuned.recipe, "row": tuned.row, "scale": tuned.scale, **pretrained_size(tuned.config)}
        about["paper"] = tuned.paper
        if json:
            print_json(about)
        else:
            print("\n".join(encoder_lines(about)))
        return
    resolved = resolve(name, row, scale, given)
    run = _with_vocabulary(resolved.config)
    found = size_of_run(run, length)
    found = {"recipe": resolved.recipe, "row": resolved.row, "scale": resolved.scale, **found, "paper": resolved.paper}
    remark = None if run.remark is None else f"its perplexity is {run.remark}"
    found |= {"next_token": remark is None, "remark": remark}
    if json:
        print_json(found)
        return
    print("\n".join(lines_of(found, run.model)))


def _with_vocabulary(run: RunConfig) -> RunConfig:
    """`run` with the sizes of vocabularies that it leaves to its data, which are prepared for it."""
    if run.model.vocab_size is not None:
        return run
    if run.translates:
        from fullrank.data.pairs import prepare_pairs
        from fullrank.experiments.translation import with_vocabularies

        return with_vocabularies(run, prepare_pairs(run.data, report=say))
    from fullrank.data import prepare
    from fullrank.experiments.language_model import with_vocabulary

    return with_vocabulary(run, prepare(run.data, report=say))


@recipes.command("list", epilog="Example:  [cyan]fullrank recipes list --json[/cyan]")
def list_recipes(json: Json = False) -> None:
    """All shipped recipes."""
    from fullrank.config.recipe import load, shipped

    found = [load(name) for name in shipped()]
    if json:
        print_json(
            [
                {"name": r.name, "rows": list(r.rows), "paper": r.paper, "table": r.table, "scales": list(r.scales)}
                for r in found
            ]
        )
        return
    for recipe in found:
        print(f"{recipe.name}\n  {recipe.table}\n  rows: {', '.join(recipe.rows)}   scales: {', '.join(recipe.scales)}")


@recipes.command("show", epilog="Example:  [cyan]fullrank recipes show mixhead/table1-vanilla[/cyan]")
def show_recipe(name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe.")], json: Json = False) -> None:
    """One recipe: what it is, its rows with the paper's figures, and its settings."""
    import yaml

    from fullrank.config.recipe import load

    recipe = load(name)
    content: dict[str, Any] = {
        "name": recipe.name,
        "table": recipe.table,
        "paper": recipe.paper,
        "notes": recipe.notes,
        "rows": dict(recipe.rows),
        "base": dict(recipe.base),
        "scales": dict(recipe.scales),
    }
    if json:
        print_json(content)
    else:
        print(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110), end="")


@config.command(
    "show", epilog="Example:  [cyan]fullrank config show mixhead/table1-vanilla --row b train.steps=100[/cyan]"
)
def show_config(
    name: Config,
    overrides: Overrides = None,
    row: Row = None,
    scale: Scale = None,
    source: Source = None,
    json: Json = False,
) -> None:
    """The resolved configuration, every value stated."""
    from fullrank.config.load import to_yaml
    from fullrank.config.recipe import resolve_any

    resolved = resolve_any(name, row, scale, with_source(overrides, source)).config
    if json:
        print_json(resolved.to_dict())
    else:
        print(to_yaml(resolved), end="")


@config.command("schema", epilog="Example:  [cyan]fullrank config schema > fullrank.schema.json[/cyan]")
def show_schema(
    finetune: Annotated[bool, typer.Option("--finetune", help="That of fine-tuning instead.")] = False,
) -> None:
    """The JSON schema of a configuration, for editors."""
    from fullrank.config.schema import finetune_schema, json_schema

    print_json(finetune_schema() if finetune else json_schema())


@config.command("validate", epilog="Example:  [cyan]fullrank config validate my.yaml[/cyan]")
def validate_config(
    name: Config, overrides: Overrides = None, row: Row = None, scale: Scale = None, json: Json = False
) -> None:
    """Check a configuration (every row and scale of a recipe) and report all errors at once."""
    from fullrank.config.recipe import load, resolve_any
    from fullrank.core.errors import ConfigError

    recipe = load(name)
    rows: list[str | None] = [row] if row or not recipe.rows else list(recipe.rows)
    scales: list[str | None] = [scale] if scale or not recipe.scales else list(recipe.scales)
    problems: dict[str, None] = {}
    for one in rows:
        for other in scales:
            try:
                resolve_any(name, one, other, overrides or [])
            except ConfigError as error:
                problems |= dict.fromkeys(error.problems)
    if json:
        print_json({"valid": not problems, "problems": list(problems)})
        if problems:
            raise typer.Exit(2)
        return
    if problems:
        raise ConfigError(*problems)
    print(f"{name}: valid" + (f" ({len(rows)} rows, {len(scales)} scales)" if recipe.rows else ""))
