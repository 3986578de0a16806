"""Drawing of benchmarks: time and peak memory against length, both axes in logarithms; ours in thick lines."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from fullrank.render.figures import INK, LINE, MUTED, SERIES, write_png
from measure import Line, Outcome

_WIDTH, _PANEL, _TITLE, _BELOW = 11.6, 2.6, 0.75, 0.62  # inches
_RANGE = 4.0  # an axis spans at least this factor, so that noise does not look like growth
_LEFT, _EACH, _GAP = 0.066, 0.3, 0.075  # shares of the width
_DASHES = ((0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
_MARKERS = "osD^vPX"
Curve = tuple[Line, dict[str, Any]]  # a line of a benchmark, and its looks


def write_figure(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw every benchmark, pass by pass, into the PNG `path`. Raises RunError if it cannot be written."""
    write_png(lambda: _figure(outcomes), path)


def _figure(outcomes: Sequence[Outcome]) -> Figure:
    rows = [(outcome, what, curves) for outcome in outcomes for what, curves in _by_pass(outcome).items()]
    each = _TITLE + _PANEL + _BELOW
    height = each * len(rows) + 0.15
    figure = Figure(figsize=(_WIDTH, height), layout="none")
    for i, (outcome, what, curves) in enumerate(rows):
        top = height - i * each
        base = (top - _TITLE - _PANEL) / height
        panels = [figure.add_axes((_LEFT + j * (_EACH + _GAP), base, _EACH, _PANEL / height)) for j in range(2)]
        _draw(panels[0], curves, [[1000 * one.seconds for _, one in line.points] for line, _ in curves], "ms")
        _draw(panels[1], curves, [[one.memory_mib for _, one in line.points] for line, _ in curves], "peak memory, MiB")
        title = f"{outcome.suite.name}: {what}"
        figure.text(_LEFT, (top - 0.33) / height, title, color=INK, fontsize=13, fontweight="bold", va="center")
        measured = f"{outcome.settings.dtype}, {outcome.settings.device}, median of {outcome.rounds} rounds"
        subtitle = f"{measured}; the greatest length is {outcome.rows[-1].shape}"
        figure.text(_LEFT, (top - 0.57) / height, subtitle, color=MUTED, fontsize=9.5, va="center")
        ends = sorted(curves, key=lambda curve: (curve[0].points[-1][0], curve[0].points[-1][1].seconds), reverse=True)
        figure.legend(
            handles=[Line2D([], [], label=line.name, **look) for line, look in ends], loc="upper left", frameon=False,
            bbox_to_anchor=(_LEFT + 2 * _EACH + _GAP + 0.012, (top - _TITLE + 0.08) / height), labelcolor=INK,
            handlelength=2.6, labelspacing=0.32, fontsize=9.5,
        )  # fmt: skip
    return figure


def _by_pass(outcome: Outcome) -> dict[str, list[Curve]]:
    """Curves by pass; a candidate has the same looks in every pass."""
    lines = outcome.lines()
    names = list(dict.fromkeys(line.name for line in sorted(lines, key=lambda line: not line.ours)))
    curves: dict[str, list[Curve]] = {}
    for line in lines:
        number = names.index(line.name)
        look: dict[str, Any] = {"color": SERIES[(number + 1) % len(SERIES)], "marker": _MARKERS[number % len(_MARKERS)],
                                "markeredgecolor": "white", "markeredgewidth": 0.8}  # fmt: skip
        if line.ours:
            look |= {"linewidth": 2.6, "markersize": 7, "zorder": 4}
        else:
            look |= {"linewidth": 1.3, "markersize": 5.5, "zorder": 3, "linestyle": _DASHES[number % len(_DASHES)]}
        curves.setdefault(line.what, []).append((line, look))
    return curves


def _draw(axes: Axes, curves: list[Curve], columns: Sequence[Sequence[float | None]], unit: str) -> None:
    axes.grid(True, axis="y", color=LINE, linewidth=0.8)
    axes.set_xlabel("length (tokens)", color=MUTED)
    axes.set_ylabel(unit, color=MUTED)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    drawn = []
    for (line, look), column in zip(curves, columns, strict=True):
        known = [(n, y) for (n, _), y in zip(line.points, column, strict=True) if y is not None and y > 0]
        if known:
            axes.plot([n for n, _ in known], [y for _, y in known], **look)
            drawn += [y for _, y in known]
    lengths = sorted({n for line, _ in curves for n, _ in line.points})
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if not drawn:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=MUTED, fontsize=10)
        axes.yaxis.set_major_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        return
    margin = max(1.25, (_RANGE * min(drawn) / max(drawn)) ** 0.5)
    low, high = min(drawn) / margin, max(drawn) * margin
    axes.set_ylim(low, high)
    decades = math.log10(high / low)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"))
