"""Figures over seeds, and numbers as people read them: the same on the page and on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MISSING = "–"


@dataclass(frozen=True)
class Stat:
    """Mean over `count` runs and the sample standard deviation (n - 1); one run has no deviation.

    A mean of perplexities is the mean of the runs' perplexities, never the exponential of a mean loss.
    """

    mean: float
    deviation: float | None
    count: int


def over_runs(values: Iterable[float | None]) -> Stat | None:
    """Statistic of the values that exist; None if there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Stat(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def apart(first: Stat, second: Stat) -> bool | None:
    """True if the intervals mean ± standard deviation do not meet; None if a single seed leaves the spread unknown."""
    if first.deviation is None or second.deviation is None:
        return None
    return abs(first.mean - second.mean) > first.deviation + second.deviation


def spread(stat: Stat | None, show: Callable[[float], str]) -> str:
    """Mean ± standard deviation; the mean alone for one seed."""
    if stat is None:
        return MISSING
    return show(stat.mean) if stat.deviation is None else f"{show(stat.mean)} ± {show(stat.deviation)}"


def signed(negative: bool, size: str) -> str:
    """A size with its sign, and none where the size rounds to zero."""
    return size if float(size.replace(",", "")) == 0 else f"{'−' if negative else '+'}{size}"


def count(value: float | None) -> str:
    """Whole number with thousands separators."""
    return MISSING if value is None else f"{value:,.0f}"


def extra(value: int | None) -> str:
    """Difference in parameters, with its sign."""
    return MISSING if value is None else signed(value < 0, f"{abs(value):,}")


def perplexity(value: float | None) -> str:
    """Two decimals below a thousand, fewer above."""
    if value is None:
        return MISSING
    return f"{value:,.2f}" if value < 1000 else f"{value:,.1f}" if value < 10000 else f"{value:,.0f}"


def bits(value: float | None) -> str:
    """Bits per byte or character: three decimals, as papers have them."""
    return MISSING if value is None else f"{value:.3f}"


def stated_bits(value: float) -> str:
    """Bits of a paper: three decimals, or two where a recipe cannot tell a zero at the end."""
    return f"{value:.3f}".removesuffix("0")


def score(value: float | None) -> str:
    """BLEU and other scores from 0 to 100: two decimals."""
    return MISSING if value is None else f"{value:.2f}"


def points(difference: float) -> str:
    """Difference of scores with its sign: 0.618 -> '+0.62'."""
    return signed(difference < 0, score(abs(difference)))


def stated(value: object, show: Callable[[float], str]) -> str:
    """Figure of a paper: numbers as `show` writes them, words as they are."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return show(float(value))
    return MISSING if value is None else str(value)


def plain(value: float) -> str:
    """1600.0 -> '1,600', 0.25 -> '0.25'."""
    return f"{value:,.0f}" if value.is_integer() else f"{value:g}"


def percent(share: float) -> str:
    """Size of a relative difference, without sign: -0.031 -> '3.1 %'."""
    size = abs(share) * 100
    if size < 0.01:
        return "less than 0.01 %"
    return f"{size:.2f} %" if size < 1 else f"{size:.1f} %" if size < 100 else f"{size:,.0f} %"


def signed_percent(share: float) -> str:
    """Relative difference with its sign: -0.031 -> '−3.1 %'."""
    return "0.00 %" if abs(share) < 0.00005 else f"{'−' if share < 0 else '+'}{percent(share)}"


def milliseconds(value: float | None) -> str:
    """Three significant digits below a thousand."""
    if value is None:
        return MISSING
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """'48 s', '12 min 03 s' or '2 h 05 min'."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole, minutes = round(seconds), round(seconds / 60)
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def short_count(value: float) -> str:
    """Ticks of an axis: 1500 -> '1.5k', 2000000 -> '2M'."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{_three_digits(value / size)}{unit}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def readable(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def listed(words: Iterable[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def plural(number: int, word: str) -> str:
    """'1 run', '3 runs'."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """'1–5, 7': three and more neighbouring whole numbers as a range."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)
