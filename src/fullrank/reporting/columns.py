"""The columns of figures of a comparison, the same on the page and on the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullrank.reporting.measure import (
    ACCURACY,
    BLEU,
    CHRF,
    MASKED_PERPLEXITY,
    PERPLEXITY,
    TOKENISED_BLEU,
    Measure,
)
from fullrank.reporting.results import SPLITS
from fullrank.reporting.stats import Stat
from fullrank.reporting.table import Comparison, Row


@dataclass(frozen=True)
class Column:
    """One column: a figure of a split in a measure. `whose` is what stands above it besides: `paper`, `ours, best` ..;
    empty where there is no other.

    kind: the paper's figure; ours, by which rows are judged; that of the last checkpoint; or another of ours.
    """

    split: str
    measure: Measure
    kind: Literal["paper", "judged", "last", "other"]
    whose: str

    @property
    def judged(self) -> bool:
        """Whether the best of its figures is set bold and differences stand beneath them."""
        return self.kind == "judged"

    def text(self, row: Row) -> str:
        """What stands in the column in a row."""
        if self.kind == "paper":
            return self.measure.stated(self.measure.of_paper(row.paper, self.split))
        return row.shown(self.measure.spread(self._stat(row)))

    def unigram(self, row: Row) -> str:
        """What stands there of word frequencies alone."""
        return self.measure.show(row.unigram.get(self.split)) if self.judged else ""

    def _stat(self, row: Row) -> Stat | None:
        if self.kind == "judged":
            return row.figures.get(self.split)
        if self.kind == "last":
            return row.last.get(self.split)
        if self.measure is PERPLEXITY:
            return perplexity_of(row, self.split)
        return row.scores.get(self.measure.key, {}).get(self.split)


def perplexity_of(row: Row, split: str) -> Stat | None:
    """Perplexity beside BLEU; None where the decoder sees later tokens (for BLEU it writes them, and none is read ahead)."""
    return row.perplexity.get(split) if all(run.next_token for run in row.runs) else None


def columns(compared: Comparison) -> list[Column]:
    """Of each split the paper's figure, where there is one, and ours; then what else there is (`more_columns`)."""
    found: list[Column] = []
    measure, paper = compared.measure, compared.paper_measure
    for split in SPLITS:
        if paper is not None:
            found.append(Column(split, paper, "paper", "paper"))
        if paper is TOKENISED_BLEU and any(paper.key in row.scores for row in compared.rows):
            # beside the paper's stands ours of the same kind
            found.append(Column(split, paper, "other", "ours"))
        found.append(Column(split, measure, "judged", "ours, best" if compared.shows_last else "ours"))
        if compared.shows_last:
            found.append(Column(split, measure, "last", "ours, last"))
    return found + more_columns(compared)


def more_columns(compared: Comparison) -> list[Column]:
    """chrF and perplexity beside BLEU, accuracy beside masked-token perplexity, of the split by which rows are judged."""
    beside = {BLEU: (CHRF, PERPLEXITY), MASKED_PERPLEXITY: (ACCURACY,)}.get(compared.measure, ())
    split = "test" if any("test" in row.figures for row in compared.rows) else "valid"
    others = [Column(split, measure, "other", "") for measure in beside]
    return [column for column in others if any(column._stat(row) is not None for row in compared.rows)]
