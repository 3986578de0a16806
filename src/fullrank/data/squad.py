"""SQuAD v1.1 and v2: questions about a paragraph, answered by a part of its text, and the windows that an encoder reads.

Questions come from the official JSON files or the Hugging Face hub. A window is question and context as one sequence; a long
context becomes several windows that overlap.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from fullrank.core.errors import InputError
from fullrank.data.corpora import SQUAD, SQUAD_HUB, SQUAD_SIZES, hub_rows
from fullrank.data.files import Report
from fullrank.files import mended, parse_json, text_of

MAX_LENGTH, DOC_STRIDE, MAX_QUERY_LENGTH = 384, 128, 64
_CHUNK = 1024  # texts that the tokenizer gets at once
NO_ANSWER = 0  # the position of [CLS], which stands for "not in this window"
_FOLDERS = {"1.1": ("squad", "squad-v1.1"), "2.0": ("squad-v2", "squad_v2", "squad-v2.0", "squad")}
_NAMES = {version: name for name, version in SQUAD.items()}
_HUB_REVISIONS = {
    "1.1": "7b6d24c440a36b6815f21b70d25016731768db1f",
    "2.0": "3ffb306f725f7d2ce8394bc1873b24868140c412",
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `answers[i]` stands in `context` at character `starts[i]`; the same answer may be there twice.

    `impossible`: the context holds no answer (v2 only); then `answers` is empty.
    """

    id: str
    title: str
    context: str
    question: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]
    impossible: bool = False


@dataclass(frozen=True)
class SquadSplit:
    """The questions of one split and what identifies them.

    `source`: the file, or the hub's name. `sha256`: of the file, or of the hub's rows in order. `is_slice`: their number is
    not the published one.
    """

    version: str
    split: str
    questions: list[Question]
    source: str
    sha256: str

    @property
    def published(self) -> int:
        return SQUAD_SIZES[self.version][self.split]

    @property
    def is_slice(self) -> bool:
        return len(self.questions) != self.published


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Answer(_Strict):
    text: str
    answer_start: int


class _Entry(_Strict):
    id: str
    question: str
    answers: list[_Answer]
    is_impossible: bool | None = None


class _Paragraph(_Strict):
    context: str
    qas: list[_Entry]


class _Article(_Strict):
    title: str = ""
    paragraphs: list[_Paragraph]


class _Official(_Strict):
    data: list[_Article]


def read_squad(
    where: str | Path | None,
    split: str,
    version: str = "1.1",
    *,
    cache: str | Path | None = None,
    report: Report = lambda line: None,
) -> SquadSplit:
    """A split ("train" or "dev") of SQuAD "1.1" or "2.0".

    `where`: a file in the official JSON form; a folder that holds it under its official name (train-v1.1.json), else a
    slice of it (train-v1.1.slice.json, or the one file named train*.slice.json); or None: the hub, which keeps its copy in
    `cache`. Every answer is checked to stand where the file says. `report` hears of a slice and of a download.
    Raises InputError for an unknown split or version, for files that are missing, empty, cut short, of the other version or
    without a key they need, for an answer that is not in its context, and for two questions with the same id; RunError if
    the hub cannot be reached.
    """
    if version not in SQUAD_SIZES:
        raise InputError(f"SQuAD has the versions {' and '.join(SQUAD_SIZES)}, not '{version}'")
    if split not in SQUAD_SIZES[version]:
        raise InputError(f"SQuAD has the splits train and dev, not '{split}'; its test set was never published")
    if where is None:
        loaded = _from_hub(split, version, None if cache is None else Path(cache), report)
    else:
        loaded = _from_file(Path(where).expanduser(), split, version)
    ids: set[str] = set()
    for question in loaded.questions:
        _check(question, loaded.source, version)
        if question.id in ids:
            raise InputError(f"{loaded.source}: two questions have the id {question.id}; ids must differ")
        ids.add(question.id)
    if loaded.is_slice:
        report(
            f"SQuAD {version} (slice): {split} has {len(loaded.questions):,} questions, published are {loaded.published:,} "
            f"({loaded.source})"
        )
    return loaded


def _check(question: Question, source: str, version: str) -> None:
    """InputError unless the answers are where the question says, and it is impossible exactly if it has none."""
    at = f"{source}: question {question.id}"
    if question.impossible and version == "1.1":
        raise _other_version(source, version, "2.0")
    if question.impossible and question.answers:
        raise InputError(f"{at} is marked is_impossible, and yet has an answer")
    if not question.impossible and not question.answers:
        hint = "; only SQuAD 2.0 has such questions" if version == "1.1" else " and is not marked is_impossible"
        raise InputError(f"{at} has no answer{hint}")
    for text, start in zip(question.answers, question.starts, strict=True):
        passage = question.context[start : start + len(text)] if start >= 0 else ""
        if not text or passage != text:
            raise InputError(f"{at}: answer_start {start} does not point at its answer {text!r}, but at {passage!r}")


