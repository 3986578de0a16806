"""Scores of tasks: BLEU and chrF of translations, the metrics of GLUE, exact match and F1 of SQuAD."""

from __future__ import annotations

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fullrank.config.finetune import GlueTask
from fullrank.core.errors import InputError, RunError, one_line, pip_install

TOKENISED_BLEU = (
    "tokenised, lower-cased BLEU4 (as fairseq-generate printed it, no smoothing); not comparable with sacreBLEU"
)


def _import_metrics() -> Any:
    """Import the metrics of sacrebleu.

    Raises InputError with the command that installs it where it is missing.
    """
    if importlib.util.find_spec("sacrebleu") is None:
        raise InputError(f"BLEU and chrF need sacrebleu; install it: {pip_install('translate')}")
    import sacrebleu

    return sacrebleu.metrics


def bleu_of(tokenize: str | None = None, language: str = "", **options: Any) -> Any:
    """Build the BLEU metric of sacreBLEU.

    Args:
        tokenize: kind of tokens; None for sacreBLEU's choice for the language, 13a for most.
        language: target language.
        **options: further options of `sacrebleu.metrics.BLEU`.

    Raises:
        InputError: a package that is needed is missing, or there are no such tokens.
    """
    metrics = _import_metrics()
    try:
        return metrics.BLEU(tokenize=tokenize, trg_lang=language, **options)
    except Exception as error:  # of MeCab, of any kind
        tokenizer = tokenize or f"the choice for {language}"
        raise InputError(f"eval.bleu_tokenize: {tokenizer} cannot be used here ({one_line(error, 200)})") from error


