"""A comparison in words: the headline with its interval, what forbids a comparison, and what weakens one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from fullrank.comparison.compare import Comparison, Group, compare_rows
from fullrank.comparison.measures import Measure
from fullrank.comparison.rows import Row, compare_texts, identify_text
from fullrank.comparison.runs import TRANSLATION
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.render.tables import join_words


@dataclass(frozen=True)
class Summary:
    """`headline` is one line, `paragraphs` are a few sentences. `warnings` forbid a comparison, `cautions` weaken one."""

    headline: str
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...]
    cautions: tuple[str, ...]


def summarize(compared: Comparison) -> Summary:
    """Summary of a comparison; every claim is one that its figures support."""
    groups = compared.groups
    claims = [write_headline(group) for group in groups]
    parts = len({group.part for group in groups})
    headline = claims[0] if claims else "No run has finished yet"
    paragraphs: list[str] = []
    if compared.mixed_texts or parts > 1:
        what = "tasks" if groups[0].runs[0].finetunes else "models"
        headline = f"{parts} {what} in one table: rows of each are compared with its first"
        names = [group.part or f"On {group.runs[0].label or 'a text that is not recorded'}" for group in groups]
        paragraphs = [f"{name}: {claim}." for name, claim in zip(names, claims, strict=True)]
    if compared.mixed_texts:
        headline = "Not one comparison: the runs differ in text, vocabulary or signature"
    cautions = tuple(dict.fromkeys(_find_cautions(compared)))
    return Summary(headline, tuple(paragraphs), tuple(_find_warnings(compared)), cautions)


def name_split(split: str) -> str:
    """`validation` of `valid`."""
    return "validation" if split == "valid" else split


# -- the headline ------------------------------------------------------------------------------------------------------


def write_headline(group: Group) -> str:
    """The headline of a group. A row `is best` only where its interval leaves out 0."""
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
    other = group.baseline_of(best) or others[0]
    difference = compare_rows(best, other, measure, split)
    if difference is None or difference.value is None:
        return f"{best.name} is {measure.extreme}: {figure}"
    size = measure.show_difference(abs(difference.value)).removeprefix("+")
    figure += f", {size} {'above' if measure.higher else 'below'} {other.name}"
    if difference.interval is None:
        seeds = "one seed" if min(len(best.runs), len(other.runs)) == 1 else "no scatter over the seeds"
        return f"{best.name} is {measure.extreme}: {figure} ({seeds}, no interval)"
    low, high = difference.interval
    ends = [measure.show_difference(end).removesuffix(" points") for end in (low, high)]
    figure += f" (95 % interval {' to '.join(ends)})"
    if low <= 0 <= high:
        return f"{best.name} is {measure.extreme}, but other seeds might turn it round: {figure}"
    return f"{best.name} is best: {figure}"


def _show_spread(row: Row, measure: Measure, split: str) -> str:
    """Mean ± sample standard deviation; the mean alone for one seed."""
    values = list(row.values(measure, split).values())
    text = measure.show(statistics.fmean(values))
    return text if len(values) < 2 else f"{text} ± {measure.show(statistics.stdev(values))}"


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
        yield f"Compared are runs of the task of the first; others are left out: {names}."
    marked = [row.name for group in compared.groups if group.is_marked for row in group.rows]
    if marked:
        yield (
            f"† {join_words(marked)}: {NOT_NEXT_TOKEN}. Such a figure compares with no other; that of the last position of "
            "every segment is an ordinary perplexity, for its target is not read."
        )


# -- what weakens one --------------------------------------------------------------------------------------------------

_MACHINES = "The runs were not all made on the same kind of machine; tokens/s, ms and wall time do not compare."
# what the runs of a comparison should share, as keys of their results, and what is said where they do not
_SHARED = {
    "protocol": "Rows were not all evaluated by the same protocol; part of a difference may come from that.",
    "corpus.vocabulary": "The rows have different vocabularies: figures per token do not compare.",
    "tokens_seen": "The runs did not train on equally many tokens.",
    "environment.cpu": _MACHINES,
    "environment.device": _MACHINES,
    "environment.threads": _MACHINES,
}


def _find_cautions(compared: Comparison) -> Iterator[str]:
    for group in compared.groups:
        first = group.runs[0]
        is_reduced = first.is_slice or any(run.get("scale") not in (None, "paper") for run in group.runs)
        if is_reduced and not first.finetunes and any(run.get("paper") for run in group.runs):
            yield f"The paper's figures are of scale paper and the full corpus: on {first.label} the levels do not compare."
        if group.above_fourgrams:
            above = join_words(row.name for row in group.above_fourgrams)
            yield f"{above}: {group.measure.words} above that of counting 4-grams, so that a difference says little yet."
        for key, sentence in _SHARED.items():
            values = {str(run.get(key)) for run in group.runs}
            # batches of whole sentences do not end at the same token with every seed
            if len(values) > 1 and (first.task, key) != (TRANSLATION, "tokens_seen"):
                yield sentence
    if any(run.finetunes and run.get("checkpoint") == "best" for run in compared.runs):
        yield "Figures are of the best evaluation, which was chosen on the very split that they are of: it flatters them."
    for row in compared.rows:
        for run in row.runs:
            trained = run.get_mapping("training")
            if trained:
                origin = " ".join(str(trained[key]) for key in ("recipe", "row") if trained.get(key))
                yield f"{row.name}, seed {run.seed}: one training with {origin} ({trained.get('folder')}), measured anew."
