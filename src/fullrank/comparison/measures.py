"""Measures in which runs are compared: where a figure stands, what it is called, which direction is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fullrank.comparison.runs import MASKED_MODELING, SPLITS, TRANSLATION, Run, mapping, number
from fullrank.render.tables import format_value

# metrics of the GLUE server's table where they are not accuracy
_SERVER_METRICS = {"glue/cola": "matthews_correlation", "glue/mrpc": "f1", "glue/qqp": "f1", "glue/stsb": "spearman"}
_METRIC_WORDS = {"f1": "F1", "matthews_correlation": "Matthews correlation"}


@dataclass(frozen=True)
class Measure:
    """A figure of a run.

    key: its name in `final.<split>` of a result and in records; words, short: names for readers.
    kind: of a `score` higher is better, else lower.
    paper: endings of the keys, after the split, under which a recipe states a paper's figure; the first that exists counts.
    scale: figures are this many times those of the result.
    """

    key: str
    words: str
    short: str
    kind: Literal["perplexity", "bits", "score", "other"] = "perplexity"
    paper: tuple[str, ...] = ()
    scale: float = 1.0

    @property
    def higher(self) -> bool:
        return self.kind == "score"

    @property
    def extreme(self) -> Literal["lowest", "highest"]:
        return "highest" if self.higher else "lowest"

    @property
    def format(self) -> str:
        """Bits have three decimals, as in papers."""
        return ",.3f" if self.kind == "bits" else ",.2f"

    @property
    def difference_format(self) -> str:
        """Points of scores, else shares in percent."""
        return "+.2f" if self.higher else "+.2%"

    @property
    def logged_unit(self) -> str:
        """The unit of validation curves: metrics.jsonl counts by token."""
        return "bits per token" if self.kind == "bits" else self.words

    def value(self, run: Run, split: str, checkpoint: str = "final") -> float | None:
        """Figure of a finished run. `checkpoint`: `final` is the best one, `last` that of the last step."""
        value = run.final(split, self.key, checkpoint)
        if value is None or (self.kind == "perplexity" and value <= 0):
            return None
        return self.scale * value

    def compare(self, value: float, base: float) -> float | None:
        """Points more for scores, else the share of the base; None where the base is zero."""
        if self.higher:
            return value - base
        return value / base - 1 if base else None

    def find_counted(self, run: Run, split: str, model: str) -> float | None:
        """Figure of a model that only counts, from its recorded perplexity p per token; None for scores.

        model: `unigram`, word frequencies, or `fourgram`, words after the three before them.

            bits = log2(p) * b / log2(q)        q, b: the run's own perplexity and bits per byte (or character)

        b / log2(q) is tokens per byte, because both count one text.
        """
        recorded = number(run.get(f"corpus.{model}_perplexity.{split}"))
        if recorded is None or recorded <= 0 or self.higher:
            return None
        if self.kind != "bits":
            return recorded
        perplexity = PERPLEXITY.value(run, split)
        bits = self.value(run, split)
        if bits is None or perplexity is None or perplexity <= 1:
            return None
        return math.log2(recorded) * bits / math.log2(perplexity)

    def find_paper(self, run: Run, split: str) -> tuple[float, float | None, str] | None:
        """The paper's figure as the recipe states it: mean, deviation, and where it was measured if not where ours is.

        Of fine-tuning `{matthews_correlation: 59.8}` is of the development split, `[59.8, 1.2]` has a deviation, too;
        `test`, `test_mismatched` are the server's scores of the splits that ours stand for.
        """
        paper = run.get_mapping("paper")
        source = ""
        if self.scale == 1:
            keys = [split + ending for ending in self.paper]
            stated = next((paper[key] for key in keys if key in paper), None)
        else:
            of_split = paper if split == "dev" else mapping(paper.get(split))
            stated = of_split.get(self.key)
            if stated is None and self.key == _SERVER_METRICS.get(run.task, "accuracy"):
                stated = paper.get(split.replace("dev", "test", 1))
                source = "test server"
        if not isinstance(stated, list) or len(stated) != 2:
            stated = [stated, None]
        mean, deviation = map(number, stated)
        return None if mean is None else (mean, deviation, source)

    def read_logged(self, line: Mapping[str, Any]) -> float | None:
        """Value of a line of metrics.jsonl, in `logged_unit`."""
        if self.higher:
            return number(line.get(self.key))
        if self.kind != "bits":
            return number(line.get("ppl"))
        nats = number(line.get("nll"))
        return None if nats is None else nats / math.log(2)

    def show_difference(self, difference: float) -> str:
        """A difference with its sign: `−3.10%`, `+0.62 points`."""
        text = format_value(difference, self.difference_format)
        return f"{text} points" if self.higher else text


PERPLEXITY = Measure("perplexity", "perplexity", "ppl", paper=("",))
# published "bits per character" of enwik8 count bytes
_PAPER_BITS = ("_bits_per_byte", "_bits_per_character")
BITS_PER_BYTE = Measure("bits_per_byte", "bits per byte", "bits/byte", "bits", _PAPER_BITS)
BITS_PER_CHARACTER = Measure("bits_per_character", "bits per character", "bits/char", "bits", _PAPER_BITS[1:])
BLEU = Measure("bleu", "BLEU", "BLEU", "score", ("_bleu",))  # sacreBLEU's, of detokenised text
# as fairseq-generate printed it; papers on IWSLT14 state this one
TOKENISED_BLEU = Measure("tokenised_bleu", "tokenised BLEU", "tokenised BLEU", "score", ("_tokenised_bleu",))
CHRF = Measure("chrf", "chrF", "chrF", "score")
# the model reads most of the text, so its perplexity compares with no other
MASKED_PERPLEXITY = Measure("perplexity", "masked-token perplexity", "masked ppl")
ACCURACY = Measure("accuracy_percent", "accuracy in %", "accuracy in %", "score")
# of text with a token <sos> before every line: only the other tokens are counted, as is usual
WITHOUT_SOS = Measure("perplexity_without_sos", "perplexity without <sos>", "ppl without <sos>")
# of a model whose tokens see later ones: the only targets that it does not read
LAST_POSITION = Measure("last_position.perplexity", "perplexity at last positions", "ppl at last positions")
LENGTH_RATIO = Measure("length_ratio", "length ratio", "length ratio", "other")
LOSS = Measure("loss", "loss", "loss", "other")
COUNTED = (PERPLEXITY, BITS_PER_BYTE, BITS_PER_CHARACTER)  # a model that only counts has them, too
COUNTING = {"unigram": "word frequencies", "fourgram": "4-grams"}
MEASURES = (*COUNTED, BLEU, TOKENISED_BLEU, CHRF, ACCURACY)
FURTHER = (TOKENISED_BLEU, CHRF, ACCURACY, WITHOUT_SOS, LAST_POSITION)  # shown beside those by which rows are judged


def list_measures(run: Run) -> list[Measure]:
    """Every measure that a run may have figures of; of fine-tuning its metrics, in points."""
    if not run.finetunes:
        return [*MEASURES, WITHOUT_SOS, LAST_POSITION, LENGTH_RATIO]
    return [*map(find_metric, run.metric_names), LOSS]


def find_metric(name: str) -> Measure:
    """The measure of a score of fine-tuning."""
    words = _METRIC_WORDS.get(name, name.replace("_", " "))
    return Measure(name, words, words.removesuffix(" correlation"), "score", scale=100.0)


def choose(runs: Sequence[Run]) -> Measure:
    """The measure in which runs of one task are compared.

    Fine-tuning: its first metric. Masked tokens: their own perplexity. Translations: BLEU. Bits where all runs read bytes or
    characters, or where a paper's figures of one are in bits: per character if all read characters, else per byte.
    Perplexity otherwise, and where there is no split of which all finished runs have the measure.
    """
    if not runs:
        return PERPLEXITY
    if runs[0].finetunes:
        return find_metric([*runs[0].metric_names, "accuracy"][0])
    if runs[0].task == MASKED_MODELING:
        return MASKED_PERPLEXITY
    kinds = {run.tokens for run in runs}
    measure = PERPLEXITY
    if runs[0].task == TRANSLATION:
        measure = BLEU
    elif kinds <= {"byte", "character"} or any(
        BITS_PER_BYTE.find_paper(run, split) for run in runs for split in SPLITS
    ):
        measure = BITS_PER_CHARACTER if kinds == {"character"} else BITS_PER_BYTE
    finished = [run for run in runs if run.result is not None]
    for split in SPLITS:
        if all(measure.value(run, split) is not None for run in finished):
            return measure
    return PERPLEXITY
