"""By what runs are compared: perplexity, bits per byte or character, or BLEU. Chosen here, once for a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullrank.reporting import format
from fullrank.reporting.results import MASKED_MODELING, SPLITS, TRANSLATION, RunRecord, mapping, number
from fullrank.reporting.stats import Stat


@dataclass(frozen=True)
class Measure:
    """A figure of a run: where it is found, what it is called, how it is written.

    key: its name in `final.<split>` of a result, and in the JSON of a report.
    words, plural: its name, of one run and of several; `article`: before the name; `short`: the name in narrow headings.
    unit: what a split of text is measured in while a model trains (metrics.jsonl counts by token).
    paper: the ends of the keys, after the split, under which a recipe states a paper's figure; the first that is there counts.
    A key that is the bare split is of the measure that the recipe names as `metric`, perplexity if it names none.
    higher: it is a score from 0 to 100 and higher is better; else lower is.
    """

    key: str
    words: str
    article: str
    plural: str
    short: str
    unit: str
    paper: tuple[str, ...]
    higher: bool = False

    @property
    def in_bits(self) -> bool:
        """Whether it is bits per something."""
        return self.unit == "bits per token"

    @property
    def title(self) -> str:
        """Its name at the beginning of a line."""
        return self.words[0].upper() + self.words[1:]

    @property
    def extreme(self) -> str:
        """What the best row is."""
        return "highest" if self.higher else "lowest"

    @property
    def comparative(self) -> str:
        """What the better of two rows is."""
        return "higher" if self.higher else "lower"

    @property
    def beyond(self) -> str:
        """Where the better of two rows is."""
        return "above" if self.higher else "below"

    def best(self, values: Iterable[float]) -> float:
        """The best of several figures."""
        return max(values) if self.higher else min(values)

    def difference(self, value: float, base: float) -> float | None:
        """How far a figure is from another: of scores the points, of others the share; None if that has no base."""
        if self.higher:
            return value - base
        return value / base - 1 if base else None

    def show_difference(self, difference: float) -> str:
        """A difference with its sign."""
        return format.signed_points(difference) if self.higher else format.signed_percent(difference)

    def size(self, difference: float) -> str:
        """A difference without its sign, in words."""
        return f"{format.score(abs(difference))} points" if self.higher else format.percent(difference)

    def final(self, record: RunRecord, split: str, checkpoint: str = "final") -> float | None:
        """The figure of a finished run on a split; None if it was not measured or is out of range.

        `checkpoint`: `final` is the best one, `last` that of the last step.
        """
        if not self.in_bits and not self.higher:
            return record.final(split, self.key, checkpoint)
        found = number(mapping(mapping(mapping(record.result).get(checkpoint)).get(split)).get(self.key))
        return found if found is not None and found >= 0 else None

    def unigram(self, record: RunRecord, split: str) -> float | None:
        """The figure of word frequencies alone on the same split, from their recorded perplexity p per token.

        bits = log2(p) * b / log2(q)        q, b: the run's own perplexity and bits per byte (or character)

        b / log2(q) is tokens per byte, for both count one text; None where the run has no b, and for scores.
        """
        if self.higher:
            return None
        perplexity = number(mapping(mapping(mapping(record.result).get("corpus")).get("unigram_perplexity")).get(split))
        if not self.in_bits or perplexity is None:
            return perplexity
        own, bits = record.final(split), self.final(record, split)
        if bits is None or own is None or own <= 1 or perplexity <= 0:
            return None
        return math.log2(perplexity) * bits / math.log2(own)

    def of_paper(self, paper: Mapping[str, Any], split: str) -> Any:
        """The paper's figure of a split as the recipe states it, None if it states none in this measure."""
        named = (paper.get("metric") or PERPLEXITY.key) == self.key
        ends = (end for end in self.paper if end or named)
        return next((paper[split + end] for end in ends if paper.get(split + end) is not None), None)

    def of_line(self, line: Mapping[str, Any]) -> float | None:
        """The value of a line of metrics.jsonl, in `unit`."""
        if self.higher:
            return number(line.get(self.key))
        if not self.in_bits:
            return number(line.get("ppl"))
        nats = number(line.get("nll"))
        return None if nats is None else nats / math.log(2)

    def show(self, value: float | None) -> str:
        """A figure of ours."""
        if self.higher:
            return format.score(value)
        return format.bits(value) if self.in_bits else format.perplexity(value)

    def tick(self, value: float) -> str:
        """A value at the axis of a curve: bits move in the third decimal."""
        return f"{value:.4g}" if self.in_bits or self.higher else format.short_count(value)

    def spread(self, stat: Stat | None) -> str:
        """A figure over seeds: mean ± standard deviation; the mean alone where there is one seed."""
        return format.spread(stat, self.show)

    def stated(self, value: object) -> str:
        """A figure of a paper: numbers in our digits (bits in no more than the recipe has), words as they stand."""
        if self.higher:
            return format.figure(value, format.score)
        return format.figure(value, format.stated_bits if self.in_bits else format.perplexity)


