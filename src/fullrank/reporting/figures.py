"""Figures: the measures in which runs are compared, statistics over seeds, and numbers as people read them."""

from __future__ import annotations

import html
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from fullrank.reporting.runs import MASKED_MODELING, SPLITS, TRANSLATION, RunRecord, mapping, number, source_texts

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


# -- Markdown, in which no value of a record is anything but text ---------------------------------------------------------


def literal(value: Any) -> str:
    """A value as text: no HTML, link, code or column of a table begins in it."""
    escaped = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"[\\`|]|\](?=[(\[:]|$)", lambda found: f"&#{ord(found[0])};", escaped)


def code(value: Any) -> str:
    """A value as code, in which nothing has a meaning; nothing for an empty one."""
    text = " ".join(str(value).split()).replace("`", "'").replace("|", "/")
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    """Markdown of an author, without HTML outside of code."""
    pieces = re.split(r"((?<!\\)`[^`]*`)", text)
    pieces[::2] = [piece.replace("<", "&lt;").replace("`", "&#96;") for piece in pieces[::2]]
    return "".join(pieces)


# -- numbers and lists as text ----------------------------------------------------------------------------------------


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


def score(value: float | None, decimals: int = 2) -> str:
    """BLEU and other scores from 0 to 100."""
    return MISSING if value is None else f"{value:.{decimals}f}"


def points(difference: float, decimals: int = 2) -> str:
    """Difference of scores with its sign: 0.618 -> '+0.62'."""
    return signed(difference < 0, score(abs(difference), decimals))


def interval(low: float | None, high: float | None, decimals: int = 2) -> str:
    """Ends of an interval of differences, with their signs."""
    return MISSING if low is None or high is None else f"{points(low, decimals)} to {points(high, decimals)}"


def decimals_of(difference: float, low: float | None, high: float | None) -> int:
    """The decimals, from two to six, for a difference and its interval.

    Where the interval leaves out 0 none of the three is shown as zero; otherwise the largest is not.
    """
    sizes = [abs(value) for value in (difference, low, high) if value]
    decided = low is None or high is None or low > 0 or high < 0
    shown = (min if decided else max)(sizes, default=1.0)
    return min(6, max(2, math.ceil(-math.log10(shown))))


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
    size, unit = next(((size, unit) for size, unit in _UNITS if abs(value) >= 0.9995 * size), (1.0, ""))
    value /= size
    return f"{value:,.0f}{unit}" if 100 <= abs(value) < 1e6 else f"{value:.3g}{unit}"


_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def tick_words(values: Sequence[float]) -> list[str]:
    """Ticks of one axis: short counts from a thousand on where they differ, else all with equally many decimals."""
    short = [short_count(value) for value in values]
    if max(map(abs, values), default=0) >= 1000 and len({*short}) == len(short):
        return short
    decimals = max((len(f"{value:.9f}".rstrip("0").partition(".")[2]) for value in values), default=0)
    return [f"{value:,.{decimals}f}" for value in values]


