"""Invented sentences and questions: their labels follow from their words, and every word is known to the random encoder."""

import numpy as np
import pytest

from fullrank.config.finetune import GLUE, SQUAD, TaskDataConfig
from fullrank.data.invented import SIZES, WORDS, write_texts
from fullrank.data.tasks import read_task


def made_split(name, split):
    return read_task(TaskDataConfig(name=name, invented=True), split)


def words_of(sentence):
    return [word for word in sentence.split() if word != "the"]


DULL = {"grey", "slow", "sad", "rough", "cold", "dull"}


@pytest.mark.parametrize("task", GLUE)
def test_labels_follow_from_the_words(task):
    split = made_split(f"glue/{task}", "dev")
    assert (len(split), len(made_split(f"glue/{task}", "train")), split.is_slice) == (400, 2000, True)
    classes = 6 if GLUE[task].labels is None else GLUE[task].outputs
    for sentences, label in split.rows:
        first, last = words_of(sentences[0]), words_of(sentences[-1])
        assert {*first, *last, "the"} <= set(WORDS)
        if len(sentences) == 1:
            assert (first[0] in DULL) == (first[3] in DULL) == (label == 0)
        else:
            shared = int(label * 5 // (classes - 1))
            assert first[:shared] == last[:shared]
    assert np.bincount([label for _, label in split.rows]).min() > 40  # each class often enough


@pytest.mark.parametrize("name", SQUAD)
def test_answers_stand_where_the_question_says(name):
    split = made_split(name, "dev")
    assert split.is_slice
    for question in split.rows:
        assert {*question.context.split(), *question.question.split()} <= set(WORDS)
        animal = question.question.split()[-1]
        assert question.impossible == (f"the {animal} lives" not in question.context)
        for answer, start in zip(question.answers, question.starts, strict=True):
            assert question.context[:start].endswith(f"the {animal} lives in ")
            assert question.context[start:].startswith(f"{answer} .")
    assert 0.25 < np.mean([question.impossible for question in split.rows]) < 0.42 or name == "squad"
    assert len({question.id for question in split.rows}) == 400


def test_a_translation_turns_words_and_their_order_around(tmp_path):
    write_texts(tmp_path)
    texts = {path.name: path.read_text(encoding="utf-8").splitlines() for path in tmp_path.iterdir()}
    assert {name: len(lines) for name, lines in texts.items()} == {
        f"{split}.{language}": count for split, count in SIZES.items() for language in ("svo", "sov")
    }
    sources = [line for split in SIZES for line in texts[f"{split}.svo"]]
    assert len({*sources}) == len(sources)
    for source, target in zip(texts["valid.svo"], texts["valid.sov"], strict=True):
        _, first, animal, verb, _, second, thing = source.split()
        assert [word[::-1] for word in target.split()] == [animal, first, f"m{thing}", f"m{second}", verb]
