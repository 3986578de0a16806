"""The comparison on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullrank.reporting import format
from fullrank.reporting.summary import summarise
from fullrank.reporting.table import SPLITS, Comparison, Row


def print_table(console: Console, compared: Comparison, title: str | None = None) -> None:
    """Prints the rows (the paper's figures beside ours where there are any), then what has to be said about them."""
    if compared.rows:
        console.print(_table(compared, title))
    summary = summarise(compared)
    console.print(Text(summary.headline, style="bold"))
    for sentence in (*summary.warnings, *summary.cautions):
        console.print(Text(sentence, style="yellow" if sentence in summary.warnings else ""))
    for run in compared.unfinished:
        console.print(Text(f"not finished: {run.folder} ({'; '.join(run.problems)})", style="yellow"))


def _table(compared: Comparison, title: str | None) -> Table:
    table = Table(
        title=None if title is None else Text(title), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    table.add_column("model", overflow="fold", min_width=8)
    for heading in ("parameters", "+parameters", *_perplexity_headings(compared), "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in compared.rows:
        name = f"{row.name} (slice)" if row.is_slice else row.name
        table.add_row(
            Text(name),
            format.count(row.parameters),
            "" if row is compared.rows[0] else format.extra(row.extra_parameters),
            *_perplexity_cells(row, compared.has_paper),
            format.count(row.tokens_per_second.mean if row.tokens_per_second else None),
        )
    for label, unigram in _unigrams(compared).items():
        cells = [
            cell
            for split in SPLITS
            for cell in ([""] if compared.has_paper else []) + [format.perplexity(unigram.get(split))]
        ]
        name = "unigram, same vocabulary" if compared.comparable else f"unigram, {label}"
        table.add_row(Text(name, style="dim"), "", "", *(Text(cell, style="dim") for cell in cells), "")
    return table


def _perplexity_headings(compared: Comparison) -> list[str]:
    words = {"valid": "valid ppl", "test": "test ppl"}
    if not compared.has_paper:
        return [words[split] for split in SPLITS]
    return [f"{split} ppl\n{whose}" for split in SPLITS for whose in ("paper", "ours")]


def _perplexity_cells(row: Row, has_paper: bool) -> list[Text]:
    cells: list[Text] = []
    for split in SPLITS:
        if has_paper:
            cells.append(Text(format.figure(row.paper.get(split)), style="dim"))
        cells.append(Text(format.spread(row.perplexity.get(split)), style="bold green" if split in row.best else ""))
    return cells


def _unigrams(compared: Comparison) -> dict[str, dict[str, float]]:
    return {row.label: dict(row.unigram) for row in compared.rows if row.unigram}
