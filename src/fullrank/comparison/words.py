"""A comparison in words: the headline, what the figures say and no more, and what forbids or weakens a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullrank.comparison.compare import Comparison, Group
from fullrank.comparison.measures import BLEU, MEASURES, TOKENISED_BLEU, WITHOUT_SOS, Measure
from fullrank.comparison.resampled import DIFFERENCE
from fullrank.comparison.rows import Row, compare_texts, find_unequal_terms, identify_text
from fullrank.comparison.runs import MASKED_MODELING, SPLITS, TRANSLATION, Run, integer, mapping
from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.records import Interval, Record
from fullrank.render.tables import format_value, join_words

_SPLIT_WORDS = {"valid": "validation"}


@dataclass(frozen=True)
class Summary:
    """`headline` is one line, `paragraphs` are a few sentences. `warnings` forbid a comparison, `cautions` weaken one."""

    headline: str
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...]
    cautions: tuple[str, ...]


def summarize(compared: Comparison, resampled: Sequence[Record] = ()) -> Summary:
    """Summary of a comparison; every claim is one that its figures support."""
    claims = [(group, *_claim(group, resampled)) for group in compared.groups]
    parts = len({group.part for group in compared.groups})
    paragraphs: list[str] = []
    if not claims:
        headline = "No run has finished yet"
    elif len(claims) == 1:
        _, headline, sentence = claims[0]
        paragraphs = [sentence]
    else:
        honest = [claim for claim in claims if not claim[0].is_marked] or claims
        paragraphs = [_join_claim(_name_group(group, compared), *claim) for group, *claim in claims]
        if compared.mixed_texts:
            headline = "Not one comparison: the runs differ in text, vocabulary or signature"
        elif parts > 1:
            what = "tasks" if compared.rows[0].first.finetunes else "models"
            headline = f"{parts} {what} in one table: rows of each are compared with its first"
        else:
            _, headline, sentence = honest[0]
            paragraphs = [sentence]
    cautions = dict.fromkeys(_find_cautions(compared))
    return Summary(headline, tuple(filter(None, paragraphs)), tuple(_find_warnings(compared)), tuple(cautions))


def _name_group(group: Group, compared: Comparison) -> str:
    return group.part or (
        f"On {group.rows[0].first.label or 'a text that is not recorded'}" if compared.mixed_texts else ""
    )


def _join_claim(name: str, headline: str, sentence: str) -> str:
    return f"{name}: {headline}. {sentence}".removeprefix(": ").strip()


def name_split(split: str) -> str:
    """`validation` of `valid`."""
    return _SPLIT_WORDS.get(split, split)


def show_spread(row: Row, measure: Measure, split: str) -> str:
    """Mean ± sample standard deviation; the mean alone for one seed."""
    values = list(row.values(measure, split).values())
    text = measure.show(statistics.fmean(values))
    return text if len(values) < 2 else f"{text} ± {measure.show(statistics.stdev(values))}"


def is_decided(interval: Interval | None) -> bool:
    """0 is outside of the interval."""
    return interval is not None and (interval[0] > 0 or interval[1] < 0)


def _claim(group: Group, resampled: Sequence[Record]) -> tuple[str, str]:
    """Headline and sentences about the rows of a group."""
    measure, split, rows = group.measure, group.split, group.rows
    names = join_words(row.name for row in rows)
    if group.undertrained:
        below = join_words(row.name for row in group.undertrained)
        headline = f"{below}: undertrained, {measure.words} above that of a unigram model"
        return headline, "Rows above it have learned less than word frequencies: train longer to compare."
    if group.is_marked:
        return f"{names}: {measure.words} is {NOT_NEXT_TOKEN}", ""
    best = group.find_best(rows)
    if best is None:
        return f"{names}: no {measure.words} to compare", ""
    figure = f"{name_split(split)} {measure.words} {show_spread(best, measure, split)}"
    if len(group.measured) == 1:
        lone = "One seed says nothing about the spread." if len(best.runs) == 1 else ""
        return f"{best.name}: {figure}", lone
    base = group.baseline_of(best)
    pair = next((record for record in resampled if _is_pair(record, best, base, split)), None)
    headline = _claim_first(group, best, figure) if base is None else _claim_best(group, best, base, figure, pair)
    sentences = [
        _describe_pair(pair),
        _find_near_rows(group, best),
        _describe_seeds(rows),
    ]
    return headline, " ".join(filter(None, sentences))


def _claim_first(group: Group, best: Row, figure: str) -> str:
    """The baseline is best: the next row stands beside it."""
    headline = f"{best.name}, the first row, stays {group.measure.extreme}: {figure}"
    other = group.find_best([row for row in group.measured if row is not best])
    difference = group.difference(other, best, group.measure, group.split) if other else None
    if other is None or difference is None:
        return headline
    if _are_equal(group, best, other):
        return f"{best.name} and {other.name} are equal to the digits shown: {figure}"
    ends = difference.interval
    sure = f" (95 % interval {group.measure.show_interval(*ends)})" if ends else ""
    return f"{headline}; next is {other.name} at {group.measure.show_difference(difference.value)}{sure}"


def _claim_best(group: Group, best: Row, base: Row, figure: str, pair: Record | None) -> str:
    """The best row beside its baseline: `is best` only where its intervals leave out 0."""
    measure = group.measure
    difference = group.difference(best, base, measure, group.split)
    lead = f"{best.name} is {measure.extreme}"
    if difference is None or difference.value is None:
        return f"{lead}: {figure}"
    if _are_equal(group, best, base):
        return f"{best.name} and {base.name} are equal to the digits shown: {figure}"
    beyond = "above" if measure.higher else "below"
    value = f"{figure}, {measure.show_size(difference.value)} {beyond} {base.name}"
    if difference.interval is None:
        lone = [row.name for row in (best, base) if len(row.runs) == 1]
        seeds = ("no scatter over the seeds", f"one seed of {join_words(lone)}", "one seed")[len(lone)]
        return f"{lead}: {value} ({seeds}, no interval)"
    value = f"{value} (95 % interval {measure.show_interval(*difference.interval)})"
    if not is_decided(difference.interval):
        return f"{lead}, but other seeds might turn it round: {value}"
    if pair is not None and not is_decided(pair.interval):
        return f"{lead}, but other sentences might turn it round: {value}"
    return f"{best.name} is best: {value}"


def _are_equal(group: Group, one: Row, other: Row) -> bool:
    shown = [group.measure.show(row.mean(group.measure, group.split)) for row in (one, other)]
    return shown[0] == shown[1]


def _is_pair(record: Record, best: Row, base: Row | None, split: str) -> bool:
    labels = {"row": best.name, "split": split, "baseline": base.name if base else ""}
    return record.measure == DIFFERENCE and record.has(labels)


def _describe_pair(pair: Record | None) -> str:
    """Result of resampled test sets for the best row."""
    if pair is None or pair.interval is None:
        return ""
    verdict = "leaves out 0" if is_decided(pair.interval) else "holds 0: other sentences might turn it round"
    change, ends = format_value(pair.value, "+.2f"), BLEU.show_interval(*pair.interval)
    return (
        f"Paired bootstrap over sentences, {pair.labels['row']} − {pair.labels['baseline']}: {change} ({ends}); "
        f"the 95 % interval {verdict}."
    )


def _find_near_rows(group: Group, best: Row) -> str:
    """Rows from which the best cannot be told apart, besides its baseline, of which the headline speaks."""
    near = []
    for row in group.measured:
        if row is not best and row is not group.baseline_of(best):
            difference = group.difference(best, row, group.measure, group.split)
            if difference is not None and difference.interval and not is_decided(difference.interval):
                near.append(row.name)
    return f"These seeds do not tell {best.name} from {join_words(near)}." if near else ""


def _describe_seeds(rows: Sequence[Row]) -> str:
    lone = [row.name for row in rows if len(row.runs) == 1]
    if len(lone) == len(rows):
        return (
            "Every row is one seed, and one seed cannot decide between rows: how far seeds scatter is not known here."
        )
    return f"One seed only, so nothing is decided: {join_words(lone)}." if lone else ""


# -- what forbids a comparison, and what weakens one -------------------------------------------------------------------


def _find_warnings(compared: Comparison) -> Iterator[str]:
    texts = compared.mixed_texts
    if texts:
        in_bits = compared.groups[0].measure.in_bits
        first, *others = (identify_text(row.first, in_bits) for row in texts)
        fields = dict.fromkeys(word for other in others for word in compare_texts(first, other))
        yield (
            f"Not comparable: the runs differ in {', '.join(fields)}. Compare only within a table: "
            f"{', '.join(row.first.label or 'a text not recorded' for row in texts)}."
        )
    if compared.left_out:
        names = join_words(f"{run.name} ({run.folder})" for run in compared.left_out)
        tasks = join_words({run.task.replace("_", " ") for run in compared.left_out})
        own = compared.task.replace("_", " ")
        yield f"These are runs of {own}, as the first is; those of {tasks} are left out: {names}. Report them on their own."
    marked = [row.name for group in compared.groups if group.is_marked for row in group.rows]
    if marked:
        yield (
            f"† {join_words(marked)}: {NOT_NEXT_TOKEN}. Such a figure compares with no other; that of the last position of "
            "every segment is an ordinary perplexity, for its target is not read."
        )
    for group in compared.groups:
        for row in group.rows:
            base = group.baseline_of(row)
            if row.first.finetunes and base is not None:
                yield from _warn_of_unequal_terms(row, base)


def _warn_of_unequal_terms(row: Row, base: Row) -> Iterator[str]:
    """Differences of fine-tuning besides the mechanism."""
    terms = find_unequal_terms(row, base)
    steps = [tuple(sorted({str(run.get("steps")) for run in one.runs})) for one in (row, base)]
    if steps[0] != steps[1]:
        terms = {"steps": (", ".join(steps[0]), ", ".join(steps[1])), **terms}
    words = [f"{key} is {own} in {row.name}, {theirs} in {base.name}" for key, (own, theirs) in terms.items()]
    files = [mapping(one.first.get("sha256")).get("train") for one in (row, base)]
    if files[0] != files[1]:
        words.append(f"{row.name} and {base.name} read other train examples")
    if words:
        yield f"Not equal terms: {'; '.join(words)}."


def _find_cautions(compared: Comparison) -> Iterator[str]:
    rows, runs = compared.rows, compared.runs
    if not compared.groups:
        return
    measure, finetunes = compared.groups[0].measure, rows[0].first.finetunes
    for group in compared.groups:
        yield from _find_cautions_of_group(group)
    protocols = name_protocols(rows)
    if len(protocols) > 1:
        ways = "; ".join(f"{mark} {words}" for words, mark in protocols.items())
        yield f"Rows were not all evaluated by the same protocol; part of a difference may come from that: {ways}."
    if any(len({str(mapping(one).get("words")) for one in mapping(run.get("protocols")).values()}) > 1 for run in runs):
        yield "Validation and test figures are measured by different protocols: the two columns do not compare."
    if compared.task == MASKED_MODELING:
        yield f"What is compared is {MASKED_TOKEN}: the model reads the rest of the text, on both sides."
    if any(run.paper.get("checkpoint") == "last" for run in runs):
        yield "The paper's figures are of the weights of the last epoch: compare them with ours of the last checkpoint."
    if any(row.mean(WITHOUT_SOS, split) for row in rows for split in SPLITS):
        yield (
            "Every line begins with a token <sos>, which counts in the perplexities and costs almost nothing; without it, as "
            "tokens are usually counted, they are higher."
        )
    stated = [one for one in MEASURES if any(one.paper_figure(run, split) for run in runs for split in SPLITS)]
    if stated and compared.groups[0].paper is None and not finetunes:
        yield f"The paper's figures are {stated[-1].words}, and these runs are compared by {measure.words}: they are left out."
    if compared.groups[0].paper is TOKENISED_BLEU:
        yield "The paper's BLEU is tokenised and lower-cased (fairseq-generate): sacreBLEU's does not compare with it."
    if compared.task == TRANSLATION and len({str(row.first.corpus.get("vocabulary")) for row in rows}) > 1:
        yield "The rows have different vocabularies: their perplexities, which are per token, do not compare; BLEU does."
    if any(run.get("checkpoint") == "best" for run in runs if finetunes):
        yield "Figures are of the best evaluation, which was chosen on the very split that they are of: it flatters them."
    for row in rows:
        yield from describe_reuse(row)


def name_protocols(rows: Sequence[Row]) -> dict[str, str]:
    """Protocols of evaluation with their marks `[1]`, `[2]` ..., in the order of the rows."""
    words = dict.fromkeys(describe_protocol(row) for row in rows)
    return {protocol: f"[{index}]" for index, protocol in enumerate(words, start=1)}


def describe_protocol(row: Row) -> str:
    """Evaluation of a row, without the remark that the dagger stands for."""
    protocols = dict.fromkeys(str(run.get("protocol") or "not recorded") for run in row.runs)
    return " and ".join(protocols).removesuffix(f"; {NOT_NEXT_TOKEN}")


def find_signatures(runs: Sequence[Run]) -> list[str]:
    """sacreBLEU's signatures of the BLEU of runs, each once."""
    signatures = [run.get("final", split, "bleu_signature") for run in runs for split in SPLITS]
    return list(dict.fromkeys(str(signature) for signature in signatures if signature))


