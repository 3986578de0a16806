"""Sentence pairs for translation: cleaned and tokenized, then a vocabulary is made of the training lines, then ids."""

from __future__ import annotations

import dataclasses
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError
from fullrank.data import builtin, prepared
from fullrank.data.corpora import USUAL_SETTINGS, CorpusInfo, pair_corpus
from fullrank.data.files import Report, cache_root, file_digest, lines, note_returns, number_of_lines
from fullrank.data.language import (
    MARKS,
    Language,
    Segmenter,
    Words,
    is_unspaced,
    learn_byte_bpe,
    learn_codes,
    learn_unigram,
    load_codes,
    plain,
)  # fmt: skip
from fullrank.data.marks import UNK
from fullrank.data.parallel import in_processes
from fullrank.data.prepared import SIDES, PairCorpus, PairSplit
from fullrank.data.sources import PairFiles, find_pairs
from fullrank.data.tokenizers import DEFAULT_BPE_SIZE, ranked
from fullrank.files import sha256_of

_CHUNK = 4096  # lines that are encoded together
_UNIGRAM_LINES = 1_000_000  # at most so many lines, evenly spread, teach a unigram model: it is slow to learn
_REPORT_EVERY = 500_000  # pairs between two progress messages

# a pair of lines: both sides as they are encoded; where Moses changes them, both sides before that as well
_Lines = tuple[str, ...]
Row = TypeVar("Row")
_COLUMNS = tuple(f"{side}{end}" for end in (".txt", ".raw.txt") for side in SIDES)  # their files


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
    _check_spaces(settings, files, say)
    sources = [
        {"split": split, "side": side, "file": str(path.absolute()), "sha256": file_digest(path, f"data.{split}")}
        | ({} if content.span is None else {"lines": content.span})
        for split, content in files.splits.items()
        for side, paths in zip(SIDES, content.sides, strict=True)
        for path in paths
    ]
    libraries: dict[str, Any] = {}
    if settings.moses:
        try:
            libraries["sacremoses"] = version("sacremoses")
        except PackageNotFoundError:  # the error comes where it is needed
            libraries["sacremoses"] = None
    paths = sorted({path for content in files.splits.values() for side in content.sides for path in side})
    returns = note_returns(paths, "data.train")
    files = dataclasses.replace(files, notes=(*files.notes, *returns))
    learned = settings.segmenter != "word" and settings.codes is None
    key = prepared.key_of(info, dataclasses.asdict(settings), sources, learned=learned, **libraries)
    folder = cache / "pairs" / f"{info.name}-{'-'.join(files.languages)}-{settings.tokens}-{key}"

    def build(target: Path) -> None:
        for note in returns:
            say(note)
        _build(target, info, settings, files, sources, lambda line: say(f"{info.name}: {line}"))

    return prepared.open_or_build(folder, prepared.load_pairs, build, say, allow_slice=allow_slice)


def _check_spaces(settings: PairSettings, files: PairFiles, say: Report) -> None:
    """Say which settings count words where the text of a language has no spaces between them."""
    counting = [key for key in ("max_length", "max_ratio") if getattr(settings, key) is not None]
    counting += ["tokens"] if settings.tokens == "word" else []
    for side, language in enumerate(files.languages):
        if counting and is_unspaced(pair[side] for pair in files.splits["train"].pairs()):
            given = ", ".join(f"data.{key}: {getattr(settings, key)}" for key in counting)
            say(
                f"{given}: words are what stands between spaces, and the {language} text has none between words; a sentence "
                "counts as a word or two"
            )


