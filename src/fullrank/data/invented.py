"""Invented sentences, for trying a table without any download; they say nothing about language and are the same everywhere.

A sentence is `the ADJECTIVE ANIMAL VERB the ADJECTIVE THING`. What is to be learned of it follows from its words:

    a class         of one sentence: adjectives are of the list of its class
    of a pair       the second sentence keeps the first words of the first one, more of them in each further class
    a score         the number of words that the second sentence has kept
    an answer       the place of the one animal asked for, in a context that gives those of four
    a translation   `ANIMAL ADJECTIVE THINGm ADJECTIVEm VERB`, each word spelled backwards
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

ADJECTIVES = (("grey", "slow", "sad", "rough", "cold", "dull"), ("bright", "quick", "glad", "kind", "warm", "fine"))
ANIMALS = ("cat", "dog", "horse", "bird", "fox", "hare", "goat", "mouse", "bear", "owl", "hen", "crab")
_VERBS = ("sees", "likes", "finds", "hides", "takes", "knows", "wants", "keeps", "brings", "leaves")
_THINGS = ("stone", "tree", "boat", "lamp", "book", "bell", "coat", "cake", "drum", "rope", "jar", "leaf")
PLACES = ("lomi", "saru", "tekal", "vindo", "orrin", "pasha", "quell", "mirat", "dunev", "halso")
_OTHERS = ("the", "lives", "in", ".", "where", "is")
WORDS = (*_OTHERS, *ADJECTIVES[0], *ADJECTIVES[1], *ANIMALS, *_VERBS, *_THINGS, *PLACES)


def draw_words(draw: Random, adjectives: tuple[str, ...] = ADJECTIVES[0] + ADJECTIVES[1]) -> list[str]:
    """Draw the adjective, animal, verb, adjective and thing of a sentence."""
    first, second = draw.sample(adjectives, 2)
    return [first, draw.choice(ANIMALS), draw.choice(_VERBS), second, draw.choice(_THINGS)]


def join_words(words: list[str]) -> str:
    """Join the five words of `draw_words` to a sentence."""
    return "the {} {} {} the {} {}".format(*words)


TRANSLATION = "synthetic-translation"
LANGUAGES = ("svo", "sov")  # suffixes of the files: named by their order of words
SIZES = {"train": 12_000, "valid": 500, "test": 500}


def translate(words: list[str]) -> str:
    """Translate a sentence into the second language."""
    first, animal, verb, second, thing = (word[::-1] for word in words)
    return f"{animal} {first} {thing}m {second}m {verb}"


def write_texts(folder: Path) -> None:
    """Write a file of each split and language into `folder`, `train.svo`, `train.sov`, ...; no source line occurs twice."""
    draw = Random(1)
    pairs = dict[str, str]()
    while len(pairs) < sum(SIZES.values()):
        words = draw_words(draw)
        pairs[join_words(words)] = translate(words)
    for language, side in zip(LANGUAGES, (list(pairs), list(pairs.values())), strict=True):
        lines = iter(side)
        for split, count in SIZES.items():
            text = "".join(f"{line}\n" for line in islice(lines, count))
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