def describe_reuse(row: Row) -> Iterator[str]:
    """Runs of a row whose training is that of a row of another table, or of this one."""
    for run in row.runs:
        origin = mapping(run.get("training"))
        if origin:
            whose = " ".join(str(origin[key]) for key in ("recipe", "row") if origin.get(key))
            yield f"{row.name}, seed {run.seed}: one training with {whose} ({origin.get('folder')}), measured anew."


def _find_cautions_of_group(group: Group) -> Iterator[str]:
    first, runs = group.rows[0].first, [run for row in group.rows for run in row.runs]
    if first.is_slice and not first.finetunes:
        yield f"The text is a slice ({first.label}): its figures are not those of the published corpus."
    reduced = first.is_slice or any(run.get("scale") not in (None, "paper") for run in runs)
    if reduced and any(run.paper for run in runs) and not first.finetunes:
        yield (
            f"These runs are on {first.label}. The paper's figures belong to its own setting (scale paper, full corpus), "
            "which these runs do not repeat: the levels do not compare."
        )
    budgets = sorted(tokens for tokens in (integer(run.get("tokens_seen")) for run in runs) if tokens is not None)
    # batches of whole sentences do not end at the same token with every seed
    slack = 1.01 if first.task == TRANSLATION else 1.0
    if budgets and budgets[-1] > slack * budgets[0]:
        yield f"The runs did not train on equally many tokens: {budgets[0]:,} to {budgets[-1]:,}."
    keys = ("platform", "cpu", "threads", "device", "precision")
    if len({tuple(str(run.get("environment", key)) for key in keys) for run in runs}) > 1:
        yield "The runs were not all made on the same kind of machine; tokens/s, ms and wall time do not compare."
