"""The comparison on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fullrank.reporting import format
from fullrank.reporting.cautions import signature_lines
from fullrank.reporting.columns import Column, columns
from fullrank.reporting.measure import LAST_POSITION, WITHOUT_SOS, Measure
from fullrank.reporting.results import SPLITS
from fullrank.reporting.significance import Differences, all_differences, heading, how, table_of
from fullrank.reporting.stats import Stat
from fullrank.reporting.summary import LAST_POSITION_TITLE, summarise
from fullrank.reporting.table import Comparison, Row


def print_table(console: Console, compared: Comparison, title: str | None = None) -> None:
    """Prints the rows (the paper's figures beside ours where there are any), then what has to be said about them."""
    if compared.rows:
        table = _table(compared, title, narrow=False)
        if width_of(console, table) > console.width:
            table = _table(compared, title, narrow=True)
        console.print(Whole(table), crop=False, soft_wrap=True)
    if compared.counts_sos:
        console.print(Whole(_without_sos(compared)), crop=False, soft_wrap=True)
    if any(row.last_position for row in compared.rows):
        console.print(Whole(_last_positions(compared)), crop=False, soft_wrap=True)
    for sentence in signature_lines(compared):
        console.print(Text(sentence, style="dim"))
    if tests := all_differences(compared):
        for tested in tests:
            console.print(Whole(_significance(tested)), crop=False, soft_wrap=True)
        for sentence in how(tests):
            console.print(Text(sentence, style="dim"))
    summary = summarise(compared)
    console.print(Text(summary.headline, style="bold"))
    for sentence in (*summary.warnings, *summary.cautions):
        console.print(Text(sentence, style="yellow" if sentence in summary.warnings else ""))
    for run in compared.unfinished:
        console.print(Text(f"not finished: {run.folder} ({'; '.join(run.problems)})", style="yellow"))


@dataclass(frozen=True)
class Whole:
    """A table at its own width even where the console is narrower: lines may wrap there, but no figure is cut off."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = width_of(console, self.table)
        yield from console.render(self.table, options.update(width=width, max_width=width))


def width_of(console: Console, table: Table) -> int:
    """How wide a table is that nothing squeezes."""
    return console.measure(table, options=console.options.update(max_width=1000)).maximum


def _table(compared: Comparison, title: str | None, *, narrow: bool) -> Table:
    """`narrow` shortens headings and sets deviations beneath their means."""
    table = Table(
        title=None if title is None else Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0) if narrow else (0, 1),
    )
    table.add_column("model", no_wrap=True)
    parameters = "params" if narrow else "parameters"
    shown = columns(compared)
    for text in (parameters, f"+{parameters}", *_headings(compared, shown, narrow), "tokens/s"):
        table.add_column(text, justify="right", no_wrap=True)
    for row in compared.rows:
        name = " ".join(filter(None, (row.name, "(slice)" if row.is_slice else "", compared.mark(row))))
        table.add_row(
            Text(name),
            format.count(row.parameters),
            "" if row is compared.rows[0] else format.extra(row.extra_parameters),
            *(_cell(column, row, narrow) for column in shown),
            format.count(row.tokens_per_second.mean if row.tokens_per_second else None),
        )
    for label, unigram in _unigrams(compared).items():
        cells = [Text(column.unigram(unigram), style="dim") for column in shown]
        name = "unigram" if compared.comparable else f"unigram, {label}"
        table.add_row(Text(name, style="dim"), "", "", *cells, "")
    return table


def _headings(compared: Comparison, shown: Sequence[Column], narrow: bool) -> list[str]:
    plain = not compared.has_paper and not compared.shows_last
    return [_heading(column, plain, narrow) for column in shown]


def _heading(column: Column, plain: bool, narrow: bool) -> str:
    """`plain`: nothing but ours is shown."""
    name = f"{column.split} {column.measure.short}"
    if plain or not column.whose:
        return name
    if not narrow:
        return f"{name}\n{column.whose}"
    above = name if column.measure.higher else column.split  # of scores there may be two kinds
    return f"{above}\n{column.whose}".replace(" ", "\n")


def _cell(column: Column, row: Row, narrow: bool) -> Text:
    if column.kind == "paper":
        return Text(column.text(row), style="dim")
    style = "bold green" if column.judged and column.split in row.best else ""
    return _figure(column.text(row), narrow, style=style)


def _figure(value: str, narrow: bool, style: str = "") -> Text:
    return Text(value.replace(" ±", "\n±") if narrow else value, style=style)


def _without_sos(compared: Comparison) -> Table:
    """Perplexity in the usual count of tokens."""
    title = f"{WITHOUT_SOS.words}, as tokens are usually counted"
    return _below(title, compared, [(row, row.without_sos) for row in compared.rows], WITHOUT_SOS, marked=True)


def _last_positions(compared: Comparison) -> Table:
    """Perplexity at last positions of the rows whose other figures are no next-token perplexities."""
    rows = [(row, row.last_position) for row in compared.rows if row.last_position]
    return _below(LAST_POSITION_TITLE, compared, rows, LAST_POSITION, marked=False)


def _below(
    title: str,
    compared: Comparison,
    rows: Sequence[tuple[Row, Mapping[str, Mapping[str, Stat]]]],
    measure: Measure,
    *,
    marked: bool,
) -> Table:
    """Figures of rows by checkpoint and split."""
    checkpoints = {"final": "\nbest", "last": "\nlast"} if compared.shows_last else {"final": ""}
    table = Table(
        title=Text(title),
        title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    table.add_column("model", no_wrap=True)
    for split in SPLITS:
        for ending in checkpoints.values():
            table.add_column(f"{split} {measure.short}{ending}", justify="right", no_wrap=True)
    for row, found in rows:
        texts = [measure.spread(found.get(name, {}).get(split)) for split in SPLITS for name in checkpoints]
        table.add_row(Text(row.name), *(Text(row.shown(text) if marked else text) for text in texts))
    return table


def _unigrams(compared: Comparison) -> dict[str, Row]:
    """For each text a row that knows the figures of word frequencies alone."""
    return {row.label: row for row in compared.rows if row.unigram}


def _significance(tested: Differences) -> Table:
    """Rows against their baselines on resampled test sets."""
    table = Table(
        title=Text(heading(tested)), title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False
    )
    heads, rows = table_of(tested)
    table.add_column("model", no_wrap=True)
    for name in heads:
        table.add_column(
            name.replace(" over ", " over\n").replace("samples ", "samples\n"), justify="right", no_wrap=True
        )
    for cells in rows:
        table.add_row(*map(Text, cells))
    return table
