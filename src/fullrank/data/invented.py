"""Invented sentences, for trying a table without any download; they say nothing about language and are the same everywhere.

A sentence is `the ADJECTIVE ANIMAL VERB the ADJECTIVE THING`. What is to be learned of it follows from its words:

    a class         of one sentence: adjectives are of the list of its class
    of a pair       the second sentence keeps the first words of the first one, more of them in each further class
    a score         the number of words that the second sentence has kept
    an answer       the place of the one animal asked for, in a context that gives those of four
    a translation   `ANIMAL ADJECTIVE THINGm ADJECTIVEm VERB`, each word spelled backwards
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from random import Random

from fullrank.config.finetune import SCORES, GlueTask
from fullrank.data.corpora import SQUAD_SIZES
from fullrank.data.files import create_folder
from fullrank.data.tasks import Question, TaskSplit

_TRAIN, _OTHER = 2_000, 400  # examples
_ADJECTIVES = (("grey", "slow", "sad", "rough", "cold", "dull"), ("bright", "quick", "glad", "kind", "warm", "fine"))
_ANIMALS = ("cat", "dog", "horse", "bird", "fox", "hare", "goat", "mouse", "bear", "owl", "hen", "crab")
_VERBS = ("sees", "likes", "finds", "hides", "takes", "knows", "wants", "keeps", "brings", "leaves")
_THINGS = ("stone", "tree", "boat", "lamp", "book", "bell", "coat", "cake", "drum", "rope", "jar", "leaf")
_PLACES = ("lomi", "saru", "tekal", "vindo", "orrin", "pasha", "quell", "mirat", "dunev", "halso")
_OTHERS = ("the", "lives", "in", ".", "where", "is")
WORDS = (*_OTHERS, *_ADJECTIVES[0], *_ADJECTIVES[1], *_ANIMALS, *_VERBS, *_THINGS, *_PLACES)


def draw_words(draw: Random, adjectives: tuple[str, ...] = _ADJECTIVES[0] + _ADJECTIVES[1]) -> list[str]:
    """The adjective, animal, verb, adjective and thing of a sentence."""
    first, second = draw.sample(adjectives, 2)
    return [first, draw.choice(_ANIMALS), draw.choice(_VERBS), second, draw.choice(_THINGS)]


def join_words(words: list[str]) -> str:
    return "the {} {} {} the {} {}".format(*words)


def _digest(rows: object) -> str:
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def make_examples(task: GlueTask, split: str) -> TaskSplit:
    """A split of a task of GLUE, 2,000 examples to train on and 400 of any other."""
    draw = Random(zlib.crc32(f"{task.name} {split}".encode()))
    rows: list[tuple[tuple[str, ...], float]] = []
    classes = int(SCORES[1]) + 1 if task.labels is None else task.outputs
    for _ in range(_TRAIN if split == "train" else _OTHER):
        label = draw.randrange(classes)
        if len(task.sentences) == 1:
            sentence = join_words(draw_words(draw, _ADJECTIVES[label]))
            rows.append(((sentence,), label))
        else:
            words, other = draw_words(draw), draw_words(draw)
            kept = label * len(words) // (classes - 1)
            rows.append(((join_words(words), join_words(words[:kept] + other[kept:])), label))
    return TaskSplit(split, rows, task.sizes[split], "invented", _digest(rows))


def make_questions(split: str, version: str) -> TaskSplit:
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
    return TaskSplit(split, questions, SQUAD_SIZES[version][split], "invented", _digest(questions))


# sentence pairs for translation

TRANSLATION = "synthetic-translation"
LANGUAGES = ("svo", "sov")  # suffixes of the files: named by their order of words
SIZES = {"train": 12_000, "valid": 500, "test": 500}


def translate(words: list[str]) -> str:
    """The translation of a sentence into the second language."""
    first, animal, verb, second, thing = (word[::-1] for word in words)
    return f"{animal} {first} {thing}m {second}m {verb}"


def write_translation(cache: Path) -> Path:
    """The folder in `cache` that holds a file of each split and language, `train.svo`, `train.sov`, ...; written if need be.

    No source line occurs twice.
    """
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # another grammar, another folder
    folder = cache / "texts" / f"{TRANSLATION}-{key}"
    if folder.is_dir():
        return folder
    draw, pairs = Random(1), dict[str, str]()
    while len(pairs) < sum(SIZES.values()):
        words = draw_words(draw)
        pairs[join_words(words)] = translate(words)
    rows = iter(pairs.items())
    with create_folder(folder) as temporary:
        for split, count in SIZES.items():
            lines = [next(rows) for _ in range(count)]
            for language, side in zip(LANGUAGES, zip(*lines, strict=True), strict=True):
                text = "".join(f"{line}\n" for line in side)
                (temporary / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
    return folder
