"""A comparison in words: the headline with its interval, what forbids a comparison, and what weakens one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullrank.comparison.compare import Comparison, Group
from fullrank.comparison.measures import Measure
from fullrank.comparison.resampled import DIFFERENCE
from fullrank.comparison.rows import Row, compare_texts, find_unequal_terms, identify_text
from fullrank.comparison.runs import TRANSLATION, integer
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.records import Record
from fullrank.render.tables import join_words


@dataclass(frozen=True)
class Summary:
    """`headline` is one line, `paragraphs` are a few sentences. `warnings` forbid a comparison, `cautions` weaken one."""

    headline: str
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...]
    cautions: tuple[str, ...]


def summarize(compared: Comparison, resampled: Sequence[Record] = ()) -> Summary:
    """Summary of a comparison; every claim is one that its figures support."""
    groups = compared.groups
    claims = [write_headline(group, resampled) for group in groups]
    paragraphs = [_name_near_rows(group) for group in groups]
    parts = len({group.part for group in groups})
    headline = claims[0] if claims else "No run has finished yet"
    if compared.mixed_texts or parts > 1:
        what = "tasks" if groups[0].runs[0].finetunes else "models"
        headline = f"{parts} {what} in one table: rows of each are compared with its first"
        names = [group.part or f"On {group.runs[0].label or 'a text that is not recorded'}" for group in groups]
        paragraphs = [f"{name}: {claim}. {near}" for name, claim, near in zip(names, claims, paragraphs, strict=True)]
    if compared.mixed_texts:
        headline = "Not one comparison: the runs differ in text, vocabulary or signature"
    return Summary(
        headline,
        tuple(filter(None, paragraphs)),
        tuple(_find_warnings(compared)),
        tuple(dict.fromkeys(_find_cautions(compared))),
    )


def name_split(split: str) -> str:
    """`validation` of `valid`."""
    return "validation" if split == "valid" else split


# -- the headline ------------------------------------------------------------------------------------------------------


def write_headline(group: Group, resampled: Sequence[Record]) -> str:
    """What the rows of a group show, and no more."""
    measure, split = group.measure, group.split
    names = join_words(row.name for row in group.rows)
    if group.undertrained:
        below = join_words(row.name for row in group.undertrained)
        return f"{below}: undertrained, {measure.words} above that of a unigram model"
    if group.is_marked:
        return f"{names}: {measure.words} is {NOT_NEXT_TOKEN}"
    if not group.ranking:
        return f"{names}: no {measure.words} to compare"
    best, *others = group.ranking
    figure = f"{name_split(split)} {measure.words} {_show_spread(best, measure, split)}"
    if not others:
        return f"{best.name}: {figure}"
    base = group.baseline_of(best)
    other = base or others[0]
    if measure.show(best.mean(measure, split)) == measure.show(other.mean(measure, split)):
        return f"{best.name} and {other.name} are equal to the digits shown: {figure}"
    if base is None:
        return f"{best.name}, the first row, stays {measure.extreme}: {figure}{_describe_next(group, best, other)}"
    return _compare_best(group, best, base, figure, resampled)


def _show_spread(row: Row, measure: Measure, split: str) -> str:
    """Mean ± sample standard deviation; the mean alone for one seed."""
    values = list(row.values(measure, split).values())
    text = measure.show(statistics.fmean(values))
    return text if len(values) < 2 else f"{text} ± {measure.show(statistics.stdev(values))}"


def _show_interval(difference: Record, measure: Measure) -> str:
    if difference.interval is None:
        return ""
    low, high = map(measure.show_difference, difference.interval)
    return f" (95 % interval {low.partition(' ')[0]} to {high})"


def _describe_next(group: Group, best: Row, other: Row) -> str:
    difference = group.compare(other, best)
    if difference is None or difference.value is None:
        return ""
    measure = group.measure
    value = measure.show_difference(difference.value)
    return f"; next is {other.name} at {value}{_show_interval(difference, measure)}"


def _compare_best(group: Group, best: Row, base: Row, figure: str, resampled: Sequence[Record]) -> str:
    """The best row beside its baseline: `is best` only where its intervals leave out 0."""
    measure = group.measure
    difference = group.compare(best, base)
    lead = f"{best.name} is {measure.extreme}"
    if difference is None or difference.value is None:
        return f"{lead}: {figure}"
    size = measure.show_difference(abs(difference.value)).removeprefix("+")
    figure = f"{figure}, {size} {'above' if measure.higher else 'below'} {base.name}"
    if difference.interval is None:
        lone = [row.name for row in (best, base) if len(row.runs) == 1]
        seeds = ("no scatter over the seeds", f"one seed of {join_words(lone)}", "one seed")[len(lone)]
        return f"{lead}: {figure} ({seeds}, no interval)"
    figure += _show_interval(difference, measure)
    if not _is_decided(difference):
        return f"{lead}, but other seeds might turn it round: {figure}"
    labels = {"row": best.name, "split": group.split, "baseline": base.name}
    pairs = [record for record in resampled if record.measure == DIFFERENCE and record.has(labels)]
    if not all(map(_is_decided, pairs)):
        return f"{lead}, but other sentences might turn it round: {figure}"
    return f"{best.name} is best: {figure}"


def _is_decided(difference: Record) -> bool:
    """0 is outside of the interval."""
    low, high = difference.interval or (0.0, 0.0)
    return low > 0 or high < 0


def _name_near_rows(group: Group) -> str:
    """Rows from which the best cannot be told apart, besides its baseline, of which the headline speaks."""
    near = []
    for row in group.ranking[1:]:
        best = group.ranking[0]
        difference = group.compare(best, row)
        if row is not group.baseline_of(best) and difference and difference.interval and not _is_decided(difference):
            near.append(row.name)
    return f"These seeds do not tell {group.ranking[0].name} from {join_words(near)}." if near else ""


# -- what forbids a comparison -----------------------------------------------------------------------------------------


def _find_warnings(compared: Comparison) -> Iterator[str]:
    texts = compared.mixed_texts
    if texts:
        first, *others = (identify_text(row.first, compared.measure.in_bits) for row in texts)
        fields = dict.fromkeys(field for other in others for field in compare_texts(first, other))
        labels = ", ".join(row.first.label or "a text not recorded" for row in texts)
        yield f"Not comparable: the runs differ in {', '.join(fields)}. Compare only within a table: {labels}."
    if compared.left_out:
        names = join_words(f"{run.name} ({run.folder})" for run in compared.left_out)
        task = compared.task.replace("_", " ")
        yield f"These are runs of {task}, as the first is. Runs of another task are left out: {names}."
    marked = [row.name for group in compared.groups if group.is_marked for row in group.rows]
    if marked:
        yield (
            f"† {join_words(marked)}: {NOT_NEXT_TOKEN}. Such a figure compares with no other; that of the last position of "
            "every segment is an ordinary perplexity, for its target is not read."
        )
    for group in compared.groups:
        for row in group.rows:
            base = group.baseline_of(row)
            terms = _find_unequal_terms(row, base) if base and row.first.finetunes else []
            if terms:
                yield f"Not equal terms: {'; '.join(terms)}."


def _find_unequal_terms(row: Row, base: Row) -> list[str]:
    """Differences of fine-tuning besides the mechanism."""
    terms = find_unequal_terms(row, base)
    after, before = ({run.get("steps") for run in one.runs} for one in (row, base))
    if after != before:
        terms["steps"] = (join_words(map(str, after)), join_words(map(str, before)))
    words = [f"{key} is {value} in {row.name}, {other} in {base.name}" for key, (value, other) in terms.items()]
    if row.first.get("sha256.train") != base.first.get("sha256.train"):
        words.append(f"{row.name} and {base.name} read other train examples")
    return words


# -- what weakens one --------------------------------------------------------------------------------------------------


def _find_cautions(compared: Comparison) -> Iterator[str]:
    rows, runs = compared.rows, compared.runs
    for group in compared.groups:
        yield from _find_cautions_of_group(group)
    protocols = name_protocols(rows)
    if len(protocols) > 1:
        marked = "; ".join(f"{mark} {words}" for words, mark in protocols.items())
        yield f"Rows were not all evaluated by the same protocol; part of a difference may come from that: {marked}."
    if rows and compared.task == TRANSLATION and len({str(run.get("corpus.vocabulary")) for run in runs}) > 1:
        yield "The rows have different vocabularies: their perplexities, which are per token, do not compare; BLEU does."
    if any(run.finetunes and run.get("checkpoint") == "best" for run in runs):
        yield "Figures are of the best evaluation, which was chosen on the very split that they are of: it flatters them."
    for row in rows:
        for run in row.runs:
            trained = run.get_mapping("training")
            if trained:
                origin = " ".join(str(trained[key]) for key in ("recipe", "row") if trained.get(key))
                yield f"{row.name}, seed {run.seed}: one training with {origin} ({trained.get('folder')}), measured anew."


def _find_cautions_of_group(group: Group) -> Iterator[str]:
    runs = group.runs
    first = runs[0]
    is_reduced = first.is_slice or any(run.get("scale") not in (None, "paper") for run in runs)
    if is_reduced and not first.finetunes and any(run.get("paper") for run in runs):
        yield f"The paper's figures are of scale paper and the full corpus: on {first.label} the levels do not compare."
    budgets = [tokens for tokens in (integer(run.get("tokens_seen")) for run in runs) if tokens is not None]
    # batches of whole sentences do not end at the same token with every seed
    slack = 1.01 if first.task == TRANSLATION else 1.0
    if budgets and max(budgets) > slack * min(budgets):
        yield f"The runs did not train on equally many tokens: {min(budgets):,} to {max(budgets):,}."
    keys = ("platform", "cpu", "threads", "device", "precision")
    if len({tuple(str(run.get(f"environment.{key}")) for key in keys) for run in runs}) > 1:
        yield "The runs were not all made on the same kind of machine; tokens/s, ms and wall time do not compare."


def name_protocols(rows: Sequence[Row]) -> dict[str, str]:
    """Protocols of evaluation with their marks `[1]`, `[2]` ..., in the order of the rows."""
    words = dict.fromkeys(describe_protocol(row) for row in rows)
    return {protocol: f"[{index}]" for index, protocol in enumerate(words, start=1)}


def describe_protocol(row: Row) -> str:
    """Evaluation of a row, without the remark that the dagger stands for."""
    protocols = dict.fromkeys(run.get("protocol") or "not recorded" for run in row.runs)
    return " and ".join(protocols).removesuffix(f"; {NOT_NEXT_TOKEN}")