def _other_version(source: str, version: str, other: str) -> InputError:
    return InputError(
        f"{source}: a file of SQuAD {other}, but {version} is asked for; "
        f"set data.name={_NAMES[other]}, or give the file of {version}"
    )


def _from_file(path: Path, split: str, version: str) -> SquadSplit:
    file = _in_folder(path, split, version) if path.is_dir() else path
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); {_wanted(split, version)}") from error
    text = text_of(raw, str(file))
    if not text.strip():
        raise InputError(f'{file}: the file is empty; a SQuAD file is JSON that begins with {{"data": [...')
    try:
        content = mended(parse_json(text))
        official = _Official.model_validate(content)
    except json.JSONDecodeError as error:
        short = error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg
        why = "it ends too early: copied or downloaded in part?" if short else "is it a SQuAD file?"
        raise InputError(f"{file}: no valid JSON at line {error.lineno}, column {error.colno}; {why}") from error
    except ValidationError as error:
        raise _unlike_official(str(file), error) from error
    except ValueError as error:
        raise InputError(f"{file}: no valid JSON: {error}") from error
    if version == "1.1" and str(content.get("version")).removeprefix("v").startswith("2"):
        raise _other_version(str(file), version, "2.0")
    entries = [
        (article.title, paragraph.context, entry)
        for article in official.data
        for paragraph in article.paragraphs
        for entry in paragraph.qas
    ]
    if not entries:
        raise InputError(f"{file}: no question in it; is it a SQuAD file?")
    # v2 says of each question whether it can be answered
    if version == "2.0" and all(entry.is_impossible is None for _, _, entry in entries):
        raise _other_version(str(file), version, "1.1")
    questions = [
        Question(
            entry.id,
            title,
            context,
            entry.question,
            tuple(answer.text for answer in entry.answers),
            tuple(answer.answer_start for answer in entry.answers),
            bool(entry.is_impossible),
        )
        for title, context, entry in entries
    ]
    return SquadSplit(version, split, questions, str(file), hashlib.sha256(raw).hexdigest())


def _unlike_official(file: str, error: ValidationError) -> InputError:
    """The first place where a file departs from the official form."""
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    value = repr(first["input"])
    shown = value if len(value) <= 40 else value[:37] + "..."
    match first["type"]:
        case "missing":
            problem = f"{place} is missing"
        case "model_type":
            problem = f"{place or 'the file'} is {shown}, not a JSON object"
        case _:
            problem = f"{place}: {first['msg']}, given {shown}"
    return InputError(f"{file}: {problem}; is it a file in the official form of SQuAD?")


def _wanted(split: str, version: str) -> str:
    return f"SQuAD {version} needs {split}-v{version}.json (data.dir: its folder)"


def _in_folder(folder: Path, split: str, version: str) -> Path:
    """The file of a split: the official name in any of the accepted folders comes before a slice in any of them."""
    folders = [inner for inner in (*(folder / name for name in _FOLDERS[version]), folder) if inner.is_dir()]
    for name in (f"{split}-v{version}.json", f"{split}-v{version}.slice.json"):
        for inner in folders:
            if (inner / name).is_file():
                return inner / name
    other = next(known for known in SQUAD_SIZES if known != version)
    for inner in folders:
        # a slice with the other version in its name is not meant
        slices = sorted(file for file in inner.glob(f"{split}*.slice.json") if f"v{other}" not in file.name)
        if len(slices) > 1:
            names = ", ".join(file.name for file in slices)
            raise InputError(
                f"{inner}: several slices of SQuAD {version} {split}: {names}; "
                f"leave one, or name it {split}-v{version}.slice.json"
            )
        if slices:
            return slices[0]
    raise InputError(
        f"{folder}: no {split}-v{version}.json and no {split}-v{version}.slice.json; {_wanted(split, version)}"
    )


def _from_hub(split: str, version: str, cache: Path | None, report: Report) -> SquadSplit:
    rows = hub_rows(
        SQUAD_HUB[version],
        "validation" if split == "dev" else split,
        revision=_HUB_REVISIONS[version],
        cache=cache,
        what=f"SQuAD {version}",
        licence="CC BY-SA 4.0",
        local=f"give a local folder that holds {split}-v{version}.json: --from DIR (data.dir=DIR)",
        report=report,
    )
    questions, digest = [], hashlib.sha256()
    for row in map(mended, rows):
        texts = tuple(row["answers"]["text"])
        starts = tuple(int(start) for start in row["answers"]["answer_start"])
        impossible = version == "2.0" and not texts
        questions.append(Question(row["id"], row["title"], row["context"], row["question"], texts, starts, impossible))
        digest.update(json.dumps([row["id"], row["context"], row["question"], texts, starts]).encode())
    return SquadSplit(version, split, questions, SQUAD_HUB[version], digest.hexdigest())


