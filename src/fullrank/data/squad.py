"""SQuAD v1.1 and v2: questions about a paragraph, answered by a part of its text, from the official JSON files or the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.core.errors import InputError
from fullrank.data.squad_hub import HUB, hub_rows

Report = Callable[[str], None]

PUBLISHED: Mapping[str, Mapping[str, int]] = {
    "1.1": {"train": 87_599, "dev": 10_570},
    "2.0": {"train": 130_319, "dev": 11_873},
}
_FOLDERS = {"1.1": ("squad", "squad-v1.1"), "2.0": ("squad-v2", "squad_v2", "squad-v2.0", "squad")}
_NAMES = {"1.1": "squad", "2.0": "squad-v2"}


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
        return PUBLISHED[self.version][self.split]

    @property
    def is_slice(self) -> bool:
        return len(self.questions) != self.published


def load_squad(where: str | Path | None, split: str, version: str = "1.1") -> list[Question]:
    """The questions of a split; `read_squad` says where they come from as well."""
    return read_squad(where, split, version).questions


def _quiet(_: str) -> None:
    """Says nothing."""


def read_squad(
    where: str | Path | None,
    split: str,
    version: str = "1.1",
    *,
    cache: str | Path | None = None,
    report: Report = _quiet,
) -> SquadSplit:
    """A split ("train" or "dev") of SQuAD "1.1" or "2.0".

    `where`: a file in the official JSON form; a folder that holds it under its official name (train-v1.1.json), else a
    slice of it (train-v1.1.slice.json, or the one file named train*.slice.json); or None: the hub, which keeps its copy in
    `cache`. Every answer is checked to stand where the file says. `report` is told of a slice and of a download.
    Raises InputError for an unknown split or version, for files that are missing, empty, cut short, of the other version or
    without a key they need, for an answer that is not in its context, and for two questions with the same id; RunError if
    the hub cannot be had.
    """
    _check(split, version)
    if where is None:
        found = _from_hub(split, version, None if cache is None else Path(cache), report)
    else:
        found = _from_file(Path(where).expanduser(), split, version)
    if found.is_slice:
        report(
            f"SQuAD {version} (slice): {split} has {len(found.questions):,} questions, published are {found.published:,} "
            f"({found.source})"
        )
    return found


def _from_file(path: Path, split: str, version: str) -> SquadSplit:
    file = _in_folder(path, split, version) if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); {_wanted(split, version)}") from error
    questions = _Reader(file, version).questions(_parse(file, content))
    return SquadSplit(version, split, questions, str(file), hashlib.sha256(content).hexdigest())


def _check(split: str, version: str) -> None:
    if version not in PUBLISHED:
        raise InputError(f"SQuAD has the versions {' and '.join(PUBLISHED)}, not '{version}'")
    if split not in PUBLISHED[version]:
        raise InputError(f"SQuAD has the splits train and dev, not '{split}'; its test set was never published")


def _wanted(split: str, version: str) -> str:
    return f"SQuAD {version} needs {split}-v{version}.json (data.dir: its folder)"


def _in_folder(folder: Path, split: str, version: str) -> Path:
    """The file of a split: the official name in any of the accepted folders comes before a slice in any of them."""
    places = [place for place in (*(folder / name for name in _FOLDERS[version]), folder) if place.is_dir()]
    for name in (f"{split}-v{version}.json", f"{split}-v{version}.slice.json"):
        for place in places:
            if (place / name).is_file():
                return place / name
    other = next(known for known in PUBLISHED if known != version)
    for place in places:
        # a slice that says the other version in its name is not meant
        slices = sorted(file for file in place.glob(f"{split}*.slice.json") if f"v{other}" not in file.name)
        if len(slices) > 1:
            names = ", ".join(file.name for file in slices)
            raise InputError(
                f"{place}: several slices of SQuAD {version} {split}: {names}; "
                f"leave one, or name it {split}-v{version}.slice.json"
            )
        if slices:
            return slices[0]
    raise InputError(
        f"{folder}: no {split}-v{version}.json and no {split}-v{version}.slice.json; {_wanted(split, version)}"
    )


def _parse(file: Path, content: bytes) -> Any:
    if not content.strip():
        raise InputError(f'{file}: the file is empty; a SQuAD file is JSON that begins with {{"data": [...')
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text at byte {error.start}; SQuAD files are JSON") from error
    except json.JSONDecodeError as error:
        short = error.pos >= len(content.decode("utf-8").rstrip()) - 1 or "Unterminated" in error.msg
        why = "it ends too early: copied or downloaded in part?" if short else "is it a SQuAD file?"
        raise InputError(f"{file}: no valid JSON at line {error.lineno}, column {error.colno}; {why}") from error
    except RecursionError as error:
        raise InputError(f"{file}: JSON nested too deeply for a SQuAD file") from error


class _Reader:
    """Reads the JSON of one file and knows how to name a place in it."""

    def __init__(self, source: Path | str, version: str) -> None:
        self.source, self.version = source, version

    def questions(self, content: Any) -> list[Question]:
        given = content.get("version") if isinstance(content, dict) else None
        if self.version == "1.1" and str(given).removeprefix("v").startswith("2"):
            raise self._other_version("2.0")
        found: list[Question] = []
        marked = False  # v2 says of each question whether it can be answered
        for title, context, entry, place in self._entries(content):
            marked = marked or "is_impossible" in entry
            found.append(self._question(title, context, entry, place))
        if not found:
            raise InputError(f"{self.source}: no question in it; is it a SQuAD file?")
        if self.version == "2.0" and not marked:
            raise self._other_version("1.1")
        self.check_ids(found)
        return found

    def check_ids(self, questions: list[Question]) -> None:
        seen: set[str] = set()
        for question in questions:
            if question.id in seen:
                raise InputError(f"{self.source}: two questions have the id {question.id}; ids must differ")
            seen.add(question.id)

    def _other_version(self, is_: str) -> InputError:
        return InputError(
            f"{self.source}: a file of SQuAD {is_}, but {self.version} is asked for; "
            f"set data.name={_NAMES[is_]}, or give the file of {self.version}"
        )

    def _entries(self, content: Any) -> Iterator[tuple[str, str, dict[str, Any], str]]:
        for i, article in enumerate(self._get(content, "data", list, "the file")):
            place = f"data[{i}]"
            title = self._get(article, "title", str, place) if "title" in _keys(article) else ""
            for j, paragraph in enumerate(self._get(article, "paragraphs", list, place)):
                inner = f"{place}.paragraphs[{j}]"
                context = self._get(paragraph, "context", str, inner)
                for k, entry in enumerate(self._get(paragraph, "qas", list, inner)):
                    yield title, context, entry, f"{inner}.qas[{k}]"

    def _question(self, title: str, context: str, entry: Any, place: str) -> Question:
        name = self._get(entry, "id", str, place)
        place = f"question {name}"
        text = self._get(entry, "question", str, place)
        impossible = "is_impossible" in entry and self._get(entry, "is_impossible", bool, place)
        answers, starts = [], []
        for i, answer in enumerate(self._get(entry, "answers", list, place)):
            where = f"{place}, answers[{i}]"
            answers.append(self._get(answer, "text", str, where))
            starts.append(self._get(answer, "answer_start", int, where))
        return self.checked(Question(name, title, context, text, tuple(answers), tuple(starts), impossible))

    def checked(self, question: Question) -> Question:
        """`question`, whose answers are where it says, and which is impossible exactly if it has none."""
        at = f"{self.source}: question {question.id}"
        if question.impossible and self.version == "1.1":
            raise self._other_version("2.0")
        if question.impossible and question.answers:
            raise InputError(f"{at} is marked is_impossible, and yet has an answer")
        if not question.impossible and not question.answers:
            hint = (
                "; only SQuAD 2.0 has such questions" if self.version == "1.1" else " and is not marked is_impossible"
            )
            raise InputError(f"{at} has no answer{hint}")
        for text, start in zip(question.answers, question.starts, strict=True):
            there = question.context[start : start + len(text)] if start >= 0 else ""
            if not text or there != text:
                raise InputError(f"{at}: answer_start {start} does not point at its answer {text!r}, but at {there!r}")
        return question

    def _get(self, holder: Any, key: str, kind: type, place: str) -> Any:
        value = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or key not in holder:
            raise InputError(f"{self.source}: {place} has no key '{key}'; is it a file in the official form of SQuAD?")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InputError(f"{self.source}: '{key}' of {place} is {_short(value)}; {_KINDS[kind]} is needed")
        return value


_KINDS: Mapping[type, str] = {list: "a list", str: "text", int: "a whole number", bool: "true or false"}


def _keys(holder: Any) -> set[str]:
    return set(holder) if isinstance(holder, dict) else set()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _from_hub(split: str, version: str, cache: Path | None, report: Report) -> SquadSplit:
    reader = _Reader(HUB[version], version)
    questions, digest = [], hashlib.sha256()
    for row in hub_rows(version, split, cache, report):
        answers = row["answers"]
        texts, starts = tuple(answers["text"]), tuple(int(start) for start in answers["answer_start"])
        question = Question(
            row["id"], row["title"], row["context"], row["question"], texts, starts, version == "2.0" and not texts
        )
        questions.append(reader.checked(question))
        digest.update(json.dumps([question.id, question.context, question.question, texts, starts]).encode())
    reader.check_ids(questions)
    return SquadSplit(version, split, questions, HUB[version], digest.hexdigest())
