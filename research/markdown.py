"""Small pieces of Markdown: tables, code, and numbers as people read them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

MISSING = "–"


def make_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Make a table whose headings are the keys of the first row."""
    if not rows:
        return "None yet."
    headings = list(rows[0])
    lines = []
    for cells in (headings, ["---"] * len(headings), *(row.values() for row in rows)):
        line = " | ".join(cell.replace("|", "/") for cell in cells)
        lines.append(f"| {line} |")
    return "\n".join(lines)


def code(text: str) -> str:
    """Write text as code; nothing for an empty text."""
    return f"`{text}`" if text else ""


def prose(text: Any) -> str:
    """Write text on one line, whose `<` outside of code begins no HTML. Tokens such as <eos> become code."""
    pieces = re.split(r"(`[^`]*`)", " ".join(str(text).split()))
    for place in range(0, len(pieces), 2):
        marked = re.sub(r"<(eos|sos|unk)>", r"`<\1>`", pieces[place])
        pieces[place] = re.sub(r"<(?!(eos|sos|unk)>`)", "&lt;", marked)
    return "".join(pieces)


def make_anchor(heading: str) -> str:
    """Make the name by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def readable(key: str) -> str:
    """Write a key as words."""
    return key.replace("_", " ")


def show(value: Any) -> str:
    """Show a float with four significant digits (whole from 1,000 on), a bool as yes or no, None as an empty text.

    Integers get commas, and other values are shown as they are.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show_count(values: Iterable[float | None]) -> str:
    """Show the mean of counts, as a whole number; a dash where none is known."""
    counts = [value for value in values if value is not None]
    return f"{statistics.fmean(counts):,.0f}" if counts else MISSING


def show_spread(values: Sequence[float], show: Callable[[float], str] = show) -> str:
    """Show mean ± standard deviation over seeds; the mean alone for one seed, a dash for none."""
    if not values:
        return MISSING
    mean = show(statistics.fmean(values))
    return f"{mean} ± {show(statistics.stdev(values))}" if len(values) > 1 else mean


def show_seeds(seeds: Iterable[int]) -> str:
    """Show seeds as in '1–5, 7': three and more neighbouring seeds as a range."""
    words = []
    for _, part in groupby(enumerate(sorted(set(seeds))), key=lambda place: place[1] - place[0]):
        neighbours = [seed for _, seed in part]
        if len(neighbours) > 2:
            words.append(f"{neighbours[0]}–{neighbours[-1]}")
        else:
            words += map(str, neighbours)
    return ", ".join(words)


def show_difference(difference: float, interval: tuple[float, float] | None, unit: str = "") -> str:
    """Show a difference as in '−10.00 [−12.48 to −7.52]'.

    Args:
        difference: the difference.
        interval: its 95 % interval; None without.
        unit: stands behind the difference.

    Returns:
        The text, with as many decimals as show on which side of zero the interval lies.
    """
    low, high = interval or (difference, difference)
    is_decided = interval is None or low > 0 or high < 0
    sizes = [abs(value) for value in (difference, *(interval or ())) if value]
    smallest = (min if is_decided else max)(sizes, default=1.0)
    decimals = min(6, max(2, math.ceil(-math.log10(smallest))))
    ends = f"{show_signed(low, decimals)} to {show_signed(high, decimals)}" if interval else MISSING
    return f"{show_signed(difference, decimals)}{unit} [{ends}]"


def show_signed(value: float, decimals: int) -> str:
    """Show a number with its sign, and without one where it rounds to zero."""
    size = f"{abs(value):.{decimals}f}"
    return size if float(size) == 0 else f"{'−' if value < 0 else '+'}{size}"
