"""Rows of GLUE: the file of a split is found in a folder and read, or the rows come from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fullrank.config.glue import GLUE, HUB, HUB_REVISION, GlueTask, plain
from fullrank.core.errors import InputError, RunError
from fullrank.data.download import hub_rows
from fullrank.data.files import Report, existing_folder, lines

KEY = "data.dir"
SLICE = ".slice"
_OUTER = ("glue", "gluedata")  # folders that hold those of the tasks
_STEMS = {
    "train": ("train",),
    "dev": ("dev", "dev_matched", "validation", "validation_matched"),
    "dev_mismatched": ("dev_mismatched", "validation_mismatched"),
    "test": ("test", "test_matched"),
    "test_mismatched": ("test_mismatched",),
    "ax": ("ax", "diagnostic"),
}
_HUB_SPLITS = {"dev": "validation", "dev_mismatched": "validation_mismatched", "ax": "test"}
_IDS = ("index", "idx", "id")
_COLA = ("source", "label", "mark", "sentence")  # its train and dev files have no header
_MOST_TORN = 100  # lines of the older QQP that questions with tabs or line ends have torn


class Row(NamedTuple):
    """One example as it stands in a file. `place` is "line 12"; `label` is None in a test split."""

    place: str
    first: str
    second: str | None
    label: Any
    id: str


def find_file(task: GlueTask, split: str, folder: Path) -> Path:
    """The file of a split; InputError if there is none, which lists the files that are there."""
    if found := locate(task, split, folder):
        return found
    places = list(_places(task, split, folder))
    there = sorted({name for place in places for name in _files(place) if name.endswith((".tsv", ".jsonl"))})
    near = f"; found there: {', '.join(there)}" if there else ""
    searched = ", ".join(map(str, places)) if places else f"{folder} (the folder of another task)"
    raise InputError(
        f"{KEY}: GLUE {task.folder}: no file {task.files[split]} in {searched}{near}. Without a folder it comes from the "
        f"Hugging Face hub ({HUB})"
    )


def locate(task: GlueTask, split: str, folder: Path) -> Path | None:
    """The file of a split in `folder`, in `folder`/<Task> or `folder`/glue/<Task>; a whole file goes before a slice."""
    existing_folder(folder, task.files[split])
    places = [_files(place) for place in _places(task, split, folder)]
    for middle in ("", SLICE):
        for here in places:
            for name in (f"{stem}{middle}{end}" for stem in _STEMS[split] for end in (".tsv", ".jsonl")):
                if name in here:
                    return here[name]
    return None


def _places(task: GlueTask, split: str, folder: Path) -> Iterator[Path]:
    """Folders that may hold the file, the nearest to the task first."""
    names = ("ax", "diagnostic", task.name) if split == "ax" else (task.name,)
    for outer in [folder, *(path for path in _entries(folder) if path.is_dir() and plain(path.name) in _OUTER)]:
        folders = [path for path in _entries(outer) if path.is_dir()]
        yield from (path for name in names for path in folders if plain(path.name) == name)
    if plain(folder.resolve().name) not in set(GLUE) - {task.name}:
        yield folder


def _files(folder: Path) -> dict[str, Path]:
    """Files by their names in lower case."""
    return {path.name.casefold(): path for path in _entries(folder) if path.is_file()}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{KEY}: {folder} cannot be read ({error.strerror})") from error


def read_rows(task: GlueTask, split: str, path: Path) -> tuple[list[Row], int]:
    """The rows of a file, and how many lines were left out: only the older QQP holds lines that are no rows.

    Raises InputError that names the file and the line for text that is missing, cut short or not UTF-8.
    """
    numbered = ((number, line.removesuffix("\r")) for number, line in enumerate(lines(path, KEY), start=1))
    filled = ((number, line) for number, line in numbered if line)
    rows: list[Row] = []
    torn: list[str] = []
    for number, content in (_jsonl if path.suffix.casefold() == ".jsonl" else _tsv)(task, split, path, filled):
        if isinstance(content, str):
            torn.append(content)
            if task.name != "qqp" or len(torn) > _MOST_TORN:
                raise InputError(torn[0])
        else:
            rows.append(_row(task, split, content, f"line {number}", len(rows), str(path)))
    if not rows:
        raise InputError(f"{KEY}: {path} holds no rows")
    return rows, len(torn)


def _tsv(
    task: GlueTask, split: str, path: Path, numbered: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Rows of tab-separated values, where a quotation mark is a character like any other; for a line that is no row, its
    fault."""
    names: Sequence[str] = ()
    rows = 0
    for number, line in numbered:
        fields = line.split("\t")
        if not names:
            complete = None not in _columns(task, split, tuple(fields))
            if task.name == "cola" and split not in task.test_splits and not complete:
                names = _COLA
            elif complete:
                names = fields
                continue
            else:
                raise _missing(task, split, tuple(fields), str(path))
        if len(fields) == len(names):
            rows += 1
            yield number, dict(zip(reversed(names), reversed(fields), strict=True))
            continue
        count = f"{len(fields)} {'field' if len(fields) == 1 else 'fields'}"
        begun = rows or names is not _COLA
        why = "the file is cut short or damaged" if begun else "or a header with sentence and label"
        yield (
            number,
            f"{KEY}: {path}, line {number}: {count}, expected are {len(names)} ({', '.join(names)}); {why}",
        )


