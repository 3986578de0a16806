"""Sentence pairs of two invented languages, made by a grammar: text to translate without a download.

A translation has to do this:

    source  (svo)   [time] subject  [tense] [not] verb  object  [preposition place]  [manner]
    target  (sov)   [time] subject  [place postposition]  object  [manner] verb+tense+number  [not]

the verb moves to the end, adjectives and relative clauses change their side of the noun, and the reason of a sentence comes
before it. Target nouns have a number and a case, adjectives agree with the gender and number of their noun, verbs with the
number of their subject. Some source words have two translations: verbs by whether their object lives, nouns by whether they
are the subject. Rules have no exceptions, so every sentence has one translation; nothing that is true of this text need be
true of a real one. The same text on every machine and in every Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from fullrank.data.files import publish, workspace, writing

NAME = "synthetic-translation"
LANGUAGES = ("svo", "sov")  # suffixes of the files: named by their order of words
SIZES = {"train": 12_000, "valid": 500, "test": 500}
_SEED = 20_220_501
_TENSES = ("present", "past", "future")
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Word:
    """A source word and its translation; `other` is the second one, of words that have two."""

    source: str
    target: str
    gender: int = 0
    alive: bool = False
    other: str | None = None


def _words(count: int, start: int, doubles: int = 0) -> list[_Word]:
    """Invented words, numbers `start` and on; one of every `doubles` has a second translation."""
    return [
        _Word(
            _spelled(start + i, ("ptkbdgmnslrvz", "aeiou", "mnlrsk", "aeiou")),
            _spelled(start + i, ("fhjkmrtwz", "aiou", "bdglnpv", "aeo", "nrstk")),
            gender=i % 3,
            alive=i % 2 == 0,
            other=_spelled(start + i + 2000, ("fhjkmrtwz", "aiou", "bdglnpv", "aeo", "nrstk"))
            if doubles and i % doubles == doubles - 1
            else None,
        )
        for i in range(count)
    ]


def _spelled(number: int, letters: Sequence[str]) -> str:
    """A letter of each group; numbers that differ, below the product of the groups' sizes, give words that differ."""
    total = 1
    for group in letters:
        total *= len(group)
    rest, word = (number * 1511 + 977) % total, ""  # a prime that divides no group's size: neighbours look unlike
    for group in letters:
        rest, letter = divmod(rest, len(group))
        word += group[letter]
    return word


_NOUNS = _words(48, 0, doubles=5)
_ADJECTIVES = _words(20, 100)
_ACTIONS = _words(24, 200, doubles=4)  # with an object
_STATES = _words(10, 300)  # without
_MANNERS, _TIMES, _PLACES = _words(8, 400), _words(6, 500), _words(6, 600)
_SOURCE = {"definite": "la", "past": "te", "future": "vo", "not": "ne", "who": "ki", "because": "par", "question": "cu"}
_TARGET = {"definite": "xe", "not": "qa", "who": "yo", "because": "wem", "question": "qo"}
_CASES = {"subject": "", "object": "m", "place": "sh"}
_ENDINGS = {"present": "i", "past": "ax", "future": "uy"}


