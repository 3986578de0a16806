"""From files of sentence pairs to two languages and files of token ids, some thousand pairs at a time.

First the lines are cleaned and tokenized and written down, then a vocabulary is made of the training lines, then the
lines become ids.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from fullrank.data.build import id_type
from fullrank.data.entries import EOS, UNK, ranked
from fullrank.data.language import MARKS, Language, plain
from fullrank.data.parallel import SIDES, Cleaned, Cleaning, PairFiles, lines, pairs_of_lines
from fullrank.data.segment import Segmenter, Words, learn_byte_bpe
from fullrank.errors import InputError

Report = Callable[[str], None]
_CHUNK = 4096  # lines
_TELL_EVERY = 500_000  # pairs between two progress messages


@dataclass(frozen=True)
class PairSettings:
    """How sentence pairs become token ids; every choice made."""

    languages: tuple[str, str]
    kind: str
    vocabulary: Literal["joint", "separate"]
    lowercase: bool
    moses: bool
    min_count: int
    max_vocabulary: int | None
    max_length: int | None
    max_ratio: float | None
    concatenate: int | None
    concatenate_splits: Literal["all", "train"]


@dataclass(frozen=True)
class PairSplit:
    """One split: how many `pairs`; of each side its `tokens` (with one `<eos>` a sentence), `words` and tokens `unknown`
    to the vocabulary; the `sha256` of each of its files."""

    pairs: int
    source_tokens: int
    target_tokens: int
    source_words: int
    target_words: int
    source_unknown: int
    target_unknown: int
    sha256: dict[str, str]


def raw_file(folder: Path, split: str, side: str) -> Path:
    """The lines as they were given, where Moses changed them."""
    return folder / f"{split}.{side}.raw.txt"


def text_file(folder: Path, split: str, side: str) -> Path:
    """The lines as they were encoded: tokenized and in lower case where the corpus is so."""
    return folder / f"{split}.{side}.txt"


def ids_file(folder: Path, split: str, side: str) -> Path:
    return folder / f"{split}.{side}.bin"


def offsets_file(folder: Path, split: str, side: str) -> Path:
    """int64: sentence i is ids[offsets[i] : offsets[i + 1]]."""
    return folder / f"{split}.{side}.offsets"


@dataclass(frozen=True)
class _Row:
    """A pair on its way: texts by side, as given (None where nothing changes them) and as encoded; ids by side."""

    raw: tuple[str, str] | None
    text: tuple[str, str]
    ids: tuple[list[int], list[int]] = ([], [])

    def joined(self, other: _Row) -> _Row:
        raw = None if self.raw is None or other.raw is None else _both(self.raw, other.raw)
        return _Row(raw, _both(self.text, other.text), (self.ids[0] + other.ids[0], self.ids[1] + other.ids[1]))


def _both(first: tuple[str, str], second: tuple[str, str]) -> tuple[str, str]:
    return plain(f"{first[0]} {second[0]}"), plain(f"{first[1]} {second[1]}")


class _Texts:
    """Writes the texts of rows; a context, which closes the files."""

    def __init__(self, folder: Path, split: str, raw: bool) -> None:
        self._stack = ExitStack()
        self._files = [self._opened(text_file(folder, split, side)) for side in SIDES]
        self._raw = [self._opened(raw_file(folder, split, side)) for side in SIDES] if raw else []

    def _opened(self, path: Path) -> TextIO:
        return self._stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))

    def __enter__(self) -> _Texts:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, row: _Row) -> None:
        for file, line in zip(self._files, row.text, strict=True):
            file.write(line + "\n")
        for file, line in zip(self._raw, row.raw or (), strict=False):
            file.write(line + "\n")


def write_texts(
    files: PairFiles, settings: PairSettings, folder: Path, key: Callable[[str], str], report: Report
) -> Cleaned:
    """Cleans and tokenizes every split and writes its lines into `folder`. Training pairs are left out as `Cleaning` says;
    those of other splits all stay, empty ones too. InputError if no training pair is left."""
    cleaning = Cleaning(settings.max_length, settings.max_ratio)
    bare = [
        Language(name, Words(), MARKS, moses=settings.moses, lowercase=settings.lowercase) for name in files.languages
    ]
    for split, both in files.splits.items():
        report(f"reading {split}")
        with _Texts(folder, split, settings.moses) as out:
            for number, pair in enumerate(pairs_of_lines(both, key(split)), start=1):
                source, target = plain(pair[0]), plain(pair[1])
                text = bare[0].prepared(source), bare[1].prepared(target)
                if split != "train" or cleaning.keeps(*text):
                    out.add(_Row((source, target) if settings.moses else None, text))
                if number % _TELL_EVERY == 0:
                    report(f"reading {split}: {number:,} pairs")
    if not cleaning.counts.kept:
        raise InputError(
            f"{key('train')}: none of {cleaning.counts.given:,} training pairs is left: {cleaning.counts.empty:,} with an "
            f"empty side, {cleaning.counts.too_long:,} longer than data.max_length, {cleaning.counts.ratio:,} beyond "
            "data.max_ratio"
        )
    return cleaning.counts


def _chunks(path: Path) -> Iterator[list[str]]:
    rows = (line.rstrip("\n") for line in lines(path, "data.cache"))
    while chunk := list(itertools.islice(rows, _CHUNK)):
        yield chunk


def _counted(segmenter: Segmenter, paths: Iterable[Path]) -> Counter[str]:
    """How often each piece occurs."""
    counts: Counter[str] = Counter()
    for path in paths:
        for chunk in _chunks(path):
            for pieces in segmenter.segment(chunk):
                counts.update(pieces)
    return counts


def _segmenter(settings: PairSettings, train: list[Path], report: Report) -> Segmenter:
    if settings.kind == "word":
        return Words()
    report(f"learning BPE: {settings.max_vocabulary:,} entries")
    texts = (line for path in train for chunk in _chunks(path) for line in chunk)
    return learn_byte_bpe(texts, int(settings.max_vocabulary or 0) - len(MARKS))


def make_languages(settings: PairSettings, texts: Path, report: Report) -> tuple[Language, Language]:
    """Source and target language of the training lines in `texts`. With a joint vocabulary they have the same entries."""
    train = [text_file(texts, "train", side) for side in SIDES]
    segmenter = _segmenter(settings, train, report)
    each = [_counted(segmenter, [path]) for path in train]
    if settings.vocabulary == "joint":
        each = [each[0] + each[1]] * 2
    made = []
    for name, counts in zip(settings.languages, each, strict=True):
        entries, totals = _entries(segmenter, counts, settings)
        made.append(
            Language(name, segmenter, entries, totals, moses=settings.moses, lowercase=settings.lowercase)
        )  # fmt: skip
    return made[0], made[1]


def _entries(segmenter: Segmenter, counts: Counter[str], settings: PairSettings) -> tuple[list[str], list[int]]:
    """Entries and counts: the marks, then pieces, most frequent first. What is left out is counted under `<unk>`."""
    table = dict(counts)
    if segmenter.pieces is not None and settings.vocabulary == "joint":
        table = dict.fromkeys(segmenter.pieces, 0) | table
    words = settings.kind == "word"
    # words of a text that look like the marks: <unk> is the mark, as in published corpora, <eos> never ends a sentence
    unknown = table.pop(UNK, 0) + table.pop(EOS, 0) if words else 0
    kept, totals = ranked(table, keep=(), unk=False, min_count=0, max_vocabulary=None)
    size = len(kept)
    if words:
        size = sum(total >= settings.min_count for total in totals)  # in falling order
        if settings.max_vocabulary is not None:
            size = min(size, settings.max_vocabulary - len(MARKS))
    return [*MARKS, *kept[:size]], [0, unknown + sum(totals[size:]), *totals[:size]]


def _rows(folder: Path, split: str, languages: tuple[Language, Language], raw: bool) -> Iterator[_Row]:
    """The pairs of a split, encoded."""
    texts = [_chunks(text_file(folder, split, side)) for side in SIDES]
    raws = [_chunks(raw_file(folder, split, side)) for side in SIDES] if raw else None
    for source, target in zip(*texts, strict=True):
        given: list[tuple[str, str] | None] = [None] * len(source)
        if raws is not None:
            given = list(zip(next(raws[0]), next(raws[1]), strict=True))
        ids = zip(languages[0].encode_prepared(source), languages[1].encode_prepared(target), strict=True)
        for before, text, pair in zip(given, zip(source, target, strict=True), ids, strict=True):
            yield _Row(before, text, pair)


def concatenated(rows: Iterable[_Row], most: int) -> Iterator[_Row]:
    """Neighbours joined while neither side has more than `most` tokens, `<eos>` not counted."""
    held: _Row | None = None
    for row in rows:
        if held is None:
            held = row
        elif max(len(held.ids[0]) + len(row.ids[0]), len(held.ids[1]) + len(row.ids[1])) <= most:
            held = held.joined(row)
        else:
            yield held
            held = row
    if held is not None:
        yield held


def encode_pairs(
    texts: Path, folder: Path, split: str, languages: tuple[Language, Language], settings: PairSettings
) -> dict[str, Any]:
    """Writes texts, ids and offsets of a split into `folder`; the counts of its `PairSplit`."""
    rows: Iterable[_Row] = _rows(texts, split, languages, settings.moses)
    if settings.concatenate is not None and (settings.concatenate_splits == "all" or split == "train"):
        rows = concatenated(rows, settings.concatenate)
    dtypes = [id_type(len(language)) for language in languages]
    offsets = [array("q", [0]), array("q", [0])]
    words, unknown, count = [0, 0], [0, 0], 0
    with _Texts(folder, split, settings.moses) as out, ExitStack() as stack:
        files = [stack.enter_context(ids_file(folder, split, side).open("wb")) for side in SIDES]
        for row in rows:
            out.add(row)
            count += 1
            for side in (0, 1):
                ids = row.ids[side]
                files[side].write(np.asarray(ids, dtype=dtypes[side]).tobytes())
                offsets[side].append(offsets[side][-1] + len(ids))
                words[side] += len(row.text[side].split())
                unknown[side] += ids.count(languages[side].unk_id)
    counts: dict[str, Any] = {"pairs": count}
    for at, name in enumerate(SIDES):
        offsets_file(folder, split, name).write_bytes(np.asarray(offsets[at], dtype="<i8").tobytes())
        counts |= {
            f"{name}_tokens": offsets[at][-1] + count,
            f"{name}_words": words[at],
            f"{name}_unknown": unknown[at],
        }
    return counts


def choices(settings: PairSettings) -> dict[str, Any]:
    """The settings as plain values."""
    return {**dataclasses.asdict(settings), "languages": list(settings.languages)}
