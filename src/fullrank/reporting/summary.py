"""What the numbers say in words, and no more than they carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullrank.reporting import format
from fullrank.reporting.grouping import measured_on, text_differences
from fullrank.reporting.results import integer, mapping
from fullrank.reporting.stats import apart
from fullrank.reporting.table import Comparison, Row


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
        groups.setdefault(row.text, []).append(row)
    cautions = (*(sentence for rows in groups.values() for sentence in _cautions(rows)), *_protocols(compared))
    if len(groups) > 1:
        parts = [f"On {rows[0].label or 'a text that is not recorded'}: {_paragraph(rows)}" for rows in groups.values()]
        headline = "Not one comparison: the runs differ in text or vocabulary"
        return Summary(
            headline, "\n".join(parts), (_incomparable(list(groups.values())),), tuple(dict.fromkeys(cautions))
        )
    rows = list(compared.rows)
    return Summary(_headline(rows), _paragraph(rows), (), tuple(dict.fromkeys(cautions)))


def judged_split(rows: Sequence[Row]) -> str:
    """`test` if any row has it, else `valid`."""
    return "test" if any("test" in row.perplexity for row in rows) else "valid"


def best_row(rows: Sequence[Row], split: str) -> Row | None:
    """The row with the lowest mean perplexity; None unless at least two rows were measured."""
    measured = [row for row in rows if split in row.perplexity]
    return min(measured, key=lambda row: row.perplexity[split].mean) if len(measured) > 1 else None


def _word(split: str) -> str:
    return "test perplexity" if split == "test" else "validation perplexity"


def _same(first: Row, second: Row, split: str) -> bool:
    return format.perplexity(first.perplexity[split].mean) == format.perplexity(second.perplexity[split].mean)


def _headline(rows: Sequence[Row]) -> str:
    split = judged_split(rows)
    first, best = rows[0], best_row(rows, split)
    if best is None:
        row = next(row for row in rows if split in row.perplexity)
        return f"{row.name}: {_word(split)} {format.spread(row.perplexity[split])}"
    value = f"{_word(split)} {format.spread(best.perplexity[split])}"
    if best is first:
        return f"{best.name}, the first row, stays lowest: {value}"
    if split not in first.perplexity:
        return f"{best.name} is lowest: {value}"
    if _same(best, first, split):
        return f"{best.name} and {first.name} are equal: {value}"
    below = f"{format.percent(_gap(best, first, split))} below {first.name}"
    match apart(best.perplexity[split], first.perplexity[split]):
        case True:
            return f"{best.name} is best: {value}, {below}"
        case False:
            return f"{best.name} is lowest, but within the spread of the seeds: {value}, {below}"
        case None:
            return f"{best.name} is lowest: {value}, {below} ({_seeds_short(best, first)})"


def _seeds_short(best: Row, first: Row) -> str:
    lone = [row.name for row in (best, first) if len(row.runs) == 1]
    return "one seed" if len(lone) != 1 else f"one seed of {lone[0]}"


def _gap(row: Row, base: Row, split: str) -> float:
    return row.perplexity[split].mean / base.perplexity[split].mean - 1


def _paragraph(rows: Sequence[Row]) -> str:
    split = judged_split(rows)
    best = best_row(rows, split)
    sentences = [_unigram(rows, split)]
    if best is None:
        row = next(row for row in rows if split in row.perplexity)
        sentences.insert(0, f"{row.name} reaches a {_word(split)} of {_value(row, split)}.")
        if len(row.runs) == 1:
            sentences.append("One seed says nothing about the spread.")
        return " ".join(filter(None, sentences))
    sentences[:0] = [_best_sentence(rows, best, split), _against_first(rows[0], best, split)]
    sentences += [_neighbours(rows, best, split), _other_split(rows, best, split), _certainty(rows)]
    return " ".join(filter(None, sentences))


def _value(row: Row, split: str) -> str:
    stat = row.perplexity[split]
    if stat.deviation is None:
        return format.perplexity(stat.mean)
    return f"{format.spread(stat)} (mean and standard deviation of {stat.count} seeds)"


def _best_sentence(rows: Sequence[Row], best: Row, split: str) -> str:
    measured = sum(split in row.perplexity for row in rows)
    of, word = (f"Of {measured} rows", "lowest") if measured > 2 else ("Of two rows", "lower")
    return f"{of}, {best.name} has the {word} {_word(split)}: {_value(best, split)}."


def _against_first(first: Row, best: Row, split: str) -> str:
    if best is first:
        return "It is the first row: none of the others is below it."
    if split not in first.perplexity:
        return f"The first row, {first.name}, has no {_word(split)} to compare with."
    base = f"{first.name}, the first row, at {_value(first, split)}"
    if _same(best, first, split):
        return f"To the digits shown it equals {base}."
    below = f"That is {format.percent(_gap(best, first, split))} below {base}"
    match apart(best.perplexity[split], first.perplexity[split]):
        case True:
            return f"{below}; the difference is larger than the spread of the seeds."
        case False:
            return f"{below}; the difference is within the spread of the seeds."
        case None:
            return f"{below}."


def _neighbours(rows: Sequence[Row], best: Row, split: str) -> str:
    """Rows besides the first that the best cannot be told from."""
    near = [
        row.name
        for row in rows
        if row is not best and row is not rows[0] and split in row.perplexity
        and apart(best.perplexity[split], row.perplexity[split]) is False
    ]  # fmt: skip
    if best is rows[0] and not near:
        return ""
    return f"Within the spread of {best.name}: {format.listed(near)}." if near else ""


def _other_split(rows: Sequence[Row], best: Row, split: str) -> str:
    if split != "test":
        return "No row has a test perplexity."
    lowest = best_row(rows, "valid")
    if lowest is None or lowest is best or ("valid" in best.perplexity and _same(lowest, best, "valid")):
        return ""
    return f"On the validation split another row is lowest: {lowest.name} with {format.spread(lowest.perplexity['valid'])}."


def _unigram(rows: Sequence[Row], split: str) -> str:
    values = {format.perplexity(row.unigram[split]) for row in rows if split in row.unigram}
    if len(values) != 1:
        return ""
    return f"A unigram model with the same vocabulary has {values.pop()}."


def _certainty(rows: Sequence[Row]) -> str:
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


def _incomparable(groups: Sequence[Sequence[Row]]) -> str:
    texts = [measured_on(rows[0].runs[0]) for rows in groups]
    words = dict.fromkeys(word for text in texts[1:] for word in text_differences(texts[0], text))
    members = "; ".join(
        f"{format.listed([row.name for row in rows])} on {rows[0].label or 'a text not recorded'}" for rows in groups
    )
    differ = f"They differ in: {', '.join(words)}."
    return f"Perplexities of these runs cannot be compared. {differ} Compare only within a group: {members}."


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


def _machine(result: object) -> str:
    environment = mapping(mapping(result).get("environment"))
    return "|".join(str(environment.get(key)) for key in ("platform", "cpu", "threads", "device", "precision"))
