"""How good extracted answers are: exact match and F1 as the official scripts of SQuAD v1.1 and v2.0 define them.

All figures are percent, 0 to 100, as those scripts print them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from fullrank.core.errors import InputError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
References = Mapping[str, Sequence[str]]


def normalize_answer(text: str) -> str:
    """Lower case; then without ASCII punctuation; then without the articles a, an, the; words parted by one space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 if both are the same after `normalize_answer`, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(reference))


def token_f1(prediction: str, reference: str, *, empty_matches: bool = False) -> float:
    """F1 of the words of both after `normalize_answer`, as bags:  2 P R / (P + R),  P = common / predicted words.

    If one of them has no word: 0 in v1.1; in v2 (`empty_matches`) 1 if neither has one, since no answer is an answer there.
    """
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(reference).split()
    if empty_matches and not (predicted and wanted):
        return float(predicted == wanted)
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def squad_scores(predictions: Mapping[str, str], references: References) -> dict[str, float]:
    """v1.1: `exact_match` and `f1`, the mean over all questions of the best of each question's references.

    `predictions`: the answer of each question id. `references`: the accepted answers of each id.
    Raises InputError if a question has no prediction (the official script warns and counts it as wrong) or no reference.
    """
    _check(predictions, references)
    for name, accepted in references.items():
        if not accepted:
            raise InputError(f"question {name} has no reference answer; questions without one need the scores of v2")
    exact = [max(exact_match(predictions[name], text) for text in texts) for name, texts in references.items()]
    f1 = [max(token_f1(predictions[name], text) for text in texts) for name, texts in references.items()]
    return {"exact_match": _percent(exact), "f1": _percent(f1), "total": len(references)}


def squad_v2_scores(
    predictions: Mapping[str, str],
    references: References,
    null_odds: Mapping[str, float] | None = None,
    *,
    threshold: float = 1.0,
) -> dict[str, float]:
    """v2: `exact` and `f1` over all questions; `HasAns_*` and `NoAns_*` over those with and without an answer.

    `references`: the accepted answers of each id, none for a question without an answer. An empty prediction says there is
    no answer. `null_odds`: how much each question looks as if it had none; a question above `threshold` counts as predicted
    empty, and `best_exact`, `best_f1` are what the best threshold (`best_exact_thresh`, `best_f1_thresh`) would give with
    these predictions, which must then be the best answers that are not empty.
    As in the official script, questions of equal odds are not kept together when the best threshold is sought.
    Raises InputError if a question lacks a prediction (the official script leaves it out) or odds.
    """
    _check(predictions, references)
    answerable = {name: bool(texts) for name, texts in references.items()}
    # an answer of articles and punctuation alone cannot be matched; without any other the question counts as having none
    accepted = {name: [text for text in texts if normalize_answer(text)] or [""] for name, texts in references.items()}
    raw = {
        "exact": _best(predictions, accepted, exact_match),
        "f1": _best(predictions, accepted, lambda given, wanted: token_f1(given, wanted, empty_matches=True)),
    }
    odds = dict.fromkeys(references, 0.0) if null_odds is None else _known_odds(null_odds, references)
    judged = {
        metric: {
            name: float(not answerable[name]) if odds[name] > threshold else score for name, score in scores.items()
        }
        for metric, scores in raw.items()
    }
    found: dict[str, float] = {}
    for prefix, names in (
        ("", list(references)),
        ("HasAns_", [name for name in references if answerable[name]]),
        ("NoAns_", [name for name in references if not answerable[name]]),
    ):
        if names:
            found |= {f"{prefix}{metric}": _percent([judged[metric][name] for name in names]) for metric in judged}
            found[f"{prefix}total"] = len(names)
    if null_odds is not None:
        for metric, scores in raw.items():
            score, at = _best_threshold(predictions, scores, odds, answerable)
            found |= {f"best_{metric}": score, f"best_{metric}_thresh": at}
    return found


def _best_threshold(
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    odds: Mapping[str, float],
    answerable: Mapping[str, bool],
) -> tuple[float, float]:
    """From all questions empty, the predictions come back in the order of their odds; the best total and where it was."""
    total = best = float(sum(not able for able in answerable.values()))
    threshold = 0.0
    for name in sorted(odds, key=lambda name: odds[name]):
        if answerable[name]:
            total += scores[name]
        elif predictions[name]:
            total -= 1
        if total > best:
            best, threshold = total, odds[name]
    return 100.0 * best / len(scores), threshold


def _best(predictions: Mapping[str, str], accepted: References, score: Callable[[str, str], float]) -> dict[str, float]:
    return {name: max(score(predictions[name], text) for text in texts) for name, texts in accepted.items()}


def _percent(scores: Sequence[float]) -> float:
    return 100.0 * sum(scores) / len(scores)


def _check(predictions: Mapping[str, str], references: References) -> None:
    if not references:
        raise InputError("no questions to score")
    _check_all("a prediction", predictions, references)


def _known_odds(odds: Mapping[str, float], references: References) -> dict[str, float]:
    _check_all("no-answer odds", odds, references)
    return {name: value for name, value in odds.items() if name in references}


def _check_all(what: str, given: Iterable[str], references: References) -> None:
    missing = references.keys() - set(given)
    if missing:
        raise InputError(f"{len(missing):,} of {len(references):,} questions lack {what}, {min(missing)} among them")
