"""Options that several verbs share."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fullrank.core.errors import FullRankError, InputError

Number = partial(typer.Option, metavar="N", min=1)  # a whole number; `min=0` is given where it may be nothing


def check_models(names: str | list[str] | None) -> str | list[str] | None:
    """Refuse a name that no model can have, before anything heavy is imported."""
    from fullrank.names import model_kind

    for name in [names] if isinstance(names, str) else names or []:
        model_kind(name)
    return names


def complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes that begin so. Where none does, the shell goes on with names of files."""
    from fullrank.config.recipe import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


def complete_rows(context: typer.Context, incomplete: str) -> list[str]:
    """Rows of the recipe or table that stands on the line; of a list with commas, its last."""
    from fullrank.config.recipe import load, tables

    begun = incomplete[: incomplete.rfind(",") + 1]
    for word in (*context.params.values(), *context.args):
        with contextlib.suppress(FullRankError):
            known = {begun + row for one in tables(word) for row in load(one).rows} if isinstance(word, str) else set()
            if rows := sorted(row for row in known if row.startswith(incomplete)):
                return rows
    return []


def _complete_scale() -> list[str]:
    from fullrank.config.recipe import SCALES

    return list(SCALES)


Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A recipe (`fullrank recipes list`), a YAML file or a run folder.",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings laid on the configuration: train.steps=1000")
]
Row = Annotated[
    str | None,
    typer.Option(
        "--row", help="The row of the recipe's table; the first one if not given.", autocompletion=complete_rows
    ),
]
Rows = Annotated[
    str | None,
    typer.Option("--rows", metavar="A,B", help="These rows, one after another.", autocompletion=complete_rows),
]
Scale = Annotated[
    str | None,
    typer.Option(
        "--scale", help="paper, small or tiny; the recipe's largest if not given.", autocompletion=_complete_scale
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
Kernel = Annotated[
    str,
    typer.Option(
        "--kernel",
        help="The attention kernel: auto, reference (for the vocabulary layer, too), sdpa, blocks, native, triton or "
        "multilinear.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:0.")]
Checkpoint = Annotated[
    str, typer.Option("--checkpoint", help="Of a run: best, last, or average, as `fullrank average` makes it.")
]
Source = Annotated[
    str | None, typer.Option("--from", metavar="DIR", help="A local folder that holds the corpus (data.dir).")
]
Column = Annotated[
    str | None, typer.Option("--column", metavar="NAME", help="Of a table (csv, tsv, jsonl): the column of the text.")
]
Reuse = Annotated[
    Path | None,
    typer.Option(
        "--reuse", metavar="DIR", help="A finished run in DIR that is this training is taken over, not repeated."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Run = Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run folder, a folder of a saved model, or a Hugging Face model (folder or hub name).",
        callback=check_models,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="Run folders, folders of saved models, or Hugging Face models (folder or hub name).",
        callback=check_models,
    ),
]
TextFile = Annotated[
    Path | None, typer.Option("--text", metavar="FILE", help="Text to read; a run's own valid split if not given.")
]
Texts = Annotated[int | None, Number("--texts", help="Segments of the text that are read.")]
SegmentLength = Annotated[
    int | None, Number("--segment-length", min=2, help="Tokens read at a time; as evaluated, or 128.")
]
Split = Annotated[str, typer.Option("--split", help="train, valid, test or another one of the corpus.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", min=0.0, help="Divides the logits: below 1 less random, above 1 more; 1 if not given."
    ),
]
TopK = Annotated[int | None, Number("--top-k", help="Only the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Only the likeliest tokens that make up p.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="Makes samples repeatable.")]


def with_source(overrides: list[str] | None, source: str | None) -> list[str]:
    """`--from DIR` as the override it stands for."""
    return [*(overrides or []), *([f"data.dir={source}"] if source else [])]


def read_seeds(text: str | None) -> list[int] | None:
    """`3` is 1 to 3; `4,7` and `26,` are a list."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isdecimal()]
    named = "," in text
    if len(numbers) < len([word for word in words if word]) or not numbers or (not named and numbers[0] < 1):
        raise InputError(f"--seeds: a number of seeds (3), or the seeds (1,5 or 26,), given {text!r}")
    return list(dict.fromkeys(numbers)) if named else list(range(1, numbers[0] + 1))