def _check_pairs(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raise InputError unless there is one reference for each hypothesis, and at least one; empty lines are allowed."""
    if len(hypotheses) != len(references) or not hypotheses:
        raise InputError(
            f"{len(hypotheses):,} hypotheses and {len(references):,} references: give one line of each for every sentence"
        )


def translation_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str | None = None,
    language: str = "",
) -> dict[str, Any]:
    """Compute BLEU and chrF of detokenised text by sacreBLEU, one reference a sentence.

    The signatures are sacreBLEU's, with its version. Scores of different signatures do not compare, so every figure
    goes with its own. `length_ratio` is tokens of the hypotheses over tokens of the references. `brevity_penalty` is
    the factor of BLEU for being shorter. An empty hypothesis is a sentence without match.

    Args:
        hypotheses: translations, one a sentence.
        references: reference translations, one a sentence.
        lowercase: ignore case in both.
        tokenize: kind of tokens, as in `bleu_of`.
        language: target language, as in `bleu_of`.

    Returns:
        Scores, their signatures, and the number of sentences.

    Raises:
        InputError: the numbers of hypotheses and references differ, there are none, sacreBLEU is missing, or there are no such
            tokens.
    """
    _check_pairs(hypotheses, references)
    bleu = bleu_of(tokenize, language, lowercase=lowercase)
    chrf = _import_metrics().CHRF(lowercase=lowercase)
    texts = (list(hypotheses), [list(references)])
    score = bleu.corpus_score(*texts)
    chrf_score = chrf.corpus_score(*texts)
    return {
        "bleu": score.score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf_score.score,
        "chrf_signature": str(chrf.get_signature()),
        "brevity_penalty": score.bp,
        "length_ratio": score.ratio,
        "sentences": len(hypotheses),
    }


def tokenised_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Compute BLEU4 over white-space tokens of both sides as they are, in lower case, without smoothing.

    This is what fairseq-generate printed for IWSLT14, where hypotheses and references are tokenised (Moses),
    lower-cased and have their subwords joined. Tokenisation changes BLEU by points, so the label goes with the figure.
    Raises InputError for different numbers of hypotheses and references, for none at all, and without sacreBLEU.
    """
    _check_pairs(hypotheses, references)
    bleu = bleu_of("none", lowercase=True, smooth_method="none", force=True)
    score = bleu.corpus_score(list(hypotheses), [list(references)]).score
    return {"tokenised_bleu": score, "tokenised_bleu_label": TOKENISED_BLEU}


def glue_scores(task: GlueTask, predictions: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Compute every metric of a task, its headline first, as fractions.

    Args:
        task: task of GLUE.
        predictions: class ids (n,), not logits; real numbers for STS-B.
        labels: right answers (n,), likewise.

    Returns:
        Metrics by name.

    Raises:
        RunError: a number is not finite.
    """
    predicted = np.asarray(predictions)
    right = np.asarray(labels)
    if not (np.isfinite(predicted).all() and np.isfinite(right).all()):
        raise RunError("predictions are not finite numbers; has training diverged? lower train.learning_rate")
    return {name: METRICS[name](predicted, right) for name in task.metrics}


def measure_accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Measure the share of predictions that equal their labels."""
    return float(np.mean(np.equal(predictions, labels)))


def measure_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Measure the harmonic mean of precision and recall of class 1, that of paraphrases and duplicates.

        F1 = 2 TP / (2 TP + FP + FN)

    It is 0 where class 1 is nowhere.
    """
    predicted = np.equal(predictions, 1)
    right = np.equal(labels, 1)
    return float(2 * (predicted & right).sum() / max(predicted.sum() + right.sum(), 1))


def correlate(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Measure the linear correlation; 0 where either side is constant.

    Of two classes it is their Matthews correlation, (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)).
    """
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    return float(np.corrcoef(predictions, labels)[0, 1])


def correlate_ranks(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Measure the linear correlation of the ranks; 0 where either side is constant.

    Equal numbers share the mean of their ranks.
    """
    from scipy.stats import rankdata

    return correlate(rankdata(predictions), rankdata(labels))


METRICS = {
    "accuracy": measure_accuracy,
    "f1": measure_f1,
    "matthews_correlation": correlate,  # CoLA has two classes
    "pearson": correlate,
    "spearman": correlate_ranks,
}


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Normalize an answer for comparison.

    Lower case; then without ASCII punctuation; then without the articles a, an, the; words parted by one space.
    """
    words = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split())


def token_f1(prediction: str, reference: str, *, empty_matches: bool = False) -> float:
    """Compute F1 of the words of both after `normalize_answer`, as bags:  2 common / (predicted + reference words).

    Args:
        prediction: predicted answer.
        reference: accepted answer.
        empty_matches: whether two answers without words match, as in v2, where no answer is an answer. An answer
            without words matches no other.

    Returns:
        F1, from 0 to 1.
    """
    predicted = normalize_answer(prediction).split()
    wanted = normalize_answer(reference).split()
    if not (predicted and wanted):
        return float(empty_matches and predicted == wanted)
    common = Counter(predicted) & Counter(wanted)
    return 2 * common.total() / (len(predicted) + len(wanted))


def squad_scores(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], *, v2: bool = False
) -> dict[str, float]:
    """Compute the mean over all questions of the exact match, and of F1, with the best of each question's references.

    Args:
        predictions: answer to each question.
        references: accepted answers to each question; in v2 none for a question without an answer.
        v2: an empty prediction says that there is no answer.

    Returns:
        Scores by name, as fractions; in v2 also `HasAns_*` and `NoAns_*`, over questions with and without an answer, and the
        numbers of these as `HasAns_total` and `NoAns_total`.
    """
    exact = {}
    f1 = {}
    for name, texts in references.items():
        if v2:  # a reference of articles and punctuation alone cannot be matched
            texts = [text for text in texts if normalize_answer(text)] or [""]
        predicted = predictions[name]
        accepted = map(normalize_answer, texts)
        exact[name] = float(normalize_answer(predicted) in accepted)
        f1[name] = max(token_f1(predicted, text, empty_matches=v2) for text in texts)
    name_of_exact = "exact" if v2 else "exact_match"
    scores = {name_of_exact: fmean(exact.values()), "f1": fmean(f1.values())}
    for prefix, has_answer in (("HasAns", True), ("NoAns", False)):
        names = [name for name, texts in references.items() if bool(texts) == has_answer]
        if v2 and names:
            scores[f"{prefix}_exact"] = fmean(exact[name] for name in names)
            scores[f"{prefix}_f1"] = fmean(f1[name] for name in names)
            scores[f"{prefix}_total"] = len(names)
    return scores
