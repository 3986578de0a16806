"""What BLEU and chrF are made of: counts of every sentence, which add up, and the score of a sum of them.

One row a sentence, so that a part of a test set, or a resampled one, is scored by adding rows.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np

from fullrank.core.errors import InputError, suggest

BLEU_ORDER = 4
CHRF_ORDER, CHRF_BETA = 6, 2.0


def sacrebleu() -> ModuleType:
    """The package sacrebleu; InputError with the command that installs it where it is missing."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise InputError("BLEU and chrF need sacrebleu; install it: pip install 'fullrank[translate]'")
    import sacrebleu

    return sacrebleu


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


@dataclass(frozen=True)
class Metric:
    """A corpus score that is a function of counts which add up over sentences.

    statistics: hypotheses and references (S sentences) -> (S, F) counts as float64, exact whole numbers.
    score: (..., F) sums of such rows -> (...), from 0 to 100.
    """

    name: str
    statistics: Callable[[Sequence[str], Sequence[str]], np.ndarray]
    score: Callable[[np.ndarray], np.ndarray]


def metric_named(name: str, *, lowercase: bool = False) -> Metric:
    """`bleu` (sacreBLEU's, 13a tokens), `chrf`, or `tokenised_bleu` (white-space tokens, always in lower case)."""
    match name:
        case "bleu":
            return Metric(
                name, lambda h, r: bleu_statistics(_words_13a(h, lowercase), _words_13a(r, lowercase)), bleu_of
            )
        case "chrf":
            return Metric(name, lambda h, r: chrf_statistics(_cased(h, lowercase), _cased(r, lowercase)), chrf_of)
        case "tokenised_bleu":
            return Metric(name, lambda h, r: bleu_statistics(_words(h), _words(r)), unsmoothed_bleu_of)
    raise InputError(f"metric: '{name}' is none; {suggest(name, ('bleu', 'chrf', 'tokenised_bleu'))}")


def bleu_statistics(hypotheses: Iterable[Sequence[str]], references: Iterable[Sequence[str]]) -> np.ndarray:
    """Counts of sentences given as tokens: (S, 2 + 2 * BLEU_ORDER).

        hypothesis length, reference length, matches of 1- to 4-grams, 1- to 4-grams in the hypothesis

    An n-gram matches at most as often as the reference has it (modified precision).
    """
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        orders = range(1, BLEU_ORDER + 1)
        matches = [_matches(hypothesis, reference, order) for order in orders]
        totals = [max(0, len(hypothesis) - order + 1) for order in orders]
        rows.append([len(hypothesis), len(reference), *matches, *totals])
    return np.array(rows, dtype=np.float64).reshape(-1, 2 + 2 * BLEU_ORDER)


def bleu_of(sums: np.ndarray) -> np.ndarray:
    """BLEU of summed counts (..., 2 + 2 * BLEU_ORDER), as sacreBLEU computes it by default.

        BLEU = 100 * min(1, exp(1 - r / c)) * (p_1 p_2 p_3 p_4)^(1/4)

    c and r are the lengths of hypotheses and references, p_n the modified precisions. Smoothing `exp`: the k-th precision
    without a match counts as 1 / (2^k * n-grams). No match at all, or no 4-gram at all, is 0.
    """
    return _bleu(sums, smooth=True)


def unsmoothed_bleu_of(sums: np.ndarray) -> np.ndarray:
    """BLEU without smoothing, as fairseq-generate computes it: 0 as soon as one precision is 0."""
    return _bleu(sums, smooth=False)


def _bleu(sums: np.ndarray, *, smooth: bool) -> np.ndarray:
    length, reference = sums[..., 0], sums[..., 1]
    matches, totals = sums[..., 2 : 2 + BLEU_ORDER], sums[..., 2 + BLEU_ORDER :]
    missed = np.cumsum(matches == 0, axis=-1)
    counted = np.where(matches == 0, 0.5**missed, matches) if smooth else matches
    with np.errstate(divide="ignore", invalid="ignore"):
        log_precision = np.log(counted / totals).mean(axis=-1)
        log_brevity = np.minimum(0.0, 1 - reference / length)
        score = 100 * np.exp(log_brevity + log_precision)
    scored = (matches[..., 0] > 0) & (totals > 0).all(axis=-1)
    return np.where(scored, score, 0.0)


def chrf_statistics(hypotheses: Iterable[str], references: Iterable[str]) -> np.ndarray:
    """Counts of sentences (S, 3 * CHRF_ORDER): n-grams of the hypothesis, of the reference, and matches, for n = 1 to 6.

    n-grams are of characters without white space. Those of a hypothesis whose reference has none of that length do not
    count, as in sacreBLEU.
    """
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        ours, theirs = "".join(hypothesis.split()), "".join(reference.split())
        row: list[int] = []
        for order in range(1, CHRF_ORDER + 1):
            mine, its = (max(0, len(line) - order + 1) for line in (ours, theirs))
            row += [mine if its else 0, its, _matches(ours, theirs, order)]
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(-1, 3 * CHRF_ORDER)


def chrf_of(sums: np.ndarray) -> np.ndarray:
    """chrF2 of summed counts (..., 3 * CHRF_ORDER), as sacreBLEU computes it.

        chrF = 100 * (1 + b^2) P R / (b^2 P + R)        b = 2

    P and R are the means of precision and recall over the orders that hypothesis and reference both have.
    """
    counts = sums.reshape(*sums.shape[:-1], CHRF_ORDER, 3)
    hypothesis, reference, matches = counts[..., 0], counts[..., 1], counts[..., 2]
    both = (hypothesis > 0) & (reference > 0)
    orders = np.maximum(both.sum(axis=-1), 1)
    precision = np.where(both, matches / np.maximum(hypothesis, 1), 0.0).sum(axis=-1) / orders
    recall = np.where(both, matches / np.maximum(reference, 1), 0.0).sum(axis=-1) / orders
    weighted = CHRF_BETA**2 * precision + recall
    return 100 * (1 + CHRF_BETA**2) * precision * recall / np.where(weighted > 0, weighted, 1.0)


def _matches(hypothesis: Sequence[str], reference: Sequence[str], order: int) -> int:
    """n-grams, of words or of characters, that both have, each at most as often as the one that has it less often."""
    ours, theirs = (Counter(zip(*(line[i:] for i in range(order)), strict=False)) for line in (hypothesis, reference))
    return sum(min(count, theirs[ngram]) for ngram, count in ours.items() if ngram in theirs)


def _cased(lines: Iterable[str], lowercase: bool) -> Iterable[str]:
    return (line.lower() if lowercase else line for line in lines)


def _words(lines: Iterable[str]) -> Iterable[list[str]]:
    return (line.lower().split() for line in lines)


def _words_13a(lines: Iterable[str], lowercase: bool) -> Iterable[list[str]]:
    """Tokens as sacreBLEU's default tokeniser (13a, that of mteval-v13a) makes them."""
    tokenise = _tokeniser_13a()
    return (tokenise(line.rstrip()).split() for line in _cased(lines, lowercase))


@cache
def _tokeniser_13a() -> Callable[[str], str]:
    """One for all: it remembers lines, and references come with every run."""
    sacrebleu()
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()
