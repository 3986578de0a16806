"""The synthetic corpus of sentence pairs: the same everywhere, one translation for each sentence, rules that hold."""

from collections import Counter

import pytest

from fullrank.config.data import DataConfig
from fullrank.data import prepare_pairs
from fullrank.data.builtin import (
    _ACTIONS,
    _ADJECTIVES,
    _MANNERS,
    _NOUNS,
    _PLACES,
    _STATES,
    _TIMES,
    SYNTHETIC_SIZES,
    synthetic_pairs,
)

ALL = (_NOUNS, _ADJECTIVES, _ACTIONS, _STATES, _MANNERS, _TIMES, _PLACES)
TENSES = {"": "i", "te": "ax", "vo": "uy"}  # a particle before the source verb, an ending of the target verb


@pytest.fixture(scope="module")
def pairs():
    return synthetic_pairs()


def test_sizes_and_no_source_line_twice(pairs):
    assert {split: len(lines) for split, lines in pairs.items()} == SYNTHETIC_SIZES
    sources = [source for lines in pairs.values() for source, _ in lines]
    assert len(set(sources)) == len(sources) == 13_000


def test_no_two_words_are_the_same():
    words = [word for group in ALL for word in group]
    sources, targets = [w.source for w in words], [t for w in words for t in (w.target, w.other) if t is not None]
    assert len(set(sources)) == len(sources) == 122
    assert len(set(targets)) == len(targets)
    assert {len(word) for word in sources} == {4}  # particles and plurals have other lengths
    assert {len(word) for word in targets} == {5}
    assert sum(w.other is not None for w in _NOUNS) == 9
    assert sum(w.other is not None for w in _ACTIONS) == 6


def test_plain_clauses_by_their_rules(pairs):
    """[la] noun [te|vo] [ne] verb [la] noun -> [xe] noun [xe] noun-m verb-tense-number [qa], words chosen by context."""
    nouns = {word.source: (word, False) for word in _NOUNS} | {word.source + "n": (word, True) for word in _NOUNS}
    verbs = {word.source: word for word in _ACTIONS}
    checked, contexts = 0, Counter()
    for source, target in pairs["train"]:
        rest = source.split()
        expected = []

        def phrase(case, rest=rest, expected=expected):
            definite = rest[0] == "la"
            noun, plural = nouns[rest[definite]]
            del rest[: 1 + definite]
            if noun.other is not None:
                contexts[noun.source, case] += 1
            stem = noun.other if noun.other and case else noun.target
            expected.extend(["xe"] * definite + [stem + "iv" * plural + case])
            return noun, plural

        try:
            _, plural = phrase("")
            tense = rest.pop(0) if rest[0] in ("te", "vo") else ""
            negated = rest[0] == "ne" and bool(rest.pop(0))
            verb = verbs[rest.pop(0)]
            thing, _ = phrase("m")
        except (KeyError, IndexError):
            continue
        if rest:
            continue
        stem = verb.other if verb.other and thing.alive else verb.target
        contexts[verb.source, thing.alive] += verb.other is not None
        expected += [stem + TENSES[tense] + "ve" * plural] + ["qa"] * negated
        assert target.split() == expected
        checked += 1
    assert checked > 300
    doubled = [key for key, _ in contexts if (key, "") in contexts and (key, "m") in contexts]
    assert doubled  # words with two translations occur in both contexts
    assert any((key, False) in contexts and (key, True) in contexts for key in verbs)


def test_verbs_move_to_the_end_and_reasons_to_the_front(pairs):
    stems = tuple(stem for word in (*_ACTIONS, *_STATES) for stem in (word.target, word.other) if stem is not None)
    for source, target in pairs["valid"]:
        words, asked = target.split(), source.startswith("cu ")
        assert (words[-1] == "qo") == asked
        last = [word for word in words[-3:] if word not in ("qo", "qa")][-1]
        assert last.startswith(stems)
        if "par" in source.split():  # what follows it in the source comes first in the target
            reason = source.split()[source.split().index("par") + 1 :]
            nouns = {word.source: (word.target, word.other) for word in _NOUNS}
            subject = next(word for word in reason if word in nouns or word.removesuffix("n") in nouns)
            known = nouns.get(subject) or nouns[subject.removesuffix("n")]
            assert any(word.startswith(known[0]) for word in words[: words.index("wem")])


def test_prepared_as_a_corpus(tmp_path):
    config = DataConfig(name="synthetic-translation", cache=str(tmp_path))
    corpus = prepare_pairs(config)
    assert corpus.label == "synthetic-translation (not a language)"
    assert not corpus.is_slice
    assert {split: content.pairs for split, content in corpus.splits.items()} == SYNTHETIC_SIZES
    for split in ("valid", "test"):
        assert (corpus.splits[split].source_unknown, corpus.splits[split].target_unknown) == (0, 0)
    assert (corpus.source.name, corpus.target.name) == ("svo", "sov")
    assert len(corpus.source) != len(corpus.target)  # a vocabulary for each
    assert prepare_pairs(config).folder == corpus.folder
    turned = prepare_pairs(DataConfig(name="synthetic-translation", cache=str(tmp_path), source="sov"))
    assert "sov to svo" in turned.label
    assert turned.pairs("test").sources() == corpus.pairs("test").references()
