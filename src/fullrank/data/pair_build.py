"""From files of sentence pairs to two languages and files of token ids, some thousand pairs at a time.

First the lines are cleaned and tokenized and written down, then a vocabulary is made of the training lines, then the
lines become ids.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fullrank.core.errors import InputError
from fullrank.data.build import id_type
from fullrank.data.files import lines
from fullrank.data.language import (
    MARKS,
    Language,
    Segmenter,
    Words,
    learn_byte_bpe,
    learn_codes,
    learn_unigram,
    load_codes,
    plain,
)
from fullrank.data.pair_lines import SIDES, PairFiles
from fullrank.data.pair_settings import PairSettings
from fullrank.data.pair_store import ids_file, offsets_file, raw_file, text_file
from fullrank.data.tokenizers import EOS, UNK, ranked

Report = Callable[[str], None]
_CHUNK = 4096  # lines
_UNIGRAM_LINES = 1_000_000  # at most so many lines, evenly spread, teach a unigram model: it is slow to learn
_TELL_EVERY = 500_000  # pairs between two progress messages


@dataclass
class Cleaned:
    """What became of the training pairs; `given` is the sum of the others but `valid`, which of `kept` went there."""

    given: int = 0
    kept: int = 0
    empty: int = 0
    too_long: int = 0
    ratio: int = 0
    valid: int = 0


@dataclass(frozen=True)
class Cleaning:
    """Which training pairs are left out; lengths in words, before subwords. An empty side always is a reason."""

    max_length: int | None = None
    max_ratio: float | None = None
    counts: Cleaned = field(default_factory=Cleaned)

    def keeps(self, source: str, target: str) -> bool:
        """Whether a pair stays; it is counted."""
        counts, m, n = self.counts, len(source.split()), len(target.split())
        counts.given += 1
        if m == 0 or n == 0:
            counts.empty += 1
        elif self.max_length is not None and max(m, n) > self.max_length:
            counts.too_long += 1
        elif self.max_ratio is not None and max(m, n) > self.max_ratio * min(m, n):
            counts.ratio += 1
        else:
            counts.kept += 1
            return True
        return False


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
    counts, every = cleaning.counts, files.valid_every
    for split, content in files.splits.items():
        report(f"reading {split}")
        moses = settings.moses and not content.tokenized
        ways = [Language(name, Words(), MARKS, moses=moses, lowercase=settings.lowercase) for name in files.languages]
        with ExitStack() as stack:
            out = stack.enter_context(_Texts(folder, split, moses))
            held = stack.enter_context(_Texts(folder, "valid", moses)) if split == "train" and every else None
            for number, (source, target) in enumerate(content.pairs(key(split)), start=1):
                source, target = plain(source), plain(target)
                row = _Row((source, target) if moses else None, (ways[0].prepared(source), ways[1].prepared(target)))
                if split != "train":
                    out.add(row)
                elif cleaning.keeps(*row.text):
                    if held is not None and every and counts.kept % every == 0:
                        counts.valid += 1
                        held.add(row)
                    else:
                        out.add(row)
                if number % _TELL_EVERY == 0:
                    report(f"reading {split}: {number:,} pairs")
    if counts.kept == counts.valid:
        raise InputError(
            f"{key('train')}: none of {counts.given:,} training pairs is left: {counts.empty:,} with an empty side, "
            f"{counts.too_long:,} longer than data.max_length, {counts.ratio:,} beyond data.max_ratio"
        )
    return counts


def _chunks(path: Path) -> Iterator[list[str]]:
    rows = lines(path, "data.cache")
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


def _segmenter(settings: PairSettings, codes: Path | None, train: list[Path], pairs: int, report: Report) -> Segmenter:
    if settings.segmenter == "word":
        return Words()
    if codes is not None and settings.segmenter == "codes":
        report(f"BPE with the merges of {codes}")
        return load_codes(codes)

    def texts() -> Iterator[str]:
        return (line for path in train for chunk in _chunks(path) for line in chunk)

    size = settings.size or 0
    if settings.segmenter == "codes":
        report(f"learning {size:,} merges of BPE")
        return learn_codes(texts, size)
    report(f"learning {settings.tokens}: {size:,} entries")
    if settings.segmenter == "byte_bpe":
        return learn_byte_bpe(texts(), size - len(MARKS))
    return learn_unigram(itertools.islice(texts(), 0, None, -(-2 * pairs // _UNIGRAM_LINES)), size - len(MARKS))


def make_languages(
    settings: PairSettings, codes: Path | None, texts: Path, pairs: int, report: Report
) -> tuple[Language, Language]:
    """Source and target language of the training `pairs` in `texts`. With a joint vocabulary they have the same entries."""
    train = [text_file(texts, "train", side) for side in SIDES]
    segmenter = _segmenter(settings, codes, train, pairs, report)
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
    if settings.segmenter == "unigram":
        table.pop(UNK, None)  # the piece of characters that it lacks
    if segmenter.pieces is not None and settings.vocabulary == "joint":
        table = dict.fromkeys(segmenter.pieces, 0) | table
    words = settings.segmenter == "word"
    # words of a text that look like the marks: <unk> is the mark, as in published corpora, <eos> never ends a sentence
    unknown = table.pop(UNK, 0) + table.pop(EOS, 0) if words else 0
    kept, totals = ranked(table, keep=(), unk=False, min_count=0, max_vocabulary=None)
    size = len(kept)
    if words:
        size = sum(total >= settings.min_count for total in totals)  # in falling order
        if settings.size is not None:
            size = min(size, settings.size - len(MARKS))
    return [*MARKS, *kept[:size]], [0, unknown + sum(totals[size:]), *totals[:size]]


def _rows(folder: Path, split: str, languages: tuple[Language, Language]) -> Iterator[_Row]:
    """The pairs of a split, encoded."""
    texts = [_chunks(text_file(folder, split, side)) for side in SIDES]
    raw = raw_file(folder, split, SIDES[0]).exists()
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
    rows: Iterable[_Row] = _rows(texts, split, languages)
    if settings.concatenate is not None and (settings.concatenate_splits == "all" or split == "train"):
        rows = concatenated(rows, settings.concatenate)
    dtypes = [id_type(len(language)) for language in languages]
    offsets = [array("q", [0]), array("q", [0])]
    words, unknown, count = [0, 0], [0, 0], 0
    raw = raw_file(texts, split, SIDES[0]).exists()
    with _Texts(folder, split, raw) as out, ExitStack() as stack:
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
