"""A page as one self-contained HTML file: style, figures and tables are inside, nothing is loaded."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from fullrank.files import write_own
from fullrank.records import Plot, Record, Table
from fullrank.render.blocks import Block, Details, Figure, Page, Section, build_grid
from fullrank.render.figures import Slots, clean_text, draw_svg, find_points

BEGINNING = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'  # of every page; a page is known by it


def render_page(page: Page) -> str:
    """Render a page as HTML. Equal pages give equal bytes."""
    return _environment().get_template("page.html").render(page=page)


def write_page(page: Page, path: Path) -> Path:
    """Write a page to `path`, or to `report.html` in the folder `path`, and return where it is.

    An older page is replaced; another file of that name is an InputError. Raises RunError where it cannot be written.
    """
    path = path / "report.html" if path.is_dir() else path
    write_own(path, render_page(page), BEGINNING, "a report")
    return path


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fullrank.render"),
        undefined=StrictUndefined,
        finalize=_clean,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.globals["address"] = _address
    return environment


def _clean(value: object) -> object:
    if type(value) is str:
        return clean_text(value)
    return value


def _address(section: Section) -> str:
    if section.name:
        return section.name
    words = re.sub(r"[^a-z0-9]+", "-", section.title.lower())
    return words.strip("-")


def build_figure(
    plot: Plot,
    records: list[Record],
    slots: Slots | None = None,
    *,
    wide: bool = False,
) -> Figure:
    """Build the figure of a plot for a page.

    Args:
        plot: what is drawn.
        records: measured values.
        slots: colours of series by name; others take the next ones.
        wide: let it span the page.

    Returns:
        The figure with its titles.
    """
    svg = draw_svg(plot, records, slots)
    return Figure(svg, plot.title, plot.subtitle, wide)


_MOST_LINES = 20  # of a table of a measurement that stands open on the page


def build_blocks(
    tables: tuple[Table, ...],
    plots: tuple[Plot, ...],
    records: list[Record],
    slots: Slots | None = None,
) -> list[Block]:
    """Build figures and tables of a measurement's records; a long table is folded.

    Args:
        tables: those without records are left out.
        plots: those without records are left out.
        records: measured values.
        slots: colours of series by name; others take the next ones.

    Returns:
        Blocks of a page, figures first.
    """
    shown = [plot for plot in plots if find_points(plot, records)]
    blocks: list[Block] = [build_figure(plot, records, slots, wide=True) for plot in shown]
    for table in tables:
        grid = build_grid(table, records)
        lines = len(grid.rows)
        if lines > _MOST_LINES:
            blocks.append(Details(grid.title or f"Table of {lines} lines", [grid]))
        elif lines:
            blocks.append(grid)
    return blocks
