"""Numbers as people read them, the same on the page and on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fullrank.reporting.stats import Stat

MISSING = "–"


def count(value: float | None) -> str:
    """A whole number with thousands separators."""
    return MISSING if value is None else f"{value:,.0f}"


def extra(value: int | None) -> str:
    """A difference in parameters, with its sign."""
    if value is None:
        return MISSING
    return "0" if value == 0 else f"{'+' if value > 0 else '−'}{abs(value):,}"


def perplexity(value: float | None) -> str:
    """Two decimals below a thousand, fewer above."""
    if value is None:
        return MISSING
    return f"{value:,.2f}" if value < 1000 else f"{value:,.1f}" if value < 10000 else f"{value:,.0f}"


def bits(value: float | None) -> str:
    """Bits per byte or character: three decimals, as papers have them."""
    return MISSING if value is None else f"{value:.3f}"


def score(value: float | None) -> str:
    """BLEU and the like, from 0 to 100: two decimals, as papers have them."""
    return MISSING if value is None else f"{value:.2f}"


def signed_points(difference: float) -> str:
    """A difference of scores with its sign: 0.618 -> '+0.62'."""
    size = score(abs(difference))
    return size if float(size) == 0 else f"{'−' if difference < 0 else '+'}{size}"


def stated_bits(value: float) -> str:
    """A paper's bits: up to three decimals, without the zeros at the end that a recipe cannot tell; at least two."""
    return f"{value:.3f}".removesuffix("0")


def plain(value: float) -> str:
    """A number as it was given, whole ones with thousands separators: 1600.0 -> '1,600', 0.25 -> '0.25'."""
    return f"{value:,.0f}" if value.is_integer() else f"{value:g}"


def spread(stat: Stat | None, show: Callable[[float], str] = perplexity) -> str:
    """A figure over seeds: mean ± standard deviation; the mean alone where there is one seed."""
    if stat is None:
        return MISSING
    return show(stat.mean) if stat.deviation is None else f"{show(stat.mean)} ± {show(stat.deviation)}"


def figure(value: object, show: Callable[[float], str] = perplexity) -> str:
    """A figure of a paper: numbers as `show` writes them, words as they stand."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return show(float(value))
    return MISSING if value is None else str(value)


def percent(share: float) -> str:
    """The size of a relative difference, without sign: 0.031 -> '3.1 %'."""
    size = abs(share) * 100
    if size < 0.01:
        return "less than 0.01 %"
    return f"{size:.2f} %" if size < 1 else f"{size:.1f} %" if size < 100 else f"{size:,.0f} %"


def signed_percent(share: float | None) -> str:
    """A relative difference with its sign: -0.031 -> '−3.1 %'."""
    if share is None:
        return MISSING
    if abs(share) < 0.00005:
        return "0.00 %"
    return f"{'−' if share < 0 else '+'}{percent(share)}"


def milliseconds(value: float | None) -> str:
    """Three significant digits below a thousand."""
    if value is None:
        return MISSING
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as '48 s', '12 min 03 s' or '2 h 05 min'."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def short_count(value: float) -> str:
    """Ticks of an axis and tiles: 1500 -> '1.5k', 2000000 -> '2M'."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{_three_digits(value / size)}{unit}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def readable(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def listed(words: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def ranges(numbers: Iterable[int]) -> str:
    """'1–5, 7': whole numbers, three and more neighbours as a range."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)
