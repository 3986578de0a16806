"""Spectra of log-probabilities as a drawing: singular values against their number, and where a softmax must end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fullrank.analysis.figure import COLOURS, INK, MUTED, clean, furnish, write
from fullrank.analysis.rank import LogProbRank

_WIDTH, _PLOT, _LEGEND_ROW = 8.6, 3.7, 0.21  # inches


def write_figure(found: Mapping[str, LogProbRank], folder: Path) -> list[Path]:
    """Draw the spectra, by the names of their models, into rank.png and rank.svg in `folder` (`figure.write`)."""
    return write(lambda: _figure(found), folder, "rank")


def _figure(found: Mapping[str, LogProbRank]) -> Figure:
    below = 0.72 + _LEGEND_ROW * (len(found) + 1)
    height = 0.95 + _PLOT + below
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((0.085, below / height, 0.885, _PLOT / height))
    lowest = _lowest(found)
    lines = []
    for i, (name, one) in enumerate(found.items()):
        colour = COLOURS[i % len(COLOURS)]
        _spectrum(axes, one, colour, lowest)
        lines.append(Line2D([], [], color=colour, linewidth=2.2, label=f"{clean(name)}: {_in_words(one)}"))
    bounds = sorted({one.layer.bound for one in found.values()})
    for bound in bounds:
        axes.axvline(bound, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)
    _furnish(axes, found, lowest)
    _name_bounds(axes, found, bounds)
    tolerance = "tolerance, s_max max(contexts, words) eps: what lies below is rounding and does not count"
    noise = Line2D([], [], color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)), label=tolerance)
    title = "How many dimensions the log-probabilities have"
    left = 0.085
    figure.text(left, 1 - 0.3 / height, title, color=INK, fontsize=13, fontweight="bold", va="center")
    figure.text(left, 1 - 0.58 / height, _subtitle(found), color=MUTED, fontsize=9.5, va="center")
    figure.legend(
        handles=[*lines, noise], loc="lower left", bbox_to_anchor=(0.078, 0.06 / height), ncols=1, frameon=False,
        fontsize=9.5, labelcolor=MUTED, handlelength=2.2, labelspacing=0.35,
    )  # fmt: skip
    return figure


def _subtitle(found: Mapping[str, LogProbRank]) -> str:
    sizes = {(one.contexts, one.columns) for one in found.values()}
    shape = ", ".join(f"{contexts:,} contexts by {columns:,} words" for contexts, columns in sorted(sizes)[:2])
    return f"Singular values of the matrix of log p(word | context), {shape}{' ...' if len(sizes) > 2 else ''}"


def _in_words(one: LogProbRank) -> str:
    return f"{one.layer.kind}, d = {one.layer.hidden_size:,}, rank {one.rank:,}"


def _lowest(found: Mapping[str, LogProbRank]) -> float:
    """The end of the axis: some way below the rounding, where values that are not counted would lie anywhere."""
    return 10 ** np.floor(np.log10(min(one.tolerance for one in found.values())) - 2.5)


def _spectrum(axes: Axes, one: LogProbRank, colour: str, lowest: float) -> None:
    """The values that count, and paler those that are rounding; a mark at the last that counts."""
    numbers = np.arange(1, len(one.singular_values) + 1)
    values = np.maximum(one.singular_values, lowest * 1e-3)
    rank = one.rank
    axes.plot(numbers[:rank], values[:rank], color=colour, linewidth=2.2, solid_capstyle="round", zorder=4)
    if rank < len(values):
        axes.plot(
            numbers[rank - 1 :], values[rank - 1 :], color=colour, linewidth=1.2, alpha=0.35, zorder=3,
            solid_joinstyle="round",
        )  # fmt: skip
    axes.axhline(one.tolerance, color=colour, linewidth=1.0, linestyle=(0, (1, 2)), alpha=0.8, zorder=2)
    axes.plot(
        numbers[rank - 1 : rank],
        values[rank - 1 : rank],
        "o",
        color=colour,
        markersize=6,
        markeredgecolor="white",
        zorder=5,
    )


def _furnish(axes: Axes, found: Mapping[str, LogProbRank], lowest: float) -> None:
    furnish(axes, "y", "number of the singular value", "singular value")
    most = max(len(one.singular_values) for one in found.values())
    largest = max(float(one.singular_values[0]) for one in found.values())
    axes.set_yscale("log")
    axes.set_ylim(lowest, 10 ** np.ceil(np.log10(largest) + 0.3))
    axes.set_xlim(0, 1.03 * max(most, *(one.layer.bound for one in found.values())))
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=9))
    axes.yaxis.set_minor_locator(LogLocator(base=10, subs=[]))
    axes.yaxis.set_major_formatter(FuncFormatter(_power))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))


def _power(value: float, _place: int | None) -> str:
    """10 to a whole power, written with raised digits: a formula would need another font."""
    if value == 1:
        return "1"
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return f"10{str(round(np.log10(value))).translate(raised)}"


def _name_bounds(axes: Axes, found: Mapping[str, LogProbRank], bounds: list[int]) -> None:
    """The words at each bound: which sum it is; on the side where there is room."""
    words = {one.layer.bound: one.layer.in_words for one in found.values()}
    right = axes.get_xlim()[1]
    for i, bound in enumerate(bounds):
        far = bound > 0.6 * right
        axes.annotate(
            f"{words[bound]} = {bound:,}: a softmax ends here", (bound, 1), xycoords=("data", "axes fraction"),
            xytext=(-6 if far else 6, -9 - 15 * i), textcoords="offset points", ha="right" if far else "left", va="center",
            color=INK, fontsize=9.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2}, zorder=6,
        )  # fmt: skip
