"""Invented sentences in the form of GLUE and SQuAD: for trying a table without any download, and saying nothing about language.

A sentence is `the ADJECTIVE ANIMAL VERB the ADJECTIVE THING`; its label follows from its words by one rule for each form:

    one sentence    adjectives are of the list of its class
    a pair          it follows, or says the same: the second sentence is the first without adjectives; contradiction: with
                    `never` before its verb; any other class: about something else
    a score         5 times the share of the first sentence's words that the second one has kept
    an answer       the place of the one animal asked for, in a context that gives those of four

All splits are drawn from seeds: they are the same on every machine.
"""

from __future__ import annotations

import hashlib
import zlib
from random import Random

import numpy as np

from fullrank.config.glue import SCORES, GlueTask
from fullrank.data.glue import Examples
from fullrank.data.squad import Question, SquadSplit

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
    make = _sentence if len(task.sentences) == 1 else _pair
    rows = [make(task, draw) for _ in range(_TRAIN if split == "train" else _OTHER)]
    labels = np.array([label for _, _, label in rows], dtype=np.float32 if task.labels is None else np.int64)
    return Examples(
        first=[first for first, _, _ in rows],
        second=[second for _, second, _ in rows] if len(task.sentences) == 2 else None,
        labels=labels,
        task=task,
        split=split,
        is_slice=True,
        source="invented",
        sha256=_digest(rows),
    )


def make_questions(split: str, version: str) -> SquadSplit:
    """A split of SQuAD, as large; in version 2.0 a third of the questions is about an animal that the context does not name."""
    draw = Random(zlib.crc32(f"squad {version} {split}".encode()))
    questions = []
    for number in range(_TRAIN if split == "train" else _OTHER):
        animals, places = draw.sample(_ANIMALS, 5), draw.sample(_PLACES, 4)
        context = " ".join(f"the {animal} lives in {place} ." for animal, place in zip(animals, places, strict=False))
        impossible = version == "2.0" and draw.random() < 1 / 3
        asked = 4 if impossible else draw.randrange(4)
        answers = () if impossible else (places[asked],)
        starts = tuple(context.index(answer) for answer in answers)
        asking = f"where is the {animals[asked]}"
        questions.append(Question(f"invented-{number}", "invented", context, asking, answers, starts, impossible))
    return SquadSplit(version, split, questions, "invented", _digest(questions))


def _digest(rows: object) -> str:
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def _words(draw: Random, adjectives: tuple[str, ...]) -> list[str]:
    """The adjective, animal, verb, adjective and thing of a sentence."""
    first, second = draw.sample(adjectives, 2)
    return [first, draw.choice(_ANIMALS), draw.choice(_VERBS), second, draw.choice(_THINGS)]


def _join_words(words: list[str]) -> str:
    return f"the {words[0]} {words[1]} {words[2]} the {words[3]} {words[4]}"


def _sentence(task: GlueTask, draw: Random) -> tuple[str, str, float]:
    label = draw.randrange(2)
    return _join_words(_words(draw, _ADJECTIVES[label])), "", label


def _pair(task: GlueTask, draw: Random) -> tuple[str, str, float]:
    words, other = (_words(draw, _ADJECTIVES[0] + _ADJECTIVES[1]) for _ in range(2))
    if task.labels is None:
        kept = [draw.random() < draw.choice((0.2, 0.8)) for _ in words]
        mixed = [mine if keep else new for mine, new, keep in zip(words, other, kept, strict=True)]
        common = sum(mine == new for mine, new in zip(words, mixed, strict=True))
        return _join_words(words), _join_words(mixed), SCORES[1] * common / len(words)
    label = draw.randrange(len(task.labels))
    name = task.labels[label]
    _, animal, verb, _, thing = words if name in _SAME or name == "contradiction" else other
    never = "never " if name == "contradiction" else ""
    return _join_words(words), f"the {animal} {never}{verb} the {thing}", label
