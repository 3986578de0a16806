"""Sentence pairs of two invented languages, made by a grammar. Nothing that is true of them need be true of a language.

    source (svo)   [time] subject [tense] [not] verb object [preposition place]
    target (sov)   [time] subject [place postposition] object verb+tense+number [not]

A subject, an object and a place are a noun with up to two adjectives. In the target, adjectives follow their noun and agree in
gender and number, nouns have a number and a case, and verbs have the number of their subject. One noun of five has another
translation where it is not the subject. Every sentence has one translation, the same on every machine and in every Python.
"""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path
from random import Random

from fullrank.data.files import new_folder

SYNTHETIC = "synthetic-translation"
LANGUAGES = ("svo", "sov")  # suffixes of the files: named by their order of words
SIZES = {"train": 12_000, "valid": 500, "test": 500}
_SEED = 20_220_501
# a word is a number: its spelling in either language, and that of its second translation
_SOURCE = [*map("".join, product("ptkbdgmnslrvz", "aeiou", "mnlrsk", "aeiou"))][::11]
_TARGET = [*map("".join, product("fhjkmrtwz", "aiou", "bdglnpv", "aeo", "nrstk"))][::19]
_NOUNS, _VERBS, _ADJECTIVES, _PLACES, _TIMES = (
    range(48),
    range(48, 82),
    range(82, 102),
    range(102, 108),
    range(108, 114),
)
_SECOND = 120
_TENSES = {"": "i", "te": "ax", "vo": "uy"}  # present, past, future: a source word, and an ending of the target
_NOT = "ne", "qa"
_SUBJECT, _OBJECT, _PLACE = "", "m", "sh"  # endings of cases


class _Speaker:
    """Draws sentences; each is source words and target words."""

    def __init__(self, seed: int) -> None:
        self._draw = Random(seed).random  # the one method whose numbers no version of Python changes

    def _pick(self, words: range) -> int:
        """The first words more often than the last ones, as in a text."""
        return words[int(len(words) * self._draw() ** 1.5)]

    def make_phrase(self, case: str, plural: bool) -> tuple[list[str], list[str]]:
        noun = self._pick(_NOUNS)
        adjectives = [self._pick(_ADJECTIVES) for _ in range(int(3 * self._draw() ** 2))]
        is_second = noun % 5 == 4 and case != _SUBJECT
        stem = _TARGET[noun + _SECOND * is_second]
        source = [*(_SOURCE[word] for word in adjectives), _SOURCE[noun] + "n" * plural]
        agreement = "aeo"[noun % 3] + "l" * plural
        target = [stem + "iv" * plural + case, *(_TARGET[word] + agreement for word in adjectives)]
        return source, target

    def make_sentence(self) -> tuple[str, str]:
        plural = self._draw() < 0.35
        source, target = self.make_phrase(_SUBJECT, plural)
        thing = self.make_phrase(_OBJECT, self._draw() < 0.35)
        verb, tense = self._pick(_VERBS), [*_TENSES][int(3 * self._draw())]
        is_negated, has_place, has_time = self._draw() < 0.15, self._draw() < 0.3, self._draw() < 0.25
        source += [tense] * bool(tense) + [_NOT[0]] * is_negated + [_SOURCE[verb], *thing[0]]
        if has_place:
            place, phrase = self._pick(_PLACES), self.make_phrase(_PLACE, False)
            source += [_SOURCE[place], *phrase[0]]
            target += [*phrase[1], _TARGET[place]]
        target += [*thing[1], _TARGET[verb] + _TENSES[tense] + "ve" * plural] + [_NOT[1]] * is_negated
        if has_time:
            time = self._pick(_TIMES)
            source, target = [_SOURCE[time], *source], [_TARGET[time], *target]
        return " ".join(source), " ".join(target)


def make_pairs() -> dict[str, list[tuple[str, str]]]:
    """(source, target) lines of every split. No source line occurs twice."""
    speaker, pairs = _Speaker(_SEED), dict[str, str]()
    while len(pairs) < sum(SIZES.values()):
        pairs.setdefault(*speaker.make_sentence())
    rows = iter(pairs.items())
    return {split: [next(rows) for _ in range(count)] for split, count in SIZES.items()}


def write_files(cache: Path) -> Path:
    """The folder in `cache` that holds a file of each split and language, `train.svo`, `train.sov`, ...; written if need be."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # another grammar, another folder
    folder = cache / "texts" / f"{SYNTHETIC}-{key}"
    if not folder.is_dir():
        with new_folder(folder) as temporary:
            for split, pairs in make_pairs().items():
                for language, side in zip(LANGUAGES, zip(*pairs, strict=True), strict=True):
                    text = "".join(f"{line}\n" for line in side)
                    (temporary / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
    return folder
