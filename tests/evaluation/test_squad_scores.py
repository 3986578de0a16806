"""EM and F1 of SQuAD against the published definition, written out here another way."""

import random
from fractions import Fraction

import pytest

from fullrank.core.errors import InputError
from fullrank.evaluation.squad import exact_match, normalize_answer, squad_scores, squad_v2_scores, token_f1

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def words(text):
    """Lower case, no punctuation characters, no articles, split at white space."""
    kept = "".join(character for character in text.lower() if character not in PUNCTUATION)
    parted, word = [], ""
    for character in kept + " ":  # an article is a whole word of letters, digits and _ ; so cut at all else
        if character.isalnum():
            word += character
            continue
        if word not in ("a", "an", "the"):
            parted.append(word)
        else:
            parted.append(" ")
        parted.append(character)
        word = ""
    return "".join(parted).split()


def f1_by_hand(predicted, wanted):
    left, common = list(wanted), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            common += 1
    # 2PR/(P+R) with P = c/p and R = c/w is 2c/(p+w)
    return Fraction(2 * common, len(predicted) + len(wanted)) if common else Fraction(0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat's\tHat.", "cats hat"),
        ("an apple a day", "apple day"),
        ("U.S.", "us"),
        ("Theatre anagram", "theatre anagram"),
        ("a–b", "–b"),  # the dash is no ASCII punctuation: it stays, and ends the word "a"
        ("thea the", "thea"),
        ("A.", ""),
        ("a.b", "ab"),
        ("“The”", "“ ”"),
        ("", ""),
    ],
)
def test_normalized(text, expected):
    assert normalize_answer(text) == expected
    assert words(text) == expected.split()


def test_exact_match_and_f1_by_hand():
    assert exact_match("the Golden anniversary", "Golden Anniversary!") == 1.0
    assert exact_match("gold anniversary", "golden anniversary") == 0.0
    assert token_f1("x x y", "x z") == pytest.approx(
        2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)
    )  # one x in common, not two
    assert token_f1("x x y", "x x") == pytest.approx(0.8)
    assert (token_f1("the", ""), token_f1("the", "", empty_matches=True)) == (0.0, 1.0)
    assert (token_f1("x", "a"), token_f1("x", "a", empty_matches=True)) == (0.0, 0.0)


VOCABULARY = ["the", "a", "Rhine", "rhine,", "river", "(river)", "of", "-", "1,000", "1000", "An", "tea", "e.g."]


def texts(generator, most=5):
    return " ".join(generator.choice(VOCABULARY) for _ in range(generator.randint(0, most)))


def test_v1_is_the_mean_of_the_best_over_references():
    generator = random.Random(0)
    references = {str(i): [texts(generator) for _ in range(generator.randint(1, 4))] for i in range(300)}
    predictions = {name: texts(generator) for name in reversed(references)} | {"unasked": "x"}
    exact = [max(words(predictions[n]) == words(text) for text in refs) for n, refs in references.items()]
    f1 = [max(f1_by_hand(words(predictions[n]), words(text)) for text in refs) for n, refs in references.items()]
    scores = squad_scores(predictions, references)
    assert 0 < sum(exact) < 300
    assert scores == {
        "exact_match": pytest.approx(100 * sum(exact) / 300, abs=1e-12),
        "f1": pytest.approx(float(100 * sum(f1) / 300), abs=1e-12),
        "total": 300,
    }


@pytest.fixture(scope="module")
def v2():
    generator = random.Random(1)
    references, predictions, odds = {}, {}, {}
    for i in range(400):
        name = str(i)
        references[name] = (
            [texts(generator) for _ in range(generator.randint(1, 3))] if generator.random() < 0.6 else []
        )
        right = references[name] and generator.random() < 0.5
        predictions[name] = generator.choice(references[name]) if right else texts(generator, most=3)
        odds[name] = generator.gauss(0, 1) + (1.0 if not references[name] else 0.0)
    return references, predictions, odds


