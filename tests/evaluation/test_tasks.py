"""Scores of tasks against their definitions written out here, sacreBLEU, scikit-learn and scipy."""

import math
import random
import warnings
from fractions import Fraction

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.config.finetune import GLUE
from fullrank.core.errors import RunError
from fullrank.evaluation.tasks import (
    TOKENISED_BLEU,
    glue_scores,
    normalize_answer,
    squad_scores,
    tokenised_bleu,
    translation_scores,
)

sklearn_metrics = pytest.importorskip("sklearn.metrics")
scipy_stats = pytest.importorskip("scipy.stats")

SENTENCE = "a man rides the red bike , in front of two dogs . Frau läuft &quot; « 3,5 U.S. don't"
WORDS = SENTENCE.split()


def sentences(count, seed, *, noise=0.3):
    """Hypotheses and references: every word of a reference is kept, dropped, changed, or doubled."""
    draw = random.Random(seed)
    references = [draw.choices(WORDS, k=draw.randint(3, 14)) for _ in range(count)]
    hypotheses = []
    for reference in references:
        words = []
        for word in reference:
            kind = draw.random()
            words += [word] if kind > noise else [[], [draw.choice(WORDS)], [word, word]][int(3 * kind / noise)]
        hypotheses.append(words)
    return [" ".join(words) for words in hypotheses], [" ".join(words) for words in references]


def ngrams(words, n):
    return [words[i : i + n] for i in range(len(words) - n + 1)]


def bleu_by_definition(hypotheses, references):
    """Papineni et al. 2002 with one reference, written out: clipped counts by searching lists, no counters."""
    precisions = []
    for n in (1, 2, 3, 4):
        clipped = total = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            unmatched = ngrams(reference.lower().split(), n)
            for gram in ngrams(hypothesis.lower().split(), n):
                total += 1
                if gram in unmatched:
                    unmatched.remove(gram)  # an n-gram of the reference can be matched once
                    clipped += 1
        precisions.append(clipped / total if total else 0.0)
    c = sum(len(hypothesis.split()) for hypothesis in hypotheses)
    r = sum(len(reference.split()) for reference in references)
    if min(precisions) == 0:
        return 0.0
    brevity = 1.0 if c >= r else math.exp(1 - r / c)
    return 100 * brevity * math.prod(precisions) ** 0.25


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3, 0.6])
def test_tokenised_bleu_is_its_definition(noise):
    hypotheses, references = sentences(60, 3, noise=noise)
    scores = tokenised_bleu(hypotheses, references)
    assert scores["tokenised_bleu"] == pytest.approx(bleu_by_definition(hypotheses, references), abs=1e-10)
    assert scores["tokenised_bleu_label"] == TOKENISED_BLEU
    assert "not comparable with sacreBLEU" in TOKENISED_BLEU


def test_a_short_translation_is_not_smoothed_as_fairseq():
    """No 4-gram matches: fairseq's BLEU is 0, sacreBLEU smooths."""
    hypotheses = ["a b c x d e f"]
    references = ["a b c y d e f"]
    assert tokenised_bleu(hypotheses, references)["tokenised_bleu"] == 0
    assert translation_scores(hypotheses, references)["bleu"] > 0


@pytest.mark.parametrize("lowercase", [False, True])
def test_scores_are_those_of_sacrebleu(lowercase):
    hypotheses, references = sentences(50, 5)
    hypotheses[0] = ""
    scores = translation_scores(hypotheses, references, lowercase=lowercase)
    bleu, chrf = sacrebleu.BLEU(lowercase=lowercase), sacrebleu.CHRF(lowercase=lowercase)
    theirs = bleu.corpus_score(hypotheses, [references])
    assert scores["bleu"] == theirs.score
    assert scores["brevity_penalty"] == theirs.bp
    assert scores["length_ratio"] == theirs.ratio
    assert scores["chrf"] == chrf.corpus_score(hypotheses, [references]).score
    assert scores["sentences"] == 50
    case = "lc" if lowercase else "mixed"
    version = f"version:{sacrebleu.__version__}"
    assert scores["bleu_signature"] == f"nrefs:1|case:{case}|eff:no|tok:13a|smooth:exp|{version}"
    assert scores["chrf_signature"] == f"nrefs:1|case:{case}|eff:yes|nc:6|nw:0|space:no|{version}"


@st.composite
def classes(draw):
    """Predictions and labels of two classes; often one side is constant."""
    count = draw(st.integers(1, 40))
    sides = [draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)) for _ in range(2)]
    if draw(st.booleans()):
        sides[draw(st.integers(0, 1))] = [draw(st.integers(0, 1))] * count
    return np.array(sides[0]), np.array(sides[1])


