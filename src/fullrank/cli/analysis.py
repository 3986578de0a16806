"""The verbs of `fullrank analyze`: the papers' analyses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullrank.cli.options import Config, Json, Overrides, Row, Scale
from fullrank.cli.output import print_json

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.tasks.context import FoundContext

analyze = typer.Typer(
    no_args_is_help=True,
    help="The papers' analyses.",
    epilog="Example:  [cyan]fullrank analyze context runs/mine --out figures[/cyan]",
)


def add_to(app: typer.Typer) -> None:
    app.add_typer(analyze, name="analyze")


@analyze.command(
    epilog="Examples:  [cyan]fullrank analyze context my.yaml model.memory_length=256 --json[/cyan]   "
    "[cyan]fullrank analyze context runs/mine --phase skip_retain --drifting 4000 --out figures[/cyan]",
)
def context(
    name: Config,
    overrides: Overrides = None,
    row: Row = None,
    scale: Scale = None,
    phase: Annotated[
        str | None, typer.Option("--phase", metavar="NAME", help="A phase of train.phases; the first that skips.")
    ] = None,
    drifting: Annotated[
        int | None,
        typer.Option(
            "--drifting", metavar="STEPS", min=0, max=10**12,
            help="Also where the released code believes the memory to be after STEPS steps (gaps: drifting).",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Draw context.png and context.svg into this folder.")
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """How far each layer's memory reaches under Skip-Retain: its exact distribution, beside the paper's Eq. 6.

    Layers are counted from 0; the reach is in tokens before the first query of a segment.
    """
    from fullrank.config.recipe import resolve
    from fullrank.tasks.context import as_dict, find_context

    found = find_context(resolve(name, row, scale, overrides or []), phase)
    files: list[Path] = []
    if out is not None:
        from fullrank.analysis.context_figure import write_figure

        files = write_figure(found.reach, out, found.title)
    if json:
        print_json({**as_dict(found, drifting), "files": [str(file) for file in files]})
        return
    print(found.title)
    print(f"memory of {found.reach.memory_length:,} tokens, segments of {found.reach.segment_length:,}")
    _show(_table(found, drifting))
    for remark in found.remarks:
        print(remark)
    for file in files:
        print(file)


def _table(found: FoundContext, drifting: int | None) -> Table:
    from rich import box
    from rich.table import Table

    from fullrank.tasks.context import QUANTILES

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shares = ("median" if share == 0.5 else f"{100 * share:g} %" for share in QUANTILES)
    headings = ["layer", "rests", "mean\nreach", "standard\ndeviation", *shares, "nearest\n(mean)"]
    if drifting is not None:
        headings.append(f"drifting label\nat {drifting:,} steps")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for layer in found.reach.layers:
        cells = [
            str(layer.layer),
            f"{100 * layer.probability:.1f} %",
            f"{layer.mean:,.1f}",
            f"{layer.deviation:,.1f}",
            *(f"{layer.reach.quantile(share):,}" for share in QUANTILES),
            f"{layer.nearest_mean:,.1f}",
        ]
        if drifting is not None:
            cells.append(f"{layer.drifting(drifting).tokens:,.0f}")
        table.add_row(*cells)
    return table


def _show(table: Table) -> None:
    """The table at its own width, also where the terminal is narrower: no figure is cut off."""
    from rich.console import Console

    console = Console()
    wide = console.measure(table, options=console.options.update(max_width=1000)).maximum
    (console if wide <= console.width else Console(width=wide)).print(table)
