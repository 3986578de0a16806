"""Files of GLUE: finding that of a split in a folder, and reading its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullrank.config.glue import GLUE, HUB, GlueTask, plain
from fullrank.core.errors import InputError
from fullrank.data.files import open_text

KEY = "data.dir"
SLICE = ".slice"
_MARK = b"\xef\xbb\xbf"  # of UTF-8, with which MRPC's files begin
_IDS = ("index", "idx", "id")
_OUTER = ("glue", "gluedata")  # folders that hold those of the tasks
_STEMS = {
    "train": ("train",),
    "dev": ("dev", "dev_matched", "validation", "validation_matched"),
    "dev_mismatched": ("dev_mismatched", "validation_mismatched"),
    "test": ("test", "test_matched"),
    "test_mismatched": ("test_mismatched",),
    "ax": ("ax", "diagnostic"),
}
_COLA = ("source", "label", "mark", "sentence")  # its train and dev files have no header
_TORN = 100  # lines of the older QQP that questions with tabs or line ends have torn


class Row(NamedTuple):
    """One example as it stands in a file. `place` is "line 12"; `label` is None in a test split."""

    place: str
    first: str
    second: str | None
    label: Any
    id: str


def find_file(task: GlueTask, split: str, folder: Path) -> Path:
    """The file of a split: in `folder`, in `folder`/<Task> or `folder`/glue/<Task>; a whole file goes before a slice.

    Raises InputError if there is none, and says what is there.
    """
    if found := locate(task, split, folder):
        return found
    places = list(_places(task, split, folder))
    there = sorted({name for place in places for name in _files(place) if name.endswith((".tsv", ".jsonl"))})
    near = f"; found there: {', '.join(there)}" if there else ""
    looked = ", ".join(map(str, places)) if places else f"{folder} (the folder of another task)"
    raise InputError(
        f"{KEY}: GLUE {task.folder}: no file {task.files[split]} in {looked}{near}. Without a folder it comes from the "
        f"Hugging Face hub ({HUB})"
    )


def locate(task: GlueTask, split: str, folder: Path) -> Path | None:
    """The file of a split, if there is one; InputError where `folder` is none."""
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.exists() else f"no such folder: {folder}"
        raise InputError(f"{KEY}: {what}; give the folder that holds {task.files[split]}")
    places = [_files(place) for place in _places(task, split, folder)]
    names = [f"{stem}{{}}{end}" for stem in _STEMS[split] for end in (".tsv", ".jsonl")]
    for middle in ("", SLICE):
        for here in places:
            for name in names:
                if found := here.get(name.format(middle)):
                    return found
    return None


def _places(task: GlueTask, split: str, folder: Path) -> Iterator[Path]:
    """Folders to look in, the nearest to the task first."""
    names = ("ax", "diagnostic", task.name) if split == "ax" else (task.name,)
    outer = [folder, *(path for path in _folders(folder) if plain(path.name) in _OUTER)]
    for place in outer:
        yield from (path for name in names for path in _folders(place) if plain(path.name) == name)
    others = set(GLUE) - {task.name}
    if plain(folder.resolve().name) not in others:
        yield folder


def _folders(folder: Path) -> list[Path]:
    return [path for path in _inside(folder) if path.is_dir()]


def _files(folder: Path) -> dict[str, Path]:
    """Files by their names in lower case."""
    return {path.name.casefold(): path for path in _inside(folder) if path.is_file()}


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{KEY}: {folder} cannot be read ({error.strerror})") from error


def read_rows(task: GlueTask, split: str, path: Path) -> tuple[list[Row], int]:
    """The rows of a file, and how many lines were left out: only the older QQP holds lines that are no rows.

    Raises InputError that names the file and the line for what is missing, cut short or not UTF-8.
    """
    rows: list[Row] = []
    torn: list[str] = []
    for row in (_jsonl if path.suffix.casefold() == ".jsonl" else _tsv)(task, split, path):
        if isinstance(row, Row):
            rows.append(row)
            continue
        torn.append(row)
        if task.name != "qqp" or len(torn) > _TORN:
            raise InputError(torn[0])
    if not rows:
        raise InputError(f"{KEY}: {path} holds no rows")
    return rows, len(torn)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers. Only a line feed ends one, and empty ones are left out."""
    with open_text(path, KEY) as file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(_MARK) if number == 1 else line
            try:
                text = content.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{KEY}: {path}, line {number}: not UTF-8 (byte 0x{content[error.start]:02x}); convert the file, for "
                    "instance with `iconv -f latin1 -t utf-8`"
                ) from None
            if text:
                yield number, text


