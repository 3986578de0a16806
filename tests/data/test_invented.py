"""Invented sentences and questions: their labels follow the stated rules, and every word is known to the random encoder."""

from __future__ import annotations

import numpy as np
import pytest

from fullrank.config.finetune import GLUE
from fullrank.data.invented import WORDS, make_examples, make_questions

DULL = {"grey", "slow", "sad", "rough", "cold", "dull"}


@pytest.mark.parametrize("task", GLUE)
def test_labels_follow_from_the_words(task: str) -> None:
    made = make_examples(GLUE[task], "dev")
    assert (len(made), len(make_examples(GLUE[task], "train")), made.is_slice) == (400, 2000, True)
    labels = made.labels
    for first, second, label in zip(made.first, made.second or made.first, labels, strict=True):
        one, two = first.split(), second.split()
        assert {*one, *two} <= set(WORDS)
        if GLUE[task].labels is None:
            assert label == sum(a == b for a, b in zip(one, two, strict=True) if a != "the")
            continue
        name = GLUE[task].labels[label]
        if made.second is None:
            assert (one[1] in DULL) == (one[5] in DULL) == (label == 0)
            continue
        rest = [word for word in two if word != "never"]
        says_the_same = rest == ["the", *one[2:5], one[6]]
        assert says_the_same or name not in ("entailment", "equivalent", "duplicate", "contradiction")
        assert ("never" in two) == (name == "contradiction")
    if GLUE[task].labels is not None:
        assert np.bincount(labels).min() > 80  # each class often enough


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_answers_stand_where_the_question_says(version: str) -> None:
    made = make_questions("dev", version)
    assert made.is_slice
    for one in made.questions:
        assert {*one.context.split(), *one.question.split()} <= set(WORDS)
        animal = one.question.split()[-1]
        assert one.impossible == (f"the {animal} lives" not in one.context)
        for answer, start in zip(one.answers, one.starts, strict=True):
            assert one.context[:start].endswith(f"the {animal} lives in ")
            assert one.context[start:].startswith(f"{answer} .")
    assert 0.25 < np.mean([one.impossible for one in made.questions]) < 0.42 or version == "1.1"
    assert len({one.id for one in made.questions}) == 400
