"""Drawing of benchmarks: time and peak memory against length, both axes in logarithms; ours in thick lines."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from fullrank.render.figures import INK, MUTED, SERIES, write_png
from measure import Line, Outcome

_WIDTH = 11.6  # inches of a pass
_HEIGHT = 3.7
_DASHES = ("dashed", "dotted", "dashdot")
_MARKERS = "osD^vPX"


def write_figure(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw every benchmark, pass by pass, into the PNG `path`. Raises RunError if it cannot be written."""
    write_png(lambda: _draw_figure(outcomes), path)


def _draw_figure(outcomes: Sequence[Outcome]) -> Figure:
    panels = []
    for outcome in outcomes:
        lines = outcome.list_lines()
        looks = _choose_looks(lines)
        for what in dict.fromkeys(line.what for line in lines):
            panels.append((outcome, what, [line for line in lines if line.what == what], looks))
    figure = Figure(figsize=(_WIDTH, _HEIGHT * max(1, len(panels))))
    grid: Any = figure.subplots(len(panels), 2, squeeze=False) if panels else []
    for (time, memory), (outcome, what, lines, looks) in zip(grid, panels, strict=True):
        _draw_lines(time, lines, looks, "ms", lambda figure: 1000 * figure.seconds)
        _draw_lines(memory, lines, looks, "peak memory, MiB", lambda figure: figure.memory_mib or 0.0)
        time.set_title(f"{outcome.suite.name}: {what}", color=INK, fontweight="bold", fontsize=13, loc="left")
        measured = f"{', '.join(outcome.dtypes)}, {outcome.settings.device}, median of {outcome.rounds} rounds"
        memory.set_title(f"{measured}; up to {outcome.rows[-1].shape}", color=MUTED, loc="left")
        memory.legend(*time.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.02, 1.0))
    return figure


def _choose_looks(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """Choose the colour, marker and width of each candidate, the same in every pass; ours first."""
    ours_first = sorted(lines, key=lambda line: not line.ours)
    looks: dict[str, dict[str, Any]] = {}
    for line in ours_first:
        number = len(looks)
        look: dict[str, Any] = {"color": SERIES[(number + 1) % len(SERIES)], "marker": _MARKERS[number % len(_MARKERS)]}
        if line.ours:
            look |= {"linewidth": 2.6, "markersize": 7, "zorder": 4}
        else:
            look |= {"linewidth": 1.3, "markersize": 5.5, "linestyle": _DASHES[number % len(_DASHES)]}
        looks.setdefault(line.name, look)
    return looks


def _draw_lines(
    axes: Axes,
    lines: Sequence[Line],
    looks: Mapping[str, dict[str, Any]],
    unit: str,
    read: Callable[[Any], float],
) -> None:
    axes.grid(True, axis="y", linewidth=0.8)
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for line in lines:
        lengths = [length for length, figure in line.points if read(figure) > 0]
        values = [read(figure) for _, figure in line.points if read(figure) > 0]
        axes.plot(lengths, values, label=line.name, **looks[line.name])
    axes.xaxis.set_major_locator(FixedLocator(sorted({length for line in lines for length, _ in line.points})))
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
