"""The best answer against a brute force over all spans, and the rule of no answer."""

import numpy as np
import pytest

from fullrank.config.finetune import FinetuneEvalConfig
from fullrank.data.tasks import Question, Window, choose_windows
from fullrank.experiments.finetuning import find_answers


def made(generator, number, num_tokens, room, first=4, step=2, alphabet="ab"):
    """A question whose context has one-letter words, and its windows."""
    context = " ".join(generator.choice(list(alphabet), size=num_tokens))
    question = Question(f"q{number}", "t", context, "?", (), (), impossible=True)
    starts = range(0, max(num_tokens - room, 0) + step, step)
    parts = [(start, min(start + room, num_tokens)) for start in starts]
    best = choose_windows(parts, num_tokens)
    windows = [
        Window(
            question=number,
            ids=np.zeros(first + end - start + 1, np.int32),
            types=np.zeros(first + end - start + 1, np.int8),
            first=first,
            offsets=np.array([[2 * i, 2 * i + 1] for i in range(start, end)], np.int32).reshape(-1, 2),
            max_context=best[start:end] == place,
            start=0,
            end=0,
        )
        for place, (start, end) in enumerate(parts)
    ]
    return question, windows


def logits_of(generator, windows, padding=3):
    return [generator.normal(size=(2, len(window.ids) + padding)).astype(np.float32) for window in windows]


def brute_force(question, windows, logits, longest):
    """Every allowed span, best first: (text, score)."""
    found = []
    for window, (start, end) in zip(windows, logits, strict=True):
        for i in range(len(window.offsets)):
            for j in range(i, len(window.offsets)):
                if j - i + 1 <= longest and window.max_context[i]:
                    text = question.context[window.offsets[i][0] : window.offsets[j][1]]
                    found.append((text, float(start[window.first + i]) + float(end[window.first + j])))
    found.sort(key=lambda pair: -pair[1])
    best = {}
    for text, score in found:
        best.setdefault(text, score)
    return list(best.items())


@pytest.mark.parametrize("alphabet", ["a", "ab", "abcdefghijkl"])
@pytest.mark.parametrize("longest", [1, 3, 30])
def test_the_best_answer_against_brute_force(alphabet, longest):
    generator = np.random.default_rng(longest)
    questions, windows = [], []
    for number, (num_tokens, room) in enumerate([(1, 5), (9, 5), (30, 7), (60, 16), (12, 40)]):
        question, mine = made(generator, number, num_tokens, room, alphabet=alphabet)
        questions.append(question)
        windows += mine
    logits = logits_of(generator, windows)
    answers = find_answers(questions, windows, logits, FinetuneEvalConfig(max_answer_length=longest), is_v2=False)
    assert list(answers) == [question.id for question in questions]
    for number, question in enumerate(questions):
        mine = [place for place, window in enumerate(windows) if window.question == number]
        pairs = [windows[place] for place in mine], [logits[place] for place in mine]
        assert answers[question.id] == brute_force(question, *pairs, longest)[0][0]


def test_no_answer_is_the_smallest_score_of_cls_and_wins_above_the_threshold():
    generator = np.random.default_rng(0)
    question, windows = made(generator, 0, 20, 6, alphabet="abcdefghijklmnopq")
    logits = logits_of(generator, windows)
    null = min(float(start[0]) + float(end[0]) for start, end in logits)
    text, score = brute_force(question, windows, logits, 30)[0]
    for threshold, expected in ((null - score + 0.01, text), (null - score - 0.01, "")):
        options = FinetuneEvalConfig(null_score_diff_threshold=threshold)
        assert find_answers([question], windows, logits, options, is_v2=True) == {"q0": expected}
