"""What the figures of a comparison do not carry: what forbids a comparison, and what weakens one."""

from __future__ import annotations

from collections.abc import Sequence

from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.reporting import format
from fullrank.reporting.grouping import measured_on, text_differences, without_version
from fullrank.reporting.measure import BLEU, MEASURES, SCORES, TOKENISED_BLEU, Measure
from fullrank.reporting.results import LANGUAGE_MODELING, MASKED_MODELING, TRANSLATION, integer, mapping
from fullrank.reporting.table import MARK, Comparison, Row


def warnings_of(compared: Comparison) -> tuple[str, ...]:
    """What forbids a comparison."""
    groups: dict[int, list[Row]] = {}
    for row in compared.rows:
        groups.setdefault(row.text, []).append(row)
    several = (_incomparable(list(groups.values()), compared.measure),) if len(groups) > 1 else ()
    return (*several, *_left_out(compared), *_not_next_token(compared))


def cautions_of(compared: Comparison) -> tuple[str, ...]:
    """What weakens a comparison without forbidding it."""
    groups: dict[int, list[Row]] = {}
    for row in compared.rows:
        groups.setdefault(row.text, []).append(row)
    found = [sentence for rows in groups.values() for sentence in _cautions(rows)]
    found += [*_protocols(compared), *_other_measure(compared), *_conventions(compared), *_translations(compared)]
    return tuple(dict.fromkeys(found))


def signature_lines(compared: Comparison) -> list[str]:
    """How the scores of translations were computed, for beneath the table."""
    found = [
        f"{score.words}: sacreBLEU, {' and '.join(ways)}."
        for score in SCORES
        if (ways := compared.signatures.get(score.key))
    ]
    if compared.paper_measure is TOKENISED_BLEU:
        measured = any(TOKENISED_BLEU.key in row.scores for row in compared.rows)
        found.append(
            f"{TOKENISED_BLEU.short}: tokenised, lower-cased BLEU4, as fairseq-generate printed it, which is what the paper "
            "states; it does not compare with sacreBLEU's."
            + ("" if measured else " These runs have none: their corpus is not tokenised.")
        )
    return found


def _incomparable(groups: Sequence[Sequence[Row]], measure: Measure) -> str:
    texts = [measured_on(rows[0].runs[0]) for rows in groups]
    words = dict.fromkeys(word for text in texts[1:] for word in text_differences(texts[0], text))
    members = "; ".join(
        f"{format.listed([row.name for row in rows])} on {rows[0].label or 'a text not recorded'}" for rows in groups
    )
    plural = measure.plural[0].upper() + measure.plural[1:]
    differ = f"They differ in: {', '.join(words)}."
    return f"{plural} of these runs cannot be compared. {differ} Compare only within a group: {members}."


def _not_next_token(compared: Comparison) -> tuple[str, ...]:
    """What the mark at figures means, where there are any."""
    if not (names := [row.name for row in compared.marked]):
        return ()
    return (
        f"{MARK} {format.listed(names)}: {NOT_NEXT_TOKEN}. Such a figure compares with no other; that of the last position of "
        "every segment is an ordinary perplexity, for its target is not read.",
    )


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
    # batches of whole sentences do not end at the same token with every seed
    slack = 1.01 if rows[0].runs[0].task == TRANSLATION else 1.0
    if len(budgets) > 1 and budgets[-1] > slack * budgets[0]:
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
    if compared.task == MASKED_MODELING:
        found.append(f"What is compared is {MASKED_TOKEN}: the model reads the rest of the text, on both sides.")
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


_KINDS = {
    TRANSLATION: "translation models",
    LANGUAGE_MODELING: "language models",
    MASKED_MODELING: "masked language models",
}


def _left_out(compared: Comparison) -> tuple[str, ...]:
    """Runs of another task, which have no figure in common with these."""
    if not compared.left_out:
        return ()
    tasks = {run.task: None for run in compared.left_out}
    kinds = format.listed([_KINDS.get(task, task) for task in tasks])
    names = format.listed([f"{run.name} ({run.folder})" for run in compared.left_out])
    own = _KINDS.get(compared.task, compared.task)
    return (f"These are {own}, as the first run is; {kinds} are left out: {names}. Report them on their own.",)


def _translations(compared: Comparison) -> list[str]:
    """What to mind with figures of translations."""
    found: list[str] = []
    ways = compared.signatures.get(BLEU.key, ())
    if len(ways) > len({without_version(way) for way in ways}):
        found.append("BLEU was computed by different versions of sacreBLEU, which may move it a little.")
    corpora = [
        mapping(mapping(row.runs[0].result).get("corpus")) for row in compared.rows if row.runs[0].task == TRANSLATION
    ]
    if len({str(corpus.get("vocabulary")) for corpus in corpora}) > 1:
        found.append(
            "The rows have different vocabularies: their perplexities, which are per token, do not compare; BLEU does."
        )
    if compared.measure is BLEU and (
        names := [row.name for row in compared.rows if any(not run.next_token for run in row.runs)]
    ):
        found.append(f"Perplexity of {format.listed(names)} is left out: {NOT_NEXT_TOKEN}.")
    if compared.paper_measure is BLEU and compared.states(TOKENISED_BLEU):
        found.append(
            "The paper's figures of some rows are tokenised BLEU and are left out: ours beside them are sacreBLEU's."
        )
    return found
