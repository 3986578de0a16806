"""Invented sentences, for trying a table without any download; they say nothing about language and are the same everywhere.

In the form of GLUE and SQuAD a sentence is `the ADJECTIVE ANIMAL VERB the ADJECTIVE THING`; its label follows from its words:

    one sentence    adjectives are of the list of its class
    a pair          it follows, or says the same: the second sentence is the first without adjectives; contradiction: with
                    `never` before its verb; any other class: about something else
    a score         5 times the share of the first sentence's words that the second one has kept
    an answer       the place of the one animal asked for, in a context that gives those of four

For translation there are two languages, made by a grammar, in which every sentence has one translation:

    source (svo)   [time] subject [tense] [not] verb object [preposition place]
    target (sov)   [time] subject [place postposition] object verb+tense+number [not]

A subject, an object and a place are a noun with up to two adjectives. In the target, adjectives follow their noun and agree in
gender and number, nouns have a number and a case, and verbs have the number of their subject. One noun of five has another
translation where it is not the subject.
"""

from __future__ import annotations

import hashlib
import zlib
from itertools import product
from pathlib import Path
from random import Random

import numpy as np

from fullrank.config.finetune import SCORES, GlueTask
from fullrank.data.files import create_folder
from fullrank.data.tasks import Examples, Question, SquadSplit

_TRAIN, _OTHER = 2_000, 400  # examples
_ADJECTIVES = (("grey", "slow", "sad", "rough", "cold", "dull"), ("bright", "quick", "glad", "kind", "warm", "fine"))
_ANIMALS = ("cat", "dog", "horse", "bird", "fox", "hare", "goat", "mouse", "bear", "owl", "hen", "crab")
_VERBS = ("sees", "likes", "finds", "hides", "takes", "knows", "wants", "keeps", "brings", "leaves")
_THINGS = ("stone", "tree", "boat", "lamp", "book", "bell", "coat", "cake", "drum", "rope", "jar", "leaf")
_PLACES = ("lomi", "saru", "tekal", "vindo", "orrin", "pasha", "quell", "mirat", "dunev", "halso")
_OTHERS = ("the", "never", "lives", "in", ".", "where", "is")
WORDS = (*_OTHERS, *_ADJECTIVES[0], *_ADJECTIVES[1], *_ANIMALS, *_VERBS, *_THINGS, *_PLACES)
_SAME = ("entailment", "equivalent", "duplicate")


def make_examples(task: GlueTask, split: str) -> Examples:
    """A split of a task of GLUE, 2,000 examples to train on and 400 of any other, marked as a slice."""
    draw = Random(zlib.crc32(f"{task.name} {split}".encode()))
    make = _make_sentence if len(task.sentences) == 1 else _make_pair
    rows = [make(task, draw) for _ in range(_TRAIN if split == "train" else _OTHER)]
    first, second, values = ([*column] for column in zip(*rows, strict=True))
    labels = np.array(values, dtype=np.float32 if task.labels is None else np.int64)
    return Examples(
        first, second if len(task.sentences) == 2 else None, labels, task, split, True, "invented", _digest(rows)
    )


def make_questions(split: str, version: str) -> SquadSplit:
    """A split of SQuAD, as large; in version 2.0 a third of the questions is about an animal that the context does not name."""
    draw = Random(zlib.crc32(f"squad {version} {split}".encode()))
    questions = []
    for number in range(_TRAIN if split == "train" else _OTHER):
        animals, places = draw.sample(_ANIMALS, 5), draw.sample(_PLACES, 4)
        context = " ".join(f"the {animal} lives in {place} ." for animal, place in zip(animals, places, strict=False))
        impossible = version == "2.0" and draw.random() < 1 / 3
        place = 4 if impossible else draw.randrange(4)
        answers = () if impossible else (places[place],)
        starts = tuple(context.index(answer) for answer in answers)
        question = f"where is the {animals[place]}"
        questions.append(Question(f"invented-{number}", "invented", context, question, answers, starts, impossible))
    return SquadSplit(version, split, questions, "invented", _digest(questions))


def _digest(rows: object) -> str:
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def _draw_words(draw: Random, adjectives: tuple[str, ...]) -> list[str]:
    """The adjective, animal, verb, adjective and thing of a sentence."""
    first, second = draw.sample(adjectives, 2)
    return [first, draw.choice(_ANIMALS), draw.choice(_VERBS), second, draw.choice(_THINGS)]


def _join_words(words: list[str]) -> str:
    return "the {} {} {} the {} {}".format(*words)


def _make_sentence(task: GlueTask, draw: Random) -> tuple[str, str, float]:
    label = draw.randrange(2)
    return _join_words(_draw_words(draw, _ADJECTIVES[label])), "", label


def _make_pair(task: GlueTask, draw: Random) -> tuple[str, str, float]:
    words, other = (_draw_words(draw, _ADJECTIVES[0] + _ADJECTIVES[1]) for _ in range(2))
    if task.labels is None:
        stay = [draw.random() < draw.choice((0.2, 0.8)) for _ in words]
        mixed = [mine if stays else new for mine, new, stays in zip(words, other, stay, strict=True)]
        common = sum(mine == new for mine, new in zip(words, mixed, strict=True))
        return _join_words(words), _join_words(mixed), SCORES[1] * common / len(words)
    label = draw.randrange(len(task.labels))
    name = task.labels[label]
    _, animal, verb, _, thing = words if name in _SAME or name == "contradiction" else other
    never = "never " if name == "contradiction" else ""
    return _join_words(words), f"the {animal} {never}{verb} the {thing}", label


# sentence pairs for translation

TRANSLATION = "synthetic-translation"
LANGUAGES = ("svo", "sov")  # suffixes of the files: named by their order of words
SIZES = {"train": 12_000, "valid": 500, "test": 500}
_SEED = 20_220_501
# a word is a number: its spelling in either language, and that of its second translation
_SOURCE = [*map("".join, product("ptkbdgmnslrvz", "aeiou", "mnlrsk", "aeiou"))][::11]
_TARGET = [*map("".join, product("fhjkmrtwz", "aiou", "bdglnpv", "aeo", "nrstk"))][::19]
_NOUNS, _ACTIONS, _QUALITIES = range(48), range(48, 82), range(82, 102)
_POSITIONS, _TIMES = range(102, 108), range(108, 114)
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
        adjectives = [self._pick(_QUALITIES) for _ in range(int(3 * self._draw() ** 2))]
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
        verb, tense = self._pick(_ACTIONS), [*_TENSES][int(3 * self._draw())]
        is_negated, has_place, has_time = self._draw() < 0.15, self._draw() < 0.3, self._draw() < 0.25
        source += [tense] * bool(tense) + [_NOT[0]] * is_negated + [_SOURCE[verb], *thing[0]]
        if has_place:
            place, phrase = self._pick(_POSITIONS), self.make_phrase(_PLACE, False)
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


def write_translation(cache: Path) -> Path:
    """The folder in `cache` that holds a file of each split and language, `train.svo`, `train.sov`, ...; written if need be."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # another grammar, another folder
    folder = cache / "texts" / f"{TRANSLATION}-{key}"
    if not folder.is_dir():
        with create_folder(folder) as temporary:
            for split, pairs in make_pairs().items():
                for language, side in zip(LANGUAGES, zip(*pairs, strict=True), strict=True):
                    text = "".join(f"{line}\n" for line in side)
                    (temporary / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
    return folder
