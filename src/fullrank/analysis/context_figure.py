"""The reach of each layer's memory as a drawing: one row for each layer, tokens to the right."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator

from fullrank.analysis.context import LayerReach, Reach
from fullrank.analysis.figure import INK, MUTED, clean, furnish, write

BARS, FILL, MEAN, PUBLISHED = "#0072b2", "#9fcbe6", "#c04f00", "#b0508b"
_ROW, _LEAST_ROW, _TALLEST = 0.42, 0.16, 16.0  # inches
_HIGHEST = 0.82  # of a row: the step of a reach that is always attained


def write_figure(reach: Reach, folder: Path, title: str) -> list[Path]:
    """Draw `reach` into context.png and context.svg in `folder` (`figure.write`)."""
    return write(lambda: _figure(reach, title), folder, "context")


def _figure(reach: Reach, title: str) -> Figure:
    count = len(reach.layers)
    row = max(_LEAST_ROW, min(_ROW, (_TALLEST - 2.2) / count))
    height = 2.2 + row * count
    figure = Figure(figsize=(8.6, height))
    axes = figure.add_axes((0.085, 1.3 / height, 0.885, row * count / height))
    end = max(max(layer.reach.quantile(0.99) for layer in reach.layers), 1.5 * reach.memory_length)
    shown = reach.memory_length < reach.published <= 2 * end  # farther away it would press the layers together
    end = max(end, reach.published) if shown else end
    for layer in reach.layers:
        _row(axes, layer)
    axes.axvline(reach.memory_length, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
    if shown:
        axes.axvline(reach.published, color=PUBLISHED, linewidth=1.4, linestyle=(0, (1, 2)), zorder=3)
    _furnish(axes, reach, end)
    size = max(7.0, min(13.0, 13 * 60 / max(1, len(title))))  # what has more than 60 letters is set smaller
    figure.text(0.085, 1 - 0.3 / height, clean(title), color=INK, fontsize=size, fontweight="bold", va="center")
    subtitle = (
        f"How far back the oldest token stands that a layer remembers; memory of {reach.memory_length:,} tokens, "
        f"segments of {reach.segment_length:,}"
    )
    figure.text(0.085, 1 - 0.58 / height, subtitle, color=MUTED, fontsize=9.5, va="center")
    figure.legend(
        handles=_legend(shown), loc="lower left", bbox_to_anchor=(0.078, 0.02 / height), ncols=2, frameon=False,
        fontsize=9.5, labelcolor=MUTED, handlelength=2.2, columnspacing=2.0,
    )  # fmt: skip
    return figure


def _row(axes: Axes, layer: LayerReach) -> None:
    """A staircase: at how large a share of the steps the memory reaches at least so far; a mark at the mean."""
    base, last = layer.layer - 0.3, layer.reach.quantile(0.99)
    kept = layer.reach.tokens <= last
    tokens, chances = layer.reach.tokens[kept], layer.reach.probabilities[kept]
    at_least = 1 - np.concatenate([[0.0], np.cumsum(chances)[:-1]])
    edges = np.concatenate([[0], tokens])
    axes.stairs(base + _HIGHEST * at_least, edges, baseline=base, fill=True, color=FILL, linewidth=0, zorder=2)
    axes.plot([0, last], [base, base], color=BARS, linewidth=1.6, zorder=3)
    axes.plot([layer.mean], [base], marker="D", markersize=5, color=MEAN, markeredgecolor="white", zorder=4)


def _furnish(axes: Axes, reach: Reach, end: int | float) -> None:
    furnish(axes, "x", "tokens before the first query of the segment", "layer")
    axes.set_xlim(0, 1.04 * end)
    axes.set_ylim(-0.6, len(reach.layers) - 0.3)
    if len(reach.layers) <= 32:
        axes.set_yticks([layer.layer - 0.1 for layer in reach.layers], [str(layer.layer) for layer in reach.layers])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    whole = (
        reach.memory_length % reach.segment_length == 0
    )  # then every reach is a number of segments: so are the ticks
    step = reach.segment_length * math.ceil(end / reach.segment_length / 9)
    axes.xaxis.set_major_locator(MultipleLocator(step) if whole else MaxNLocator(nbins=8))


def _legend(published: bool) -> list[Line2D | Patch]:
    items: list[Line2D | Patch] = [
        Patch(color=FILL, label="height: how often it reaches at least so far"),
        Line2D([], [], color=BARS, linewidth=1.6, label="99 % of the steps reach no farther"),
        Line2D([], [], color=MEAN, marker="D", linestyle="", markersize=5, label="mean"),
        Line2D([], [], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="without skipping"),
    ]
    if published:
        style = (0, (1, 2))
        items.append(
            Line2D(
                [], [], color=PUBLISHED, linewidth=1.4, linestyle=style, label="the paper's Eq. 6, a sum over layers"
            )
        )
    return items
