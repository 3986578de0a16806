"""Tables of benchmarks on the terminal."""

from collections.abc import Iterable, Sequence

from fullrank.render.blocks import Cell, Grid, Heading
from fullrank.render.terminal import print_grid


def print_table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Iterable[str | Cell]]) -> None:
    """Print a table whose first columns are text and whose others are numbers."""
    headings = [Heading(text, left=True) for text in texts]
    headings += [Heading(text) for text in numbers]
    cells = []
    for row in rows:
        cells.append([Cell(cell) if isinstance(cell, str) else cell for cell in row])
    print_grid(Grid(headings, cells))