@given(classes())
@settings(deadline=None, max_examples=60)
def test_scores_of_classes_are_those_of_scikit_learn(sides):
    guessed, labels = sides
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of a single label
        matthews = sklearn_metrics.matthews_corrcoef(labels, guessed)
        expected = sklearn_metrics.f1_score(labels, guessed, zero_division=0)
    scores = glue_scores(GLUE["mrpc"], guessed, labels)
    assert scores["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(labels, guessed), abs=1e-15)
    assert scores["f1"] == pytest.approx(expected, abs=1e-15)
    assert glue_scores(GLUE["cola"], guessed, labels) == {"matthews_correlation": pytest.approx(matthews, abs=1e-12)}


def test_correlations_are_those_of_scipy_and_ties_share_their_ranks():
    generator = np.random.default_rng(0)
    guessed = generator.normal(size=200).astype(np.float32)
    labels = generator.integers(0, 6, size=200).astype(np.float32)
    scores = glue_scores(GLUE["stsb"], guessed, labels)
    assert scores["pearson"] == pytest.approx(scipy_stats.pearsonr(guessed.astype(float), labels).statistic, abs=1e-12)
    assert scores["spearman"] == pytest.approx(scipy_stats.spearmanr(guessed, labels).statistic, abs=1e-12)
    tied = glue_scores(GLUE["stsb"], [1.0, 5.0, 5.0, 9.0], [1.0, 2.0, 3.0, 4.0])
    assert tied["spearman"] == pytest.approx(4.5 / math.sqrt(4.5 * 5), rel=1e-14)
    constant = glue_scores(GLUE["stsb"], [0.1] * 7, np.linspace(0, 5, 7))
    assert constant == {"pearson": 0.0, "spearman": 0.0}
    with pytest.raises(RunError, match="not finite"):
        glue_scores(GLUE["stsb"], [0.5, float("nan")], [1.0, 0.0])


PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def answer_words(text):
    """Lower case, no punctuation characters, no articles, split at white space."""
    unpunctuated = "".join(character for character in text.lower() if character not in PUNCTUATION)
    without_articles = ""
    word = ""
    for character in unpunctuated + " ":  # words are letters and digits; every other character ends one
        if character.isalnum():
            word += character
        else:
            without_articles += (" " if word in ("a", "an", "the") else word) + character
            word = ""
    return without_articles.split()


def f1_by_hand(predicted, reference):
    unmatched = list(reference)
    for word in predicted:
        if word in unmatched:
            unmatched.remove(word)
    common = len(reference) - len(unmatched)
    # 2PR/(P+R) with P = c/p and R = c/r is 2c/(p+r)
    return Fraction(2 * common, len(predicted) + len(reference)) if common else Fraction(0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat's\tHat.", "cats hat"),
        ("U.S.", "us"),
        ("a–b", "–b"),  # the dash is no ASCII punctuation: it stays, and ends the word "a"
        ("a.b", "ab"),
        ("“The”", "“ ”"),
        ("", ""),
    ],
)
def test_normalized(text, expected):
    assert normalize_answer(text) == expected
    assert answer_words(text) == expected.split()


VOCABULARY = ["the", "a", "Rhine", "rhine,", "river", "(river)", "of", "-", "1,000", "1000", "An", "tea", "e.g."]


def answers(generator, most=5):
    return " ".join(generator.choice(VOCABULARY) for _ in range(generator.randint(0, most)))


def draw_references(generator, most):
    return [answers(generator) for _ in range(generator.randint(1, most))]


def test_v1_is_the_mean_of_the_best_over_references():
    generator = random.Random(0)
    references = {str(i): draw_references(generator, 4) for i in range(300)}
    predictions = {name: answers(generator) for name in reversed(references)} | {"unasked": "x"}
    exact = []
    f1 = []
    for name, texts in references.items():
        predicted = answer_words(predictions[name])
        exact.append(max(predicted == answer_words(text) for text in texts))
        f1.append(max(f1_by_hand(predicted, answer_words(text)) for text in texts))
    assert 0 < sum(exact) < 300
    assert squad_scores(predictions, references) == {
        "exact_match": pytest.approx(sum(exact) / 300, abs=1e-12),
        "f1": pytest.approx(float(sum(f1) / 300), abs=1e-12),
    }


@pytest.fixture(scope="module")
def v2():
    generator = random.Random(1)
    references = {}
    predictions = {}
    for i in range(400):
        name = str(i)
        references[name] = draw_references(generator, 3) if generator.random() < 0.6 else []
        right = references[name] and generator.random() < 0.5
        predictions[name] = generator.choice(references[name]) if right else answers(generator, most=3)
    return references, predictions


def by_definition(references, predictions):
    """Exact and F1 of each question."""
    exact = {}
    f1 = {}
    for name, texts in references.items():
        accepted = [answer_words(text) for text in texts if answer_words(text)] or [[]]
        predicted = answer_words(predictions[name])
        exact[name] = Fraction(max(int(predicted == text) for text in accepted))
        f1[name] = max(
            f1_by_hand(predicted, text) if predicted and text else Fraction(int(predicted == text)) for text in accepted
        )
    return exact, f1


def test_v2_over_all_with_and_without_answers(v2):
    references, predictions = v2
    exact, f1 = by_definition(references, predictions)
    scores = squad_scores(predictions, references, v2=True)
    groups = {
        "": list(references),
        "HasAns_": [name for name in references if references[name]],
        "NoAns_": [name for name in references if not references[name]],
    }
    for prefix, names in groups.items():
        for metric, values in (("exact", exact), ("f1", f1)):
            mean = float(sum(values[name] for name in names) / len(names))
            assert scores[prefix + metric] == pytest.approx(mean, abs=1e-12)
    assert (scores["HasAns_total"], scores["NoAns_total"]) == (len(groups["HasAns_"]), len(groups["NoAns_"]))
    only_empty = squad_scores({"a": ""}, {"a": []}, v2=True)
    assert only_empty == {"exact": 1.0, "f1": 1.0, "NoAns_exact": 1.0, "NoAns_f1": 1.0, "NoAns_total": 1}
