"""Tasks to fine-tune on, from local files or the Hugging Face hub: GLUE, and SQuAD with the windows that an encoder reads."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fullrank.config.finetune import GLUE, SCORES, SQUAD, GlueTask, TaskDataConfig
from fullrank.config.run import CorpusInfo, list_corpora
from fullrank.core.errors import InputError, RunError, one_line, pip_install
from fullrank.data import invented
from fullrank.files import (
    digest,
    lines,
    mended,
    parse_json,
    read_text,
    sha256_of,
)

logger = logging.getLogger(__name__)
NO_ANSWER = 0  # the position of [CLS], which stands for "not in this window"
_COLA = ["source", "label", "mark", "sentence"]  # its files have no header
_CHUNK = 1024  # questions that the tokenizer gets at once
_REVISIONS = {  # on the Hugging Face hub
    "nyu-mll/glue": "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c",
    "rajpurkar/squad": "7b6d24c440a36b6815f21b70d25016731768db1f",
    "rajpurkar/squad_v2": "3ffb306f725f7d2ce8394bc1873b24868140c412",
}


@dataclass(frozen=True)
class TaskSplit:
    """One split of a task.

    rows: of GLUE one or two sentences with their label (a class id; in STS-B a score from 0 to 5), of SQuAD questions.
    published: number of rows. source: the file, or the hub's name. sha256: of the file, or of the hub's rows.
    """

    split: str
    rows: Sequence[Any]
    published: int
    source: str
    sha256: str

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_slice(self) -> bool:
        """The number of rows is not the published one."""
        return len(self) != self.published

    def take(self, rows: Iterable[int]) -> TaskSplit:
        """Return the examples of these rows, in this order."""
        return dataclasses.replace(self, rows=[self.rows[row] for row in rows])

    def describe(self) -> dict[str, Any]:
        """Return counts and file, for a record."""
        return {
            "rows": len(self),
            "published": self.published,
            "is_slice": self.is_slice,
            "source": self.source,
            "sha256": self.sha256,
        }


def read_task(data: TaskDataConfig, split: str) -> TaskSplit:
    """Read one split of a task: train or dev; of glue/mnli also dev_mismatched.

    It is read from `data.dir`, a file in the official form or a folder: of the tasks, or of the files of this one. Without it,
    from the Hugging Face hub, which keeps its copy in `data.cache`. A slice and a download are logged. With `data.invented` its
    examples are made by a program instead.

    Raises InputError for files that are missing, empty, cut short, not UTF-8, or of another form or version; that lack a column
    or hold a label outside the allowed ones; where an answer is not in its context or two questions have one id. RunError if
    the hub cannot be reached.
    """
    info = list_corpora()[data.name]
    published = info.published[split]
    rows: list[Any]
    if data.invented:
        rows = make_questions(SQUAD[data.name], split) if data.answers else make_examples(GLUE[data.task], split)
        return TaskSplit(split, rows, published, "invented", digest([repr(rows)]))
    file = None if data.dir is None else _find_file(info, split, Path(data.dir).expanduser())
    source = str(file or info.hub.partition(",")[0])
    hub_rows = _read_hub(info, split, data.cache) if file is None else []
    if data.answers:
        version = SQUAD[data.name]
        rows = _read_squad_file(file) if file else [_read_question(row, version) for row in hub_rows]
        _check_questions(rows, source, version)
    else:
        rows = _read_examples(GLUE[data.task], file, hub_rows, source)
    if not rows:
        raise InputError(f"data.dir: {source} holds no rows of the split {split}")
    if file:
        sha256 = sha256_of(file)
    else:
        sha256 = digest([*map(dataclasses.asdict, rows)] if data.answers else rows)
    task = TaskSplit(split, rows, published, source, sha256)
    if task.is_slice:
        logger.info(f"{data.name} (slice): {split} has {len(rows):,} rows, published are {published:,} ({source})")
    return task


def _find_file(info: CorpusInfo, split: str, where: Path) -> Path:
    """Find the file: `where` itself, or one in `where` or its folders; an official name anywhere comes before a slice's."""
    official = Path(info.files[split][0])
    title = official.parent.name
    folders = [title, f"glue/{title}"] if title else [*dict.fromkeys((info.name, "squad"))]
    stem = official.stem.removesuffix("_matched")
    names = [official.name, f"{stem}.slice{official.suffix}"]
    paths = [where / folder / name for name in names for folder in (*folders, "")]
    file = next((path for path in paths if path.is_file()), where)
    if not file.is_file():
        raise InputError(
            f"data.dir: {where}: no file {' or '.join(names)}, nor in {', '.join(folders)}; without a folder it comes from the "
            "Hugging Face hub"
        )
    return file