PERPLEXITY = Measure("perplexity", "perplexity", "a ", "perplexities", "ppl", "perplexity", ("",))
BITS_PER_BYTE = Measure(
    "bits_per_byte", "bits per byte", "", "bits per byte", "bits/byte", "bits per token",
    ("_bits_per_byte", "_bits_per_character"),  # published "bits per character" of enwik8 count bytes
)  # fmt: skip
BITS_PER_CHARACTER = Measure(
    "bits_per_character", "bits per character", "", "bits per character", "bits/char", "bits per token",
    ("_bits_per_character",),
)  # fmt: skip
WITHOUT_SOS = Measure(  # of text with a token <sos> before every line: the others alone are counted, as is usual
    "perplexity_without_sos", "perplexity without <sos>", "a ", "perplexities without <sos>", "ppl", "perplexity", (),
)  # fmt: skip
LAST_POSITION = Measure(  # of a model whose tokens see later ones: the only targets that it does not read
    "last_position.perplexity", "perplexity at last positions", "a ", "perplexities at last positions", "ppl", "perplexity", (),
)  # fmt: skip
BLEU = Measure(  # sacreBLEU's, of detokenised text
    "bleu", "BLEU", "a ", "BLEU scores", "BLEU", "BLEU", ("", "_bleu"), higher=True,
)  # fmt: skip
TOKENISED_BLEU = Measure(  # as fairseq-generate printed it; papers on IWSLT14 state this one
    "tokenised_bleu", "tokenised BLEU", "a ", "tokenised BLEU scores", "tok. BLEU", "BLEU", ("", "_tokenised_bleu"),
    higher=True,
)  # fmt: skip
CHRF = Measure("chrf", "chrF", "a ", "chrF scores", "chrF", "chrF", ("", "_chrf"), higher=True)
SCORES = (BLEU, TOKENISED_BLEU, CHRF)  # of translations
MASKED_PERPLEXITY = Measure(  # most of the text is given: compares with no other perplexity
    "perplexity", "masked-token perplexity", "a ", "masked-token perplexities", "masked ppl", "masked-token perplexity", (),
)  # fmt: skip
ACCURACY = Measure(  # of masked tokens
    "accuracy_percent", "accuracy in %", "an ", "accuracies in %", "accuracy in %", "accuracy in %", (), higher=True,
)  # fmt: skip
MEASURES = (PERPLEXITY, BITS_PER_BYTE, BITS_PER_CHARACTER, *SCORES, ACCURACY)


def choose(records: Sequence[RunRecord]) -> Measure:
    """The measure in which runs are compared.

    Bits where all of them read bytes or characters, or where a paper's figures of one are in bits: per character if all
    read characters, else per byte. Perplexity otherwise, and wherever a finished run has no bits for a split that it
    has a perplexity for, as a model of words.
    Of translations it is BLEU, and perplexity where there is no split that all of them have a BLEU of; of masked tokens
    their own perplexity.
    """
    if records and all(record.task == MASKED_MODELING for record in records):
        return MASKED_PERPLEXITY
    if records and all(record.task == TRANSLATION for record in records):
        return BLEU if any(all(_scored(record, split) for record in records) for split in SPLITS) else PERPLEXITY
    kinds = {record.tokens for record in records}
    stated = any(_papers_bits(record) for record in records)
    if not records or not (stated or kinds <= {"byte", "character"}):
        return PERPLEXITY
    measure = BITS_PER_CHARACTER if kinds == {"character"} else BITS_PER_BYTE
    return measure if all(_has(record, measure) for record in records) else PERPLEXITY


def paper_of(record: RunRecord) -> Mapping[str, Any]:
    """What the recipe says of the run's row in the paper."""
    return mapping(mapping(record.result).get("paper") or record.identity.get("paper"))


def _papers_bits(record: RunRecord) -> bool:
    return any(BITS_PER_BYTE.of_paper(paper_of(record), split) is not None for split in SPLITS)


def _scored(record: RunRecord, split: str) -> bool:
    """Whether a run has a BLEU of the split; one that has not finished, of any line."""
    if record.result is None:
        return any(BLEU.of_line(line) is not None for line in record.metrics)
    return BLEU.final(record, split) is not None


def _has(record: RunRecord, measure: Measure) -> bool:
    return all(measure.final(record, split) is not None for split in SPLITS if record.final(split) is not None)