def _columns(task: GlueTask, split: str) -> list[tuple[str, ...]]:
    """Accepted names of each column that is needed, the official one first: sentences, then the label."""
    common = ("sentence",) if len(task.sentences) == 1 else ("sentence1", "sentence2")
    found = [tuple(dict.fromkeys(names)) for names in zip(task.sentences, task.hub_sentences, common, strict=True)]
    return found if split in task.test_splits else [*found, tuple(dict.fromkeys((task.label_column, "label")))]


def _chosen(wanted: Sequence[tuple[str, ...]], there: Sequence[str]) -> list[str | None]:
    """Of each wanted column the name that it has here."""
    return [next((name for name in names if name in there), None) for names in wanted]


def _missing(source: str, wanted: Sequence[tuple[str, ...]], there: Sequence[str], what: str) -> InputError:
    lacking = [names[0] for names, name in zip(wanted, _chosen(wanted, there), strict=True) if name is None]
    shown = ", ".join(name[:40] for name in there[:12]) + (", ..." if len(there) > 12 else "")
    return InputError(
        f"{KEY}: {source}: no {what} {', '.join(map(repr, lacking))}; expected are {', '.join(names[0] for names in wanted)}, "
        f"found are {shown or 'none'}"
    )


def _tsv(task: GlueTask, split: str, path: Path) -> Iterator[Row | str]:
    """Rows of tab-separated values, where a quotation mark is a character like any other.

    For a line that is no row, what is wrong with it.
    """
    wanted = _columns(task, split)
    names: Sequence[str] = ()
    at: list[int] = []
    label_at: int | None = None
    id_at: int | None = None
    rows = 0
    for number, line in _lines(path):
        fields = line.split("\t")
        if not names:
            headed = None not in _chosen(wanted, fields)
            bare = task.name == "cola" and split not in task.test_splits and not headed
            names = _COLA if bare else fields
            if not (bare or headed):
                raise _missing(str(path), wanted, fields, "column")
            at = [names.index(name) for name in _chosen(wanted, names) if name is not None]
            label_at = at.pop() if split not in task.test_splits else None
            id_at = next((names.index(name) for name in _IDS if name in names), None)
            if not bare:
                continue
        if len(fields) != len(names):
            what = f"{len(fields)} {'field' if len(fields) == 1 else 'fields'}"
            begun = rows or names is not _COLA
            why = "the file is cut short or damaged" if begun else "or a header with sentence and label"
            yield f"{KEY}: {path}, line {number}: {what}, expected are {len(names)} ({', '.join(names)}); {why}"
            continue
        yield Row(
            f"line {number}",
            fields[at[0]],
            fields[at[1]] if len(at) == 2 else None,
            None if label_at is None else fields[label_at],
            str(rows) if id_at is None else fields[id_at],
        )
        rows += 1


def _jsonl(task: GlueTask, split: str, path: Path) -> Iterator[Row | str]:
    """Rows of JSON objects, one a line, with the hub's or the official names of columns."""
    wanted = _columns(task, split)
    for count, (number, line) in enumerate(_lines(path)):
        where = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{KEY}: {where}: not a JSON object; the file is cut short or damaged") from None
        if not isinstance(content, Mapping):
            raise InputError(f"{KEY}: {where}: not a JSON object but {line[:40]}")
        yield row_of(task, split, content, f"line {number}", count, str(path), wanted)


def row_of(
    task: GlueTask,
    split: str,
    content: Mapping[str, Any],
    place: str,
    count: int,
    source: str,
    wanted: Sequence[tuple[str, ...]] | None = None,
) -> Row:
    """The row of a mapping from columns to values, of a file of JSON lines or the hub."""
    wanted = _columns(task, split) if wanted is None else wanted
    names = [name for name in _chosen(wanted, list(content)) if name is not None]
    if len(names) < len(wanted):
        raise _missing(f"{source}, {place}", wanted, list(content), "key")
    label = content[names.pop()] if split not in task.test_splits else None
    for name in names:
        if not isinstance(content[name], str):
            raise InputError(f"{KEY}: {source}, {place}: {name} is {content[name]!r}, a text is wanted")
    first, second = content[names[0]], content[names[1]] if len(names) == 2 else None
    number = next((content[name] for name in _IDS if name in content), count)
    return Row(place, first, second, label, str(number))
