"""Tables and sentences on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from fullrank.reporting import finetuning_tables, tables
from fullrank.reporting.compare import Comparison
from fullrank.reporting.finetuning import Tuning
from fullrank.reporting.runs import RunRecord
from fullrank.reporting.summary import signature_lines, summarize
from fullrank.reporting.tables import Cell, Table


@dataclass(frozen=True)
class Line:
    """A sentence; `style` as rich names it."""

    text: str
    style: str = ""


def show(content: Comparison | Tuning, console: Console | None = None) -> None:
    """Print tables (narrow where they would not fit) and sentences, one after another."""
    console = console or Console()
    for part in _of_tuning(content) if isinstance(content, Tuning) else _of_comparison(content):
        if isinstance(part, Line):
            console.print(Text(part.text, style=part.style))
            continue
        table = _rich(part, narrow=False)
        if _width(console, table) > console.width:
            table = _rich(part, narrow=True)
        console.print(_Whole(table), crop=False, soft_wrap=True)


def _of_comparison(compared: Comparison) -> Iterator[Table | Line]:
    if compared.rows:
        yield tables.comparison_table(compared)
    yield from tables.other_figures(compared)
    yield from (Line(line, "dim") for line in signature_lines(compared))
    yield from tables.differences_tables(compared)
    yield from (Line(line, "dim") for line in tables.differences_notes(compared))
    summary = summarize(compared)
    yield Line(summary.headline, "bold")
    yield from (Line(line, "yellow") for line in summary.warnings)
    yield from map(Line, summary.cautions)
    yield from map(_not_finished, compared.unfinished)


def _of_tuning(found: Tuning) -> Iterator[Table | Line]:
    for task in found.tasks:
        yield from (finetuning_tables.scores_table(task, key) for key in task.keys)
        yield finetuning_tables.arms_table(task)
        yield from (Line(line, "dim") for line in finetuning_tables.protocol_lines(task))
    summary = finetuning_tables.summarize(found)
    yield from (Line(line, "bold") for line in (summary.headline, *summary.paragraphs))
    yield from (Line(line, "yellow") for line in summary.warnings)
    yield from (Line(line, "dim") for line in summary.cautions)
    yield from map(_not_finished, found.unfinished)


def _not_finished(run: RunRecord) -> Line:
    return Line(f"not finished: {run.folder} ({'; '.join(run.problems)})", "yellow")


@dataclass(frozen=True)
class _Whole:
    """A table at its own width even where the console is narrower: lines may wrap there, but no figure is cut off."""

    table: RichTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = _width(console, self.table)
        yield from console.render(self.table, options.update(width=width, max_width=width))


def _width(console: Console, table: RichTable) -> int:
    return console.measure(table, options=console.options.update(max_width=1000)).maximum


def _rich(table: Table, *, narrow: bool) -> RichTable:
    """`narrow` shortens headings and sets deviations beneath their means."""
    rich = RichTable(
        title=Text(table.caption) if table.show_caption else None,
        title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 0 if narrow and table.lines_below else 1, 0, 0) if narrow or table.lines_below else (0, 1),
    )  # fmt: skip
    shown = [index for index, column in enumerate(table.columns) if column.only != "page"]
    for index in shown:
        column = table.columns[index]
        heading = column.terminal or column.heading
        heading = heading.replace(" ", "\n") if narrow and not column.below else heading
        below = f"\n{column.below}" if column.below and table.lines_below else ""
        rich.add_column(
            Text(heading + below),
            justify="left" if column.left else "right",
            no_wrap=not (column.left and table.lines_below),
            overflow="fold",
            max_width=18 if index == 0 and narrow and table.lines_below else None,
        )
    for row in table.rows:
        rich.add_row(*(_text(row[index], narrow, table.lines_below) for index in shown))
    for row in table.foot:
        rich.add_row(*(_text(row[index], narrow, False) for index in shown))
    return rich


def _text(cell: Cell, narrow: bool, lines_below: bool) -> Text:
    text = cell.text.replace(" ±", "\n±") if narrow and not lines_below else cell.text
    if cell.badges:
        text += f" ({', '.join(badge for badge, _ in cell.badges)})"
    style = "bold green" if cell.strong else "dim" if cell.quiet else ""
    return Text("\n".join((text, *cell.below)) if lines_below else text, style=style)