def squad_overview(version: str, where: str | Path | None) -> dict[str, Any]:
    """Counts and files of both splits, for `fullrank data prepare`; raises the errors of `read_squad`."""
    parts = [read_squad(where, split, version) for split in ("train", "dev")]
    is_slice = any(part.is_slice for part in parts)
    return {
        "label": f"SQuAD {version}" + (" (slice)" if is_slice else ""),
        "version": version,
        "is_slice": is_slice,
        "splits": {
            part.split: {
                "questions": len(part.questions),
                "published": part.published,
                "is_slice": part.is_slice,
                "contexts": len({question.context for question in part.questions}),
                "answers": sum(len(question.answers) for question in part.questions),
                "impossible": sum(question.impossible for question in part.questions),
                "source": part.source,
                "sha256": part.sha256,
            }
            for part in parts
        },
    }


def squad_lines(overview: Mapping[str, Any]) -> list[str]:
    """`squad_overview` for people."""
    lines = [f"{overview['label']}: answers as spans of a context"]
    for split, content in overview["splits"].items():
        count = "as published" if not content["is_slice"] else f"published {content['published']:,}"
        without = f", {content['impossible']:,} without an answer" if content["impossible"] else ""
        lines.append(
            f"  {split:<5} {content['questions']:>8,} questions ({count}) on {content['contexts']:,} contexts, "
            f"{content['answers']:,} answers{without}   {content['source']}"
        )
    return lines


# windows


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
    special = sum(map(len, layout.ids))
    contexts: dict[str, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
    windows: list[Window] = []
    for at in range(0, len(questions), _CHUNK):
        some = questions[at : at + _CHUNK]
        wanted = dict.fromkeys(question.context for question in some)
        contexts = {text: contexts[text] for text in wanted if text in contexts}
        fresh = [text for text in wanted if text not in contexts]
        for text, encoded in zip(fresh, backend.encode_batch(fresh, add_special_tokens=False), strict=True):
            offsets = np.array(encoded.offsets, dtype=np.int32).reshape(-1, 2)
            contexts[text] = np.array(encoded.ids, dtype=np.int32), _without_spaces(text, offsets)
        queries = backend.encode_batch([question.question.strip() for question in some], add_special_tokens=False)
        for index, (question, encoded) in enumerate(zip(some, queries, strict=True), start=at):
            query = np.array(encoded.ids[:max_query_length], dtype=np.int32)
            room = max_length - len(query) - special
            if room < 1:
                raise InputError(
                    f"max_length={max_length} leaves no room for the context of question {question.id}: {len(query)} tokens "
                    f"of question and {special} special tokens; raise max_length or lower max_query_length"
                )
            ids, offsets = contexts[question.context]
            parts = spans(len(ids), room, doc_stride)
            best = most_context(parts, len(ids))
            answer = None
            if question.answers:
                answer = answer_tokens(offsets, question.starts[0], question.starts[0] + len(question.answers[0]))
            for number, (start, end) in enumerate(parts):
                tokens, types, first = layout.joined(query, ids[start:end])
                inside = answer is not None and start <= answer[0] and answer[1] < end
                target = (
                    (answer[0] - start + first, answer[1] - start + first) if answer and inside else (NO_ANSWER,) * 2
                )
                windows.append(
                    Window(index, tokens, types, first, offsets[start:end], best[start:end] == number, *target)
                )
    return windows


def spans(num_tokens: int, room: int, doc_stride: int) -> list[tuple[int, int]]:
    """The context tokens [from, to) of each window: `room` of them, every `doc_stride`; one empty window for no tokens."""
    starts = range(0, max(num_tokens - room, 0) + min(room, doc_stride), min(room, doc_stride))
    return [(start, min(start + room, num_tokens)) for start in starts]


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
    """Ids and types of the special tokens before, between and after the two texts of a pair, and the type of each text."""

    ids: list[NDArray[np.int32]]
    types: list[NDArray[np.int8]]
    text_types: tuple[int, int]

    def joined(
        self, query: NDArray[np.int32], context: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int8], int]:
        """Ids and types of a pair of texts, and the position of its first context token."""
        ids = [self.ids[0], query, self.ids[1], context, self.ids[2]]
        parted = [
            np.full(len(text), kind, np.int8) for text, kind in zip((query, context), self.text_types, strict=True)
        ]
        types = [self.types[0], parted[0], self.types[1], parted[1], self.types[2]]
        return np.concatenate(ids), np.concatenate(types), sum(map(len, ids[:3]))


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
    return _Layout([ids[cut] for cut in cuts], [types[cut] for cut in cuts], (types[query[0]], types[context[0]]))


def _without_spaces(text: str, offsets: NDArray[np.int32]) -> NDArray[np.int32]:
    """Offsets that leave out white space at the ends of a token (byte-level and SentencePiece tokens begin with it)."""
    for row in offsets:
        token = text[row[0] : row[1]]
        start = row[1] - len(token.lstrip())
        row[:] = start, start + len(token.strip())
    return offsets
