"""A score of every arm as a strip: each seed a dot, beneath it the mean and the deviation."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fullrank.reporting.figures import WIDTH, disc, furnish, short
from fullrank.reporting.finetuning.comparing import Arm, Figure
from fullrank.reporting.svg import LINE, series_colour, settings, to_svg

_LEFT, _RIGHT = 112, 18
_SPAN = WIDTH - _LEFT - _RIGHT  # user units between the ends of the axis
_UNDER = 15  # user units of a row for mean and deviation


def strip_figure(found: Sequence[tuple[Arm, Figure]], slots: Sequence[int], x_label: str, alt: str) -> str:
    """The arms from top to bottom as SVG; dots that would cover each other are set above and below."""
    ends = [end for _, figure in found for end in (*figure.values, *_spread(figure))]
    low, high = min(ends), max(ends)
    pad = 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad
    size = 8.5 if max(len(figure.values) for _, figure in found) <= 10 else 6.0
    unit = _SPAN / (high - low)
    lanes = [swarm([value * unit for value in figure.values], size) for _, figure in found]
    deepest = max(max(map(abs, lane)) for lane in lanes)
    row = (2 * deepest + 1) * (size + 1.5) + _UNDER + 8
    height = 44 + row * len(found)
    with matplotlib.rc_context(settings()):  # type: ignore[arg-type]
        canvas = Canvas(figsize=(WIDTH / 72, height / 72))
        axes = canvas.add_axes((_LEFT / WIDTH, 36 / height, _SPAN / WIDTH, (height - 36 - 8) / height))
        furnish(axes, x_label, "")
        axes.grid(True, axis="x", color=LINE, linewidth=0.8)
        axes.grid(False, axis="y")
        axes.set_xlim(low, high)
        axes.set_ylim(-row * len(found), 0)
        middles = [-row * place - (row - _UNDER) / 2 for place in range(len(found))]
        for (_, figure), slot, middle, lane in zip(found, slots, middles, lanes, strict=True):
            colour = series_colour(slot)
            disc(axes, figure.values, [middle + (size + 1.5) * step for step in lane], colour, slot, size)
            if figure.stat.deviation is not None:
                under = middle - (row - _UNDER) / 2 - 1
                axes.plot(_spread(figure), [under] * 2, color=colour, linewidth=2, alpha=0.6, clip_on=False,
                          gid=f"slot-{slot}:spread")  # fmt: skip
                axes.plot([figure.stat.mean] * 2, [under - 6, under + 6], color=colour, linewidth=3, clip_on=False,
                          gid=f"slot-{slot}:mean")  # fmt: skip
        axes.set_yticks(middles, [short(arm.name) for arm, _ in found])
        for text, slot in zip(axes.get_yticklabels(), slots, strict=True):
            text.set_color(series_colour(slot))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=3))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        return to_svg(canvas, alt)


def _spread(figure: Figure) -> list[float]:
    reach = figure.stat.deviation or 0.0
    return [figure.stat.mean - reach, figure.stat.mean + reach]


def swarm(places: Sequence[float], size: float) -> list[int]:
    """A lane for each dot, 0 in the middle, then above and below: dots of one lane are at least `size` apart."""
    ends: dict[int, float] = {}
    lanes = [0] * len(places)
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        lane = 0
        while places[index] - ends.get(lane, float("-inf")) < size:
            lane = -lane if lane > 0 else 1 - lane
        ends[lane], lanes[index] = places[index], lane
    return lanes
