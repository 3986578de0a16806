"""Sentence pairs for translation: cleaned and tokenized, then a vocabulary is made of the training lines, then ids."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tokenizers

from fullrank.config.run import CorpusInfo, DataConfig, find_corpus
from fullrank.core.errors import InputError
from fullrank.data import invented
from fullrank.data.corpora import Sources, find_pairs
from fullrank.data.language import (
    MARKS,
    Language,
    Pieces,
    build_language,
    clean_line,
    find_words,
    learn_byte_bpe,
    learn_codes,
    learn_unigram,
    normalize_line,
    read_codes,
    write_piece,
)
from fullrank.data.prepared import SIDES, Built, Plan, id_type
from fullrank.data.tokenizers import DEFAULT_BPE_SIZE, sort_by_count
from fullrank.files import batched, file_digest, lines, map_in_processes

logger = logging.getLogger(__name__)

_CHUNK = 4096  # lines that are encoded together
_UNIGRAM_LINES = 1_000_000  # at most so many lines, evenly spread, teach a unigram model: it is slow to learn

# a pair of lines: both sides as they are encoded; where Moses changes them, both sides before that as well
_Lines = tuple[str, ...]
_Encoded = tuple[_Lines, tuple[list[int], ...]]  # the lines of a pair, and the ids of both sides
_COLUMNS = tuple(f"{side}{end}" for end in (".txt", ".raw.txt") for side in SIDES)  # their files


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """The choices by which sentence pairs become token ids, none left open.

    `segmenter`: `word`; `byte_bpe`, BPE over bytes, to which nothing is unknown; `codes`, BPE over characters as
    subword-nmt has it; `unigram`. `size`: entries of a vocabulary, merges of codes that are learned.
    """

    languages: tuple[str, ...]
    tokens: str
    segmenter: str
    codes: str | None  # sha256 of the file
    vocabulary: str
    lowercase: bool
    moses: bool
    min_count: int
    size: int | None
    max_length: int | None = None
    max_ratio: float | None = None
    concatenate: int | None


def plan_pairs(config: DataConfig, cache: Path) -> Plan:
    """Plan how the sentence pairs of a configuration are prepared.

    Raises InputError for bad data or settings, RunError for a failed download.
    """
    info = find_corpus(config.name)
    sources = find_pairs(config, info, cache)
    settings = _resolve_settings(config, info, sources)
    identity = {}
    if settings.moses:
        identity["sacremoses"] = version("sacremoses") if find_spec("sacremoses") else None
    if settings.segmenter != "word" and settings.codes is None:
        identity["tokenizers"] = tokenizers.__version__
    name = f"{info.name}-{'-'.join(settings.languages)}-{settings.tokens}"
    build = partial(_build, info, settings, sources)
    return Plan(info, name, dataclasses.asdict(settings), sources, identity, build)


def _resolve_settings(config: DataConfig, info: CorpusInfo, sources: Sources) -> PairSettings:
    """Resolve every `null` of the settings.

    BPE is by the codes of `sources` if there are any. Else one vocabulary for both languages is byte-level BPE, and where each
    has its own, merges are learned from both together and each language has the pieces that its training text uses.
    """
    chosen = {
        "vocabulary": "joint",
        "lowercase": config.lowercase,
        "moses": False,
        "size": DEFAULT_BPE_SIZE,
        **info.settings,
    }
    for key in ("vocabulary", "moses", "max_length", "max_ratio"):
        value = getattr(config, key)
        if value is not None:
            chosen[key] = value
    if chosen["moses"] is None:
        chosen["moses"] = any(content.is_tokenized for content in sources.splits.values())
    segmenter = config.unit
    codes = None
    if segmenter == "bpe":
        codes = sources.codes
        segmenter = "byte_bpe" if codes is None and chosen["vocabulary"] == "joint" else "codes"
    if codes is not None:
        chosen["size"] = None
    elif segmenter == "word" or config.max_vocabulary:
        chosen["size"] = config.max_vocabulary
    return PairSettings(
        languages=sources.languages,
        tokens=config.unit,
        segmenter=segmenter,
        codes=None if codes is None else file_digest(codes, "data.codes"),
        min_count=config.min_count or 1,
        concatenate=config.concatenate,
        **chosen,
    )


def _build(info: CorpusInfo, settings: PairSettings, sources: Sources, folder: Path) -> Built:
    """Write the lines of every split, then their ids."""
    cleaning = dict.fromkeys(("given", "kept", "empty", "too_long", "ratio", "valid"), 0)
    counts: dict[str, int] = {}
    cleaned = folder / "lines"
    cleaned.mkdir()
    for split in sources.splits:
        logger.info(f"{info.name}: reading {split}")
        counts |= _write_lines(split, sources, settings, cleaned, cleaning)
    logger.info(f"{info.name}: making the vocabularies")
    languages = _make_languages(settings, sources.codes, cleaned, counts["train"])
    splits = {}
    for split in counts:
        logger.info(f"{info.name}: encoding {split}")
        splits[split] = _encode(cleaned, folder, split, languages, settings)
    shutil.rmtree(cleaned)
    marks = []
    if info.languages is None:
        marks.append(", ".join(section[0].path.name for section in sources.splits["train"].columns))
    elif settings.languages != tuple(info.languages):
        marks.append(" to ".join(settings.languages))
    if info.name == invented.TRANSLATION:
        marks.append("not a language")
    if settings.concatenate is not None:
        marks.append(f"joined to {settings.concatenate} tokens")
    by_side = dict(zip(SIDES, languages, strict=True))
    details = {
        "cleaning": cleaning,
        "codes": None if settings.codes is None else str(sources.codes),
        "vocabulary": {side: len(language) for side, language in by_side.items()},
    }
    return Built(by_side, splits, counts, marks, details)


# lines: cleaned, tokenized, and written


def _open_columns(names: Iterable[str], folder: Path, stack: ExitStack) -> Callable[[_Lines], None]:
    """Open a file for each column, and return a function that writes the lines of a pair to them."""
    files = [stack.enter_context((folder / name).open("w", encoding="utf-8", newline="\n")) for name in names]

    def write(pair: _Lines) -> None:
        for file, line in zip(files, pair, strict=True):
            file.write(line + "\n")

    return write


def _write_lines(
    split: str, sources: Sources, settings: PairSettings, folder: Path, cleaning: dict[str, int]
) -> dict[str, int]:
    """Clean and tokenize a split, write its lines into `folder`, and count the pairs.

    Training pairs may be left out, which `cleaning` counts; every `valid_every`-th of the rest goes to the validation split.
    Raises InputError if none is left.
    """
    content = sources.splits[split]
    moses = settings.moses and not content.is_tokenized
    normalize = partial(_normalize_pair, settings, moses)
    rows = map_in_processes(normalize, content.read_pairs(), _CHUNK, alone=not moses)
    every = sources.valid_every if split == "train" else None
    counts = dict.fromkeys((split, "valid") if every else (split,), 0)
    with ExitStack() as stack:
        columns = _COLUMNS if moses else _COLUMNS[:2]
        writers = {}
        for name in counts:
            names = [f"{name}.{column}" for column in columns]
            writers[name] = _open_columns(names, folder, stack)
        remaining = _clean(rows, settings, cleaning) if split == "train" else rows
        for number, row in enumerate(remaining, start=1):
            name = "valid" if every and number % every == 0 else split
            writers[name](row)
            counts[name] += 1
    if every:
        cleaning["valid"] = counts["valid"]
    if split == "train" and not counts["train"]:
        raise InputError(
            f"{content.key}: none of {cleaning['given']:,} training pairs is left: {cleaning['empty']:,} with an "
            f"empty side, {cleaning['too_long']:,} longer than data.max_length, {cleaning['ratio']:,} beyond data.max_ratio"
        )
    return counts


def _normalize_pair(settings: PairSettings, moses: bool, pair: tuple[str, str]) -> _Lines:
    """Normalize the lines of a pair as they are encoded; with `moses`, the lines before that follow."""
    sides = zip(settings.languages, pair, strict=True)
    text = [normalize_line(line, name, moses=moses, lowercase=settings.lowercase) for name, line in sides]
    return (*text, *map(clean_line, pair)) if moses else tuple(text)


def _clean(rows: Iterable[_Lines], settings: PairSettings, cleaning: dict[str, int]) -> Iterator[_Lines]:
    """Yield the pairs that stay: a pair goes if a side is empty or has too many words, or the ratio of both is too large."""
    max_length = settings.max_length or math.inf
    max_ratio = settings.max_ratio or math.inf
    for row in rows:
        shorter, longer = sorted(len(side.split()) for side in row[:2])
        fate = "kept"
        if shorter == 0:
            fate = "empty"
        elif longer > max_length:
            fate = "too_long"
        elif longer > max_ratio * shorter:
            fate = "ratio"
        cleaning["given"] += 1
        cleaning[fate] += 1
        if fate == "kept":
            yield row


# vocabularies of the training lines


def _make_languages(settings: PairSettings, codes: Path | None, folder: Path, pairs: int) -> list[Language]:
    """Make source and target language from the training `pairs` in `folder`.

    With a joint vocabulary they have the same entries.
    """
    train = [folder / f"train.{column}" for column in _COLUMNS[:2]]
    pieces = _learn_pieces(settings, codes, train, pairs)
    everything = build_language("", pieces)
    counts = []
    for path in train:
        encoded = map(everything.encode_normalized, batched(lines(path, "data.cache"), _CHUNK))
        numbers = Counter(chain.from_iterable(chain.from_iterable(encoded)))
        counts.append(Counter({everything.entries[number]: count for number, count in numbers.items()}))
    if settings.vocabulary == "joint":
        counts = [counts[0] + counts[1]] * 2
    languages = []
    for name, side_counts in zip(settings.languages, counts, strict=True):
        entries = _rank_pieces(pieces, side_counts, settings)
        languages.append(build_language(name, pieces, entries, moses=settings.moses, lowercase=settings.lowercase))
    return languages


def _learn_pieces(settings: PairSettings, codes: Path | None, train: list[Path], pairs: int) -> Pieces:
    def read_lines() -> Iterator[str]:
        return (line for path in train for line in lines(path, "data.cache"))

    size = settings.size or 0
    if settings.segmenter == "word":
        return find_words(read_lines())
    if settings.segmenter == "codes" and codes is not None:
        logger.info(f"BPE with the merges of {codes}")
        return read_codes(codes, read_lines())
    logger.info(f"learning {settings.tokens}: {size:,} {'merges' if settings.segmenter == 'codes' else 'entries'}")
    if settings.segmenter == "codes":
        return learn_codes(read_lines, size)
    if settings.segmenter == "byte_bpe":
        return learn_byte_bpe(read_lines(), size - len(MARKS))
    return learn_unigram(islice(read_lines(), 0, None, -(-2 * pairs // _UNIGRAM_LINES)), size - len(MARKS))


def _rank_pieces(pieces: Pieces, counts: Mapping[str, int], settings: PairSettings) -> list[str]:
    """Rank pieces, most frequent first, ties alphabetically; in a joint vocabulary of bytes or a unigram model all of them."""
    counts = {piece: count for piece, count in counts.items() if piece not in MARKS}
    if pieces.kind == "word":
        frequent = [word for word in sort_by_count(counts) if counts[word] >= settings.min_count]
        return frequent[: None if settings.size is None else settings.size - len(MARKS)]
    if pieces.kind == "codes":
        return sorted(counts, key=lambda piece: (-counts[piece], write_piece(piece)))
    if settings.vocabulary == "joint":
        counts = dict.fromkeys(pieces.names, 0) | counts
    return sort_by_count(counts)


# lines to token ids


def _encode_rows(paths: Sequence[Path], languages: Sequence[Language]) -> Iterator[_Encoded]:
    for columns in zip(*(batched(lines(path, "data.cache"), _CHUNK) for path in paths), strict=True):
        ids = (language.encode_normalized(column) for language, column in zip(languages, columns[:2], strict=True))
        yield from zip(zip(*columns, strict=True), zip(*ids, strict=True), strict=True)


def concatenate(pairs: Iterable[_Encoded], most: int) -> Iterator[_Encoded]:
    """Join neighbours while neither side has more than `most` tokens, `<eos>` not counted."""
    waiting = None
    for pair in pairs:
        if waiting is not None:
            ids = tuple(a + b for a, b in zip(waiting[1], pair[1], strict=True))
            if max(map(len, ids)) <= most:
                pair = tuple(clean_line(f"{a} {b}") for a, b in zip(waiting[0], pair[0], strict=True)), ids
            else:
                yield waiting
        waiting = pair
    if waiting is not None:
        yield waiting


def _encode(
    cleaned: Path, folder: Path, split: str, languages: Sequence[Language], settings: PairSettings
) -> dict[str, int]:
    """Write lines, ids and offsets of a split, whose lines are joined where that is asked for, and count them."""
    columns = [cleaned / f"{split}.{column}" for column in _COLUMNS]
    paths = [path for path in columns if path.exists()]
    rows = _encode_rows(paths, languages)
    if settings.concatenate is not None:
        rows = concatenate(rows, settings.concatenate)
    lengths = [array("q", [0]), array("q", [0])]
    words = [0, 0]
    unknown = [0, 0]
    with ExitStack() as stack:
        write = _open_columns([path.name for path in paths], folder, stack)
        files = [stack.enter_context((folder / f"{split}.{side}.bin").open("wb")) for side in SIDES]
        for text, both_ids in rows:
            write(text)
            for side, (language, ids) in enumerate(zip(languages, both_ids, strict=True)):
                files[side].write(np.asarray(ids, dtype=id_type(len(language))).tobytes())
                lengths[side].append(len(ids))
                words[side] += len(text[side].split())
                unknown[side] += ids.count(language.unk_id)
    counts = {"pairs": len(lengths[0]) - 1}
    for side, name in enumerate(SIDES):
        offsets = np.cumsum(lengths[side], dtype="<i8")
        (folder / f"{split}.{name}.offsets").write_bytes(offsets.tobytes())
        counts[f"{name}_tokens"] = int(offsets[-1]) + counts["pairs"]
        counts[f"{name}_words"] = words[side]
        counts[f"{name}_unknown"] = unknown[side]
    return counts
