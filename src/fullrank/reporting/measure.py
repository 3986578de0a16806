"""The measure in which runs are compared: perplexity, bits per byte or character, or BLEU. Chosen once for a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fullrank.reporting import format
from fullrank.reporting.format import Stat
from fullrank.reporting.runs import MASKED_MODELING, SPLITS, TRANSLATION, RunRecord, mapping, number


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
    def title(self) -> str:
        return self.words[0].upper() + self.words[1:]

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
        """A difference with its sign."""
        return format.points(difference) if self.higher else format.signed_percent(difference)

    def size(self, difference: float) -> str:
        """A difference without its sign, in words."""
        return f"{format.score(abs(difference))} points" if self.higher else format.percent(difference)

    def final(self, record: RunRecord, split: str, checkpoint: str = "final") -> float | None:
        """Figure of a finished run; None if it was not measured or is out of range.

        `checkpoint`: `final` is the best checkpoint, `last` the one of the last step.
        """
        value = record.final(split, self.key, checkpoint)
        if value is None or value < 0:
            return None
        return None if self.kind == "perplexity" and value == 0 else value

    def unigram(self, record: RunRecord, split: str) -> float | None:
        """Figure of word frequencies alone on the same split, from their recorded perplexity p per token.

            bits = log2(p) * b / log2(q)        q, b: the run's own perplexity and bits per byte (or character)

        b / log2(q) is tokens per byte, because both count one text. None where the run has no b, and for scores.
        """
        if self.higher:
            return None
        perplexity = number(mapping(record.corpus.get("unigram_perplexity")).get(split))
        if not self.in_bits or perplexity is None:
            return perplexity
        own, bits = PERPLEXITY.final(record, split), self.final(record, split)
        if bits is None or own is None or own <= 1 or perplexity <= 0:
            return None
        return math.log2(perplexity) * bits / math.log2(own)

    def of_paper(self, paper: Mapping[str, Any], split: str) -> Any:
        """The paper's figure as the recipe states it; None if it states none in this measure."""
        named = (paper.get("metric") or PERPLEXITY.key) == self.key
        keys = (split + ending for ending in self.paper if ending or named)
        return next((paper[key] for key in keys if paper.get(key) is not None), None)

    def of_line(self, line: Mapping[str, Any]) -> float | None:
        """Value of a line of metrics.jsonl, in `unit`."""
        if self.higher:
            return number(line.get(self.key))
        if not self.in_bits:
            return number(line.get("ppl"))
        nats = number(line.get("nll"))
        return None if nats is None else nats / math.log(2)

    def show(self, value: float | None) -> str:
        """A figure of ours."""
        return (format.score if self.higher else format.bits if self.in_bits else format.perplexity)(value)

    def spread(self, stat: Stat | None) -> str:
        """A figure over seeds."""
        return format.spread(stat, self.show)

    def tick(self, value: float) -> str:
        """A value at an axis: bits move in the third decimal."""
        return format.short_count(value) if self.kind == "perplexity" else f"{value:.4g}"

    def stated(self, value: object) -> str:
        """A figure of a paper in our digits; bits in no more than the recipe has, words as they are."""
        return format.stated(value, format.stated_bits if self.in_bits else self.show)


PERPLEXITY = Measure("perplexity", "perplexity", "perplexities", "ppl", "perplexity", paper=("",))
BITS_PER_BYTE = Measure(
    "bits_per_byte", "bits per byte", "bits per byte", "bits/byte", "bits per token", "bits",
    ("_bits_per_byte", "_bits_per_character"),  # published "bits per character" of enwik8 count bytes
)  # fmt: skip
BITS_PER_CHARACTER = Measure(
    "bits_per_character", "bits per character", "bits per character", "bits/char", "bits per token", "bits",
    ("_bits_per_character",),
)  # fmt: skip
BLEU = Measure(
    "bleu", "BLEU", "BLEU scores", "BLEU", "BLEU", "score", ("", "_bleu")
)  # sacreBLEU's, of detokenised text
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
    read characters, else per byte. Perplexity otherwise, and wherever a finished run has no bits for a split of which it
    has a perplexity, as a model of words.
    """
    if not records:
        return PERPLEXITY
    if all(record.task == MASKED_MODELING for record in records):
        return MASKED_PERPLEXITY
    if all(record.task == TRANSLATION for record in records):
        return BLEU if any(all(_has_bleu(record, split) for record in records) for split in SPLITS) else PERPLEXITY
    kinds = {record.tokens for record in records}
    stated = any(BITS_PER_BYTE.of_paper(record.paper, split) is not None for record in records for split in SPLITS)
    if not stated and not kinds <= {"byte", "character"}:
        return PERPLEXITY
    measure = BITS_PER_CHARACTER if kinds == {"character"} else BITS_PER_BYTE
    measured = [
        (record, split) for record in records for split in SPLITS if PERPLEXITY.final(record, split) is not None
    ]
    return measure if all(measure.final(record, split) is not None for record, split in measured) else PERPLEXITY


def _has_bleu(record: RunRecord, split: str) -> bool:
    """A finished run: of the split; one that has not finished: in any line."""
    if record.result is None:
        return any(BLEU.of_line(line) is not None for line in record.metrics)
    return BLEU.final(record, split) is not None
