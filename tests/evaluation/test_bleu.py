"""BLEU and chrF: against sacreBLEU where ours are computed anew, and against their definitions written out here."""

from __future__ import annotations

import math
import random
import sys

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.core.errors import InputError
from fullrank.evaluation.bleu import TOKENISED_BLEU, tokenised_bleu, translation_scores
from fullrank.evaluation.ngrams import metric_named

SENTENCE = "a man rides the red bike , in front of two dogs . Frau läuft &quot; « 3,5 U.S. don't"
WORDS = SENTENCE.split()


def sentences(count: int, seed: int, *, noise: float = 0.3) -> tuple[list[str], list[str]]:
    """Hypotheses and references: every word of a reference is kept, dropped, changed, or doubled."""
    drawn = random.Random(seed)
    references = [[drawn.choice(WORDS) for _ in range(drawn.randint(3, 14))] for _ in range(count)]
    hypotheses = []
    for reference in references:
        words: list[str] = []
        for word in reference:
            kind = drawn.random()
            words += [word] if kind > noise else [[], [drawn.choice(WORDS)], [word, word]][int(3 * kind / noise)]
        hypotheses.append(words)
    return [" ".join(words) for words in hypotheses], [" ".join(words) for words in references]


def bleu_by_definition(hypotheses: list[str], references: list[str]) -> float:
    """Papineni et al. 2002 with one reference, written out: clipped counts by searching lists, no counters."""
    precisions, c, r = [], 0, 0
    for n in (1, 2, 3, 4):
        clipped = total = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            h, rest = hypothesis.lower().split(), reference.lower().split()
            theirs = [rest[i : i + n] for i in range(len(rest) - n + 1)]
            for i in range(len(h) - n + 1):
                total += 1
                if h[i : i + n] in theirs:
                    theirs.remove(h[i : i + n])  # an n-gram of the reference can be matched once
                    clipped += 1
        precisions.append(clipped / total if total else 0.0)
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        c, r = c + len(hypothesis.split()), r + len(reference.split())
    if min(precisions) == 0:
        return 0.0
    brevity = 1.0 if c >= r else math.exp(1 - r / c)
    return 100 * brevity * math.prod(precisions) ** 0.25


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3, 0.6])
def test_tokenised_bleu_is_its_definition(noise: float) -> None:
    hypotheses, references = sentences(60, 3, noise=noise)
    found = tokenised_bleu(hypotheses, references)
    assert found["tokenised_bleu"] == pytest.approx(bleu_by_definition(hypotheses, references), abs=1e-10)
    theirs = sacrebleu.BLEU(tokenize="none", lowercase=True, smooth_method="none", force=True)
    assert found["tokenised_bleu"] == pytest.approx(theirs.corpus_score(hypotheses, [references]).score, abs=1e-10)
    assert found["tokenised_bleu_label"] == TOKENISED_BLEU
    assert "not comparable with sacreBLEU" in TOKENISED_BLEU


