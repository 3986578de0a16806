"""Attention weights of a translation as a drawing: what each written token read of the source."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from fullrank.analysis.figure import INK, LINE, MUTED, clean, write_png

_BLUES = LinearSegmentedColormap.from_list("weights", ["#ffffff", "#9ecae8", "#0072b2", "#00304d"])
_BOTH = LinearSegmentedColormap.from_list("signed", ["#7a3200", "#e08a4a", "#ffffff", "#6fb1dd", "#00304d"])
_WIDEST, _CELL, _LEAST, _GAP = 16.0, 0.24, 0.09, 0.32  # inches: of the panels together, of a token, between panels
_LABELS = 60  # tokens of an axis that are named; of longer texts every second, third ...


@dataclass(frozen=True)
class Panel:
    """weights (N, M) of one head, or a mean over heads."""

    name: str
    weights: np.ndarray


@dataclass(frozen=True)
class AttentionMaps:
    """Panels over the same tokens: target has N names, source M. mixed: the weights have passed a mixing of heads."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    panels: tuple[Panel, ...]
    title: str
    mixed: bool


def write_figure(maps: AttentionMaps, path: Path) -> None:
    """Draw the panels, one scale for all, into the PNG `path`; equal figures give equal bytes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a box stands for it
        write_png(lambda: _figure(maps), path)


def _figure(maps: AttentionMaps) -> Figure:
    count, (rows, columns) = len(maps.panels), maps.panels[0].weights.shape
    side = 0.12 + 0.085 * max(map(len, maps.target))  # inches for the names of rows, and for those of columns
    top = 0.12 + 0.085 * max(map(len, maps.source))
    cell = max(0.05, min(_CELL, (_WIDEST - side) / columns, _WIDEST / rows))
    while True:  # many heads are drawn smaller, until they fit on a page
        across = _across(count, columns * cell + _GAP, side)
        down = math.ceil(count / across)
        if down * (rows * cell + _GAP) <= _WIDEST or cell <= _LEAST:
            break
        cell *= 0.9
    wide, high = columns * cell, rows * cell
    least = 5.2  # for title and words below
    width = max(least, 0.2 + side + across * (wide + _GAP) + 0.75)
    above, below = 0.8 + top, 0.42
    height = above + down * (high + _GAP) + below
    figure = Figure(figsize=(width, height))
    limit = max(float(np.abs(panel.weights).max()) for panel in maps.panels) or 1.0
    signed = any(float(panel.weights.min()) < 0 for panel in maps.panels)
    image = None
    for i, panel in enumerate(maps.panels):
        row, column = divmod(i, across)
        left, upper = 0.2 + side + column * (wide + _GAP), above + row * (high + _GAP)
        axes = figure.add_axes((left / width, 1 - (upper + high) / height, wide / width, high / height))
        image = axes.imshow(
            panel.weights, cmap=_BOTH if signed else _BLUES, vmin=-limit if signed else 0.0, vmax=limit, aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        _furnish(axes, maps, cell, names=(row == 0, column == 0))
        axes.set_xlabel(panel.name, color=MUTED, fontsize=9, labelpad=4)
    bar_left = 0.2 + side + across * (wide + _GAP) - _GAP + 0.14
    bar = figure.add_axes((bar_left / width, 1 - (above + high) / height, 0.1 / width, high / height))
    assert image is not None
    figure.colorbar(image, cax=bar)
    bar.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    bar.spines["outline"].set_edgecolor(LINE)
    figure.text(0.2 / width, 1 - 0.24 / height, maps.title, color=INK, fontsize=12, fontweight="bold", va="center")
    words = "weights after mixing" if maps.mixed else "weights (heads are not mixed)"
    figure.text(
        0.2 / width, 1 - 0.5 / height, f"rows: tokens written, columns: tokens of the source; {words}",
        color=MUTED, fontsize=9, va="center",
    )  # fmt: skip
    return figure


def _across(count: int, wide: float, side: float) -> int:
    """Panels beside each other: as many as fit, but not so many that the last row is nearly empty."""
    fit = max(1, int((_WIDEST - side) / wide))
    best = min(count, fit)
    down = math.ceil(count / best)
    return math.ceil(count / down)


def _furnish(axes: Axes, maps: AttentionMaps, cell: float, names: tuple[bool, bool]) -> None:
    """Names of tokens above the first row and beside the first column of panels."""
    size = max(5.0, min(9.0, cell * 72 * 0.62))
    above, beside = names
    axes.tick_params(length=0, labelcolor=INK, labelsize=size, pad=2)
    axes.tick_params(axis="x", labeltop=above, labelbottom=False)
    step = math.ceil(len(maps.source) / _LABELS)
    axes.set_xticks(range(0, len(maps.source), step))
    axes.set_xticklabels([clean(t) for t in maps.source[::step]] if above else [], rotation=90)
    step = math.ceil(len(maps.target) / _LABELS)
    axes.set_yticks(range(0, len(maps.target), step))
    axes.set_yticklabels([clean(t) for t in maps.target[::step]] if beside else [])
    for spine in axes.spines.values():
        spine.set_color(LINE)
