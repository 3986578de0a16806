"""Options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A recipe (`fullrank recipes list`), a YAML file or a run folder.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings laid on the configuration: train.steps=1000"),
]
Row = Annotated[str | None, typer.Option("--row", help="The row of the recipe's table; the first one if not given.")]
Scale = Annotated[str | None, typer.Option("--scale", help="paper, small or tiny; the recipe's largest if not given.")]
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
    str,
    typer.Option("--checkpoint", help="Of a run: best, last, or average, as `fullrank average` makes it."),
]
Source = Annotated[
    str | None, typer.Option("--from", metavar="DIR", help="A local folder that holds the corpus (data.dir).")
]


def with_source(overrides: list[str] | None, source: str | None) -> list[str]:
    """`--from DIR` as the override it stands for."""
    return [*(overrides or []), *([f"data.dir={source}"] if source else [])]