def test_tokenised_bleu_by_hand() -> None:
    """Precisions 4/5, 3/4, 2/3, 1/2; five words against six."""
    found = tokenised_bleu(["The cat sat on mats"], ["the cat sat on the mat"])
    assert found["tokenised_bleu"] == pytest.approx(100 * math.exp(-1 / 5) * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_a_short_translation_is_not_smoothed_as_fairseq() -> None:
    """No 4-gram matches: fairseq's BLEU is 0, sacreBLEU smooths."""
    hypotheses, references = ["a b c x d e f"], ["a b c y d e f"]
    assert tokenised_bleu(hypotheses, references)["tokenised_bleu"] == 0
    assert translation_scores(hypotheses, references)["bleu"] > 0


@pytest.mark.parametrize("lowercase", [False, True])
def test_scores_are_those_of_sacrebleu(lowercase: bool) -> None:
    hypotheses, references = sentences(50, 5)
    hypotheses[0] = ""
    found = translation_scores(hypotheses, references, lowercase=lowercase)
    bleu, chrf = sacrebleu.BLEU(lowercase=lowercase), sacrebleu.CHRF(lowercase=lowercase)
    theirs = bleu.corpus_score(hypotheses, [references])
    assert found["bleu"] == theirs.score
    assert found["brevity_penalty"] == theirs.bp
    assert found["length_ratio"] == theirs.ratio
    assert found["chrf"] == chrf.corpus_score(hypotheses, [references]).score
    assert found["sentences"] == 50
    case, version = "lc" if lowercase else "mixed", sacrebleu.__version__
    assert found["bleu_signature"] == f"nrefs:1|case:{case}|eff:no|tok:13a|smooth:exp|version:{version}"
    assert found["chrf_signature"] == f"nrefs:1|case:{case}|eff:yes|nc:6|nw:0|space:no|version:{version}"


def test_length_ratio_and_brevity_by_hand() -> None:
    found = translation_scores(["a b c d e"], ["a b c d e f g h i j"])
    assert (found["length_ratio"], found["brevity_penalty"]) == (0.5, pytest.approx(math.exp(-1)))
    assert found["bleu"] == pytest.approx(100 * math.exp(-1))


LINES = st.lists(st.sampled_from(["the", "dog", "Dog,", "dogs.", "3.5", "«", "ä", "end-\n", ""]), max_size=7).map(
    " ".join
)


@settings(max_examples=150)
@given(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=6), st.booleans())
def test_our_counts_score_as_sacrebleu(pairs: list[tuple[str, str]], lowercase: bool) -> None:
    """Empty, one-word and unmatched lines included: the score of summed counts is sacreBLEU's of the corpus."""
    hypotheses, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    theirs = {
        "bleu": sacrebleu.BLEU(lowercase=lowercase, force=True),
        "chrf": sacrebleu.CHRF(lowercase=lowercase),
        "tokenised_bleu": sacrebleu.BLEU(tokenize="none", lowercase=True, smooth_method="none", force=True),
    }
    for name, scorer in theirs.items():
        metric = metric_named(name, lowercase=lowercase)
        counts = metric.statistics(hypotheses, references)
        assert counts.shape[0] == len(pairs)
        expected = scorer.corpus_score(hypotheses, [references]).score
        assert float(metric.score(counts.sum(axis=0))) == pytest.approx(expected, abs=1e-9), name


def test_scores_of_many_sums_at_once() -> None:
    hypotheses, references = sentences(30, 7)
    for name in ("bleu", "chrf", "tokenised_bleu"):
        metric = metric_named(name)
        counts = metric.statistics(hypotheses, references)
        parts = np.stack([counts[:10].sum(axis=0), counts[10:].sum(axis=0), np.zeros(counts.shape[1])])
        together = metric.score(parts[None])
        assert together.shape == (1, 3)
        assert together[0].tolist() == [float(metric.score(part)) for part in parts]
        assert together[0, 2] == 0


def test_nothing_but_empty_hypotheses() -> None:
    found = translation_scores(["", ""], ["a dog .", "two dogs ."])
    assert (found["bleu"], found["chrf"], found["length_ratio"], found["brevity_penalty"]) == (0, 0, 0, 0)
    assert tokenised_bleu(["", ""], ["a dog .", ""])["tokenised_bleu"] == 0


def test_nothing_but_empty_references() -> None:
    found = translation_scores(["a dog .", ""], ["", ""])
    assert (found["bleu"], found["chrf"], found["length_ratio"]) == (0, 0, 0)
    assert tokenised_bleu(["a dog ."], [""])["tokenised_bleu"] == 0


@pytest.mark.parametrize("score", [translation_scores, tokenised_bleu])
def test_what_cannot_be_scored(score: object) -> None:
    assert callable(score)
    with pytest.raises(InputError, match="1,001 hypotheses and 1,000 references"):
        score(["a"] * 1001, ["a"] * 1000)
    with pytest.raises(InputError, match="no sentences"):
        score([], [])
    with pytest.raises(InputError, match="hypotheses: a list of sentences"):
        score("a dog", ["a dog"])


def test_unknown_metric() -> None:
    with pytest.raises(InputError, match="metric: 'blue' is none; did you mean 'bleu'"):
        metric_named("blue")


def test_without_sacrebleu_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(InputError, match=r"pip install 'fullrank\[translate\]'"):
        translation_scores(["a"], ["a"])
    assert tokenised_bleu(["a b c d"], ["a b c d"])["tokenised_bleu"] == pytest.approx(100), "needs no package"
