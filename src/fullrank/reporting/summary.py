"""What the numbers say in words, and no more than they carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullrank.config.schema import NOT_NEXT_TOKEN
from fullrank.reporting import format
from fullrank.reporting.grouping import measured_on, text_differences
from fullrank.reporting.measure import LAST_POSITION, MEASURES, Measure
from fullrank.reporting.results import integer, mapping
from fullrank.reporting.stats import apart
from fullrank.reporting.table import MARK, Comparison, Row

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
    if not compared.rows:
        return Summary("No run has finished yet", "There is nothing to compare until a run has written its result.")
    groups: dict[int, list[Row]] = {}
    for row in compared.rows:
        groups.setdefault(row.text, []).append(row.judged)
    found = [sentence for rows in groups.values() for sentence in _cautions(rows)]
    cautions = tuple(dict.fromkeys([*found, *_protocols(compared), *_other_measure(compared), *_conventions(compared)]))
    if len(groups) > 1:
        parts = [
            f"On {rows[0].label or 'a text that is not recorded'}: {_paragraph(rows, _judged(rows, compared))}"
            for rows in groups.values()
        ]
        headline = "Not one comparison: the runs differ in text or vocabulary"
        warning = _incomparable(list(groups.values()), compared.measure)
        return Summary(headline, "\n".join(parts), (warning, *_not_next_token(compared)), cautions)
    (rows,) = groups.values()
    figure = _judged(rows, compared)
    return Summary(_headline(rows, figure), _paragraph(rows, figure), _not_next_token(compared), cautions)


def _not_next_token(compared: Comparison) -> tuple[str, ...]:
    """What the mark at figures means, where there are any."""
    if not (names := [row.name for row in compared.marked]):
        return ()
    return (
        f"{MARK} {format.listed(names)}: {NOT_NEXT_TOKEN}. Such a figure compares with no other; that of the last position of "
        "every segment is an ordinary perplexity, for its target is not read.",
    )


def _judged(rows: Sequence[Row], compared: Comparison) -> _Figure:
    return _Figure(compared.measure, judged_split(rows))


def judged_split(rows: Sequence[Row]) -> str:
    """`test` if any row has it, else `valid`."""
    return "test" if any("test" in row.figures for row in rows) else "valid"


def best_row(rows: Sequence[Row], split: str) -> Row | None:
    """The row with the lowest mean; None unless at least two rows were measured."""
    measured = [row for row in rows if split in row.figures]
    return min(measured, key=lambda row: row.figures[split].mean) if len(measured) > 1 else None


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

    def below(self, row: Row, base: Row) -> str:
        share = row.figures[self.split].mean / base.figures[self.split].mean - 1
        return f"{format.percent(share)} below"

    def apart(self, first: Row, second: Row) -> bool | None:
        return apart(first.figures[self.split], second.figures[self.split])


def _headline(rows: Sequence[Row], figure: _Figure) -> str:
    first, best = rows[0], best_row(rows, figure.split)
    if best is None:
        row = next((row for row in rows if figure.split in row.figures), None)
        if row is None:
            return f"{format.listed([row.name for row in rows])}: {figure.measure.words} is {NOT_NEXT_TOKEN}"
        return f"{row.name}: {figure.words} {figure.short(row)}"
    value = f"{figure.words} {figure.short(best)}"
    if best is first:
        return f"{best.name}, the first row, stays lowest: {value}"
    if figure.split not in first.figures:
        return f"{best.name} is lowest: {value}"
    if figure.same(best, first):
        return f"{best.name} and {first.name} are equal: {value}"
    below = f"{figure.below(best, first)} {first.name}"
    match figure.apart(best, first):
        case True:
            return f"{best.name} is best: {value}, {below}"
        case False:
            return f"{best.name} is lowest, but within the spread of the seeds: {value}, {below}"
        case None:
            return f"{best.name} is lowest: {value}, {below} ({_seeds_short(best, first)})"


def _seeds_short(best: Row, first: Row) -> str:
    lone = [row.name for row in (best, first) if len(row.runs) == 1]
    return "one seed" if len(lone) != 1 else f"one seed of {lone[0]}"


def _paragraph(rows: Sequence[Row], figure: _Figure) -> str:
    best = best_row(rows, figure.split)
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
    of, word = (f"Of {measured} rows", "lowest") if measured > 2 else ("Of two rows", "lower")
    return f"{of}, {best.name} has the {word} {figure.words}: {figure.long(best)}."


def _against_first(first: Row, best: Row, figure: _Figure) -> str:
    if best is first:
        return "It is the first row: none of the others is below it."
    if figure.split not in first.figures:
        kind = "" if first.next_token else " of next tokens"
        return f"The first row, {first.name}, has no {figure.words}{kind} to compare with."
    base = f"{first.name}, the first row, at {figure.long(first)}"
    if figure.same(best, first):
        return f"To the digits shown it equals {base}."
    below = f"That is {figure.below(best, first)} {base}"
    match figure.apart(best, first):
        case True:
            return f"{below}; the difference is larger than the spread of the seeds."
        case False:
            return f"{below}; the difference is within the spread of the seeds."
        case None:
            return f"{below}."


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
    other, lowest = _Figure(figure.measure, "valid"), best_row(rows, "valid")
    if lowest is None or lowest is best or ("valid" in best.figures and other.same(lowest, best)):
        return ""
    return f"On the validation split another row is lowest: {lowest.name} with {other.short(lowest)}."


def _unigram(rows: Sequence[Row], figure: _Figure) -> str:
    values = {figure.measure.show(row.unigram[figure.split]) for row in rows if figure.split in row.unigram}
    if len(values) != 1:
        return ""
    return f"A unigram model with the same vocabulary has {values.pop()}."


def _certainty(rows: Sequence[Row]) -> str:
    rows = [row for row in rows if row.next_token]
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


def _incomparable(groups: Sequence[Sequence[Row]], measure: Measure) -> str:
    texts = [measured_on(rows[0].runs[0]) for rows in groups]
    words = dict.fromkeys(word for text in texts[1:] for word in text_differences(texts[0], text))
    members = "; ".join(
        f"{format.listed([row.name for row in rows])} on {rows[0].label or 'a text not recorded'}" for rows in groups
    )
    differ = f"They differ in: {', '.join(words)}."
    return f"{measure.plural.capitalize()} of these runs cannot be compared. {differ} Compare only within a group: {members}."


def _cautions(rows: Sequence[Row]) -> list[str]:
    """What weakens a comparison without forbidding it."""
    found: list[str] = []
    results = [mapping(run.result) for row in rows for run in row.runs]
    if rows[0].is_slice:
        found.append(f"The text is a slice ({rows[0].label}): its figures are not those of the published corpus.")
    if any(row.paper for row in rows) and (
        rows[0].is_slice or any(result.get("scale") not in (None, "paper") for result in results)
    ):
        found.append(
            "The paper's figures belong to its own setting (scale paper, full corpus), "
            "which these runs do not repeat: the levels do not compare."
        )
    budgets = sorted({tokens for result in results if (tokens := integer(result.get("tokens_seen"))) is not None})
    if len(budgets) > 1:
        found.append(f"The runs did not train on equally many tokens: {budgets[0]:,} to {budgets[-1]:,}.")
    if len({_machine(result) for result in results}) > 1:
        found.append(
            "The runs were not all made on the same kind of machine; tokens/s, ms and wall time do not compare."
        )
    return found


def _protocols(compared: Comparison) -> list[str]:
    """What the marks of the rows mean, where there are any."""
    if len(compared.protocols) < 2:
        return []
    ways = "; ".join(f"[{number}] {protocol}" for number, protocol in enumerate(compared.protocols, start=1))
    return [
        "The runs were not all evaluated by the same protocol; part of a difference may come from that. "
        f"Rows are marked with theirs: {ways}."
    ]


def _other_measure(compared: Comparison) -> list[str]:
    """Figures of a paper that no column can hold."""
    others = [measure.plural for measure in MEASURES if compared.states(measure)]
    if not others or compared.has_paper:
        return []
    return [
        f"The paper's figures are {others[-1]}, and these runs are compared by {compared.measure.words}: they are left out."
    ]


def _conventions(compared: Comparison) -> list[str]:
    """Which of our figures are the paper's kind, and what counts as a token, where either is not the usual."""
    found: list[str] = []
    if compared.paper_is_last:
        found.append(
            "The paper's figures are of the weights of the last epoch: compare them with ours of the last checkpoint"
            + (", which in these runs is the best." if compared.last_is_best else ".")
        )
    if compared.counts_sos:
        found.append(
            "Every line begins with a token <sos>, which counts in the perplexities and costs almost nothing; without it, as "
            "tokens are usually counted, they are higher."
        )
    return found


def _machine(result: object) -> str:
    environment = mapping(mapping(result).get("environment"))
    return "|".join(str(environment.get(key)) for key in ("platform", "cpu", "threads", "device", "precision"))
