"""Scores of tasks: BLEU and chrF of translations, the metrics of GLUE, exact match and F1 of SQuAD."""

from __future__ import annotations

import importlib.util
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike

from fullrank.config.glue import GlueTask
from fullrank.config.run import Tokenization
from fullrank.core.errors import InputError, one_line, pip_install, suggest

# -- translation: BLEU and chrF, 0 to 100 -----------------------------------------------------------------------------

TOKENISED_BLEU = (
    "tokenised, lower-cased BLEU4 (as fairseq-generate printed it, no smoothing); not comparable with sacreBLEU"
)


def sacrebleu() -> ModuleType:
    """The package sacrebleu; InputError with the command that installs it where it is missing."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise InputError(f"BLEU and chrF need sacrebleu; install it: {pip_install('translate')}")
    import sacrebleu

    return sacrebleu


# languages whose BLEU has other tokens than 13a, by their codes (ISO 639-1, 639-2, 639-3) and two names of countries
_BY_LANGUAGE: dict[Tokenization, str] = {
    "zh": "zh zho chi cmn yue cn",
    "ja-mecab": "ja jpn jp",
    "ko-mecab": "ko kor",
    "char": "th tha lo lao km khm my mya bur bo bod tib dz dzo",  # no spaces, and no tokens of sacreBLEU for them
}
_EXTRAS = {"ja-mecab": "sacrebleu[ja]", "ko-mecab": "sacrebleu[ko]"}


def tokenization_of(language: str) -> Tokenization | None:
    """Tokens of BLEU for a target language named `zh`, `zh_CN`, `zho_Hans` or the like; None where 13a is usual."""
    code = re.split(r"[^a-z]", language.casefold())[0]
    return next((name for name, codes in _BY_LANGUAGE.items() if code in codes.split()), None)


def bleu_of(tokenize: str = "13a", **options: Any) -> Any:
    """The BLEU of sacreBLEU over tokens of a kind; InputError where a package that they need is missing."""
    metrics = sacrebleu().metrics
    try:
        return metrics.BLEU(tokenize=tokenize, **options)
    except Exception as error:  # whatever MeCab raises
        if tokenize not in _EXTRAS:
            raise
        raise InputError(
            f"eval.bleu_tokenize: {tokenize} needs MeCab ({one_line(error, 80)}); install it: pip install "
            f"'{_EXTRAS[tokenize]}', or choose char"
        ) from error


def check_pairs(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """InputError unless there is one reference for each hypothesis, and at least one; empty lines are allowed."""
    for name, lines in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(lines, str):
            raise InputError(f"{name}: a list of sentences, given one string")
    if len(hypotheses) != len(references):
        raise InputError(
            f"{len(hypotheses):,} hypotheses and {len(references):,} references: give one line of each for every sentence"
        )
    if not hypotheses:
        raise InputError("no sentences to score: hypotheses and references are empty")


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "13a"
) -> dict[str, Any]:
    """BLEU and chrF of detokenised text by sacreBLEU, one reference a sentence.

    `lowercase` ignores case in both, `tokenize` is sacreBLEU's name of the tokens that BLEU counts. The signatures are
    sacreBLEU's, with its version: scores of different signatures do not compare, so every figure goes with its own.
    `length_ratio` is tokens of the hypotheses over tokens of the references; `brevity_penalty` is the factor of BLEU for
    being shorter. An empty hypothesis is a sentence without match.
    Raises InputError for different numbers of hypotheses and references, for none at all, and without sacreBLEU.
    """
    check_pairs(hypotheses, references)
    bleu, chrf = bleu_of(tokenize, lowercase=lowercase), sacrebleu().metrics.CHRF(lowercase=lowercase)
    score = bleu.corpus_score(list(hypotheses), [list(references)])
    return {
        "bleu": float(score.score),
        "bleu_signature": str(bleu.get_signature()),
        "chrf": float(chrf.corpus_score(list(hypotheses), [list(references)]).score),
        "chrf_signature": str(chrf.get_signature()),
        "brevity_penalty": float(score.bp),
        "length_ratio": float(score.ratio),
        "sentences": len(hypotheses),
    }


def tokenised_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """BLEU4 over white-space tokens of both sides as they are, in lower case, without smoothing.

    This is what fairseq-generate printed for IWSLT14, where hypotheses and references are tokenised (Moses), lower-cased
    and have their subwords joined. Tokenisation changes BLEU by points, so the label goes with the figure.
    Raises InputError for different numbers of hypotheses and references, and for none at all.
    """
    check_pairs(hypotheses, references)
    metric = metric_named("tokenised_bleu")
    score = metric.score(np.sum(metric.statistics(hypotheses, references), axis=0))
    return {"tokenised_bleu": float(score), "tokenised_bleu_label": TOKENISED_BLEU}


@dataclass(frozen=True)
class Metric:
    """A corpus score that is a function of counts which add up over sentences: resampled test sets are sums of rows.

    `scorer`: sacreBLEU's BLEU or CHRF, whose significance tests read counts by the same two methods.
    """

    name: str
    scorer: Any

    def statistics(self, hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
        """Counts (S, F) of n-grams of S sentences as float64, exact whole numbers."""
        counts = self.scorer._extract_corpus_statistics(list(hypotheses), [list(references)])
        return np.array(counts, dtype=np.float64).reshape(len(hypotheses), -1)

    def score(self, sums: np.ndarray) -> np.ndarray:
        """Scores (...), from 0 to 100, of sums (..., F) of counts."""
        rows = sums.reshape(-1, sums.shape[-1]).tolist()
        return np.array([self.scorer._compute_score_from_stats(row).score for row in rows]).reshape(sums.shape[:-1])


@cache  # a tokeniser remembers lines, and references recur
def metric_named(name: str, *, lowercase: bool = False, tokenize: str = "13a") -> Metric:
    """`bleu` (sacreBLEU's, of the tokens `tokenize`), `chrf`, or `tokenised_bleu` (white-space tokens, in lower case)."""
    match name:
        case "bleu":
            return Metric(name, bleu_of(tokenize, lowercase=lowercase, force=True))
        case "chrf":
            return Metric(name, sacrebleu().metrics.CHRF(lowercase=lowercase))
        case "tokenised_bleu":
            return Metric(name, bleu_of("none", lowercase=True, smooth_method="none", force=True))
    raise InputError(f"metric: '{name}' is none; {suggest(name, ('bleu', 'chrf', 'tokenised_bleu'))}")


def settings_of(signature: str) -> dict[str, Any]:
    """`lowercase` and `tokenize` of the BLEU that a signature of sacreBLEU describes; those of most if it states none."""
    stated = dict(part.split(":", 1) for part in signature.split("|") if ":" in part)
    tokens = stated.get("tok", "13a")  # MeCab's are followed by its version: ja-mecab-0.996-IPA
    known = (name for name in get_args(Tokenization) if tokens == name or tokens.startswith(f"{name}-"))
    return {"lowercase": stated.get("case") == "lc", "tokenize": next(known, tokens)}


# -- GLUE: fractions in double precision ------------------------------------------------------------------------------


def glue_scores(task: GlueTask, predictions: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Every metric of a task, its headline first, as fractions.

    predictions, labels (n,): class ids, not logits; real numbers for STS-B.
    Raises InputError for shapes that differ, no examples, class ids that are not integers and numbers that are not finite.
    """
    return {name: METRICS[name](predictions, labels) for name in task.metrics}


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Share of predictions that are right."""
    predicted, right = _classes(predictions, labels)
    return float(np.mean(predicted == right))


def f1(predictions: ArrayLike, labels: ArrayLike, positive: int = 1) -> float:
    """Harmonic mean of precision and recall of one class, here that of paraphrases and duplicates.

        F1 = 2 TP / (2 TP + FP + FN)

    0 where the class is neither among the labels nor predicted.
    """
    predicted, right = _classes(predictions, labels)
    both = int(np.sum((predicted == positive) & (right == positive)))
    either = int(np.sum(predicted == positive)) + int(np.sum(right == positive))  # 2 TP + FP + FN
    return 2 * both / either if either else 0.0


def matthews_correlation(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Correlation of predicted and true classes; of two classes,

        MCC = (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)),

    and of more, Gorodkin's R_K, which is the same for two. 0 where either side holds one class only.
    """
    predicted, right = _classes(predictions, labels)
    classes = np.unique(np.concatenate([predicted, right]))
    # integers of any length, so nothing is rounded before the last division
    predictions_of = [int(np.sum(predicted == one)) for one in classes]
    labels_of = [int(np.sum(right == one)) for one in classes]
    total, correct = len(right), int(np.sum(predicted == right))
    covariance = correct * total - sum(p * t for p, t in zip(predictions_of, labels_of, strict=True))
    spread = (total**2 - sum(p * p for p in predictions_of)) * (total**2 - sum(t * t for t in labels_of))
    return covariance / math.sqrt(spread) if spread else 0.0


def pearson(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Linear correlation; 0 where either side is constant, which has none (scipy returns nan there)."""
    return _correlation(*_numbers(predictions, labels))


def spearman(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Linear correlation of the ranks, where equal numbers share the mean of their ranks; 0 where either side is constant."""
    predicted, right = _numbers(predictions, labels)
    return _correlation(_ranks(predicted), _ranks(right))


METRICS: Mapping[str, Callable[[ArrayLike, ArrayLike], float]] = {
    metric.__name__: metric for metric in (accuracy, f1, matthews_correlation, pearson, spearman)
}


def _pair(predictions: ArrayLike, labels: ArrayLike, kinds: str, wanted: str) -> dict[str, np.ndarray]:
    """Both as arrays (n,) of the `kinds` of numpy; InputError for other shapes and types, and for no examples."""
    predicted, right = np.asarray(predictions), np.asarray(labels)
    if predicted.ndim == 2:
        raise InputError(f"predictions of shape {predicted.shape}: give one number an example, as logits.argmax(-1)")
    if predicted.shape != right.shape or predicted.ndim != 1:
        raise InputError(f"predictions {predicted.shape} and labels {right.shape}: give one of each an example")
    if len(right) == 0:
        raise InputError("no predictions: a metric needs at least one example")
    pair = {"predictions": predicted, "labels": right}
    for name, values in pair.items():
        if values.dtype.kind not in kinds:
            raise InputError(f"{name} of type {values.dtype}: {wanted}")
    return pair


def _classes(predictions: ArrayLike, labels: ArrayLike) -> list[np.ndarray]:
    pair = _pair(predictions, labels, "iub", "class ids are integers")
    return [values.astype(np.int64) for values in pair.values()]


def _numbers(predictions: ArrayLike, labels: ArrayLike) -> list[np.ndarray]:
    pair = _pair(predictions, labels, "iubf", "numbers are wanted")
    for name, values in pair.items():
        if len(bad := np.flatnonzero(~np.isfinite(values))):
            raise InputError(f"{name}: number {bad[0]} is {values[bad[0]]}; a correlation needs finite numbers")
    return [values.astype(np.float64) for values in pair.values()]


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's r of two series of the same length."""
    if (x == x[0]).all() or (y == y[0]).all():  # a rounded mean would leave something to divide by
        return 0.0
    x, y = x - x[0], y - y[0]  # exact or nearly, so that a great common offset costs no precision
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(np.dot(x / np.linalg.norm(x), y / np.linalg.norm(y)), -1.0, 1.0))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


# -- SQuAD: percent, 0 to 100, as the official scripts print it -------------------------------------------------------

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
    _check_questions("a prediction", predictions, references)
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
    _check_questions("a prediction", predictions, references)
    if null_odds is not None:
        _check_questions("no-answer odds", null_odds, references)
    answerable = {name: bool(texts) for name, texts in references.items()}
    raw: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for name, texts in references.items():
        # an answer of articles and punctuation alone cannot be matched; without any other, the question counts as having none
        accepted = [text for text in texts if normalize_answer(text)] or [""]
        raw["exact"][name] = max(exact_match(predictions[name], text) for text in accepted)
        raw["f1"][name] = max(token_f1(predictions[name], text, empty_matches=True) for text in accepted)
    emptied = set() if null_odds is None else {name for name in references if null_odds[name] > threshold}
    scores = {
        metric: {name: float(not answerable[name]) if name in emptied else of[name] for name in references}
        for metric, of in raw.items()
    }
    figures: dict[str, float] = {}
    for prefix, names in (
        ("", list(references)),
        ("HasAns_", [name for name in references if answerable[name]]),
        ("NoAns_", [name for name in references if not answerable[name]]),
    ):
        if names:
            figures |= {f"{prefix}{metric}": _percent([of[name] for name in names]) for metric, of in scores.items()}
            figures[f"{prefix}total"] = len(names)
    if null_odds is not None:
        by_odds = sorted((name for name in null_odds if name in references), key=lambda name: null_odds[name])
        for metric, of in raw.items():
            # all questions begin empty, and the predictions come back in the order of their odds
            total = best = float(sum(not able for able in answerable.values()))
            best_threshold = 0.0
            for name in by_odds:
                if answerable[name]:
                    total += of[name]
                elif predictions[name]:
                    total -= 1
                if total > best:
                    best, best_threshold = total, null_odds[name]
            figures |= {f"best_{metric}": 100.0 * best / len(of), f"best_{metric}_thresh": best_threshold}
    return figures


def _percent(scores: Sequence[float]) -> float:
    return 100.0 * sum(scores) / len(scores)


def _check_questions(what: str, answers: Mapping[str, object], references: References) -> None:
    if not references:
        raise InputError("no questions to score")
    if missing := references.keys() - answers.keys():
        raise InputError(f"{len(missing):,} of {len(references):,} questions lack {what}, {min(missing)} among them")