class _Speaker:
    """Draws sentences; each is source words and target words."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability  # the one method whose numbers no version of Python changes

    def _pick(self, items: Sequence[_T]) -> _T:
        """The first items more often than the last ones, as words of a text."""
        return items[int(len(items) * self._random.random() ** 1.5)]

    def sentence(self) -> tuple[list[str], list[str]]:
        """A clause, a clause with its reason, or a question."""
        source, target = self._clause()
        if self._chance(0.2):
            reason = self._clause(short=True)
            source = [*source, _SOURCE["because"], *reason[0]]
            target = [*reason[1], _TARGET["because"], *target]
        if self._chance(0.15):
            return [_SOURCE["question"], *source], [*target, _TARGET["question"]]
        return source, target

    def _clause(self, short: bool = False) -> tuple[list[str], list[str]]:
        acts = self._chance(0.75)
        plural = self._chance(0.35)
        subject = self._phrase("subject", plural, nested=not short)
        verb, tense, negated = self._pick(_ACTIONS if acts else _STATES), self._pick(_TENSES), self._chance(0.15)
        written, at_end = [], []
        if tense != "present":
            written.append(_SOURCE[tense])
        if negated:
            written.append(_SOURCE["not"])
        written.append(verb.source)
        alive = False
        if acts:
            noun = self._pick(_NOUNS)
            alive = noun.alive
            thing = self._phrase("object", self._chance(0.35), noun=noun)
            written += thing[0]
            at_end += thing[1]
        before: list[str] = []
        if not short and self._chance(0.3):
            place, where = self._pick(_PLACES), self._phrase("place", self._chance(0.2))
            written += [place.source, *where[0]]
            before = [*where[1], place.target]
        if not short and self._chance(0.25):
            manner = self._pick(_MANNERS)
            written.append(manner.source)
            at_end.append(manner.target)
        source, target = [*subject[0], *written], [*subject[1], *before, *at_end, _verb(verb, alive, tense, plural)]
        if negated:
            target.append(_TARGET["not"])
        if not short and self._chance(0.25):
            time = self._pick(_TIMES)
            source, target = [time.source, *source], [time.target, *target]
        return source, target

    def _phrase(
        self, case: str, plural: bool, noun: _Word | None = None, nested: bool = False
    ) -> tuple[list[str], list[str]]:
        """A noun with what belongs to it."""
        noun = noun or self._pick(_NOUNS)
        adjectives = [self._pick(_ADJECTIVES) for _ in range(self._chance(0.45) + self._chance(0.15))]
        definite = self._chance(0.5)
        source = [_SOURCE["definite"]] if definite else []
        source += [adjective.source for adjective in adjectives]
        source.append(noun.source + "n" * plural)
        stem = noun.other if noun.other is not None and case != "subject" else noun.target
        target = [_TARGET["definite"]] if definite else []
        target.append(stem + ("iv" if plural else "") + _CASES[case])
        target += [a.target + "aeo"[noun.gender] + ("l" if plural else "") for a in adjectives]
        if nested and self._chance(0.2):
            verb, thing = self._pick(_ACTIONS), self._pick(_NOUNS)
            inner = self._phrase("object", self._chance(0.3), noun=thing)
            source += [_SOURCE["who"], verb.source, *inner[0]]
            target = [*inner[1], _verb(verb, thing.alive, "present", plural), _TARGET["who"], *target]
        return source, target


def _verb(verb: _Word, alive: bool, tense: str, plural: bool) -> str:
    """The target form: of the two translations that of a living object, with tense and the subject's number."""
    stem = verb.other if verb.other is not None and alive else verb.target
    return stem + _ENDINGS[tense] + ("ve" if plural else "")


def pairs() -> dict[str, list[tuple[str, str]]]:
    """(source, target) lines of every split. No source line occurs twice."""
    speaker, seen = _Speaker(_SEED), set()
    found: dict[str, list[tuple[str, str]]] = {}
    for split, count in SIZES.items():
        lines: list[tuple[str, str]] = []
        while len(lines) < count:
            source, target = (" ".join(words) for words in speaker.sentence())
            if source not in seen:
                seen.add(source)
                lines.append((source, target))
        found[split] = lines
    return found


def files(cache: Path) -> Path:
    """The folder in `cache` that holds a file of each split and language, `train.svo`, `train.sov`, ...; written if need be."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # another grammar, another folder
    folder = cache / "texts" / f"{NAME}-{key}"
    if not folder.is_dir():
        with workspace(folder.parent) as temporary, writing(cache):
            for split, lines in pairs().items():
                for side, language in enumerate(LANGUAGES):
                    text = "".join(f"{pair[side]}\n" for pair in lines)
                    (temporary / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
            publish(temporary, folder)
    return folder
