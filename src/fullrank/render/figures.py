"""Figures of records, by matplotlib: PNG and SVG files, and SVG inside a page, where colours follow the reader's theme."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

from fullrank.core.errors import InputError
from fullrank.files import write_bytes
from fullrank.records import Plot, Record
from fullrank.render.plots import HOVER, INK, LINE, MUTED, SERIES, SURFACE, Slots, clean_text, draw_plot, find_points

_STYLE: dict[str, Any] = {
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 9,
    "figure.constrained_layout.use": True,
    "font.family": ["DejaVu Sans"],
    "grid.color": LINE,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.labelcolor": MUTED,
    "lines.linewidth": 1.8,
    "lines.markeredgecolor": SURFACE,
    "svg.fonttype": "none",
    "svg.hashsalt": "fullrank",
    "svg.id": None,
    "text.parse_math": False,
    "text.usetex": False,
    "xtick.color": MUTED,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
_THEME = {INK: "--ink", MUTED: "--muted", LINE: "--line", SURFACE: "--surface"}
_THEME |= {color: f"--series-{slot}" for slot, color in enumerate(SERIES)}
_HOVER = re.compile(f'<g id="{HOVER}([^"]*)">'.encode())
_UNUSED_IDS = re.compile(r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend|title)_?[\d-]*"')


# -- files -------------------------------------------------------------------------------------------------------------


def save_plots(plots: Sequence[Plot], records: Sequence[Record], folder: Path, name: str) -> list[Path]:
    """Draw plots into NAME, NAME_2, ... in `folder`, PNG and SVG; those without records are left out.

    Equal records give equal bytes. Raises InputError where the folder is a file, RunError where it cannot be written to.
    """
    if folder.is_file():
        raise InputError(f"--out {folder}: a file of that name exists; give a folder")
    paths = []
    for number, plot in enumerate(plots, start=1):
        stem = name if number == 1 else f"{name}_{number}"
        for kind in ("png", "svg") if find_points(plot, records) else ():
            paths.append(folder / f"{stem}.{kind}")
            write_bytes(paths[-1], draw_bytes(plot, records, kind))
    return paths


def write_png(draw: Callable[[], Figure], path: Path) -> None:
    """Write a figure of one's own drawing, in the style of all others."""
    with _style():
        content = _to_bytes(draw(), "png")
    write_bytes(path, content)


def draw_bytes(plot: Plot, records: Sequence[Record], kind: str = "svg") -> bytes:
    """The file of a plot with its title. kind: `png` or `svg`."""
    with _style():
        figure = draw_plot(plot, records)
        figure.suptitle(clean_text(plot.title), x=0.02, ha="left", color=INK, fontweight="bold", fontsize=12)
        if plot.subtitle:
            figure.supxlabel(clean_text(plot.subtitle), x=0.02, ha="left", color=MUTED, fontsize=8)
        return _to_bytes(figure, kind)


# -- pages -------------------------------------------------------------------------------------------------------------


def draw_svg(plot: Plot, records: Sequence[Record], slots: Slots | None = None) -> str:
    """SVG for a page: without the title, its colours are the variables of the page's style sheet.

    slots: colours of series by name.
    """
    with _style(salt=f"{plot}{len(records)}"):
        svg = _to_bytes(draw_plot(plot, records, slots), "svg").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _UNUSED_IDS.sub("", svg)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg class="figure" role="img" viewBox="\1">', svg, count=1)
    for color, variable in _THEME.items():
        svg = svg.replace(color, f"var({variable})")
    return svg.strip()


@contextmanager
def _style(salt: str = "fullrank") -> Iterator[None]:
    settings = _STYLE | {"svg.hashsalt": salt}
    with matplotlib.style.context(settings, after_reset=True):
        yield


def _to_bytes(figure: Figure, kind: str) -> bytes:
    metadata = {"Software": "fullrank"} if kind == "png" else {"Date": None, "Creator": "fullrank"}
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a box stands for it
        background = "white" if kind == "png" else "none"
        figure.savefig(buffer, format=kind, dpi=150, facecolor=background, metadata=metadata)
    # the text of a point inside its group, which browsers show on hover
    return _HOVER.sub(rb"<g><title>\1</title>", buffer.getvalue()) if kind == "svg" else buffer.getvalue()
