"""Built-in corpora: prose of the running Python, and sentence pairs of invented languages by their rules."""

import platform
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError
from fullrank.data import Corpus, builtin, prepare, prepare_pairs
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

SOURCE = b'''#!/usr/bin/env python
# -*- coding: utf-8 -*-
"""Module docstring.  It has two sentences

    >>> indented_example(1)
    2
and a line after.
"""
# A comment over
# two lines.

# Another one.
x = "# no comment"  # Trailing words.
class C:
    """About C."""
    def f(self):
        """* An item that
          goes on here.
        * Another item.
        """
        # type: ignore
        #----------
        return 1  # noqa
'''


def test_docstrings_and_comments_in_their_order():
    assert builtin.module_lines(SOURCE) == [
        "Module docstring.",
        "It has two sentences",
        ">>> indented_example(1)",
        "and a line after.",
        "A comment over two lines.",
        "Another one.",
        "Trailing words.",
        "About C.",
        "* An item that goes on here.",
        "* Another item.",
    ]


def test_what_is_no_prose_is_left_out():
    assert builtin.module_lines(b"decoding_table = (\n    'a'  # 0x00 -> NULL\n)\n") == []
    assert builtin.module_lines(b"print 'Python 2'\n") == []
    assert list(builtin.sentences("****\n\nword\n\n-----")) == ["word"]


def test_long_lines_stay_in_their_first_document():
    long, short = "this very licence text is long enough", "see also"
    found = builtin.without_repeats([("a", [long, short, long]), ("b", [short, long.upper(), "b only"])])
    assert list(found) == [("a", [long, short, long], 0), ("b", [short, "b only"], 1)]


def test_split_by_name_about_90_5_5():
    places = [builtin.split_of(f"document{i}") for i in range(20_000)]
    for split, share in {"train": 0.90, "valid": 0.05, "test": 0.05}.items():
        expected = 20_000 * share
        assert abs(places.count(split) - expected) < 5 * (expected * (1 - share)) ** 0.5
    # fixed for ever: a document must not change its split with the version (sha256("json.decoder")[:8] mod 100 = 65)
    assert builtin.split_of("json.decoder") == "train"


def test_modules_are_the_library_without_tests():
    names = [name for name, _ in builtin.modules()]
    assert {"argparse", "json.decoder", "asyncio.events"} <= set(names)
    assert not [n for n in names if re.search(r"(^|\.)(tests?|idlelib|lib2to3|site-packages|__pycache__)(\.|$)", n)]


@pytest.fixture(scope="module")
def extracted(tmp_path_factory) -> Path:
    """A folder with the extracted texts and the cache of `corpus`."""
    return tmp_path_factory.mktemp("builtin")


@pytest.fixture(scope="module")
def corpus(extracted) -> Corpus:
    """The corpus; the text that it is made from is kept, since extracting it takes seconds."""
    write = builtin.write

    def write_and_keep(folder: Path) -> dict[str, object]:
        record = write(folder)
        for split in builtin.SPLITS:
            shutil.copy(folder / f"{split}.txt", extracted)
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin, "write", write_and_keep)
        return prepare(DataConfig(cache=str(extracted / "cache")))


def test_size_and_label(corpus):
    assert corpus.label == f"builtin (Python {platform.python_version()})"
    assert not corpus.is_slice
    tokens = {split: counts.tokens for split, counts in corpus.splits.items()}
    assert 0.65e6 < sum(tokens.values()) < 0.9e6
    assert 0.85 < tokens["train"] / sum(tokens.values()) < 0.95
    assert min(tokens.values()) > 25_000
    assert 6_500 < len(corpus.tokenizer) < 9_500
    assert corpus.details["python"] == platform.python_version()
    assert len(corpus.details["content_sha256"]) == 64
    assert sum(corpus.details["documents"].values()) > 400


def test_words_are_lower_case_and_seen_three_times(corpus):
    vocabulary = corpus.tokenizer
    assert all(word == word.lower() for word in vocabulary.entries)
    assert {"the", ".", "function", "<unk>", "<eos>"} <= set(vocabulary.entries)
    rare = [e for e, c in zip(vocabulary.entries, vocabulary.counts, strict=True) if c < 3 and not e.startswith("<")]
    assert rare == []
    unknown = (corpus.ids("valid") == vocabulary.unk_id).mean()
    assert 0.005 < unknown < 0.10
    ids = vocabulary.encode("Returns the list, or None.")
    assert vocabulary.decode(ids) == "returns the list , or none ."


def test_valid_and_test_hardly_repeat_training_lines(corpus):
    def lines(split: str) -> list[str]:
        return corpus.tokenizer.decode(corpus.ids(split).tolist()).split("\n")

    seen = set(lines("train"))
    for split in ("valid", "test"):
        words = [len(line.split()) for line in lines(split)]
        repeated = sum(n for n, line in zip(words, lines(split), strict=True) if line in seen)
        assert repeated < 0.08 * sum(words)


def test_no_text_is_left_in_the_folder(corpus):
    assert [path.name for path in corpus.folder.glob("*.txt")] == ["vocabulary.txt"]


def test_ids_are_those_of_the_text(corpus, extracted):
    text = (extracted / "valid.txt").read_text(encoding="utf-8")
    assert corpus.splits["valid"].words == len(text.split()) + text.count("\n")
    assert corpus.tokenizer.encode(text) == corpus.ids("valid").tolist()


def test_a_second_call_opens_the_first_corpus(corpus, extracted, monkeypatch):
    monkeypatch.setattr(builtin, "write", None)  # would fail if called
    assert prepare(DataConfig(cache=str(extracted / "cache"))).folder == corpus.folder


def test_stripped_documentation_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(builtin, "topics", dict)
    monkeypatch.setattr(builtin, "modules", lambda: [("os", Path(builtin.ast.__file__))])
    with pytest.raises(
        InputError, match=r"'builtin' reads the documentation .* in 0 help topics and 1 modules.*stripped it"
    ):
        prepare(DataConfig(cache=str(tmp_path)))
    assert list((tmp_path / "corpora").iterdir()) == []


# sentence pairs of invented languages


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