def _settings(config: DataConfig, info: CorpusInfo, files: PairFiles) -> PairSettings:
    """Every `null` resolved; InputError for choices that do not go together.

    BPE is by the codes of `files` if there are any. Else one vocabulary for both languages is byte-level BPE, and where each
    has its own, merges are learned from both together and each language has the pieces that its training text uses.
    """
    usual = USUAL_SETTINGS.get(info.name, {})
    tokens = config.tokens or info.tokens
    vocabulary = config.vocabulary or usual.get("vocabulary", "joint")
    size = config.max_vocabulary
    codes = files.codes if tokens == "bpe" else None
    segmenter: Literal["word", "byte_bpe", "codes", "unigram"]
    if tokens == "bpe":
        segmenter = "codes" if codes is not None or vocabulary == "separate" else "byte_bpe"
    else:
        segmenter = "unigram" if tokens == "unigram" else "word"
    if segmenter != "word":
        size = None if codes is not None else size or usual.get("size", DEFAULT_BPE_SIZE)
    moses = usual.get("moses", False) if config.moses is None else config.moses
    return PairSettings(
        languages=files.languages,
        tokens=tokens,
        segmenter=segmenter,
        codes=None if codes is None else file_digest(codes, "data.codes"),
        vocabulary=vocabulary,
        lowercase=config.lowercase or usual.get("lowercase", False),
        moses=any(content.tokenized for content in files.splits.values()) if moses is None else moses,
        min_count=config.min_count or 1,
        size=size,
        max_length=config.max_length or usual.get("max_length"),
        max_ratio=config.max_ratio or usual.get("max_ratio"),
        concatenate=config.concatenate,
        concatenate_splits=config.concatenate_splits or "all",
    )


def _build(
    folder: Path,
    info: CorpusInfo,
    settings: PairSettings,
    files: PairFiles,
    sources: Sequence[Mapping[str, Any]],
    report: Report,
) -> None:
    texts = folder / "texts"
    texts.mkdir()
    cleaning = _write_texts(files, settings, texts, report)
    report("making the vocabularies")
    languages = _make_languages(settings, files.codes, texts, cleaning["kept"], report)
    for side, language in zip(SIDES, languages, strict=True):
        language.save(folder / side)
    first, *others = files.splits
    splits = {}
    for split in [first, "valid", *others] if files.valid_every else files.splits:
        report(f"encoding {split}")
        counts = _encode(texts, folder, split, languages, settings)
        written = sorted(path for path in folder.glob(f"{split}.*") if path.is_file())
        splits[split] = PairSplit(**counts, sha256={path.name: sha256_of(path) for path in written})
    # counted before neighbours are joined
    here = {split: number_of_lines(texts / f"{split}.{_COLUMNS[0]}", "data.cache") for split in splits}
    differs = prepared.differences(info, here)
    marks = ["slice"] if differs else []
    if info.languages is None:
        marks.append(", ".join(paths[0].name for paths in files.splits["train"].sides))
    elif files.languages != info.languages:
        marks.append(" to ".join(files.languages))
    if info.name == builtin.SYNTHETIC:
        marks.append("not a language")
    if settings.concatenate is not None:
        marks.append(f"joined to {settings.concatenate} tokens")
    shutil.rmtree(texts)
    prepared.write_record(
        folder,
        info,
        marks,
        splits,
        sources=sources,
        settings=dataclasses.asdict(settings),
        notes=files.notes,
        differs=differs,
        cleaning=cleaning,
        codes=None if settings.codes is None else str(files.codes),
        vocabulary={side: len(language) for side, language in zip(SIDES, languages, strict=True)},
    )


# lines: cleaned, tokenized, and written to files of texts


def _writer(folder: Path, split: str, columns: int, stack: ExitStack) -> Callable[[_Lines], None]:
    """A function that writes the lines of a pair to the files `<split>.<column>`."""
    names = (f"{split}.{column}" for column in _COLUMNS[:columns])
    files = [stack.enter_context((folder / name).open("w", encoding="utf-8", newline="\n")) for name in names]

    def write(pair: _Lines) -> None:
        for file, line in zip(files, pair, strict=True):
            file.write(line + "\n")

    return write


def _fate(pair: _Lines, settings: PairSettings) -> str:
    """`kept`, or why cleaning leaves a training pair out: a side is empty or has too many words, or the ratio of both."""
    shorter, longer = sorted(len(side.split()) for side in pair[:2])
    if shorter == 0:
        return "empty"
    if settings.max_length is not None and longer > settings.max_length:
        return "too_long"
    return "ratio" if settings.max_ratio is not None and longer > settings.max_ratio * shorter else "kept"