def _read_hub(info: CorpusInfo, split: str, cache: str | Path | None) -> Iterable[dict[str, Any]]:
    """Read the rows of a split from the Hugging Face hub.

    Raises InputError where `datasets` is not installed, RunError where the hub cannot be reached; both name the local way.
    """
    name, _, configuration = info.hub.partition(", ")
    (file,) = info.files[split]
    local = f"give a local folder that holds {file}: --from DIR (data.dir=DIR)"
    if importlib.util.find_spec("datasets") is None:
        raise InputError(f"{local}; or install what the Hugging Face hub ({name}) needs: {pip_install('hf')}")
    import datasets

    part = Path(file).stem.partition("-")[0].replace("dev", "validation")  # `validation_matched` of dev_matched.tsv
    logger.info(f"{name}: {part} from the Hugging Face hub ({info.licence})")
    try:
        rows = datasets.load_dataset(
            name,
            configuration or None,
            split=part,
            revision=_REVISIONS[name],
            cache_dir=None if cache is None else str(Path(cache) / "hub"),
        )
    except Exception as error:  # of many libraries: no network, no such revision, a full disk
        raise RunError(
            f"{name} could not be had from the Hugging Face hub ({type(error).__name__}: {one_line(error, 300)}). Either "
            f"connect to the network, or {local}"
        ) from error
    return map(mended, rows)


# GLUE: one or two sentences with a label


def _read_examples(
    task: GlueTask, file: Path | None, hub_rows: Iterable[Mapping[str, Any]], source: str
) -> list[tuple[tuple[str, ...], float]]:
    """Read the sentences and the label of each row of a file, or else of the hub's rows."""
    columns = [*(task.hub_sentences or task.sentences), "label"]
    places: Iterable[tuple[str, Mapping[str, Any]]] = ((f"row {number}", row) for number, row in enumerate(hub_rows))
    if file is not None:
        columns = [*task.sentences, task.label_column]
        places = _read_tsv(task, file)
    rows = []
    for place, row in places:
        if missing := [column for column in columns if column not in row]:
            names = ", ".join(row)[:200]
            raise InputError(f"data.dir: {source}, {place}: no column '{missing[0]}'; its columns are {names}")
        *sentences, label = (row[column] for column in columns)
        rows.append((tuple(sentences), task.read_label(label, f"data.dir: {source}, {place}")))
    return rows


def _read_tsv(task: GlueTask, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield rows of tab-separated values with their places; a quotation mark is a character like any other."""
    names: list[str] = []
    for number, line in enumerate(lines(path, "data.dir"), start=1):
        fields = line.split("\t")
        if not names and (task.name != "cola" or "sentence" in fields):
            names = fields
            continue
        names = names or _COLA
        if task.name == "qqp" and len(fields) < len(names):
            continue  # the published file has a few such rows, which its published number leaves out
        if line and len(fields) != len(names):
            raise InputError(
                f"data.dir: {path}, line {number}: {len(fields)} fields, expected are {len(names)} ({', '.join(names)}); the "
                "file is cut short or damaged"
            )
        if line:
            yield f"line {number}", dict(zip(names, fields, strict=True))


# SQuAD: questions about a paragraph, answered by a part of its text


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `answers[i]` stands in `context` at character `starts[i]`; the same answer may be there twice.

    `impossible`: the context holds no answer, and `answers` is empty; None where the file does not say (v1.1).
    """

    id: str
    title: str
    context: str
    question: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]
    impossible: bool | None = None


def _read_squad_file(file: Path) -> list[Question]:
    """Read the questions of a file; InputError where it departs from the official form."""
    questions = []
    try:
        for article in mended(parse_json(read_text(file)))["data"]:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    row = {"title": article.get("title", ""), "context": paragraph["context"], **entry}
                    texts = [answer["text"] for answer in entry["answers"]]
                    starts = [answer["answer_start"] for answer in entry["answers"]]
                    questions.append(_make_question(row, texts, starts, entry.get("is_impossible")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file}: not in the official form of SQuAD ({error!r}); was it copied or downloaded in part?"
        ) from error
    return questions


