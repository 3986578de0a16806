"""The files of a vocabulary: `vocabulary.json` says what it is, `vocabulary.txt` lists entries with their counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

META_FILE, ENTRIES_FILE = "vocabulary.json", "vocabulary.txt"


def save_meta(folder: Path, kind: str, entries: int, fingerprint: str, options: Mapping[str, Any]) -> None:
    """`vocabulary.json`: what `load_tokenizer` needs besides the entries."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": kind, "entries": entries, "fingerprint": fingerprint, **options}, indent=1)
    (folder / META_FILE).write_text(text + "\n", encoding="utf-8")


def _escaped(entry: str) -> str:
    if entry.isprintable() and "\\" not in entry:
        return entry
    return entry.encode("unicode_escape").decode("ascii")


def _unescaped(entry: str) -> str:
    return entry.encode("ascii").decode("unicode_escape") if "\\" in entry else entry


def save_entries(folder: Path, entries: Sequence[str], counts: Sequence[int]) -> None:
    """`vocabulary.txt`: an entry and its count a line, in the order of ids; unprintable characters escaped as in Python."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{_escaped(entry)}\t{count}\n" for entry, count in zip(entries, counts, strict=True))
    (folder / ENTRIES_FILE).write_text(text, encoding="utf-8", newline="\n")


def read_entries(path: Path) -> tuple[list[str], list[int]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        rows = [line.rstrip("\n").rpartition("\t") for line in file]
    return [_unescaped(entry) for entry, _, _ in rows], [int(count) for _, _, count in rows]
