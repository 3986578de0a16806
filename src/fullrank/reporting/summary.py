"""A comparison in words: the headline, what the figures say and no more, and what forbids or weakens a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.reporting import format
from fullrank.reporting.compare import MARK, Comparison, Row, best_row, judged_split
from fullrank.reporting.measure import BLEU, LAST_POSITION, MEASURES, SCORES, TOKENISED_BLEU, Measure
from fullrank.reporting.runs import (
    LANGUAGE_MODELING,
    MASKED_MODELING,
    TRANSLATION,
    differences_of_text,
    integer,
    mapping,
    measured_on,
    without_version,
)
from fullrank.reporting.translations import interval

LAST_POSITION_TITLE = "Perplexity at the last position of every segment, the only one whose target is not read"
SPLIT_WORDS = {"valid": "validation", "test": "test"}
_KINDS = {
    TRANSLATION: "translation models",
    LANGUAGE_MODELING: "language models",
    MASKED_MODELING: "masked language models",
}


@dataclass(frozen=True)
class Summary:
    """`headline` is one line, `paragraphs` are a few sentences. `warnings` forbid a comparison, `cautions` weaken one."""

    headline: str
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def summarize(compared: Comparison) -> Summary:
    """Summary of a comparison; every claim is one that its figures support."""
    warnings, cautions = _warnings(compared), _cautions(compared)
    groups = [_Words(rows, compared.measure) for rows in compared.groups]
    if not groups:
        nothing = "There is nothing to compare until a run has written its result."
        return Summary("No run has finished yet", (nothing,), warnings, cautions)
    if len(groups) > 1:
        paragraphs = tuple(
            f"On {one.first.label or 'a text that is not recorded'}: {one.paragraph()}" for one in groups
        )
        what = "text or signature" if compared.translates else "text or vocabulary"
        return Summary(f"Not one comparison: the runs differ in {what}", paragraphs, warnings, cautions)
    words = groups[0]
    resampled, undecided = words.resampled(compared)
    return Summary(words.headline(undecided), (f"{words.paragraph()} {resampled}".strip(),), warnings, cautions)


class _Words:
    """Sentences about rows that were measured on one text, judged by one figure on one split."""

    def __init__(self, rows: Sequence[Row], measure: Measure) -> None:
        self.rows, self.measure, self.first = rows, measure, rows[0]
        with_figures = [row for row in rows if row.comparable_figures]
        self.split = judged_split(with_figures)
        self.measured = [row for row in rows if self.split in row.comparable_figures]
        self.best = best_row(rows, measure, self.split)
        self.name = f"{SPLIT_WORDS[self.split]} {measure.words}"

    def short(self, row: Row, split: str = "") -> str:
        return self.measure.spread(row.figures[split or self.split])

    def long(self, row: Row) -> str:
        stat = row.figures[self.split]
        seeds = "" if stat.deviation is None else f" (mean and standard deviation of {stat.count} seeds)"
        return self.short(row) + seeds

    def equal(self, one: Row, other: Row, split: str = "") -> bool:
        """Equal to the digits shown."""
        split = split or self.split
        return self.measure.show(one.figures[split].mean) == self.measure.show(other.figures[split].mean)

    def beyond(self, row: Row, base: Row) -> str:
        """`3.1 % below`, `0.62 points above`."""
        difference = self.measure.difference(row.figures[self.split].mean, base.figures[self.split].mean)
        return f"{self.measure.size(difference or 0.0)} {self.measure.beyond}"

    def apart(self, one: Row, other: Row) -> bool | None:
        return format.apart(one.figures[self.split], other.figures[self.split])

    def headline(self, undecided: bool) -> str:
        """`undecided`: on resampled test sets the best row and the first cannot be told apart."""
        best, first = self.best, self.first
        if best is None:
            return f"{format.listed(row.name for row in self.rows)}: {self.measure.words} is {NOT_NEXT_TOKEN}"
        value, extreme = f"{self.name} {self.short(best)}", self.measure.extreme
        if len(self.measured) == 1:
            return f"{best.name}: {value}"
        if best is first:
            return f"{best.name}, the first row, stays {extreme}: {value}"
        if first not in self.measured:
            return f"{best.name} is {extreme}: {value}"
        if self.equal(best, first):
            return f"{best.name} and {first.name} are equal: {value}"
        value = f"{value}, {self.beyond(best, first)} {first.name}"
        apart = self.apart(best, first)
        if apart is None:
            lone = [row.name for row in (best, first) if len(row.runs) == 1]
            return f"{best.name} is {extreme}: {value} ({'one seed' if len(lone) != 1 else f'one seed of {lone[0]}'})"
        if not apart:
            return f"{best.name} is {extreme}, but within the spread of the seeds: {value}"
        if undecided:
            return f"{best.name} is {extreme}, but other sentences might turn it round: {value}"
        return f"{best.name} is best: {value}"

    def paragraph(self) -> str:
        best = self.best
        if best is None:
            return self._last_positions()
        if len(self.measured) == 1:
            sentences = [
                f"{best.name} reaches {self.measure.article}{self.name} of {self.long(best)}.",
                self._unigram(),
            ]
            sentences += ["One seed says nothing about the spread."] if len(best.runs) == 1 else []
        else:
            many = len(self.measured) > 2
            of, degree = (f"Of {len(self.measured)} rows", self.measure.extreme) if many else (
                "Of two rows", self.measure.comparative)  # fmt: skip
            sentences = [
                f"{of}, {best.name} has the {degree} {self.name}: {self.long(best)}.",
                self._against_first(best), self._unigram(), self._neighbours(best), self._other_split(best), self._seeds(),
            ]  # fmt: skip
        return " ".join(filter(None, sentences))

    def _last_positions(self) -> str:
        """The only figures where no row has a next-token perplexity."""
        stats = [(row, row.last_position.get("final", {})) for row in self.rows]
        split = "test" if any("test" in by_split for _, by_split in stats) else "valid"
        said = [f"{row.name} {LAST_POSITION.spread(by_split[split])}" for row, by_split in stats if split in by_split]
        return f"{LAST_POSITION_TITLE}, on the {SPLIT_WORDS[split]} split: {format.listed(said)}." if said else ""

    def _against_first(self, best: Row) -> str:
        first = self.first
        if best is first:
            return f"It is the first row: none of the others is {self.measure.beyond} it."
        if first not in self.measured:
            kind = " of next tokens" if first.marked else ""
            return f"The first row, {first.name}, has no {self.name}{kind} to compare with."
        base = f"{first.name}, the first row, at {self.long(first)}"
        if self.equal(best, first):
            return f"To the digits shown it equals {base}."
        apart = self.apart(best, first)
        spread = (
            ""
            if apart is None
            else f"; the difference is {'larger than' if apart else 'within'} the spread of the seeds"
        )
        return f"That is {self.beyond(best, first)} {base}{spread}."

    def _unigram(self) -> str:
        values = {self.measure.show(row.unigram[self.split]) for row in self.rows if self.split in row.unigram}
        return f"A unigram model with the same vocabulary has {values.pop()}." if len(values) == 1 else ""

    def _neighbours(self, best: Row) -> str:
        """Rows besides the first from which the best cannot be told apart."""
        others = [row for row in self.measured if row is not best and row is not self.first]
        near = [row.name for row in others if self.apart(best, row) is False]
        return f"Within the spread of {best.name}: {format.listed(near)}." if near else ""

    def _other_split(self, best: Row) -> str:
        if self.split != "test":
            return f"No row has {self.measure.article}test {self.measure.words}."
        measured = [row for row in self.rows if "valid" in row.comparable_figures]
        lead = best_row(measured, self.measure, "valid") if len(measured) > 1 else None
        if lead is None or lead is best or ("valid" in best.figures and self.equal(lead, best, "valid")):
            return ""
        value = self.short(lead, "valid")
        return f"On the validation split another row is {self.measure.extreme}: {lead.name} with {value}."

    def _seeds(self) -> str:
        rows = [row for row in self.rows if not row.marked]
        lone = [row.name for row in rows if len(row.runs) == 1]
        if len(lone) == len(rows):
            return "Every row is one seed, and one seed cannot decide between rows: how far seeds scatter is not known here."
        meaning = "The spread is judged by whether the intervals mean ± standard deviation meet, which is no significance test."
        return f"{meaning} One seed only, so nothing is decided: {format.listed(lone)}." if lone else meaning

    def resampled(self, compared: Comparison) -> tuple[str, bool]:
        """Result of resampled test sets for the best row against the first (or the best of the others if it is the first).

        True if the best row and the first cannot be told apart.
        """
        tested = compared.differences[0] if compared.differences else None
        if tested is None or tested.split != self.split or len(self.measured) < 2:
            return "", False
        other = best_row(self.rows[1:], self.measure, self.split) if self.best is self.first else self.best
        pair = None if other is None else tested.of(other.name)
        if pair is None:
            return "", False
        means = "" if pair.runs == pair.baseline_runs == 1 else ", means over their runs"
        says = "leaves out 0" if pair.decided else "holds 0: other sentences might turn it round"
        said = (
            f"Paired bootstrap over {tested.split} sentences, {pair.row} − {pair.baseline}{means}: "
            f"{format.points(pair.difference)} ({interval(pair.low, pair.high)}); the 95 % interval {says} "
            f"(p = {pair.p_value:.3f})."
        )
        return said, pair.baseline == self.first.name and not pair.decided


def signature_lines(compared: Comparison) -> list[str]:
    """How the scores of translations were computed."""
    lines = [
        f"{score.words}: sacreBLEU, {' and '.join(compared.signatures[score.key])}."
        for score in SCORES
        if score.key in compared.signatures
    ]
    if compared.paper_measure is TOKENISED_BLEU:
        measured = any(TOKENISED_BLEU.key in row.scores for row in compared.rows)
        lines.append(
            f"{TOKENISED_BLEU.short}: tokenised, lower-cased BLEU4, as fairseq-generate printed it, which is what the paper "
            "states; it does not compare with sacreBLEU's."
            + ("" if measured else " These runs have none: their corpus is not tokenised.")
        )
    return lines


def _warnings(compared: Comparison) -> tuple[str, ...]:
    """Reasons why figures must not be compared."""
    warnings = []
    if not compared.comparable:
        texts = [measured_on(rows[0].runs[0]) for rows in compared.groups]
        fields = dict.fromkeys(word for text in texts[1:] for word in differences_of_text(texts[0], text))
        groups = "; ".join(
            f"{format.listed(row.name for row in rows)} on {rows[0].label or 'a text not recorded'}"
            for rows in compared.groups
        )
        plural = compared.measure.plural[0].upper() + compared.measure.plural[1:]
        warnings.append(
            f"{plural} of these runs cannot be compared. They differ in: {', '.join(fields)}. "
            f"Compare only within a group: {groups}."
        )
    if compared.left_out:
        kinds = format.listed(dict.fromkeys(_KINDS.get(run.task, run.task) for run in compared.left_out))
        names = format.listed(f"{run.name} ({run.folder})" for run in compared.left_out)
        own = _KINDS.get(compared.task, compared.task)
        warnings.append(
            f"These are {own}, as the first run is; {kinds} are left out: {names}. Report them on their own."
        )
    if marked := [row.name for row in compared.rows if row.marked]:
        warnings.append(
            f"{MARK} {format.listed(marked)}: {NOT_NEXT_TOKEN}. Such a figure compares with no other; that of the last "
            "position of every segment is an ordinary perplexity, for its target is not read."
        )
    return tuple(warnings)


def _cautions(compared: Comparison) -> tuple[str, ...]:
    """Reasons why a difference may not be due to the rows."""
    cautions = [caution for rows in compared.groups for caution in _cautions_of_group(rows)]
    measure = compared.measure
    if len(compared.protocols) > 1:
        ways = "; ".join(f"[{index}] {protocol}" for index, protocol in enumerate(compared.protocols, start=1))
        cautions.append(
            "The runs were not all evaluated by the same protocol; part of a difference may come from that. "
            f"Rows are marked with theirs: {ways}."
        )
    others = [other.plural for other in MEASURES if compared.states(other)]
    if others and compared.paper_measure is None:
        cautions.append(
            f"The paper's figures are {others[-1]}, and these runs are compared by {measure.words}: they are left out."
        )
    if compared.task == MASKED_MODELING:
        cautions.append(f"What is compared is {MASKED_TOKEN}: the model reads the rest of the text, on both sides.")
    if compared.paper_is_last:
        last_is_best = all(row.last and row.last == row.figures for row in compared.rows)
        cautions.append(
            "The paper's figures are of the weights of the last epoch: compare them with ours of the last checkpoint"
            + (", which in these runs is the best." if last_is_best else ".")
        )
    if any(row.without_sos for row in compared.rows):
        cautions.append(
            "Every line begins with a token <sos>, which counts in the perplexities and costs almost nothing; without it, as "
            "tokens are usually counted, they are higher."
        )
    signatures = compared.signatures.get(BLEU.key, ())
    if len(signatures) > len({without_version(signature) for signature in signatures}):
        cautions.append("BLEU was computed by different versions of sacreBLEU, which may move it a little.")
    if compared.translates and len({str(row.runs[0].corpus.get("vocabulary")) for row in compared.rows}) > 1:
        cautions.append(
            "The rows have different vocabularies: their perplexities, which are per token, do not compare; BLEU does."
        )
    if measure is BLEU:
        if names := [row.name for row in compared.rows if any(not run.next_token for run in row.runs)]:
            cautions.append(f"Perplexity of {format.listed(names)} is left out: {NOT_NEXT_TOKEN}.")
        if compared.paper_measure is BLEU and compared.states(TOKENISED_BLEU):
            cautions.append(
                "The paper's figures of some rows are tokenised BLEU and are left out: ours beside them are sacreBLEU's."
            )
    return tuple(dict.fromkeys(cautions))


def _cautions_of_group(rows: Sequence[Row]) -> list[str]:
    """Cautions about rows that were measured on one text."""
    cautions = []
    first, runs = rows[0], [run for row in rows for run in row.runs]
    if first.is_slice:
        cautions.append(f"The text is a slice ({first.label}): its figures are not those of the published corpus.")
    reduced = first.is_slice or any(run.of("scale") not in (None, "paper") for run in runs)
    if reduced and any(row.paper for row in rows):
        cautions.append(
            "The paper's figures belong to its own setting (scale paper, full corpus), "
            "which these runs do not repeat: the levels do not compare."
        )
    budgets = sorted(tokens for run in runs if (tokens := integer(run.of("tokens_seen"))) is not None)
    # batches of whole sentences do not end at the same token with every seed
    slack = 1.01 if runs[0].task == TRANSLATION else 1.0
    if budgets and budgets[-1] > slack * budgets[0]:
        cautions.append(f"The runs did not train on equally many tokens: {budgets[0]:,} to {budgets[-1]:,}.")
    environments = [mapping(run.of("environment")) for run in runs]
    keys = ("platform", "cpu", "threads", "device", "precision")
    if len({tuple(str(environment.get(key)) for key in keys) for environment in environments}) > 1:
        cautions.append(
            "The runs were not all made on the same kind of machine; tokens/s, ms and wall time do not compare."
        )
    return cautions