def _read_question(row: Mapping[str, Any], version: str) -> Question:
    """Read a question from a row of the hub."""
    texts = row["answers"]["text"]
    return _make_question(row, texts, row["answers"]["answer_start"], not texts if version == "2.0" else None)


def _make_question(row: Mapping[str, Any], texts: list[str], starts: list[int], impossible: bool | None) -> Question:
    return Question(row["id"], row["title"], row["context"], row["question"], tuple(texts), tuple(starts), impossible)


def _check_questions(questions: list[Question], source: str, version: str) -> None:
    """Check questions of a file or of the hub.

    Raises InputError for no question, one of another version, two with one id, or an answer that is not where it should be.
    """
    if len({question.id for question in questions}) < max(len(questions), 1):
        raise InputError(f"{source}: no questions, or two with the same id; ids must differ")
    for question in questions:
        place = f"{source}: question {question.id}"
        if (question.impossible is None) == (version == "2.0"):
            raise InputError(f"{place}: not of SQuAD {version}; set data.name: squad for 1.1, squad-v2 for 2.0")
        if bool(question.impossible) == bool(question.answers):
            raise InputError(f"{place}: a question has an answer, or (SQuAD 2.0) is marked is_impossible, and not both")
        for text, start in zip(question.answers, question.starts, strict=True):
            passage = question.context[start : start + len(text)]
            if start < 0 or not text or passage != text:
                raise InputError(
                    f"{place}: answer_start {start} does not point at its answer {text!r}, but at {passage!r}"
                )


@dataclass(frozen=True, slots=True)
class Window:
    """One window over one context:  [CLS] question [SEP] part of the context [SEP], or as the tokenizer lays out a pair.

    question        index of its question in the list the windows were made from
    ids, types (N,) token ids and token_type_ids
    first           position of its first context token; `len(offsets)` of them follow each other
    offsets (C, 2)  the characters [from, to) of each context token; of some tokenizers white space before it is one of them
    max_context (C,) whether this is the window in which the token has most context
    start, end      positions of the first and last token of the first answer; both 0, [CLS], if it is not wholly in here
    """

    question: int
    ids: np.ndarray
    types: np.ndarray
    first: int
    offsets: np.ndarray
    max_context: np.ndarray
    start: int
    end: int


def squad_windows(
    questions: Sequence[Question], tokenizer: Any, *, max_length: int, doc_stride: int, max_query_length: int
) -> list[Window]:
    """Cut the contexts of questions into windows that a model can read.

    The convention is that of BERT's own script: the question is cut to its first `max_query_length` tokens, the context gets
    the rest of `max_length`, and each window begins `doc_stride` context tokens after the one before, but never so far on that
    a token is left out. The last window is the first that reaches the end.

    Args:
        questions: questions with their contexts.
        tokenizer: of the package tokenizers, or a fast one of transformers. It is not changed, and its own truncation and
            padding are not used. Its post-processor says which special tokens stand where and which types tokens have.
        max_length: tokens of a window, special tokens among them.
        doc_stride: step between windows; in Hugging Face's scripts the argument of this name is their overlap.
        max_query_length: tokens of a question; the rest of a longer one is cut off.

    Returns:
        All windows of all questions, in order; at least one for each question.

    Raises:
        InputError: the tokenizer puts no special token first, or no room is left for the context.
    """
    backend = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", tokenizer))
    backend.no_truncation()
    backend.no_padding()
    if not backend.encode("a", "a").special_tokens_mask[0]:
        raise InputError(
            "the tokenizer puts no special token such as [CLS] before a pair of texts, where a model says that a window holds "
            "no answer; use the tokenizer of an encoder such as BERT or RoBERTa"
        )
    special = backend.num_special_tokens_to_add(is_pair=True)
    windows = []
    for first in range(0, len(questions), _CHUNK):
        chunk = questions[first : first + _CHUNK]
        queries = backend.encode_batch([question.question.strip() for question in chunk], add_special_tokens=False)
        contexts = backend.encode_batch([question.context for question in chunk], add_special_tokens=False)
        for index, (question, query, context) in enumerate(zip(chunk, queries, contexts, strict=True), start=first):
            query.truncate(max_query_length)
            room = max_length - len(query) - special
            if room < 1:
                raise InputError(
                    f"data.max_length: {max_length} leaves no room for the context of question {question.id}: {len(query)} "
                    f"tokens of question and {special} special tokens; raise it or lower data.max_query_length"
                )
            windows += _cut_windows(backend, index, question, query, context, room, min(room, doc_stride))
    return windows


