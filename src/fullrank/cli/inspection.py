"""Verbs that train nothing: info, recipes, data, config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullrank.cli.options import Config, Json, Overrides, Row, Scale, Source, with_source
from fullrank.cli.output import print_json, say

if TYPE_CHECKING:
    from fullrank.config.schema import DataConfig

recipes = typer.Typer(
    no_args_is_help=True,
    help="The tables of the papers, row by row, with the paper's figures.",
    epilog="Example:  [cyan]fullrank recipes show mixhead/table1-vanilla[/cyan]",
)
data = typer.Typer(
    no_args_is_help=True,
    help="Corpora: what is known, and getting one ready.",
    epilog="Example:  [cyan]fullrank data prepare ptb --from ~/corpora/ptb[/cyan]",
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
        int | None, typer.Option("--length", min=1, help="Sequence length; the training segment's.")
    ] = None,
    json: Json = False,
) -> None:
    """Parameters by part (total exact), memory and FLOPs per token. Allocates nothing.

    Multi-linear attention is shown beside multi-head attention of the same width, its output map included.
    """
    from fullrank.config.recipe import resolve
    from fullrank.config.schema import NOT_NEXT_TOKEN
    from fullrank.model.size import size

    resolved = resolve(name, row, scale, with_source(overrides, source))
    run = resolved.config
    if run.model.vocab_size is None:
        from fullrank.data import prepare
        from fullrank.tasks.language_modeling import with_vocabulary

        run = with_vocabulary(run, prepare(run.data, report=say))
    found = size(run.model, length or run.train.segment_length, run.train.batch_size)
    found = {"recipe": resolved.recipe, "row": resolved.row, "scale": resolved.scale, **found, "paper": resolved.paper}
    remark = f"its perplexity is {NOT_NEXT_TOKEN}" if run.model.sees_future else None
    found |= {"next_token": remark is None, "remark": remark}
    if json:
        print_json(found)
        return
    parts = found["parameters"]
    print(f"{resolved.recipe}" + (f", row {resolved.row}, scale {resolved.scale}" if resolved.row else ""))
    for part, count in parts.items():
        if count or part == "total":
            print(f"  {part:<14} {count:>14,}")
    paper = resolved.paper or {}
    if paper:
        print("  the paper:     " + ", ".join(f"{key} {value}" for key, value in paper.items()))
    if found["attention_block"]:
        print(_block(found["attention_block"], run.model.num_hidden_layers))
    flops, sizes = found["flops_per_token"], found["bytes"]
    print(f"FLOPs per token at length {flops['length']}: forward {flops['forward']:,}, training {flops['training']:,}")
    print(
        f"memory: weights {sizes['weights_fp32'] / 2**20:,.1f} MiB in fp32, with gradients and Adam "
        f"{sizes['training_adam_fp32'] / 2**20:,.1f} MiB, cache {sizes['cache_per_token_fp32'] / 2**10:,.1f} KiB per token"
        + (f" and {sizes['state_per_text_fp32'] / 2**10:,.1f} KiB per text" if sizes["state_per_text_fp32"] else "")
        + (f", {sizes['memory_per_text_fp32'] / 2**20:,.1f} MiB of memory per text" if run.model.memory_length else "")
    )
    if remark is not None:
        print(remark)


_PIECES = {
    "projections": "projections Q K V",
    "output_map": "output map W_O",
    "cores": "cores",
    "position_term": "position term",
    "bias": "biases",
    "total": "all",
}


def _block(block: dict[str, Any], layers: int) -> str:
    """A multi-linear attention block beside multi-head attention, in lines."""
    own, plain, paper = block["parameters"], block["multi_head"], block["paper_formula"]
    lines = [f"{'one attention block':<22} {'multi-linear':>14} {'multi-head':>14}"]
    for piece, name in _PIECES.items():
        if own[piece] or plain.get(piece):
            lines.append(f"  {name:<20} {own[piece]:>14,} {plain.get(piece, 0):>14,}")
    lines.append(
        f"  {_compared(block['ratio'], 'the block')} (of {plain['heads']} heads; their number changes nothing)"
    )
    if own["position_term"]:
        lines.append(f"  with relative positions as in Transformer-XL, multi-head has {plain['output_map']:,} more")
    places = block["positions"]
    pairs = (
        f"has a row for each of {places:,} x {places:,} pairs of positions" if places else "does not grow with length"
    )
    lines.append(f"  the output map {pairs}")
    for key, name in (("all_layers", f"attention of {layers} layers"), ("whole_model", "the whole model")):
        one = block[key]
        lines.append(
            f"  {_compared(one['ratio'], name)}: {one['multilinear']:,}, with multi-head {one['multi_head']:,}"
        )
    lines.append(
        f"  the paper's formula (3 h d) / (3 d + h) is {paper['ratio']:.2f} at h = {paper['heads']} heads and factors of width "
        f"d = {paper['factor_width']}:\n  it counts projections and cores only and leaves W_O out"
    )
    return "\n".join(lines)


def _compared(ratio: float, name: str) -> str:
    """In words: multi-head over multi-linear parameters."""
    if ratio == 1:
        return f"{name} is as large as with multi-head attention"
    times, word = (ratio, "smaller") if ratio > 1 else (1 / ratio, "LARGER")
    return f"{name} is {times:.{1 if times >= 1.95 else 3}f} times {word} than with multi-head attention"


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


@data.command("list", epilog="Example:  [cyan]fullrank data list[/cyan]")
def list_data(json: Json = False) -> None:
    """Known corpora: tokens, published counts, terms, where they come from."""
    import dataclasses

    from fullrank.data import known_corpora

    found = [dataclasses.asdict(corpus) for corpus in known_corpora()]
    if json:
        print_json(found)
        return
    for corpus in found:
        print(corpus["name"])
        for key, value in corpus.items():
            if key != "name" and value:
                text = (
                    ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in value.items())
                    if isinstance(value, dict)
                    else value
                )
                print(f"  {key}: {text}")


@data.command("prepare", epilog="Example:  [cyan]fullrank data prepare ptb --from ~/corpora/ptb[/cyan]")
def prepare_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A corpus (`fullrank data list`).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings such as data.tokens=bpe")
    ] = None,
    source: Source = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where prepared corpora are kept (data.cache).")
    ] = None,
    json: Json = False,
) -> None:
    """Find or download a corpus, verify its counts, and turn it into token ids once and for all."""
    from fullrank.config.load import apply_overrides, build

    words = [*with_source(overrides, source), *([f"data.cache={to}"] if to else [])]
    given = build(apply_overrides({"data": {"name": name}}, words)).data
    found, lines = _prepared_pairs(given) if given.has_pairs else _prepared_text(given)
    if json:
        print_json(found)
        return
    for line in lines:
        print(line)


def _prepared_text(given: DataConfig) -> tuple[dict[str, Any], list[str]]:
    """A corpus for language models: what JSON says of it, and lines for people."""
    from fullrank.data import prepare
    from fullrank.tasks.language_modeling import describe

    corpus = prepare(given, report=say)
    lines = [f"{corpus.label}: vocabulary {len(corpus.tokenizer):,} ({corpus.tokenizer.kind}), {corpus.folder}"]
    lines += [
        f"  {split:<6} {content.tokens:>12,} tokens   {content.words:>12,} words   {content.bytes:>13,} bytes"
        for split, content in corpus.splits.items()
    ]
    return {"folder": str(corpus.folder), **describe(corpus)}, lines


def _prepared_pairs(given: DataConfig) -> tuple[dict[str, Any], list[str]]:
    """A corpus of sentence pairs: what JSON says of it, and lines for people."""
    import dataclasses

    from fullrank.data import prepare_pairs

    corpus = prepare_pairs(given, report=say)
    sides = {"source": corpus.source, "target": corpus.target}
    found = {
        "folder": str(corpus.folder), "name": corpus.name, "label": corpus.label, "is_slice": corpus.is_slice,
        "languages": {side: language.name for side, language in sides.items()},
        "vocabulary": {side: len(language) for side, language in sides.items()},
        "fingerprint": {side: language.fingerprint for side, language in sides.items()},
        "splits": {split: dataclasses.asdict(content) for split, content in corpus.splits.items()},
        "details": dict(corpus.details),
    }  # fmt: skip
    kind = corpus.source.segmenter.kind
    one = (
        "one vocabulary of both languages" if corpus.source.fingerprint == corpus.target.fingerprint else "vocabularies"
    )
    sizes = ", ".join(f"{language.name} {len(language):,}" for language in sides.values())
    lines = [f"{corpus.label}: {one}: {sizes} ({kind}), {corpus.folder}"]
    for split, content in corpus.splits.items():
        counts = ", ".join(
            f"{language.name} {getattr(content, f'{side}_tokens'):,} tokens of {getattr(content, f'{side}_words'):,} words"
            for side, language in sides.items()
        )
        lines.append(f"  {split:<8} {content.pairs:>10,} pairs   {counts}")
    cleaning = corpus.details["cleaning"]
    lines.append(
        f"  training pairs given {cleaning['given']:,}, left out {cleaning['given'] - cleaning['kept']:,}: "
        f"{cleaning['empty']:,} with an empty side, {cleaning['too_long']:,} too long (data.max_length), "
        f"{cleaning['ratio']:,} too unlike in length (data.max_ratio)"
    )
    return found, lines


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
    from fullrank.config.load import to_dict, to_yaml
    from fullrank.config.recipe import resolve

    resolved = resolve(name, row, scale, with_source(overrides, source)).config
    if json:
        print_json(to_dict(resolved))
    else:
        print(to_yaml(resolved), end="")


@config.command("schema", epilog="Example:  [cyan]fullrank config schema > fullrank.schema.json[/cyan]")
def show_schema() -> None:
    """The JSON schema of a configuration, for editors."""
    from fullrank.config.load import json_schema

    print_json(json_schema())


@config.command("validate", epilog="Example:  [cyan]fullrank config validate my.yaml[/cyan]")
def validate_config(
    name: Config, overrides: Overrides = None, row: Row = None, scale: Scale = None, json: Json = False
) -> None:
    """Check a configuration (every row and scale of a recipe) and report all errors at once."""
    from fullrank.config.recipe import load, resolve
    from fullrank.errors import ConfigError

    recipe = load(name)
    rows: list[str | None] = [row] if row or not recipe.rows else list(recipe.rows)
    scales: list[str | None] = [scale] if scale or not recipe.scales else list(recipe.scales)
    problems: dict[str, None] = {}
    for one in rows:
        for other in scales:
            try:
                resolve(name, one, other, overrides or [])
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
