"""Invented sentences and questions: their labels follow the stated rules, and every word is known to the random encoder."""

import numpy as np
import pytest

from fullrank.config.finetune import GLUE, SQUAD, TaskDataConfig
from fullrank.data.invented import SIZES, WORDS, write_texts
from fullrank.data.tasks import read_task


def made_split(name, split):
    return read_task(TaskDataConfig(name=name, invented=True), split)


DULL = {"grey", "slow", "sad", "rough", "cold", "dull"}


@pytest.mark.parametrize("task", GLUE)
def test_labels_follow_from_the_words(task):
    made = made_split(f"glue/{task}", "dev")
    assert (len(made), len(made_split(f"glue/{task}", "train")), made.is_slice) == (400, 2000, True)
    classes = 6 if GLUE[task].labels is None else GLUE[task].outputs
    for sentences, label in made.rows:
        one, two = ([word for word in sentences[at].split() if word != "the"] for at in (0, -1))
        assert {*one, *two, "the"} <= set(WORDS)
        if len(sentences) == 1:
            assert (one[0] in DULL) == (one[3] in DULL) == (label == 0)
        else:
            kept = int(label * 5 // (classes - 1))
            assert one[:kept] == two[:kept]
    assert np.bincount([label for _, label in made.rows]).min() > 40  # each class often enough


@pytest.mark.parametrize("name", SQUAD)
def test_answers_stand_where_the_question_says(name):
    made = made_split(name, "dev")
    assert made.is_slice
    for one in made.rows:
        assert {*one.context.split(), *one.question.split()} <= set(WORDS)
        animal = one.question.split()[-1]
        assert one.impossible == (f"the {animal} lives" not in one.context)
        for answer, start in zip(one.answers, one.starts, strict=True):
            assert one.context[:start].endswith(f"the {animal} lives in ")
            assert one.context[start:].startswith(f"{answer} .")
    assert 0.25 < np.mean([one.impossible for one in made.rows]) < 0.42 or name == "squad"
    assert len({one.id for one in made.rows}) == 400


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
        subject, of_subject, of_object, of_verb = [animal, first], f"m{thing}", f"m{second}", verb
        assert [word[::-1] for word in target.split()] == [*subject, of_subject, of_object, of_verb]
