"""Sentence pairs for translation: cleaned and tokenized, then a vocabulary is made of the training lines, then ids."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError
from fullrank.data import synthetic_pairs
from fullrank.data.corpora import CorpusInfo, pair_corpus
from fullrank.data.files import Report, cache_root, file_digest, lines, number_of_lines
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
from fullrank.data.pair_files import PairFiles, find_pairs, split_key
from fullrank.data.prepared import (
    SIDES,
    PairCorpus,
    PairSplit,
    differences,
    id_type,
    key_of,
    load_pairs,
    open_or_build,
    sha256_of,
    write_record,
)
from fullrank.data.tokenizers import DEFAULT_BPE_SIZE, EOS, UNK, ranked

_CHUNK = 4096  # lines that are encoded together
_UNIGRAM_LINES = 1_000_000  # at most so many lines, evenly spread, teach a unigram model: it is slow to learn
_REPORT_EVERY = 500_000  # pairs between two progress messages


@dataclass(frozen=True)
class PairSettings:
    """The choices by which sentence pairs become token ids, none left open.

    `segmenter`: `word`; `byte_bpe`, BPE over bytes, to which nothing is unknown; `codes`, BPE over characters as
    subword-nmt has it; `unigram`. `size`: entries of a vocabulary, merges of codes that are learned.
    """

    languages: tuple[str, str]
    tokens: str
    segmenter: Literal["word", "byte_bpe", "codes", "unigram"]
    codes: str | None  # sha256 of the file
    vocabulary: Literal["joint", "separate"]
    lowercase: bool
    moses: bool
    min_count: int
    size: int | None
    max_length: int | None
    max_ratio: float | None
    concatenate: int | None
    concatenate_splits: Literal["all", "train"]

    def plain_values(self) -> dict[str, Any]:
        """The settings as they are in JSON."""
        return {**dataclasses.asdict(self), "languages": list(self.languages)}


@dataclass(frozen=True)
class _Usual:
    """The choices that are usual for a corpus, where the configuration leaves them open."""

    vocabulary: Literal["joint", "separate"] = "joint"
    lowercase: bool = False
    moses: bool | None = False  # None: where the files are tokenized
    size: int = DEFAULT_BPE_SIZE
    max_length: int | None = None
    max_ratio: float | None = None


_USUAL = {
    "parallel": _Usual(),
    "multi30k-de-en": _Usual(),
    "iwslt14-de-en": _Usual("separate", lowercase=True, moses=True, max_length=175, max_ratio=1.5),
    "synthetic-translation": _Usual("separate"),
    "wmt16-en-de": _Usual(moses=None, size=32_000),
}


def prepare_pairs(config: DataConfig, *, report: Report | None = None, allow_slice: bool = True) -> PairCorpus:
    """The sentence pairs of a configuration: found or downloaded, counted, cleaned, made subwords, and kept.

    A second call with the same text and settings only opens them. `report` is called with a line at each step and with
    every departure from the published corpus. `allow_slice=False` (paper scale) refuses a corpus whose counts differ.
    Raises InputError for bad data or settings, RunError for a failed download or a full disk.
    """
    say = report or (lambda line: None)
    info = pair_corpus(config.name)
    cache = cache_root(config.cache)
    files = find_pairs(config, info, cache, say)
    settings = _settings(config, info, files)
    sources = [
        {"split": split, "side": side, "file": str(path.absolute()), "sha256": file_digest(path, f"data.{split}")}
        for split, content in files.splits.items()
        for side, paths in zip(SIDES, content.sides(), strict=True)
        for path in paths
    ]
    name = f"{info.name}-{'-'.join(files.languages)}-{settings.tokens}"
    folder = cache / "pairs" / f"{name}-{_key(info, settings, sources)}"

    def build(target: Path) -> None:
        _build(target, info, settings, files, sources, say)

    return open_or_build(folder, load_pairs, build, say, allow_slice=allow_slice)


def _settings(config: DataConfig, info: CorpusInfo, files: PairFiles) -> PairSettings:
    """Every `null` resolved; InputError for choices that do not go together.

    BPE is by the codes of `files` if there are any. Else one vocabulary for both languages is byte-level BPE, and where each
    has its own, merges are learned from both together and each language has the pieces that its training text uses.
    """
    usual = _USUAL[info.name]
    tokens = config.tokens or info.tokens
    vocabulary = config.vocabulary or usual.vocabulary
    size = config.max_vocabulary
    codes = files.codes if tokens == "bpe" else None
    segmenter: Literal["word", "byte_bpe", "codes", "unigram"]
    if tokens == "bpe":
        segmenter = "codes" if codes is not None or vocabulary == "separate" else "byte_bpe"
    else:
        segmenter = "unigram" if tokens == "unigram" else "word"
    if segmenter == "word":
        if size is not None and size <= len(MARKS):
            raise InputError(f"data.max_vocabulary: more than 2 (<eos> and <unk>), given {size}")
    else:
        size = None if codes is not None else size or usual.size
    tokenized = any(content.tokenized for content in files.splits.values())
    moses = tokenized if usual.moses is None else usual.moses
    return PairSettings(
        languages=files.languages,
        tokens=tokens,
        segmenter=segmenter,
        codes=None if codes is None else file_digest(codes, "data.codes"),
        vocabulary=vocabulary,
        lowercase=config.lowercase or usual.lowercase,
        moses=moses if config.moses is None else config.moses,
        min_count=config.min_count or 1,
        size=size,
        max_length=config.max_length or usual.max_length,
        max_ratio=config.max_ratio or usual.max_ratio,
        concatenate=config.concatenate,
        concatenate_splits=config.concatenate_splits or "all",
    )


def _key(info: CorpusInfo, settings: PairSettings, sources: Sequence[Mapping[str, Any]]) -> str:
    identity: dict[str, Any] = {"sources": [{**row, "file": Path(row["file"]).name} for row in sources]}
    if settings.segmenter in ("byte_bpe", "unigram") or (settings.segmenter == "codes" and settings.codes is None):
        import tokenizers

        identity["tokenizers"] = tokenizers.__version__
    if settings.moses:
        try:
            identity["sacremoses"] = version("sacremoses")
        except PackageNotFoundError:  # the error comes where it is needed
            identity["sacremoses"] = None
    return key_of(info, settings.plain_values(), **identity)


def _label(info: CorpusInfo, files: PairFiles, settings: PairSettings, is_slice: bool) -> str:
    marks = ["slice"] if is_slice else []
    if info.languages is None:
        train = files.splits["train"]
        marks.append(", ".join(path.name for path in (train.source[0], train.target[0])))
    elif files.languages != info.languages:
        marks.append(" to ".join(files.languages))
    if info.name == synthetic_pairs.NAME:
        marks.append("not a language")
    if settings.concatenate is not None:
        marks.append(f"joined to {settings.concatenate} tokens")
    return f"{info.name} ({'; '.join(marks)})" if marks else info.name


def _build(
    folder: Path,
    info: CorpusInfo,
    settings: PairSettings,
    files: PairFiles,
    sources: Sequence[Mapping[str, Any]],
    report: Report,
) -> None:
    """Write a whole corpus into `folder`."""

    def say(line: str) -> None:
        report(f"{info.name}: {line}")

    texts = folder / "texts"
    texts.mkdir()
    cleaned = _write_texts(files, settings, texts, split_key(info, "train"), info, say)
    say("making the vocabularies")
    languages = _make_languages(settings, files.codes, texts, cleaned.kept, say)
    for side, language in zip(SIDES, languages, strict=True):
        language.save(folder / side)
    splits = {}
    for split in files.names:
        say(f"encoding {split}")
        counts = _encode(texts, folder, split, languages, settings)
        written = sorted(path for path in folder.glob(f"{split}.*") if path.is_file())
        splits[split] = PairSplit(**counts, sha256={path.name: sha256_of(path) for path in written})
    # counted before neighbours are joined
    differs = differences(
        info, {split: number_of_lines(texts / f"{split}.{SIDES[0]}.txt", "data.cache") for split in splits}
    )
    shutil.rmtree(texts)
    write_record(
        folder,
        info,
        _label(info, files, settings, bool(differs)),
        splits,
        sources=sources,
        settings=settings.plain_values(),
        notes=files.notes,
        differs=differs,
        cleaning=dataclasses.asdict(cleaned),
        codes=None if settings.codes is None else str(files.codes),
        vocabulary={side: len(language) for side, language in zip(SIDES, languages, strict=True)},
    )


# lines: cleaned, tokenized, and written to files of texts


@dataclass
class _Cleaning:
    """Counts of the training pairs by what became of them: left out for an empty side, for their length in words (before
    subwords), for the ratio of both lengths, or kept; `valid` of those kept went to the validation split."""

    given: int = 0
    kept: int = 0
    empty: int = 0
    too_long: int = 0
    ratio: int = 0
    valid: int = 0

    def keeps(self, source: str, target: str, settings: PairSettings) -> bool:
        """True if a pair stays; it is counted."""
        m, n = len(source.split()), len(target.split())
        self.given += 1
        if m == 0 or n == 0:
            self.empty += 1
        elif settings.max_length is not None and max(m, n) > settings.max_length:
            self.too_long += 1
        elif settings.max_ratio is not None and max(m, n) > settings.max_ratio * min(m, n):
            self.ratio += 1
        else:
            self.kept += 1
            return True
        return False


@dataclass(frozen=True)
class _Pair:
    """Texts by side, as given (None where Moses changes nothing) and as encoded; ids by side."""

    raw: tuple[str, str] | None
    text: tuple[str, str]
    ids: tuple[list[int], list[int]] = ([], [])

    def joined(self, other: _Pair) -> _Pair:
        def both(first: tuple[str, str], second: tuple[str, str]) -> tuple[str, str]:
            return plain(f"{first[0]} {second[0]}"), plain(f"{first[1]} {second[1]}")

        raw = None if self.raw is None or other.raw is None else both(self.raw, other.raw)
        return _Pair(raw, both(self.text, other.text), (self.ids[0] + other.ids[0], self.ids[1] + other.ids[1]))


class _TextWriter:
    """Files of the texts of a split: `<split>.<side>.txt`, and with Moses `<split>.<side>.raw.txt`."""

    def __init__(self, folder: Path, split: str, raw: bool, stack: ExitStack) -> None:
        def opened(name: str) -> TextIO:
            return stack.enter_context((folder / f"{split}.{name}").open("w", encoding="utf-8", newline="\n"))

        self._files = [opened(f"{side}.txt") for side in SIDES]
        self._raw = [opened(f"{side}.raw.txt") for side in SIDES] if raw else []

    def add(self, pair: _Pair) -> None:
        for file, line in zip(self._files, pair.text, strict=True):
            file.write(line + "\n")
        for file, line in zip(self._raw, pair.raw or (), strict=False):
            file.write(line + "\n")


def _write_texts(
    files: PairFiles, settings: PairSettings, folder: Path, train_key: str, info: CorpusInfo, report: Report
) -> _Cleaning:
    """Clean and tokenize every split and write its lines into `folder`. Only training pairs are left out.

    Raises InputError if no training pair is left.
    """
    cleaning, every = _Cleaning(), files.valid_every
    for split, content in files.splits.items():
        report(f"reading {split}")
        moses = settings.moses and not content.tokenized
        source_language, target_language = (
            Language(name, Words(), MARKS, moses=moses, lowercase=settings.lowercase) for name in files.languages
        )
        with ExitStack() as stack:
            out = _TextWriter(folder, split, moses, stack)
            valid = _TextWriter(folder, "valid", moses, stack) if split == "train" and every else None
            for number, (source, target) in enumerate(content.pairs(split_key(info, split)), start=1):
                source, target = plain(source), plain(target)
                text = source_language.prepared(source), target_language.prepared(target)
                pair = _Pair((source, target) if moses else None, text)
                if split != "train":
                    out.add(pair)
                elif cleaning.keeps(*text, settings):
                    if valid is not None and every and cleaning.kept % every == 0:
                        cleaning.valid += 1
                        valid.add(pair)
                    else:
                        out.add(pair)
                if number % _REPORT_EVERY == 0:
                    report(f"reading {split}: {number:,} pairs")
    if cleaning.kept == cleaning.valid:
        raise InputError(
            f"{train_key}: none of {cleaning.given:,} training pairs is left: {cleaning.empty:,} with an empty side, "
            f"{cleaning.too_long:,} longer than data.max_length, {cleaning.ratio:,} beyond data.max_ratio"
        )
    return cleaning


def _chunks(path: Path) -> Iterator[list[str]]:
    rows = lines(path, "data.cache")
    while chunk := list(itertools.islice(rows, _CHUNK)):
        yield chunk


# vocabularies of the training lines


def _make_languages(
    settings: PairSettings, codes: Path | None, texts: Path, pairs: int, report: Report
) -> tuple[Language, Language]:
    """Source and target language of the training `pairs` in `texts`. With a joint vocabulary they have the same entries."""
    train = [texts / f"train.{side}.txt" for side in SIDES]
    segmenter = _segmenter(settings, codes, train, pairs, report)
    counts: list[Counter[str]] = [Counter(), Counter()]
    for path, counted in zip(train, counts, strict=True):
        for chunk in _chunks(path):
            for pieces in segmenter.segment(chunk):
                counted.update(pieces)
    if settings.vocabulary == "joint":
        counts = [counts[0] + counts[1]] * 2
    source, target = (
        Language(
            name, segmenter, *_entries(segmenter, each, settings), moses=settings.moses, lowercase=settings.lowercase
        )
        for name, each in zip(settings.languages, counts, strict=True)
    )
    return source, target


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


def _entries(segmenter: Segmenter, counts: Counter[str], settings: PairSettings) -> tuple[list[str], list[int]]:
    """Entries and counts: the marks, then pieces, most frequent first. Pieces that are left out are counted under `<unk>`."""
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


# lines to token ids


def _encoded(texts: Path, split: str, languages: tuple[Language, Language]) -> Iterator[_Pair]:
    """The pairs of a split, encoded."""
    raw = (texts / f"{split}.{SIDES[0]}.raw.txt").exists()
    sides = [_chunks(texts / f"{split}.{side}.txt") for side in SIDES]
    raw_sides = [_chunks(texts / f"{split}.{side}.raw.txt") for side in SIDES] if raw else sides[:0]
    for source, target in zip(*sides, strict=True):
        ids = zip(languages[0].encode_prepared(source), languages[1].encode_prepared(target), strict=True)
        before = zip(*(next(side) for side in raw_sides), strict=True) if raw else itertools.repeat(None, len(source))
        for given, text, pair in zip(before, zip(source, target, strict=True), ids, strict=True):
            yield _Pair(given, text, pair)


def concatenated(pairs: Iterable[_Pair], most: int) -> Iterator[_Pair]:
    """Neighbours joined while neither side has more than `most` tokens, `<eos>` not counted."""
    held: _Pair | None = None
    for pair in pairs:
        if held is None:
            held = pair
        elif max(len(held.ids[0]) + len(pair.ids[0]), len(held.ids[1]) + len(pair.ids[1])) <= most:
            held = held.joined(pair)
        else:
            yield held
            held = pair
    if held is not None:
        yield held


def _encode(
    texts: Path, folder: Path, split: str, languages: tuple[Language, Language], settings: PairSettings
) -> dict[str, int]:
    """Write texts, ids and offsets of a split into `folder`; the counts of its `PairSplit`."""
    pairs: Iterable[_Pair] = _encoded(texts, split, languages)
    if settings.concatenate is not None and (settings.concatenate_splits == "all" or split == "train"):
        pairs = concatenated(pairs, settings.concatenate)
    raw = (texts / f"{split}.{SIDES[0]}.raw.txt").exists()
    dtypes = [id_type(len(language)) for language in languages]
    offsets = [array("q", [0]), array("q", [0])]
    words, unknown, count = [0, 0], [0, 0], 0
    with ExitStack() as stack:
        out = _TextWriter(folder, split, raw, stack)
        files = [stack.enter_context((folder / f"{split}.{side}.bin").open("wb")) for side in SIDES]
        for pair in pairs:
            out.add(pair)
            count += 1
            for side, ids in enumerate(pair.ids):
                files[side].write(np.asarray(ids, dtype=dtypes[side]).tobytes())
                offsets[side].append(offsets[side][-1] + len(ids))
                words[side] += len(pair.text[side].split())
                unknown[side] += ids.count(languages[side].unk_id)
    counts = {"pairs": count}
    for number, name in enumerate(SIDES):
        (folder / f"{split}.{name}.offsets").write_bytes(np.asarray(offsets[number], dtype="<i8").tobytes())
        counts[f"{name}_tokens"] = offsets[number][-1] + count
        counts[f"{name}_words"], counts[f"{name}_unknown"] = words[number], unknown[number]
    return counts
