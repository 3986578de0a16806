"""A comparison in words: the headline with its interval, what forbids a comparison, and what weakens one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from fullrank.comparison.compare import Comparison, Group, compare_rows
from fullrank.comparison.rows import compare_texts, identify_text
from fullrank.comparison.runs import TRANSLATION, integer
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.render.tables import join_words


def summarize(compared: Comparison) -> tuple[str, list[str]]:
    """The headline and further sentences; every claim is one that the figures support."""
    groups = compared.groups
    claims = [write_headline(group) for group in groups]
    parts = len({group.part for group in groups})
    headline = claims[0] if claims else "No run has finished yet"
    sentences: list[str] = []
    if compared.mixed_texts or parts > 1:
        what = "tasks" if groups[0].runs[0].finetunes else "models"
        headline = f"{parts} {what} in one table: rows of each are compared with its first"
        names = [group.part or f"On {group.runs[0].label or 'a text that is not recorded'}" for group in groups]
        sentences = [f"{name}: {claim}." for name, claim in zip(names, claims, strict=True)]
    if compared.mixed_texts:
        headline = "Not one comparison: the runs differ in text, vocabulary or signature"
    return headline, sentences


# -- the headline ------------------------------------------------------------------------------------------------------


def write_headline(group: Group) -> str:
    """The headline of a group. A row `is best` only where its interval leaves out 0."""
    measure, split = group.measure, group.split
    names = join_words(row.name for row in group.rows)
    if undertrained := group.find_above("unigram"):
        below = join_words(row.name for row in undertrained)
        return f"{below}: undertrained, {measure.words} above that of a unigram model"
    if group.is_marked:
        return f"{names}: {measure.words} is {NOT_NEXT_TOKEN}"
    if not group.ranking:
        return f"{names}: no {measure.words} to compare"
    best, *others = group.ranking
    values = list(best.values(measure, split).values())
    figure = f"{split} {measure.words} {measure.show(statistics.fmean(values))}"
    if len(values) > 1:
        figure += f" ± {measure.show(statistics.stdev(values))}"
    if not others:
        return f"{best.name}: {figure}"
    other = group.find_baseline(best) or others[0]
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


# -- what forbids a comparison -----------------------------------------------------------------------------------------


def find_warnings(compared: Comparison) -> Iterator[str]:
    """Sentences about runs that do not compare."""
    texts = compared.mixed_texts
    if texts:
        first, *others = (identify_text(row.first) for row in texts)
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
    "environment.cpu": _MACHINES,
    "environment.device": _MACHINES,
    "environment.threads": _MACHINES,
}


def find_cautions(compared: Comparison) -> Iterator[str]:
    """Sentences about what part of a difference may come from; some come again for each group."""
    for group in compared.groups:
        first = group.runs[0]
        is_reduced = first.is_slice or any(run.get("scale") not in (None, "paper") for run in group.runs)
        if is_reduced and not first.finetunes and any(run.get("paper") for run in group.runs):
            yield f"The paper's figures are of scale paper and the full corpus: on {first.label} the levels do not compare."
        if above := group.find_above("fourgram"):
            names = join_words(row.name for row in above)
            yield f"{names}: {group.measure.words} above that of counting 4-grams, so that a difference says little yet."
        for key, sentence in _SHARED.items():
            values = {str(run.get(key)) for run in group.runs}
            if len(values) > 1:
                yield sentence
        tokens = [integer(run.get("tokens_seen")) or 0 for run in group.runs if run.result is not None]
        # streams of random lengths, and batches of whole sentences, do not end at the same token with every seed
        if first.task != TRANSLATION and max(tokens, default=0) > 1.01 * min(tokens, default=0):
            yield "The runs did not train on equally many tokens."
    if any(run.finetunes and run.get("checkpoint") == "best" for run in compared.runs):
        yield "Figures are of the best evaluation, which was chosen on the very split that they are of: it flatters them."
    for row in compared.rows:
        for run in row.runs:
            trained = run.get_mapping("training")
            if trained:
                origin = " ".join(str(trained[key]) for key in ("recipe", "row") if trained.get(key))
                yield f"{row.name}, seed {run.seed}: one training with {origin} ({trained.get('folder')}), measured anew."