def _write_texts(files: PairFiles, settings: PairSettings, folder: Path, report: Report) -> dict[str, int]:
    """Clean and tokenize every split and write its lines into `folder`; counts of training pairs by their fate.

    Only training pairs are left out. `valid` of those kept go to the validation split. InputError if none is left.
    """
    fates = dict.fromkeys(("given", "kept", "empty", "too_long", "ratio", "valid"), 0)
    for split, content in files.splits.items():
        report(f"reading {split}")
        moses = settings.moses and not content.tokenized
        languages = [
            Language(name, Words(), MARKS, moses=moses, lowercase=settings.lowercase) for name in files.languages
        ]
        train = split == "train"
        with ExitStack() as stack:
            write = _writer(folder, split, 4 if moses else 2, stack)
            write_valid = _writer(folder, "valid", 4 if moses else 2, stack) if train and files.valid_every else None
            made = in_processes(partial(_rows, languages, moses), _chunks(content.pairs()), alone=not moses)
            for number, row in enumerate(chain.from_iterable(made), start=1):
                fate = _fate(row, settings) if train else None
                if fate is not None:
                    fates["given"] += 1
                    fates[fate] += 1
                if fate == "kept" and write_valid and files.valid_every and fates["kept"] % files.valid_every == 0:
                    fates["valid"] += 1
                    write_valid(row)
                elif fate in (None, "kept"):
                    write(row)
                if number % _REPORT_EVERY == 0:
                    report(f"reading {split}: {number:,} pairs")
    if fates["kept"] == fates["valid"]:
        raise InputError(
            f"{files.splits['train'].key}: none of {fates['given']:,} training pairs is left: {fates['empty']:,} with an "
            f"empty side, {fates['too_long']:,} longer than data.max_length, {fates['ratio']:,} beyond data.max_ratio"
        )
    return fates


def _rows(languages: Sequence[Language], moses: bool, pairs: Sequence[tuple[str, str]]) -> list[_Lines]:
    """The lines of pairs as they are encoded; with `moses` followed by those before that."""
    raw = [(plain(source), plain(target)) for source, target in pairs]
    texts = [tuple(language.prepared(line) for language, line in zip(languages, pair, strict=True)) for pair in raw]
    return [(*text, *pair) for text, pair in zip(texts, raw, strict=True)] if moses else list(texts)


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(islice(rows, _CHUNK)):
        yield chunk


# vocabularies of the training lines


def _make_languages(
    settings: PairSettings, codes: Path | None, texts: Path, pairs: int, report: Report
) -> tuple[Language, Language]:
    """Source and target language of the training `pairs` in `texts`. With a joint vocabulary they have the same entries."""
    train = [texts / f"train.{column}" for column in _COLUMNS[:2]]
    segmenter = _segmenter(settings, codes, train, pairs, report)
    counts: list[Counter[str]] = [Counter(), Counter()]
    for path, counted in zip(train, counts, strict=True):
        for chunk in _chunks(lines(path, "data.cache")):
            for pieces in segmenter.segment(chunk):
                counted.update(pieces)
    if settings.vocabulary == "joint":
        counts = [counts[0] + counts[1]] * 2
    entries = (_entries(segmenter, each, settings) for each in counts)
    source, target = (
        Language(name, segmenter, *each, moses=settings.moses, lowercase=settings.lowercase)
        for name, each in zip(settings.languages, entries, strict=True)
    )
    return source, target


