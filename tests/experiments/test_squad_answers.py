"""n-best answers against a brute force over all spans, the rule of no answer, and the files for the test server."""

import json
import math

import numpy as np
import pytest

from fullrank.config.finetune import FinetuneEvalConfig
from fullrank.core.errors import RunError
from fullrank.data.squad import Question, Window, most_context
from fullrank.experiments.squad import find_answers, write_answers


def made(generator, number, num_tokens, room, first=4, step=2, alphabet="ab"):
    """A question whose context has one-letter words, and its windows."""
    context = " ".join(generator.choice(list(alphabet), size=num_tokens))
    question = Question(f"q{number}", "t", context, "?", (), (), impossible=True)
    starts = range(0, max(num_tokens - room, 0) + step, step)
    parts = [(start, min(start + room, num_tokens)) for start in starts]
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
@pytest.mark.parametrize(("n_best", "longest"), [(1, 1), (5, 3), (20, 30), (200, 4)])
def test_n_best_against_brute_force(alphabet, n_best, longest):
    generator = np.random.default_rng(n_best)
    questions, windows = [], []
    for number, (num_tokens, room) in enumerate([(1, 5), (9, 5), (30, 7), (60, 16), (12, 40)]):
        question, mine = made(generator, number, num_tokens, room, alphabet=alphabet)
        questions.append(question)
        windows += mine
    logits = logits_of(generator, windows)
    options = FinetuneEvalConfig(n_best=n_best, max_answer_length=longest)
    answers = find_answers(questions, windows, logits, options, is_v2=False)
    assert [answer.id for answer in answers] == [question.id for question in questions]
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        mine = [place for place, window in enumerate(windows) if window.question == number]
        pairs = [windows[place] for place in mine], [logits[place] for place in mine]
        expected = brute_force(question, *pairs, longest)[:n_best]
        assert [candidate.text for candidate in answer.candidates] == [text for text, _ in expected]
        assert [candidate.score for candidate in answer.candidates] == pytest.approx([score for _, score in expected])
        total = sum(math.exp(score) for _, score in expected)
        shares = [math.exp(score) / total for _, score in expected]
        assert [candidate.probability for candidate in answer.candidates] == pytest.approx(shares)
        assert answer.text == answer.best == expected[0][0]
        assert answer.null_odds is None


def test_no_answer_is_the_smallest_score_of_cls_and_wins_above_the_threshold():
    generator = np.random.default_rng(0)
    question, windows = made(generator, 0, 20, 6, alphabet="abcdefghijklmnopq")
    logits = logits_of(generator, windows)
    null = min(float(start[0]) + float(end[0]) for start, end in logits)
    text, score = brute_force(question, windows, logits, 30)[0]
    odds = null - score

    def answer(threshold, n_best=20):
        options = FinetuneEvalConfig(n_best=n_best, null_score_diff_threshold=threshold)
        (found,) = find_answers([question], windows, logits, options, is_v2=True)
        return found

    assert answer(odds + 0.01).text == text
    found = answer(odds - 0.01)
    assert (found.text, found.best, found.null_odds) == ("", text, pytest.approx(odds))
    assert sum(candidate.probability for candidate in found.candidates) == pytest.approx(1)
    for n_best in (1, 3, 20, 500):  # no answer is listed even if it is not among the n best
        listed = answer(0.0, n_best).candidates
        scores = [candidate.score for candidate in listed]
        assert scores == sorted(scores, reverse=True)
        assert [candidate.score for candidate in listed if candidate.text == ""] == [pytest.approx(null)]
        assert len(listed) <= n_best + 1


def test_a_context_without_tokens():
    question, windows = made(np.random.default_rng(0), 0, 0, 5)
    logits = [np.array([[0.5, 1, 1, 1, 1]] * 2)]
    (plain,) = find_answers([question], windows, logits, FinetuneEvalConfig(), is_v2=False)
    assert (plain.text, plain.best, [candidate.probability for candidate in plain.candidates]) == ("", "", [1.0])
    (null,) = find_answers([question], windows, logits, FinetuneEvalConfig(), is_v2=True)
    assert (null.text, null.null_odds, len(null.candidates)) == ("", 1.0, 1)


def test_logits_that_are_not_finite():
    question, windows = made(np.random.default_rng(0), 0, 9, 20)
    with pytest.raises(RunError, match="not finite"):
        find_answers([question], windows, [np.full((2, 14), np.nan)], FinetuneEvalConfig(), is_v2=False)


def test_the_official_files(tmp_path):
    generator = np.random.default_rng(0)
    question, windows = made(generator, 0, 6, 20, alphabet="äb")
    logits = logits_of(generator, windows)
    for is_v2 in (False, True):
        answers = find_answers([question], windows, logits, FinetuneEvalConfig(n_best=2), is_v2)
        write_answers(answers, tmp_path)
        predictions, n_best = (
            json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("predictions", "nbest_predictions")
        )
        assert predictions == {"q0": answers[0].text}
        assert [list(entry) for entry in n_best["q0"]] == [["text", "probability", "start_logit", "end_logit"]] * (
            2 + is_v2
        )
        assert n_best["q0"][0]["start_logit"] == answers[0].candidates[0].start_logit
        assert (tmp_path / "null_odds.json").exists() == is_v2