def _cut_windows(
    backend: Any, index: int, question: Question, query: Any, context: Any, room: int, step: int
) -> list[Window]:
    """Cut the windows of one question: `room` tokens of its context, every `step`."""
    offsets = np.array(context.offsets, dtype=np.int32).reshape(-1, 2)
    answer = np.empty(0, np.int64)  # the tokens that share a character with it
    if question.answers:
        begin = question.starts[0]
        end = begin + len(question.answers[0])
        answer = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end))
    context.truncate(room, stride=room - step)
    parts = [context, *context.overflowing]
    spans = [(number * step, number * step + len(part)) for number, part in enumerate(parts)]
    best = choose_windows(spans, len(offsets))
    windows = []
    for number, (part, (start, end)) in enumerate(zip(parts, spans, strict=True)):
        # the parts one by one: of parts that overflow, the tokenizer gives the wrong types
        pair = backend.post_process(query, part)
        ids = np.array(pair.ids, dtype=np.int32)
        types = np.array(pair.type_ids, dtype=np.int8)
        first = pair.sequence_ids.index(1) if len(part) else len(ids)
        target = [NO_ANSWER, NO_ANSWER]
        if len(answer) and start <= answer[0] and answer[-1] < end:
            target = (answer[[0, -1]] - start + first).tolist()
        windows.append(Window(index, ids, types, first, offsets[start:end], best[start:end] == number, *target))
    return windows


def choose_windows(windows: Sequence[tuple[int, int]], num_tokens: int) -> np.ndarray:
    """Choose the window in which each context token is scored (num_tokens,).

    It is the one where the smaller of the numbers of tokens to its left and to its right, plus 0.01 of the window's length, is
    largest, and the first of several such.
    """
    scores = np.full((len(windows), num_tokens), -1.0)
    for row, (start, end) in zip(scores, windows, strict=True):
        left = np.arange(end - start)
        row[start:end] = np.minimum(left, left[::-1]) + 0.01 * (end - start)
    return scores.argmax(axis=0)


# invented examples and questions, whose answers follow from their words (see `invented`)

_TRAIN = 2_000
_OTHER = 400  # of a split


def make_examples(task: GlueTask, split: str) -> list[tuple[tuple[str, ...], float]]:
    """Make a split of a task of GLUE, 2,000 examples to train on and 400 of any other split."""
    draw = Random(zlib.crc32(f"{task.name} {split}".encode()))
    rows: list[tuple[tuple[str, ...], float]] = []
    classes = int(SCORES[1]) + 1 if task.labels is None else task.outputs
    for _ in range(_TRAIN if split == "train" else _OTHER):
        label = draw.randrange(classes)
        if len(task.sentences) == 1:
            sentence = invented.join_words(invented.draw_words(draw, invented.ADJECTIVES[label]))
            rows.append(((sentence,), label))
        else:
            words = invented.draw_words(draw)
            other = invented.draw_words(draw)
            shared = label * len(words) // (classes - 1)
            changed = words[:shared] + other[shared:]
            rows.append(((invented.join_words(words), invented.join_words(changed)), label))
    return rows


def make_questions(version: str, split: str) -> list[Question]:
    """Make a split of SQuAD, as large as those of GLUE.

    In version 2.0 a third of the questions is about an animal that the context does not name.
    """
    draw = Random(zlib.crc32(f"squad {version} {split}".encode()))
    questions = []
    for number in range(_TRAIN if split == "train" else _OTHER):
        animals = draw.sample(invented.ANIMALS, 5)
        places = draw.sample(invented.PLACES, 4)
        context = " ".join(f"the {animal} lives in {place} ." for animal, place in zip(animals, places, strict=False))
        impossible = version == "2.0" and draw.random() < 1 / 3
        place = 4 if impossible else draw.randrange(4)
        answers = () if impossible else (places[place],)
        starts = tuple(context.index(answer) for answer in answers)
        question = f"where is the {animals[place]}"
        questions.append(Question(f"invented-{number}", "invented", context, question, answers, starts, impossible))
    return questions
