"""Question and context as one sequence for an encoder; a long context becomes several windows that overlap."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullrank.core.errors import InputError
from fullrank.data.squad import Question

MAX_LENGTH, DOC_STRIDE, MAX_QUERY_LENGTH = 384, 128, 64
_CHUNK = 1024  # texts that the tokenizer gets at once
NO_ANSWER = 0  # the position of [CLS], which stands for "not in this window"


@dataclass(frozen=True, slots=True)
class Window:
    """One window over one context:  [CLS] question [SEP] part of the context [SEP], or as the tokenizer lays out a pair.

    question        index of its question in the list the windows were made from
    ids, types (N,) token ids and token_type_ids
    first           position of its first context token; `len(offsets)` of them follow each other
    offsets (C, 2)  the characters [from, to) of each context token in the original context
    max_context (C,) whether this is the window in which the token has most context
    start, end      positions of the first and last token of the first answer; both 0, [CLS], if it is not wholly in here
    """

    question: int
    ids: NDArray[np.int32]
    types: NDArray[np.int8]
    first: int
    offsets: NDArray[np.int32]
    max_context: NDArray[np.bool_]
    start: int
    end: int

    def characters(self, start: int, end: int) -> tuple[int, int]:
        """The characters [from, to) of the context that tokens `start` to `end` (positions, both included) cover."""
        return int(self.offsets[start - self.first, 0]), int(self.offsets[end - self.first, 1])


def squad_windows(
    questions: Sequence[Question],
    tokenizer: Any,
    *,
    max_length: int = MAX_LENGTH,
    doc_stride: int = DOC_STRIDE,
    max_query_length: int = MAX_QUERY_LENGTH,
) -> list[Window]:
    """All windows of all questions, in order; at least one for each question.

    `tokenizer`: of the package tokenizers, or a fast one of transformers; it is not changed, and its own truncation and
    padding are not used. Its post-processor says which special tokens stand where and which types tokens have.
    The convention is that of BERT's own script: the question is cut to its first `max_query_length` tokens, the context gets
    the rest of `max_length`, and each window begins `doc_stride` context tokens after the one before (`doc_stride` is the
    step, the overlap is the rest; in Hugging Face's scripts the argument of the same name is the overlap), but never so far
    on that a token is left out. The last window is the first that reaches the end.
    Raises InputError if a tokenizer has no offsets or puts no special token first, and if no room is left for the context.
    """
    for key, value in (("max_length", max_length), ("doc_stride", doc_stride), ("max_query_length", max_query_length)):
        if value < 1:
            raise InputError(f"{key}={value} is not possible; set it to 1 or more")
    backend = _backend(tokenizer)
    layout = _layout(backend)
    contexts: dict[str, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
    windows: list[Window] = []
    for at in range(0, len(questions), _CHUNK):
        some = questions[at : at + _CHUNK]
        fresh = list(dict.fromkeys(question.context for question in some if question.context not in contexts))
        contexts = {question.context: contexts[question.context] for question in some if question.context in contexts}
        for text, encoded in zip(fresh, _encode(backend, fresh), strict=True):
            ids = np.array(encoded.ids, dtype=np.int32)
            contexts[text] = ids, _without_spaces(text, np.array(encoded.offsets, dtype=np.int32).reshape(-1, 2))
        asked = _encode(backend, [question.question.strip() for question in some])
        for index, (question, encoded) in enumerate(zip(some, asked, strict=True), start=at):
            query = np.array(encoded.ids[:max_query_length], dtype=np.int32)
            room = max_length - len(query) - layout.special
            if room < 1:
                raise InputError(
                    f"max_length={max_length} leaves no room for the context of question {question.id}: {len(query)} tokens "
                    f"of question and {layout.special} special tokens; raise max_length or lower max_query_length"
                )
            windows.extend(_windows(index, question, query, *contexts[question.context], layout, room, doc_stride))
    return windows


def spans(num_tokens: int, room: int, doc_stride: int) -> list[tuple[int, int]]:
    """The context tokens [from, to) of each window: `room` of them, every `doc_stride`; one empty window for no tokens."""
    found, start = [], 0
    while start + room < num_tokens:
        found.append((start, start + room))
        start += min(room, doc_stride)
    return [*found, (start, num_tokens)]


def most_context(windows: Sequence[tuple[int, int]], num_tokens: int) -> NDArray[np.int64]:
    """The window in which each context token is scored (num_tokens,).

    The one where the smaller of the numbers of tokens to its left and to its right, plus 0.01 of the window's length, is
    largest, and the first of several such.
    """
    positions = np.arange(num_tokens)
    scores = np.full((len(windows), num_tokens), -1.0)
    for row, (start, end) in zip(scores, windows, strict=True):
        inside = positions[start:end]
        row[start:end] = np.minimum(inside - start, end - 1 - inside) + 0.01 * (end - start)
    return scores.argmax(axis=0)


def answer_tokens(offsets: NDArray[np.int32], start: int, end: int) -> tuple[int, int] | None:
    """First and last token, both included, that share a character with the characters [start, end); None if none does."""
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


@dataclass(frozen=True)
class _Layout:
    """The special tokens before, between and after the two texts of a pair, and the types of all."""

    before: NDArray[np.int32]
    between: NDArray[np.int32]
    after: NDArray[np.int32]
    types: tuple[NDArray[np.int8], NDArray[np.int8], NDArray[np.int8]]
    query_type: int
    context_type: int

    @property
    def special(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


def _windows(
    index: int,
    question: Question,
    query: NDArray[np.int32],
    ids: NDArray[np.int32],
    offsets: NDArray[np.int32],
    layout: _Layout,
    room: int,
    doc_stride: int,
) -> Iterator[Window]:
    parts = spans(len(ids), room, doc_stride)
    best = most_context(parts, len(ids))
    first = len(layout.before) + len(query) + len(layout.between)
    head = np.concatenate([layout.before, query, layout.between])
    before, between, after = layout.types
    head_types = np.concatenate([before, np.full(len(query), layout.query_type, np.int8), between])
    answer = None
    if question.answers:
        answer = answer_tokens(offsets, question.starts[0], question.starts[0] + len(question.answers[0]))
    for number, (start, end) in enumerate(parts):
        inside = answer is not None and start <= answer[0] and answer[1] < end
        target = (answer[0] - start + first, answer[1] - start + first) if answer and inside else (NO_ANSWER, NO_ANSWER)
        yield Window(
            question=index,
            ids=np.concatenate([head, ids[start:end], layout.after]),
            types=np.concatenate([head_types, np.full(end - start, layout.context_type, np.int8), after]),
            first=first,
            offsets=offsets[start:end],
            max_context=best[start:end] == number,
            start=target[0],
            end=target[1],
        )


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not all(hasattr(backend, name) for name in ("encode_batch", "no_truncation", "no_padding")):
        raise InputError(
            f"answers are found by the offsets of tokens, which {type(tokenizer).__name__} does not give; "
            "use a fast tokenizer (one with a tokenizer.json)"
        )
    backend = copy.deepcopy(backend)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _encode(backend: Any, texts: Sequence[str]) -> Any:
    return backend.encode_batch(list(texts), add_special_tokens=False)


def _layout(backend: Any) -> _Layout:
    """The layout of a pair of texts: the tokens that are of neither text, found by encoding one."""
    for text in ("a", "1", "."):
        encoded = backend.encode(text, text)
        sides = encoded.sequence_ids
        if 0 in sides and 1 in sides:
            break
    else:
        raise InputError("the tokenizer makes no tokens of 'a', '1' or '.'; is it whole?")
    ids, types = np.array(encoded.ids, dtype=np.int32), np.array(encoded.type_ids, dtype=np.int8)
    query = [position for position, side in enumerate(sides) if side == 0]
    context = [position for position, side in enumerate(sides) if side == 1]
    if query[0] == 0:
        raise InputError(
            "the tokenizer puts no special token such as [CLS] before a pair of texts, where a model says that a window holds "
            "no answer; use the tokenizer of an encoder such as BERT or RoBERTa"
        )
    cuts = slice(0, query[0]), slice(query[-1] + 1, context[0]), slice(context[-1] + 1, len(ids))
    before, between, after = (ids[cut] for cut in cuts)
    parted = types[cuts[0]], types[cuts[1]], types[cuts[2]]
    return _Layout(before, between, after, parted, int(types[query[0]]), int(types[context[0]]))


def _without_spaces(text: str, offsets: NDArray[np.int32]) -> NDArray[np.int32]:
    """Offsets that leave out white space at the ends of a token (byte-level and SentencePiece tokens begin with it)."""
    for row in offsets:
        start, end = row
        while start < end and text[start].isspace():
            start += 1
        while end > start and text[end - 1].isspace():
            end -= 1
        row[:] = start, end
    return offsets