def _jsonl(
    task: GlueTask, split: str, path: Path, numbered: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of JSON objects, one a line, with the hub's or the official names of columns."""
    for number, line in numbered:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(
                f"{KEY}: {path}, line {number}: not a JSON object; the file is cut short or damaged"
            ) from None
        if not isinstance(content, Mapping):
            raise InputError(f"{KEY}: {path}, line {number}: not a JSON object but {line[:40]}")
        yield number, content


def read_hub(task: GlueTask, split: str, cache: Path | None, report: Report) -> tuple[list[Row], str]:
    """The rows of a split on the Hugging Face hub, and the sha256 of their text; errors as in `hub_rows`."""
    matched = "_matched" if task.name == "mnli" and split in ("dev", "test") else ""
    contents = hub_rows(
        HUB,
        _HUB_SPLITS.get(split, split) + matched,
        configuration="ax" if split == "ax" else task.name,
        revision=HUB_REVISION,
        cache=cache,
        what=f"GLUE {task.folder}",
        licence=task.licence,
        local=f"give a local folder that holds {task.folder}/train.tsv and so on: --from DIR (data.dir=DIR)",
        report=report,
    )
    rows = [_row(task, split, content, f"row {i}", i, HUB) for i, content in enumerate(contents)]
    if not rows:
        raise RunError(f"GLUE {task.folder}: {HUB} holds no rows of the split {split}")
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return rows, digest.hexdigest()


def _row(task: GlueTask, split: str, content: Mapping[str, Any], place: str, count: int, source: str) -> Row:
    """The row of a mapping from columns to values."""
    there = tuple(content)
    names = _columns(task, split, there)
    if None in names:
        raise _missing(task, split, there, f"{source}, {place}")
    values = [(name, content[name]) for name in names if name is not None]
    label = None if split in task.test_splits else values.pop()[1]
    for name, value in values:
        if not isinstance(value, str):
            raise InputError(f"{KEY}: {source}, {place}: {name} is {value!r}, a text is wanted")
    second = values[1][1] if len(values) == 2 else None
    number = next((content[name] for name in _IDS if name in content), count)
    return Row(place, values[0][1], second, label, str(number))


def _accepted(task: GlueTask, split: str) -> list[tuple[str, ...]]:
    """Accepted names of each column that is needed, the official one first: sentences, then the label."""
    common = ("sentence",) if len(task.sentences) == 1 else ("sentence1", "sentence2")
    columns: list[tuple[str, ...]] = list(zip(task.sentences, task.hub_sentences, common, strict=True))
    return columns if split in task.test_splits else [*columns, (task.label_column, "label", "label")]


@lru_cache(maxsize=8)
def _columns(task: GlueTask, split: str, there: tuple[str, ...]) -> tuple[str | None, ...]:
    """The names that the needed columns have here; None for a column that is missing."""
    return tuple(next((name for name in names if name in there), None) for names in _accepted(task, split))


def _missing(task: GlueTask, split: str, there: tuple[str, ...], source: str) -> InputError:
    accepted, names = _accepted(task, split), _columns(task, split, there)
    lacking = (repr(some[0]) for some, name in zip(accepted, names, strict=True) if name is None)
    shown = ", ".join(name[:40] for name in there[:12]) + (", ..." if len(there) > 12 else "")
    return InputError(
        f"{KEY}: {source}: no column {', '.join(lacking)}; expected are {', '.join(some[0] for some in accepted)}, "
        f"found are {shown or 'none'}"
    )
