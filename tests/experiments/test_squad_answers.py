"""n-best answers against a brute force over all spans, the rule of no answer, and the files for the test server."""

import json
import math
import time

import numpy as np
import pytest

from fullrank.core.errors import InputError, RunError
from fullrank.data.squad import Question, Window, most_context, spans
from fullrank.experiments.squad import find_answers, write_answers


def made(generator, number, num_tokens, room, first=4, step=2, alphabet="ab"):
    """A question whose context has one-letter words, and its windows."""
    context = " ".join(generator.choice(list(alphabet), size=num_tokens))
    question = Question(f"q{number}", "t", context, "?", (), (), impossible=True)
    parts = spans(num_tokens, room, step)
    best = most_context(parts, num_tokens)
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
    return [generator.normal(size=len(window.ids) + padding).astype(np.float32) for window in windows]


def brute_force(question, windows, starts, ends, longest):
    """Every allowed span, best first: (text, score)."""
    found = []
    for window, start, end in zip(windows, starts, ends, strict=True):
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
@pytest.mark.parametrize(("n_best", "longest"), [(1, 1), (5, 3), (20, 30), (200, 4)])
def test_n_best_against_brute_force(alphabet, n_best, longest):
    generator = np.random.default_rng(n_best)
    questions, windows = [], []
    for number, (num_tokens, room) in enumerate([(1, 5), (9, 5), (30, 7), (60, 16), (12, 40)]):
        question, mine = made(generator, number, num_tokens, room, alphabet=alphabet)
        questions.append(question)
        windows += mine
    starts, ends = logits_of(generator, windows), logits_of(generator, windows)
    answers = find_answers(questions, windows, starts, ends, n_best=n_best, max_answer_length=longest)
    assert [answer.id for answer in answers] == [question.id for question in questions]
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        mine = [place for place, window in enumerate(windows) if window.question == number]
        expected = brute_force(
            question, *([given[place] for place in mine] for given in (windows, starts, ends)), longest
        )[:n_best]
        assert [candidate.text for candidate in answer.candidates] == [text for text, _ in expected]
        assert [candidate.score for candidate in answer.candidates] == pytest.approx([score for _, score in expected])
        total = sum(math.exp(score) for _, score in expected)
        shares = [math.exp(score) / total for _, score in expected]
        assert [candidate.probability for candidate in answer.candidates] == pytest.approx(shares)
        assert answer.text == answer.best == expected[0][0]
        assert answer.null_odds is None
        for candidate in answer.candidates:
            assert question.context[candidate.start : candidate.end] == candidate.text


def test_no_answer_is_the_smallest_score_of_cls_and_wins_above_the_threshold():
    generator = np.random.default_rng(0)
    question, windows = made(generator, 0, 20, 6, alphabet="abcdefghijklmnopq")
    starts, ends = logits_of(generator, windows), logits_of(generator, windows)
    null = min(float(start[0]) + float(end[0]) for start, end in zip(starts, ends, strict=True))
    text, score = brute_force(question, windows, starts, ends, 30)[0]
    odds = null - score

    def answer(threshold, n_best=20):
        (found,) = find_answers(
            [question], windows, starts, ends, null=True, n_best=n_best, null_score_diff_threshold=threshold
        )
        return found

    assert answer(odds + 0.01).text == text
    assert answer(odds - 0.01).text == ""
    found = answer(odds - 0.01)
    assert (found.best, found.null_odds) == (text, pytest.approx(odds))
    assert sum(candidate.probability for candidate in found.candidates) == pytest.approx(1)
    for n_best in (1, 3, 20, 500):  # no answer is listed even if it is not among the n best
        listed = answer(0.0, n_best).candidates
        scores = [candidate.score for candidate in listed]
        assert scores == sorted(scores, reverse=True)
        empty = [candidate for candidate in listed if candidate.text == ""]
        assert [candidate.score for candidate in empty] == [pytest.approx(null)]
        assert len(listed) <= n_best + 1
    starts = [np.concatenate([[9.0], start[1:]]) for start in starts]
    (found,) = find_answers([question], windows, starts, ends, null=True)
    assert (found.text, found.candidates[0].text, found.best) == ("", "", text)


def test_a_context_without_tokens():
    question, windows = made(np.random.default_rng(0), 0, 0, 5)
    logits = [np.array([0.5, 1, 1, 1, 1])]
    (plain,) = find_answers([question], windows, logits, logits)
    assert (plain.text, plain.best, [candidate.probability for candidate in plain.candidates]) == ("", "", [1.0])
    (null,) = find_answers([question], windows, logits, logits, null=True)
    assert (null.text, null.null_odds, len(null.candidates)) == ("", 1.0, 1)


def test_faults():
    generator = np.random.default_rng(0)
    question, windows = made(generator, 0, 9, 20)
    good = logits_of(generator, windows)
    with pytest.raises(InputError, match="1 windows have 0 start and 1 end logits"):
        find_answers([question], windows, [], good)
    with pytest.raises(InputError, match="a window of 14 tokens has 5 start and 17 end logits"):
        find_answers([question], windows, [good[0][:5]], good)
    with pytest.raises(InputError, match="question q0 has no window"):
        find_answers([question], [], [], [])
    with pytest.raises(InputError, match="n_best=0"):
        find_answers([question], windows, good, good, n_best=0)
    for bad in (np.nan, np.inf):
        with pytest.raises(RunError, match="not finite"):
            find_answers([question], windows, [np.full(14, bad)], good)


def test_a_thousand_questions_in_seconds():
    generator = np.random.default_rng(0)
    questions, windows = [], []
    for number in range(1000):
        question, mine = made(generator, number, 180, 350, step=128, alphabet="abcdefghij")
        questions.append(question)
        windows += mine
    starts, ends = logits_of(generator, windows), logits_of(generator, windows)
    begin = time.process_time()
    find_answers(questions, windows, starts, ends, null=True)
    assert time.process_time() - begin < 20  # 1 s on an idle machine


def test_the_files_of_the_test_server(tmp_path):
    generator = np.random.default_rng(0)
    question, windows = made(generator, 0, 6, 20, alphabet="äb")
    starts, ends = logits_of(generator, windows), logits_of(generator, windows)
    plain = find_answers([question], windows, starts, ends, n_best=2)
    assert [file.name for file in write_answers(plain, tmp_path / "v1")] == [
        "predictions.json",
        "nbest_predictions.json",
    ]
    answers = find_answers([question], windows, starts, ends, n_best=2, null=True)
    files = write_answers(answers, tmp_path / "v2")
    predictions, n_best, odds = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    assert [file.name for file in files] == ["predictions.json", "nbest_predictions.json", "null_odds.json"]
    assert predictions == {"q0": answers[0].text}
    assert odds == {"q0": answers[0].null_odds}
    assert [list(entry) for entry in n_best["q0"]] == [["text", "probability", "start_logit", "end_logit"]] * 3
    assert n_best["q0"][0]["start_logit"] == answers[0].candidates[0].start_logit