def readable(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def listed(words: Iterable[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def ranges(numbers: Iterable[int]) -> str:
    """'1–5, 7': three and more neighbouring whole numbers as a range."""
    neighbours = groupby(enumerate(sorted(set(numbers))), key=lambda place: place[1] - place[0])
    parts = [[value for _, value in part] for _, part in neighbours]
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


# -- measures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A figure of a run: its place, its names, its direction.

    key: its name in `final.<split>` of a result, and in the JSON of a report; words, plural, short: names for readers.
    unit: the unit of validation curves (metrics.jsonl counts by token).
    kind: `score` is from 0 to 100 and higher is better; else lower is better.
    paper: endings of the keys, after the split, under which a recipe states a paper's figure; the first that exists counts.
    A key that is the bare split belongs to the measure that the recipe names as `metric` (perplexity if it names none).
    """

    key: str
    words: str
    plural: str
    short: str
    unit: str
    kind: Literal["perplexity", "bits", "score"] = "perplexity"
    paper: tuple[str, ...] = ()

    @property
    def higher(self) -> bool:
        return self.kind == "score"

    @property
    def in_bits(self) -> bool:
        return self.kind == "bits"

    @property
    def article(self) -> str:
        return "" if self.in_bits else "an " if self.words.startswith("a") else "a "

    @property
    def extreme(self) -> str:
        return "highest" if self.higher else "lowest"

    @property
    def comparative(self) -> str:
        return "higher" if self.higher else "lower"

    @property
    def beyond(self) -> str:
        return "above" if self.higher else "below"

    def best(self, values: Iterable[float]) -> float:
        """The best of several figures."""
        return max(values) if self.higher else min(values)

    def difference(self, value: float, base: float) -> float | None:
        """Points for scores, else the share of the base; None where the base is zero."""
        if self.higher:
            return value - base
        return value / base - 1 if base else None

    def show_difference(self, difference: float) -> str:
        """A difference with its sign: 0.618 -> '+0.62' points, -0.031 -> '−3.1 %'."""
        if self.higher:
            return points(difference)
        return "0.00 %" if abs(difference) < 0.00005 else f"{'−' if difference < 0 else '+'}{percent(difference)}"

    def show_interval(self, low: float, high: float) -> str:
        """Ends of an interval of differences: '−0.31 to +1.20' points, '−4.1 to +2.2 %'."""
        if self.higher:
            return interval(low, high)
        return f"{interval(100 * low, 100 * high, 1 if max(-low, high) >= 0.01 else 2)} %"

    def size(self, difference: float) -> str:
        """A difference without its sign, in words."""
        return f"{score(abs(difference))} points" if self.higher else percent(difference)

    def final(self, record: RunRecord, split: str, checkpoint: str = "final") -> float | None:
        """Figure of a finished run; None if it was not measured or is out of range.

        `checkpoint`: `final` is the best checkpoint, `last` the one of the last step.
        """
        value = record.final(split, self.key, checkpoint)
        return value if value is not None and (value > 0 or (value == 0 and self.kind != "perplexity")) else None

    def over_runs(self, runs: Sequence[RunRecord], checkpoint: str = "final") -> dict[str, Stat]:
        """Statistic over runs, by split."""
        stats = {split: over_runs(self.final(run, split, checkpoint) for run in runs) for split in SPLITS}
        return {split: stat for split, stat in stats.items() if stat is not None}

    def unigrams(self, record: RunRecord) -> dict[str, float]:
        """Figures of word frequencies alone, by split, from their recorded perplexity p per token.

            bits = log2(p) * b / log2(q)        q, b: the run's own perplexity and bits per byte (or character)

        b / log2(q) is tokens per byte, because both count one text. None of a split where the run has no b, and of scores.
        """
        recorded = mapping(record.corpus.get("unigram_perplexity"))
        known = {split: value for split in SPLITS if (value := number(recorded.get(split))) is not None}
        if not self.in_bits:
            return {} if self.higher else known
        figures = {}
        for split, perplexity in known.items():
            own, bits = PERPLEXITY.final(record, split), self.final(record, split)
            if bits is not None and own is not None and own > 1 and perplexity > 0:
                figures[split] = math.log2(perplexity) * bits / math.log2(own)
        return figures

    def paper_figure(self, paper: Mapping[str, Any], split: str) -> Any:
        """The paper's figure as the recipe states it; None if it states none in this measure."""
        named = (paper.get("metric") or PERPLEXITY.key) == self.key
        keys = (split + ending for ending in self.paper if ending or named)
        return next((paper[key] for key in keys if paper.get(key) is not None), None)

    def logged_figure(self, line: Mapping[str, Any]) -> float | None:
        """Value of a line of metrics.jsonl, in `unit`."""
        if self.higher:
            return number(line.get(self.key))
        if not self.in_bits:
            return number(line.get("ppl"))
        nats = number(line.get("nll"))
        return None if nats is None else nats / math.log(2)

    def show(self, value: float | None) -> str:
        """A figure of ours: bits with three decimals, as papers have them; perplexities with fewer above a thousand."""
        if value is None or self.higher:
            return score(value)
        decimals = 3 if self.in_bits else 2 if value < 1000 else 1 if value < 10000 else 0
        return f"{value:,.{decimals}f}"

    def spread(self, stat: Stat | None) -> str:
        """A figure over seeds."""
        return spread(stat, self.show)

    def stated(self, value: object) -> str:
        """A figure of a paper in our digits; of bits two decimals where a recipe cannot tell a zero at the end."""
        return stated(value, (lambda bits: f"{bits:.3f}".removesuffix("0")) if self.in_bits else self.show)


PERPLEXITY = Measure("perplexity", "perplexity", "perplexities", "ppl", "perplexity", paper=("",))
BITS_PER_BYTE = Measure(
    "bits_per_byte", "bits per byte", "bits per byte", "bits/byte", "bits per token", "bits",
    ("_bits_per_byte", "_bits_per_character"),  # published "bits per character" of enwik8 count bytes
)  # fmt: skip
BITS_PER_CHARACTER = Measure(
    "bits_per_character", "bits per character", "bits per character", "bits/char", "bits per token", "bits",
    ("_bits_per_character",),
)  # fmt: skip
BLEU = Measure("bleu", "BLEU", "BLEU scores", "BLEU", "BLEU", "score", ("", "_bleu"))  # sacreBLEU's, detokenised text
TOKENISED_BLEU = Measure(  # as fairseq-generate printed it; papers on IWSLT14 state this one
    "tokenised_bleu", "tokenised BLEU", "tokenised BLEU scores", "tok. BLEU", "BLEU", "score", ("", "_tokenised_bleu"),
)  # fmt: skip
CHRF = Measure("chrf", "chrF", "chrF scores", "chrF", "chrF", "score", ("", "_chrf"))
SCORES = (BLEU, TOKENISED_BLEU, CHRF)  # of translations
MASKED_PERPLEXITY = Measure(  # the model reads most of the text, so it compares with no other perplexity
    "perplexity", "masked-token perplexity", "masked-token perplexities", "masked ppl", "masked-token perplexity",
)  # fmt: skip
ACCURACY = Measure(  # of masked tokens
    "accuracy_percent", "accuracy in %", "accuracies in %", "accuracy in %", "accuracy in %", "score",
)  # fmt: skip
WITHOUT_SOS = Measure(  # of text with a token <sos> before every line: only the other tokens are counted, as is usual
    "perplexity_without_sos", "perplexity without <sos>", "perplexities without <sos>", "ppl", "perplexity",
)  # fmt: skip
LAST_POSITION = Measure(  # of a model whose tokens see later ones: the only targets that it does not read
    "last_position.perplexity", "perplexity at last positions", "perplexities at last positions", "ppl", "perplexity",
)  # fmt: skip
MEASURES = (PERPLEXITY, BITS_PER_BYTE, BITS_PER_CHARACTER, *SCORES, ACCURACY)


def choose(records: Sequence[RunRecord]) -> Measure:
    """The measure in which runs are compared.

    Masked tokens: their own perplexity. Translations: BLEU, or perplexity where there is no split of which all have a BLEU.
    Else bits where all runs read bytes or characters, or where a paper's figures of one are in bits: per character if all
    read characters, else per byte. Bits per character, too, where the same text was cut into different tokens. Perplexity
    otherwise, and wherever a finished run has no bits for a split of which it has a perplexity, as a model of words.
    """
    if records and all(record.task == MASKED_MODELING for record in records):
        return MASKED_PERPLEXITY
    if records and all(record.task == TRANSLATION for record in records):
        known = [_splits_with_bleu(record) for record in records]
        return BLEU if set.intersection(*known) else PERPLEXITY
    kinds = {record.tokens for record in records}
    stated = any(BITS_PER_BYTE.paper_figure(record.paper, split) is not None for record in records for split in SPLITS)
    cut_differently = (
        len(kinds) > 1
        and bool(first := source_texts(records[0]))
        and all(source_texts(record) == first for record in records)
    )
    if not records or not (stated or cut_differently or kinds <= {"byte", "character"}):
        return PERPLEXITY
    measure = BITS_PER_CHARACTER if kinds == {"character"} or cut_differently else BITS_PER_BYTE
    measured = [(run, split) for run in records for split in SPLITS if PERPLEXITY.final(run, split) is not None]
    return measure if all(measure.final(run, split) is not None for run, split in measured) else PERPLEXITY


def _splits_with_bleu(record: RunRecord) -> set[str]:
    """Splits with a final BLEU; of a run that has not finished both, where any line has one."""
    logged = record.result is None and any(BLEU.logged_figure(line) is not None for line in record.metrics)
    return {split for split in SPLITS if logged or BLEU.final(record, split) is not None}