def by_definition(references, predictions, empty):
    """Exact and F1 of each question if those in `empty` were predicted to have no answer."""
    exact, f1 = {}, {}
    for name, given in references.items():
        if name in empty:
            exact[name] = f1[name] = Fraction(int(not given))
            continue
        accepted = [words(text) for text in given if words(text)] or [[]]
        predicted = words(predictions[name])
        exact[name] = Fraction(max(int(predicted == text) for text in accepted))
        f1[name] = max(
            f1_by_hand(predicted, text) if predicted and text else Fraction(int(predicted == text)) for text in accepted
        )
    return exact, f1


def percent(scores, names):
    return pytest.approx(float(100 * sum(scores[name] for name in names) / len(names)), abs=1e-10)


@pytest.mark.parametrize("threshold", [1.0, 0.0, -0.7])
def test_v2_over_all_with_and_without_answers(v2, threshold):
    references, predictions, odds = v2
    exact, f1 = by_definition(references, predictions, {name for name in odds if odds[name] > threshold})
    scores = squad_v2_scores(predictions, references, odds, threshold=threshold)
    groups = {
        "": list(references),
        "HasAns_": [name for name in references if references[name]],
        "NoAns_": [name for name in references if not references[name]],
    }
    for prefix, names in groups.items():
        assert scores[prefix + "exact"] == percent(exact, names)
        assert scores[prefix + "f1"] == percent(f1, names)
        assert scores[prefix + "total"] == len(names)


def test_v2_without_odds_nothing_is_emptied(v2):
    references, predictions, _ = v2
    exact, f1 = by_definition(references, predictions, set())
    scores = squad_v2_scores(predictions, references)
    assert scores["exact"] == percent(exact, list(references))
    assert scores["f1"] == percent(f1, list(references))
    assert not any(name.startswith("best") for name in scores)


def test_v2_best_threshold_is_the_best_of_all(v2):
    references, predictions, odds = ({name: given[name] for name in list(given)[:120]} for given in v2)
    # the official search counts a question without an answer as wrong as soon as its prediction is not the empty string
    predictions = {name: text if words(text) else "river" for name, text in predictions.items()}
    scores = squad_v2_scores(predictions, references, odds)
    for number, metric in enumerate(("exact", "f1")):
        totals = {}
        for threshold in [min(odds.values()) - 1, *odds.values()]:
            judged = by_definition(references, predictions, {name for name in odds if odds[name] > threshold})[number]
            totals[threshold] = float(sum(judged.values()))
        best = max(totals.values())
        assert scores[f"best_{metric}"] == pytest.approx(100 * best / len(references), abs=1e-10)
        assert totals[scores[f"best_{metric}_thresh"]] == pytest.approx(best, abs=1e-10)
        assert best > max(
            totals[min(odds.values()) - 1], totals[max(odds.values())]
        )  # the search had something to find


def test_v2_best_threshold_where_all_empty_is_best():
    found = squad_v2_scores({"a": "x", "b": "y"}, {"a": [], "b": ["z"]}, {"a": 5.0, "b": 6.0}, threshold=9.0)
    assert (found["exact"], found["best_exact"], found["best_exact_thresh"]) == (0.0, 50.0, 0.0)
    one_sided = squad_v2_scores({"a": ""}, {"a": []})
    assert one_sided == {
        "exact": 100.0,
        "f1": 100.0,
        "total": 1,
        "NoAns_exact": 100.0,
        "NoAns_f1": 100.0,
        "NoAns_total": 1,
    }


def test_what_is_missing_is_said():
    with pytest.raises(InputError, match="2 of 3 questions lack a prediction, b among them"):
        squad_scores({"a": "x"}, {"a": ["x"], "b": ["x"], "c": ["x"]})
    with pytest.raises(InputError, match="1 of 1 questions lack a prediction, b"):
        squad_v2_scores({}, {"b": []})
    with pytest.raises(InputError, match="1 of 1 questions lack no-answer odds"):
        squad_v2_scores({"b": ""}, {"b": []}, {})
    with pytest.raises(InputError, match="question a has no reference answer"):
        squad_scores({"a": "x"}, {"a": []})
    with pytest.raises(InputError, match="no questions"):
        squad_scores({"a": "x"}, {})
