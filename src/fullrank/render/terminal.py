"""Blocks on the terminal, by rich."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullrank.render.blocks import Block, Cell, Code, Facts, Grid, Group, Heading, Page, Paragraph

_HEADING_WIDTH = 15  # columns of a heading, which then goes on in the next line
_STYLES = {"note": "dim", "warning": "yellow"}
_WIDEST = 1000  # columns of a table that is printed at its own width


def print_page(page: Page, console: Console | None = None) -> None:
    """Print the headline, the summary and every section that is not for the page alone."""
    console = console or Console(highlight=False)
    console.print(Text(page.headline, "bold"))
    print_blocks(page.summary, console)
    for section in page.sections:
        if section.page_only:
            continue
        heading = f"\n{section.title}"
        if section.badge:
            heading += f" [{section.badge}]"
        console.print(Text(heading, "bold"))
        print_blocks(section.blocks, console)


def print_blocks(blocks: Iterable[Block], console: Console) -> None:
    """Print blocks one after another; figures, legends and details are left out."""
    for block in blocks:
        match block:
            case Grid():
                print_grid(block, console)
            case Paragraph():
                text = block.short or block.text
                style = _STYLES.get(block.kind, "")
                print_line(text, console, style)
            case Code():
                console.print(Text(f"  {block.text}"), soft_wrap=True)
            case Facts() if block.kind != "tiles":
                for term, text in block.items:
                    print_line(f"{term}: {text}" if term else text, console)
            case Group():
                print_blocks(block.blocks, console)


def print_line(text: str, console: Console, style: str = "") -> None:
    """Print a paragraph.

    Args:
        text: a paragraph. A terminal wraps it; a file takes lines of any length.
        console: where it is printed.
        style: that of `rich`.
    """
    is_file = not console.is_terminal
    console.print(Text(text, style), soft_wrap=is_file)


def print_grid(grid: Grid, console: Console | None = None) -> None:
    """Print a table; on a terminal the last columns are left out where it would be too wide."""
    console = console or Console(highlight=False)
    columns = [index for index, heading in enumerate(grid.headings) if not heading.page_only]
    left_out: list[str] = []
    table = _build_table(grid, columns)
    while console.is_terminal and len(columns) > 2 and _measure_width(table, console) > console.width:
        last = columns.pop()
        left_out.insert(0, grid.headings[last].text)
        table = _build_table(grid, columns)
    table.width = _measure_width(table, console)  # no number is cut off, also where the console is narrower
    console.print(table, soft_wrap=True)
    for note in grid.notes:
        print_line(note, console, "dim")
    if left_out:
        names = ", ".join(left_out)
        print_line(f"Left out in {console.width} columns: {names}; --json has them.", console, "dim")


def _measure_width(table: Table, console: Console) -> int:
    options = console.options.update(max_width=_WIDEST)
    measured = console.measure(table, options=options)
    return measured.maximum


def _build_table(grid: Grid, columns: Sequence[int]) -> Table:
    table = Table(
        title=Text(grid.title),
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    headings = [_heading_lines(grid.headings[index]) for index in columns]
    tallest = max(map(len, headings), default=0)
    for index, lines in zip(columns, headings, strict=True):
        above = [""] * (tallest - len(lines))  # headings stand at the bottom, cells at the top
        heading = Text("\n".join(above + lines))
        table.add_column(heading, justify="left" if grid.headings[index].left else "right", no_wrap=True)
    for row in grid.rows:
        cells = [_write_cell(row[index]) for index in columns]
        table.add_row(*cells)
    return table


def _heading_lines(heading: Heading) -> list[str]:
    words = textwrap.wrap(heading.text, _HEADING_WIDTH, break_long_words=False)
    lines = [heading.group, *words, heading.line]
    return [line for line in lines if line]


def _write_cell(cell: Cell) -> Text:
    text = cell.text
    if cell.badge:
        text += f" ({cell.badge})"
    style = "bold" if cell.strong else ""
    return Text("\n".join([text, *cell.lines]), style)
