"""The verbs of `fullrank analyze`: the papers' analyses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fullrank.cli.options import Checkpoint, Config, Device, Json, Overrides, Row, Scale
from fullrank.cli.output import print_json, say, show

if TYPE_CHECKING:
    from rich.table import Table

    from fullrank.experiments.context import FoundContext
    from fullrank.experiments.rank import FoundRank

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
    from fullrank.experiments.context import as_dict, find_context

    found = find_context(resolve(name, row, scale, overrides or []), phase)
    files: list[Path] = []
    if out is not None:
        from fullrank.analysis.plots import write_context

        files = write_context(found.reach, out, found.title)
    if json:
        print_json({**as_dict(found, drifting), "files": [str(file) for file in files]})
        return
    print(found.title)
    print(f"memory of {found.reach.memory_length:,} tokens, segments of {found.reach.segment_length:,}")
    show(_table(found, drifting))
    for remark in found.remarks:
        print(remark)
    for file in files:
        print(file)


@analyze.command(
    epilog="Examples:  [cyan]fullrank analyze rank runs/plain runs/mixture --out figures[/cyan]   "
    "[cyan]fullrank analyze rank gpt2 --text book.txt --contexts 2000 --json[/cyan]",
)
def rank(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Run folders, folders of saved models, or Hugging Face models (folder or hub name).",
        ),
    ],
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="What is read; a run's own valid split if not given.")
    ] = None,
    contexts: Annotated[
        int | None, typer.Option("--contexts", metavar="N", min=2, help="How many; 2 (d + 2) + 32 if not given.")
    ] = None,
    segment_length: Annotated[
        int | None,
        typer.Option("--segment-length", metavar="N", min=2, help="Tokens read at a time; as evaluated, or 128."),
    ] = None,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Draw rank.png and rank.svg into this folder.")
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """The softmax bottleneck: the rank of log p(word | context) over many contexts, and its bound.

    A softmax over d hidden dimensions has rank d + 1 at most, d + 2 with an output bias;
    a mixture of softmaxes, sigsoftmax and a soft-cap on the logits are exempt.
    In double precision; a singular value counts above s_max max(shape) eps.
    Effective rank: exp(entropy) of the singular values as shares of their sum.
    """
    from fullrank.experiments.rank import Reading, as_dict, find_ranks

    found, together = find_ranks(names, Reading(text, contexts, segment_length, checkpoint, device), say)
    files: list[Path] = []
    if out is not None:
        from fullrank.analysis.plots import write_rank

        files = write_rank({one.name: one.figures for one in found}, out)
    if json:
        content = {"models": [as_dict(one) for one in found], "remarks": list(together)}
        print_json({**content, "files": [str(file) for file in files]})
        return
    show(_rank_table(found))
    for one in found:
        print("\n".join([f"{one.name} ({one.text}, segments of {one.segment_length:,}):", *one.remarks]))
    for line in (*together, *files):
        print(line)


def _rank_table(found: list[FoundRank]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "output", "d", "bound", "rank", "effective\nrank", "contexts", "words"):
        justify: Literal["left", "right"] = "left" if heading in ("model", "output") else "right"
        table.add_column(heading, justify=justify, no_wrap=True, vertical="bottom")
    for one in found:
        figures, layer = one.figures, one.figures.layer
        table.add_row(
            Text(one.name),
            layer.kind,
            f"{layer.hidden_size:,}",
            f"{layer.bound:,}" if layer.exempt is None else f"exempt ({layer.bound:,})",
            f"{figures.rank:,}",
            f"{figures.effective_rank:,.2f}",
            f"{figures.contexts:,}",
            f"{figures.columns:,}" + ("" if figures.columns == figures.vocab_size else f" of {figures.vocab_size:,}"),
        )
    return table


def _table(found: FoundContext, drifting: int | None) -> Table:
    from rich import box
    from rich.table import Table

    from fullrank.experiments.context import QUANTILES

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
