"""SQuAD v1.1 and v2: questions about a paragraph, answered by a part of its text, from the official JSON files or the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fullrank.core.errors import InputError
from fullrank.data.corpora import SQUAD, SQUAD_HUB, SQUAD_SIZES
from fullrank.data.download import hub_rows
from fullrank.data.files import Report

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
    """The official JSON form."""

    data: list[_Article]


_OFFICIAL = TypeAdapter(_Official)


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
        found = _from_hub(split, version, None if cache is None else Path(cache), report)
    else:
        found = _from_file(Path(where).expanduser(), split, version)
    ids: set[str] = set()
    for question in found.questions:
        _check(question, found.source, version)
        if question.id in ids:
            raise InputError(f"{found.source}: two questions have the id {question.id}; ids must differ")
        ids.add(question.id)
    if found.is_slice:
        report(
            f"SQuAD {version} (slice): {split} has {len(found.questions):,} questions, published are {found.published:,} "
            f"({found.source})"
        )
    return found


def load_squad(where: str | Path | None, split: str, version: str = "1.1") -> list[Question]:
    """The questions of a split; see `read_squad`."""
    return read_squad(where, split, version).questions


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
        there = question.context[start : start + len(text)] if start >= 0 else ""
        if not text or there != text:
            raise InputError(f"{at}: answer_start {start} does not point at its answer {text!r}, but at {there!r}")


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
    if not raw.strip():
        raise InputError(f'{file}: the file is empty; a SQuAD file is JSON that begins with {{"data": [...')
    try:
        content = json.loads(raw.decode("utf-8"))
        official = _OFFICIAL.validate_python(content)
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text at byte {error.start}; SQuAD files are JSON") from error
    except json.JSONDecodeError as error:
        short = error.pos >= len(raw.decode("utf-8").rstrip()) - 1 or "Unterminated" in error.msg
        why = "it ends too early: copied or downloaded in part?" if short else "is it a SQuAD file?"
        raise InputError(f"{file}: no valid JSON at line {error.lineno}, column {error.colno}; {why}") from error
    except RecursionError as error:
        raise InputError(f"{file}: JSON nested too deeply for a SQuAD file") from error
    except ValidationError as error:
        raise _unlike_official(str(file), error) from error
    if version == "1.1" and str(content.get("version")).removeprefix("v").startswith("2"):
        raise _other_version(str(file), version, "2.0")
    entries = [entry for article in official.data for paragraph in article.paragraphs for entry in paragraph.qas]
    if not entries:
        raise InputError(f"{file}: no question in it; is it a SQuAD file?")
    # v2 says of each question whether it can be answered
    if version == "2.0" and all(entry.is_impossible is None for entry in entries):
        raise _other_version(str(file), version, "1.1")
    questions = list(_questions(official))
    return SquadSplit(version, split, questions, str(file), hashlib.sha256(raw).hexdigest())


def _unlike_official(file: str, error: ValidationError) -> InputError:
    """The first place where a file departs from the official form."""
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    given = repr(first["input"])
    shown = given if len(given) <= 40 else given[:37] + "..."
    match first["type"]:
        case "missing":
            problem = f"{place} is missing"
        case "model_type":
            problem = f"{place or 'the file'} is {shown}, not a JSON object"
        case _:
            problem = f"{place}: {first['msg']}, given {shown}"
    return InputError(f"{file}: {problem}; is it a file in the official form of SQuAD?")


def _questions(official: _Official) -> Iterator[Question]:
    for article in official.data:
        for paragraph in article.paragraphs:
            for entry in paragraph.qas:
                yield Question(
                    entry.id,
                    article.title,
                    paragraph.context,
                    entry.question,
                    tuple(answer.text for answer in entry.answers),
                    tuple(answer.answer_start for answer in entry.answers),
                    bool(entry.is_impossible),
                )


def _wanted(split: str, version: str) -> str:
    return f"SQuAD {version} needs {split}-v{version}.json (data.dir: its folder)"


def _in_folder(folder: Path, split: str, version: str) -> Path:
    """The file of a split: the official name in any of the accepted folders comes before a slice in any of them."""
    places = [place for place in (*(folder / name for name in _FOLDERS[version]), folder) if place.is_dir()]
    for name in (f"{split}-v{version}.json", f"{split}-v{version}.slice.json"):
        for place in places:
            if (place / name).is_file():
                return place / name
    other = next(known for known in SQUAD_SIZES if known != version)
    for place in places:
        # a slice with the other version in its name is not meant
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
    for row in rows:
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