def _segmenter(settings: PairSettings, codes: Path | None, train: list[Path], pairs: int, report: Report) -> Segmenter:
    def texts() -> Iterator[str]:
        return (line for path in train for line in lines(path, "data.cache"))

    size = settings.size or 0
    match settings.segmenter:
        case "word":
            return Words()
        case "codes" if codes is not None:
            report(f"BPE with the merges of {codes}")
            return load_codes(codes)
        case "codes":
            report(f"learning {size:,} merges of BPE")
            return learn_codes(texts, size)
    report(f"learning {settings.tokens}: {size:,} entries")
    if settings.segmenter == "byte_bpe":
        return learn_byte_bpe(texts(), size - len(MARKS))
    return learn_unigram(islice(texts(), 0, None, -(-2 * pairs // _UNIGRAM_LINES)), size - len(MARKS))


def _entries(segmenter: Segmenter, counts: Counter[str], settings: PairSettings) -> tuple[list[str], list[int]]:
    """Entries and counts: the marks, then pieces, most frequent first. Pieces that are left out are counted under `<unk>`."""
    table = dict(counts)
    if settings.segmenter == "unigram":
        table.pop(UNK, None)  # the piece of characters that it lacks
    if segmenter.pieces is not None and settings.vocabulary == "joint":
        table = dict.fromkeys(segmenter.pieces, 0) | table
    words = settings.segmenter == "word"
    unknown = table.pop(UNK, 0) if words else 0  # a word of published corpora; any other mark in a text is a word
    kept, totals = ranked(table, keep=(), unk=False, min_count=0, max_vocabulary=None)
    size = len(kept)
    if words:
        size = sum(total >= settings.min_count for total in totals)  # in falling order
        if settings.size is not None:
            size = min(size, settings.size - len(MARKS))
    return [*MARKS, *kept[:size]], [0, unknown + sum(totals[size:]), *totals[:size]]


# lines to token ids

_Encoded = tuple[_Lines, tuple[list[int], ...]]  # the lines of a pair, and the ids of both sides


def _encoded(texts: Path, split: str, languages: tuple[Language, Language]) -> Iterator[_Encoded]:
    paths = [path for path in (texts / f"{split}.{column}" for column in _COLUMNS) if path.exists()]
    for columns in zip(*(_chunks(lines(path, "data.cache")) for path in paths), strict=True):
        ids = (language.encode_prepared(column) for language, column in zip(languages, columns[:2], strict=True))
        yield from zip(zip(*columns, strict=True), zip(*ids, strict=True), strict=True)


def concatenated(pairs: Iterable[_Encoded], most: int) -> Iterator[_Encoded]:
    """Neighbours joined while neither side has more than `most` tokens, `<eos>` not counted."""
    held: _Encoded | None = None
    for pair in pairs:
        if held is not None:
            ids = tuple(a + b for a, b in zip(held[1], pair[1], strict=True))
            if max(map(len, ids)) <= most:
                pair = tuple(plain(f"{a} {b}") for a, b in zip(held[0], pair[0], strict=True)), ids
            else:
                yield held
        held = pair
    if held is not None:
        yield held


def _encode(
    texts: Path, folder: Path, split: str, languages: tuple[Language, Language], settings: PairSettings
) -> dict[str, int]:
    """Write texts, ids and offsets of a split into `folder`; the counts of its `PairSplit`."""
    pairs: Iterable[_Encoded] = _encoded(texts, split, languages)
    if settings.concatenate is not None and (settings.concatenate_splits == "all" or split == "train"):
        pairs = concatenated(pairs, settings.concatenate)
    raw = (texts / f"{split}.{_COLUMNS[2]}").exists()
    offsets = [array("q", [0]), array("q", [0])]
    words, unknown = [0, 0], [0, 0]
    with ExitStack() as stack:
        write = _writer(folder, split, 4 if raw else 2, stack)
        files = [stack.enter_context((folder / f"{split}.{side}.bin").open("wb")) for side in SIDES]
        for text, both_ids in pairs:
            write(text)
            for side, (language, ids) in enumerate(zip(languages, both_ids, strict=True)):
                files[side].write(np.asarray(ids, dtype=prepared.id_type(len(language))).tobytes())
                offsets[side].append(offsets[side][-1] + len(ids))
                words[side] += len(text[side].split())
                unknown[side] += ids.count(language.unk_id)
    counts = {"pairs": len(offsets[0]) - 1}
    for number, name in enumerate(SIDES):
        (folder / f"{split}.{name}.offsets").write_bytes(np.asarray(offsets[number], dtype="<i8").tobytes())
        counts[f"{name}_tokens"] = offsets[number][-1] + counts["pairs"]
        counts[f"{name}_words"], counts[f"{name}_unknown"] = words[number], unknown[number]
    return counts
