"""Verbs that train nothing: info, recipes, config; `data` is in a file of its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fullrank.cli.app import app, examples, verb
from fullrank.cli.data import data
from fullrank.cli.options import Config, Json, Number, Overrides, Row, Scale, Source, complete_recipe, with_source
from fullrank.cli.output import print_json, say, tell

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
    name: Config,
    overrides: Overrides = None,
    row: Row = None,
    scale: Scale = None,
    source: Source = None,
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
    from fullrank.config.recipe import resolve_any

    resolved = resolve_any(name, row, scale, with_source(overrides, source))
    if getattr(resolved.config.model, "vocab_size", 0) is None:  # the data have it
        from fullrank.data.sources import check_data

        check_data(resolved.config.data)

    from fullrank.analysis.size import size_of_run

    run, size = resolved.config, {key: getattr(resolved, key) for key in ("recipe", "row", "scale")}
    if isinstance(run, FinetuneConfig):
        from fullrank.experiments.pretrained import pretrained_size

        size |= {**pretrained_size(run), "paper": resolved.paper}
        tell(size, encoder_lines(size), json=json)
        return
    if run.model.vocab_size is None:
        from fullrank.experiments.run import with_vocabulary

        run = with_vocabulary(run, say)
    remark = None if run.remark is None else f"its perplexity is {run.remark}"
    size |= {**size_of_run(run, length), "paper": resolved.paper, "next_token": remark is None, "remark": remark}
    tell(size, lines_of(size), json=json)


@verb("fullrank recipes list --json", name="list", group=recipes)
def list_recipes(json: Json = False) -> None:
    """All shipped recipes."""
    from fullrank.config.recipe import load, shipped

    known = [load(name) for name in shipped()]
    content = [
        {"name": r.name, "rows": list(r.rows), "paper": r.paper, "table": r.table, "scales": list(r.scales)}
        for r in known
    ]
    lines = [f"{r.name}\n  {r.table}\n  rows: {', '.join(r.rows)}   scales: {', '.join(r.scales)}" for r in known]
    tell(content, lines, json=json)


@verb("fullrank recipes show mixhead/table1-vanilla", name="show", group=recipes)
def show_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe.", autocompletion=complete_recipe)],
    json: Json = False,
) -> None:
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
    tell(content, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110).splitlines(), json=json)


@verb("fullrank config show mixhead/table1-vanilla --row b train.steps=100", name="show", group=config)
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
    tell(resolved.to_dict(), to_yaml(resolved).splitlines(), json=json)


@verb("fullrank config schema > fullrank.schema.json", name="schema", group=config)
def show_schema(
    finetune: Annotated[bool, typer.Option("--finetune", help="That of fine-tuning instead.")] = False,
) -> None:
    """The JSON schema of a configuration, for editors."""
    from fullrank.config.schema import finetune_schema, json_schema

    print_json(finetune_schema() if finetune else json_schema())


@verb("fullrank config validate my.yaml", name="validate", group=config)
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


_PLACES = {"encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}


def lines_of(size: dict[str, Any]) -> list[str]:
    """The lines about a model, from `size_of_run` and its recipe."""
    lines = _parameter_lines(size)
    blocks = size["attention_block"] or {}
    if blocks and "by_place" not in size:
        blocks = {"": blocks}
    for place, block in blocks.items():
        lines += [_PLACES[place]] if place else []
        lines += _block_lines(block)
    flops = size["flops_per_token"]
    lines.append(f"FLOPs per token at length {flops['length']}")
    for name, work in (("", flops), (" source", flops.get("source")), (" target", flops.get("target"))):
        if work is not None:
            lines.append(f"  forward{name} {work['forward']:,}, training{name} {work['training']:,}")
    memory = ", ".join(f"{name} {count / 2**20:,.1f}" for name, count in size["memory"].items())
    lines.append(f"memory of training in MiB: {memory}")
    decoding = [
        f"{words} {size['bytes'][key] / 2**10:,.1f}" for key, words in _DECODING.items() if size["bytes"].get(key)
    ]
    if decoding:
        lines.append(f"memory of decoding in KiB: {', '.join(decoding)}")
    return lines if size["remark"] is None else [*lines, size["remark"]]


_DECODING = {
    "cache_per_token_fp32": "cache per token",
    "cache_per_source_token_fp32": "cache per token of the source",
    "state_per_text_fp32": "state per text",
    "memory_per_text_fp32": "segment memory per text",
}


def encoder_lines(size: dict[str, Any]) -> list[str]:
    """The lines about a pretrained encoder, from `pretrained_size` and its recipe."""
    shape = size["attention"]
    mixed = f", mixing in {shape['layers']} layers of {shape['heads']} heads" if size["parameters"]["mixing"] else ""
    about = f"  {size['task']}: the pretrained encoder {size['encoder']} ({size['model']}), fine-tuned{mixed}"
    return _parameter_lines(size, about)


def _parameter_lines(size: dict[str, Any], *about: str) -> list[str]:
    """The recipe, parts as lines (of a translation model, with a column for each place), and the paper's sizes."""
    places = size.get("by_place") or {}
    lines = [f"{size['recipe']}" + (f", row {size['row']}, scale {size['scale']}" if size["row"] else ""), *about]
    if places:
        lines.append(f"  {'':<14} {'':>14}" + "".join(f" {_PLACES[place]:>15}" for place in places))
    for part, count in size["parameters"].items():
        if count or part == "total":
            columns = "".join(f" {place.get(part, 0):>15,}" for place in places.values())
            lines.append(f"  {part:<14} {count:>14,}{columns}")
    if size["paper"]:
        lines.append("  the paper:     " + ", ".join(f"{key} {value}" for key, value in size["paper"].items()))
    return lines


def _block_lines(block: dict[str, Any]) -> list[str]:
    """A multi-linear attention block beside multi-head attention."""
    multi_head, paper = block["multi_head"], block["paper_formula"]
    lines = [f"  {'an attention block':<20} {'multi-linear':>14} {'multi-head':>14}"]
    for piece, count in block["parameters"].items():
        if count or multi_head.get(piece):
            lines.append(f"  {piece:<20} {count:>14,} {multi_head.get(piece, 0):>14,}")
    pairs = (
        f"{block['positions']:,} x {block['positions']:,} pairs of positions" if block["positions"] else "any length"
    )
    return [
        *lines,
        f"  the output map is for {pairs}",
        f"  multi-head / multi-linear: the block {block['ratio']:.3f}, attention of all layers "
        f"{block['all_layers']['ratio']:.3f}, the whole model {block['whole_model']['ratio']:.3f}",
        f"  the paper's formula (3 h d) / (3 d + h) = {paper['ratio']:.2f} at h = {paper['heads']} and "
        f"d = {paper['factor_width']} leaves the output map out",
    ]
