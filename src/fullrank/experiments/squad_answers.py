"""Answers to SQuAD questions from the start and end logits of their windows: n best, no answer, files for the test server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fullrank.core.errors import InputError, RunError
from fullrank.data.squad import Question
from fullrank.data.squad_windows import NO_ANSWER, Window
from fullrank.files import write_json

N_BEST, MAX_ANSWER_LENGTH = 20, 30
Logits = Sequence[NDArray[np.floating]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible answer: its text and characters [start, end) in the context ("" at 0, 0: no answer), the two logits whose
    sum is its score, and the softmax of the scores over the n best."""

    text: str
    start: int
    end: int
    start_logit: float
    end_logit: float
    probability: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the question `id`.

    `text`: "" says that there is none. `best`: the best answer that is not empty, whatever the threshold.
    `candidates`: the n best, best first. `null_odds`: score of no answer minus score of `best`; None in v1.1.
    """

    id: str
    text: str
    best: str
    candidates: tuple[Candidate, ...]
    null_odds: float | None = None


def find_answers(
    questions: Sequence[Question],
    windows: Sequence[Window],
    start_logits: Logits,
    end_logits: Logits,
    *,
    null: bool = False,
    n_best: int = N_BEST,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    null_score_diff_threshold: float = 0.0,
) -> list[Answer]:
    """One answer for each question, in order.

    `start_logits[w]`, `end_logits[w]` (at least as long as window w; the rest is padding): what the model said of window w.
    A candidate begins at a context token that has most context in its window, ends in the same window no earlier, and has at
    most `max_answer_length` tokens; its score is start logit + end logit, its text is cut from the context as it is written.
    Of candidates with the same text only the best stays. `null` (v2): no answer is a candidate too; its score is the smallest
    sum of the two logits at [CLS] over the question's windows, and it wins if null odds > `null_score_diff_threshold`.
    BERT's script looks only at pairs of the 20 best starts and the 20 best ends of a window; here every span is looked at.
    Raises InputError for logits that do not fit the windows, RunError for logits that are not finite.
    """
    for key, value in (("n_best", n_best), ("max_answer_length", max_answer_length)):
        if value < 1:
            raise InputError(f"{key}={value} is not possible; set it to 1 or more")
    if not len(windows) == len(start_logits) == len(end_logits):
        raise InputError(f"{len(windows)} windows have {len(start_logits)} start and {len(end_logits)} end logits")
    of_question: list[list[int]] = [[] for _ in questions]
    for place, window in enumerate(windows):
        of_question[window.question].append(place)
    found = []
    for question, places in zip(questions, of_question, strict=True):
        if not places:
            raise InputError(f"question {question.id} has no window")
        parts = [_Part(windows[place], start_logits[place], end_logits[place], max_answer_length) for place in places]
        spans = _best_spans(question.context, parts, n_best)
        found.append(_answer(question.id, spans, parts if null else [], n_best, null_score_diff_threshold))
    return found


class _Part:
    """One window and the scores of all spans in it: `scores[s, k]` of context tokens s to s + k, -inf where not allowed."""

    def __init__(
        self, window: Window, start: NDArray[np.floating], end: NDArray[np.floating], max_answer_length: int
    ) -> None:
        self.window, size = window, len(window.ids)
        if len(start) < size or len(end) < size:
            raise InputError(f"a window of {size} tokens has {len(start)} start and {len(end)} end logits")
        # in float64, where the sum of two float32 logits keeps its order
        self.start, self.end = (np.asarray(logits[:size], dtype=np.float64) for logits in (start, end))
        if not (np.isfinite(self.start).all() and np.isfinite(self.end).all()):
            raise RunError(
                "the model's start or end logits are not finite; has training diverged? lower the learning rate"
            )
        num_context = len(window.offsets)
        context = slice(window.first, window.first + num_context)
        width = min(max_answer_length, num_context)
        ends = np.full(num_context + width, -np.inf)  # beyond the window no span ends
        ends[:num_context] = self.end[context]
        starts = np.where(window.max_context, self.start[context], -np.inf)
        shape = num_context, width
        self.scores = starts[:, None] + (
            np.lib.stride_tricks.sliding_window_view(ends, width)[:num_context] if width else np.empty(shape)
        )

    @property
    def null(self) -> tuple[float, float]:
        return float(self.start[NO_ANSWER]), float(self.end[NO_ANSWER])


@dataclass(frozen=True, slots=True)
class _Span:
    text: str
    start: int
    end: int
    start_logit: float
    end_logit: float


def _best_spans(context: str, parts: Sequence[_Part], n_best: int) -> list[_Span]:
    """The `n_best` spans of different text, best first; of equal scores the one that comes first."""
    scores = np.concatenate([part.scores.ravel() for part in parts])
    sizes = np.cumsum([0] + [part.scores.size for part in parts])
    possible = int(np.isfinite(scores).sum())
    wanted = min(possible, 4 * n_best)
    while True:
        spans: dict[str, _Span] = {}
        if wanted:
            least = np.partition(scores, len(scores) - wanted)[len(scores) - wanted]
            places = np.flatnonzero(scores >= least)
            for place in places[np.argsort(-scores[places], kind="stable")]:
                number = int(np.searchsorted(sizes, place, side="right")) - 1
                span = _span(context, parts[number], int(place - sizes[number]))
                if span.text:
                    spans.setdefault(span.text, span)
                if len(spans) == n_best:
                    break
        if len(spans) == n_best or wanted == possible:
            return list(spans.values())
        wanted = min(possible, 8 * wanted)  # the same text stood there many times


def _span(context: str, part: _Part, place: int) -> _Span:
    first, more = divmod(place, part.scores.shape[1])
    start, end = part.window.first + first, part.window.first + first + more
    begin, stop = part.window.characters(start, end)
    return _Span(context[begin:stop], begin, stop, float(part.start[start]), float(part.end[end]))


def _answer(name: str, spans: list[_Span], parts: Sequence[_Part], n_best: int, threshold: float) -> Answer:
    best = spans[0] if spans else None
    text = best.text if best else ""
    odds = None
    if parts:
        start, end = min((part.null for part in parts), key=sum)
        # a context without any token has no span to compare with; as in BERT's script it scores 0
        odds = start + end - (best.start_logit + best.end_logit if best else 0.0)
        spans = sorted([*spans, _Span("", 0, 0, start, end)], key=lambda span: -(span.start_logit + span.end_logit))
        kept = spans[:n_best]
        spans = kept if any(not span.text for span in kept) else [*kept, _Span("", 0, 0, start, end)]
    spans = spans or [_Span("", 0, 0, 0.0, 0.0)]
    scores = np.array([span.start_logit + span.end_logit for span in spans])
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    candidates = tuple(
        Candidate(span.text, span.start, span.end, span.start_logit, span.end_logit, float(share))
        for span, share in zip(spans, shares, strict=True)
    )
    return Answer(name, "" if odds is not None and odds > threshold else text, text, candidates, odds)


def write_answers(answers: Sequence[Answer], folder: str | Path) -> list[Path]:
    """predictions.json, nbest_predictions.json and, for v2, null_odds.json in the official form, each by question id.

    RunError if a file cannot be written.
    """
    contents: dict[str, Mapping[str, object]] = {
        "predictions.json": {answer.id: answer.text for answer in answers},
        "nbest_predictions.json": {
            answer.id: [
                {
                    "text": candidate.text,
                    "probability": candidate.probability,
                    "start_logit": candidate.start_logit,
                    "end_logit": candidate.end_logit,
                }
                for candidate in answer.candidates
            ]
            for answer in answers
        },
    }
    odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None}
    if odds:
        contents["null_odds.json"] = odds
    files = []
    for name, content in contents.items():
        files.append(Path(folder).expanduser() / name)
        write_json(files[-1], content)
    return files
