"""What the numbers say in words, and no more than they carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.reporting import format
from fullrank.reporting.cautions import cautions_of, warnings_of
from fullrank.reporting.measure import LAST_POSITION, Measure
from fullrank.reporting.significance import Difference, Differences, differences, over_sentences
from fullrank.reporting.stats import apart
from fullrank.reporting.table import Comparison, Row

LAST_POSITION_TITLE = "Perplexity at the last position of every segment, the only one whose target is not read"


@dataclass(frozen=True)
class Summary:
    """`headline` is one line, `paragraph` a few sentences (a line for each text, where there are several).

    `warnings` forbid a comparison, `cautions` weaken one.
    """

    headline: str
    paragraph: str
    warnings: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def summarise(compared: Comparison) -> Summary:
    """The summary of a comparison; every claim is one that its figures carry."""
    warnings, cautions = warnings_of(compared), cautions_of(compared)
    if not compared.rows:
        nothing = "There is nothing to compare until a run has written its result."
        return Summary("No run has finished yet", nothing, warnings, cautions)
    groups: dict[int, list[Row]] = {}
    for row in compared.rows:
        groups.setdefault(row.text, []).append(row.judged)
    if len(groups) > 1:
        parts = [
            f"On {rows[0].label or 'a text that is not recorded'}: {_paragraph(rows, _judged(rows, compared))}"
            for rows in groups.values()
        ]
        what = "text or signature" if compared.translates else "text or vocabulary"
        return Summary(f"Not one comparison: the runs differ in {what}", "\n".join(parts), warnings, cautions)
    (rows,) = groups.values()
    figure = _judged(rows, compared)
    paragraph, tested = _paragraph(rows, figure), _tested(rows, figure, compared)
    if tested is not None:
        paragraph = f"{paragraph} {_resampled(*tested)}"
    undecided = tested is not None and tested[1].baseline == rows[0].name and not tested[1].decided
    return Summary(_headline(rows, figure, undecided), paragraph, warnings, cautions)


def _tested(rows: Sequence[Row], figure: _Figure, compared: Comparison) -> tuple[Differences, Difference] | None:
    """What resampled test sets say of the best row against the first, or of the best of the others."""
    tested = differences(compared)
    if tested is None or tested.split != figure.split:
        return None
    best = best_row(rows, figure.measure, figure.split)
    other = best if best is not rows[0] else best_row(rows[1:], figure.measure, figure.split, alone=True)
    found = None if other is None else tested.of(other)
    return None if found is None else (tested, found)


def _resampled(tested: Differences, found: Difference) -> str:
    means = "" if found.runs == found.baseline_runs == 1 else ", means over their runs"
    says = "leaves out 0" if found.decided else "holds 0: other sentences might turn it round"
    return (
        f"Paired bootstrap over {tested.split} sentences, {found.row} − {found.baseline}{means}: "
        f"{over_sentences(found)}; the 95 % interval {says} (p = {found.p_value:.3f})."
    )


def _judged(rows: Sequence[Row], compared: Comparison) -> _Figure:
    return _Figure(compared.measure, judged_split(rows))


def judged_split(rows: Sequence[Row]) -> str:
    """`test` if any row has it, else `valid`."""
    return "test" if any("test" in row.figures for row in rows) else "valid"


def best_row(rows: Sequence[Row], measure: Measure, split: str, *, alone: bool = False) -> Row | None:
    """The row with the best mean; None unless at least two rows were measured (one, where it may be alone)."""
    measured = [row for row in rows if split in row.figures]
    if len(measured) < (1 if alone else 2):
        return None
    best = measure.best(row.figures[split].mean for row in measured)
    return next(row for row in measured if row.figures[split].mean == best)


@dataclass(frozen=True)
class _Figure:
    """The figure by which rows are judged: the measure of the comparison on one split. The rows asked for must have it."""

    measure: Measure
    split: str

    @property
    def words(self) -> str:
        return f"{'test' if self.split == 'test' else 'validation'} {self.measure.words}"

    @property
    def one(self) -> str:
        return f"{self.measure.article}{self.words}"

    def short(self, row: Row) -> str:
        return self.measure.spread(row.figures[self.split])

    def long(self, row: Row) -> str:
        stat = row.figures[self.split]
        seeds = "" if stat.deviation is None else f" (mean and standard deviation of {stat.count} seeds)"
        return self.short(row) + seeds

    def same(self, first: Row, second: Row) -> bool:
        means = [self.measure.show(row.figures[self.split].mean) for row in (first, second)]
        return means[0] == means[1]

    def beyond(self, row: Row, base: Row) -> str:
        """`3.1 % below`, `0.62 points above`."""
        means = [one.figures[self.split].mean for one in (row, base)]
        return f"{self.measure.size(self.measure.difference(*means) or 0.0)} {self.measure.beyond}"

    def apart(self, first: Row, second: Row) -> bool | None:
        return apart(first.figures[self.split], second.figures[self.split])


def _headline(rows: Sequence[Row], figure: _Figure, undecided: bool) -> str:
    """`undecided`: on resampled test sets the best row and the first are not told apart."""
    first, best = rows[0], best_row(rows, figure.measure, figure.split)
    if best is None:
        row = next((row for row in rows if figure.split in row.figures), None)
        if row is None:
            return f"{format.listed([row.name for row in rows])}: {figure.measure.words} is {NOT_NEXT_TOKEN}"
        return f"{row.name}: {figure.words} {figure.short(row)}"
    value, extreme = f"{figure.words} {figure.short(best)}", figure.measure.extreme
    if best is first:
        return f"{best.name}, the first row, stays {extreme}: {value}"
    if figure.split not in first.figures:
        return f"{best.name} is {extreme}: {value}"
    if figure.same(best, first):
        return f"{best.name} and {first.name} are equal: {value}"
    beyond = f"{figure.beyond(best, first)} {first.name}"
    match figure.apart(best, first):
        case True if undecided:
            return f"{best.name} is {extreme}, but other sentences might turn it round: {value}, {beyond}"
        case True:
            return f"{best.name} is best: {value}, {beyond}"
        case False:
            return f"{best.name} is {extreme}, but within the spread of the seeds: {value}, {beyond}"
        case None:
            return f"{best.name} is {extreme}: {value}, {beyond} ({_seeds_short(best, first)})"


def _seeds_short(best: Row, first: Row) -> str:
    lone = [row.name for row in (best, first) if len(row.runs) == 1]
    return "one seed" if len(lone) != 1 else f"one seed of {lone[0]}"


def _paragraph(rows: Sequence[Row], figure: _Figure) -> str:
    best = best_row(rows, figure.measure, figure.split)
    sentences = [_unigram(rows, figure)]
    if best is None:
        row = next((row for row in rows if figure.split in row.figures), None)
        if row is None:
            return _last_positions(rows)
        sentences.insert(0, f"{row.name} reaches {figure.one} of {figure.long(row)}.")
        if len(row.runs) == 1:
            sentences.append("One seed says nothing about the spread.")
        return " ".join(filter(None, sentences))
    sentences[:0] = [_best_sentence(rows, best, figure), _against_first(rows[0], best, figure)]
    sentences += [_neighbours(rows, best, figure), _other_split(rows, best, figure), _certainty(rows)]
    return " ".join(filter(None, sentences))


def _last_positions(rows: Sequence[Row]) -> str:
    """What is left to say where no row has a next-token perplexity."""
    found = [(row, row.last_position.get("final", {})) for row in rows]
    split = "test" if any("test" in stats for _, stats in found) else "valid"
    said = [f"{row.name} {LAST_POSITION.spread(stats[split])}" for row, stats in found if split in stats]
    where = "test" if split == "test" else "validation"
    return f"{LAST_POSITION_TITLE}, on the {where} split: {format.listed(said)}." if said else ""


def _best_sentence(rows: Sequence[Row], best: Row, figure: _Figure) -> str:
    measured = sum(figure.split in row.figures for row in rows)
    measure = figure.measure
    of, word = (f"Of {measured} rows", measure.extreme) if measured > 2 else ("Of two rows", measure.comparative)
    return f"{of}, {best.name} has the {word} {figure.words}: {figure.long(best)}."


def _against_first(first: Row, best: Row, figure: _Figure) -> str:
    if best is first:
        return f"It is the first row: none of the others is {figure.measure.beyond} it."
    if figure.split not in first.figures:
        kind = " of next tokens" if first.marked else ""
        return f"The first row, {first.name}, has no {figure.words}{kind} to compare with."
    base = f"{first.name}, the first row, at {figure.long(first)}"
    if figure.same(best, first):
        return f"To the digits shown it equals {base}."
    beyond = f"That is {figure.beyond(best, first)} {base}"
    match figure.apart(best, first):
        case True:
            return f"{beyond}; the difference is larger than the spread of the seeds."
        case False:
            return f"{beyond}; the difference is within the spread of the seeds."
        case None:
            return f"{beyond}."


def _neighbours(rows: Sequence[Row], best: Row, figure: _Figure) -> str:
    """Rows besides the first that the best cannot be told from."""
    near = [
        row.name
        for row in rows
        if row is not best and row is not rows[0] and figure.split in row.figures and figure.apart(best, row) is False
    ]  # fmt: skip
    if best is rows[0] and not near:
        return ""
    return f"Within the spread of {best.name}: {format.listed(near)}." if near else ""


def _other_split(rows: Sequence[Row], best: Row, figure: _Figure) -> str:
    if figure.split != "test":
        return f"No row has {_Figure(figure.measure, 'test').one}."
    other, lead = _Figure(figure.measure, "valid"), best_row(rows, figure.measure, "valid")
    if lead is None or lead is best or ("valid" in best.figures and other.same(lead, best)):
        return ""
    return f"On the validation split another row is {figure.measure.extreme}: {lead.name} with {other.short(lead)}."


def _unigram(rows: Sequence[Row], figure: _Figure) -> str:
    values = {figure.measure.show(row.unigram[figure.split]) for row in rows if figure.split in row.unigram}
    if len(values) != 1:
        return ""
    return f"A unigram model with the same vocabulary has {values.pop()}."


def _certainty(rows: Sequence[Row]) -> str:
    rows = [row for row in rows if not row.marked]
    seeds = [len(row.runs) for row in rows]
    if max(seeds) == 1:
        return (
            "Every row is one seed, and one seed cannot decide between rows: how far seeds scatter is not known here."
        )
    lone = [row.name for row in rows if len(row.runs) == 1]
    meaning = (
        "The spread is judged by whether the intervals mean ± standard deviation meet, which is no significance test."
    )
    if lone:
        return f"{meaning} One seed only, so nothing is decided: {format.listed(lone)}."
    return meaning
