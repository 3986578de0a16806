"""Blocks on the terminal, by rich."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullrank.files import visible
from fullrank.render.blocks import Block, Cell, Code, Facts, Grid, Group, Heading, Page, Paragraph

_HEADING_WIDTH = 15  # columns of a heading, which then goes on in the next line
_WIDEST = 1000  # columns of a table that is printed at its own width


def print_page(page: Page, console: Console | None = None) -> None:
    """Print the headline, the summary and every section that is not for the page alone."""
    console = console or Console(highlight=False)
    console.print(Text(visible(page.headline), "bold"))
    print_blocks(page.summary, console)
    for section in page.sections:
        if not section.page_only:
            badge = f" [{section.badge}]" if section.badge else ""
            console.print(Text(f"\n{section.title}{badge}", "bold"))
            print_blocks(section.blocks, console)


def print_blocks(blocks: Iterable[Block], console: Console | None = None) -> None:
    """Print blocks one after another; figures, legends and details are left out."""
    console = console or Console(highlight=False)
    for block in blocks:
        if isinstance(block, Grid):
            print_grid(block, console)
        elif isinstance(block, Paragraph):
            style = {"note": "dim", "warning": "yellow"}.get(block.kind, "")
            console.print(Text(visible(block.short or block.text), style), soft_wrap=not console.is_terminal)
        elif isinstance(block, Code):
            console.print(Text(f"  {visible(block.text)}"), soft_wrap=True)
        elif isinstance(block, Facts) and block.kind not in ("samples", "tiles"):
            for term, text in block.items:
                console.print(Text(visible(f"{term}: {text}" if term else text)), soft_wrap=not console.is_terminal)
        elif isinstance(block, Group):
            print_blocks(block.blocks, console)


def print_grid(grid: Grid, console: Console | None = None) -> None:
    """Print a table; on a terminal the last columns are left out where it would be too wide."""
    console = console or Console(highlight=False)
    columns = [index for index, heading in enumerate(grid.headings) if not heading.page_only]
    left_out: list[str] = []
    table = _build_table(grid, columns)
    while console.is_terminal and _measure_width(table, console) > console.width and len(columns) > 2:
        left_out.insert(0, grid.headings[columns.pop()].text)
        table = _build_table(grid, columns)
    table.width = _measure_width(table, console)  # no number is cut off, also where the console is narrower
    console.print(table, soft_wrap=True)
    for note in grid.notes:
        console.print(Text(visible(note), "dim"), soft_wrap=not console.is_terminal)
    if left_out:
        words = f"Left out in {console.width} columns: {', '.join(left_out)}; --json and the page have them."
        console.print(Text(words, "dim"))


def _measure_width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum


def _build_table(grid: Grid, columns: Sequence[int]) -> Table:
    title = Text(visible(grid.title)) if grid.title else None
    table = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    headings = [_heading_lines(grid.headings[index]) for index in columns]
    most = max(map(len, headings), default=0)
    for index, lines in zip(columns, headings, strict=True):
        text = Text("\n".join([""] * (most - len(lines)) + lines))  # at the bottom, and cells at the top
        table.add_column(text, justify="left" if grid.headings[index].left else "right", no_wrap=True)
    for row in grid.rows:
        table.add_row(*(_cell_text(row[index]) for index in columns))
    return table


def _heading_lines(heading: Heading) -> list[str]:
    words = textwrap.wrap(heading.text, _HEADING_WIDTH, break_long_words=False)
    return [line for line in (heading.group, *words, heading.line) if line]


def _cell_text(cell: Cell) -> Text:
    text = f"{cell.text} ({cell.badge})" if cell.badge else cell.text
    style = "bold" if cell.strong else "dim" if cell.quiet else ""
    return Text("\n".join(map(visible, (text, *cell.lines))), style)
