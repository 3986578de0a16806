"""Text for language models: found or downloaded, divided into splits, counted, and made token ids, a megabyte at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from fullrank.config.data import DataConfig
from fullrank.core.errors import ConfigError, InputError, RunError
from fullrank.data import builtin, prepared
from fullrank.data.corpora import CorpusInfo, text_corpus
from fullrank.data.files import Part, Report, Section, cache_root, holds, note_returns, parts
from fullrank.data.parallel import PREFIX, Counts, finished, progress
from fullrank.data.prepared import Corpus, Split
from fullrank.data.sources import SPLITS, TextSources, find_text, report_unread_folder
from fullrank.data.tokenizers import (
    DEFAULT_BPE_SIZE,
    EOS,
    SOS,
    ByteVocabulary,
    CharacterVocabulary,
    Tokenizer,
    WordVocabulary,
    entry_rows,
    load_tokenizer,
    train_bpe,
    write_entries,
)  # fmt: skip
from fullrank.files import silent

_BUILTIN_MIN_COUNT = 3
_COPIED_AT_ONCE = 1 << 20
_TYPES_AT_ONCE = 1 << 20  # whose counts are in memory
_OPEN_FILES = 256  # of counts, at once
_LABELS = {"byte": "bytes", "character": "characters", "bpe": "BPE"}  # of tokens, in a label; words are the usual


@dataclass(frozen=True)
class Settings:
    """The choices by which text becomes tokens, none left open."""

    kind: str
    lowercase: bool
    line_end: bool  # a newline is the token <eos>
    split: Literal["whitespace", "punctuation"]
    min_count: int
    max_vocabulary: int | None
    max_tokens: int | None  # of the training split
    line_start: bool = False  # <sos> stands before every line


def prepare(
    config: DataConfig, *, report: Report | None = None, allow_slice: bool = True, tokenizer: Tokenizer | None = None
) -> Corpus:
    """The text of a configuration: found or downloaded, checked against published counts, tokenized, and kept.

    A second call with the same text and settings only opens it. `report` is called with a line at each step and with
    every departure from the published corpus. `allow_slice=False` (paper scale) refuses a corpus whose counts differ.
    tokenizer: of another text, in place of one that is made from this one.
    Raises InputError for bad data or settings, RunError for a failed download or a full disk.
    """
    say = report or silent
    info = text_corpus(config.name)
    settings = _settings(config, info)
    cache = cache_root(config.cache)
    found = None if info.name == "builtin" else find_text(config, info, cache, say)
    sources = [] if found is None else found.rows()
    identity = {} if tokenizer is None else {"tokenizer": tokenizer.fingerprint}
    returns: tuple[str, ...] = ()
    if found is not None and settings.kind != "byte":
        # earlier versions kept carriage returns, and took <eos> for the mark
        paths = {section.path for some in found.sections.values() for section in some}
        if returns := note_returns(sorted(paths), "data.train"):
            found = dataclasses.replace(found, notes=(*found.notes, *returns))
            identity["line_ends"] = "newline"
        if settings.kind != "character" and any(holds(path, EOS.encode(), "data.train") for path in paths):
            identity["marks"] = "text"
    choices = dataclasses.asdict(settings)
    if not settings.line_start:  # so that corpora prepared before there was a choice are found
        del choices["line_start"]
    if info.name == "builtin":
        report_unread_folder(config, say)
        extraction = hashlib.sha256(Path(builtin.__file__).read_bytes()).hexdigest()
        identity |= {"python": builtin.signature(), "extraction": extraction}
    key = prepared.key_of(info, choices, sources, learned=settings.kind == "bpe", **identity)
    folder = cache / "corpora" / f"{info.name}-{settings.kind}-{key}"

    def build(target: Path) -> None:
        for note in returns:
            say(note)
        _build(target, info, settings, found, sources, say, tokenizer)

    return prepared.open_or_build(folder, prepared.load_corpus, build, say, allow_slice=allow_slice)


def encode_file(path: Path, tokenizer: Tokenizer, folder: Path, report: Report) -> Corpus:
    """A file as the split `text` of a corpus, in the tokens of a trained model; its ids are written into `folder`.

    Raises InputError for a file that cannot be read, that the tokenizer cannot encode, or that has no token.
    """
    line_end, line_start = (bool(getattr(tokenizer, name, False)) for name in ("line_end", "line_start"))
    settings = Settings(tokenizer.kind, tokenizer.lowercase, line_end, "whitespace", 1, None, None, line_start)
    read = list(parts(Section(path), exact=tokenizer.kind == "byte", key="--text"))
    split = _encode(tokenizer, read, folder, settings, "text", report, key="--text")
    return Corpus(folder, "text", path.name, False, {"text": split}, {}, tokenizer)


def _settings(config: DataConfig, info: CorpusInfo) -> Settings:
    """Every `null` resolved; InputError for keys that the kind of tokens has no use for."""
    kind = config.tokens or info.tokens
    if problems := [*config.problems_of_tokens(kind)]:  # of a corpus of one's own, whose tokens are known here only
        raise ConfigError(*problems)
    line_end = kind in ("word", "bpe") if config.eos is None else config.eos
    prose = info.name == "builtin" and kind == "word"
    return Settings(
        kind=kind,
        lowercase=config.lowercase or prose,
        line_end=line_end,
        split="punctuation" if prose else "whitespace",
        min_count=config.min_count or (_BUILTIN_MIN_COUNT if prose else 1),
        max_vocabulary=config.max_vocabulary,
        max_tokens=config.max_tokens,
        line_start=config.sos,
    )


def _build(
    folder: Path,
    info: CorpusInfo,
    settings: Settings,
    found: TextSources | None,
    sources: Sequence[Mapping[str, Any]],
    report: Report,
    tokenizer: Tokenizer | None = None,
) -> None:
    extracted: Mapping[str, Any] = {}
    if found is None:
        report("builtin: reading the documentation of the running Python")
        extracted = builtin.write(folder)
        found = TextSources({split: [Section(folder / f"{split}.txt")] for split in SPLITS})
    exact = settings.kind == "byte"
    read = {
        split: [part for section in found.sections[split] for part in parts(section, exact=exact, key=f"data.{split}")]
        for split in SPLITS
    }
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(folder)  # of a preparation that was killed
        except (InputError, RunError):
            report(f"{info.name}: making a {settings.kind} vocabulary")
            tokenizer = _make_tokenizer(folder, read["train"], settings, report)
    tokenizer.save(folder)
    splits = {}
    for split in SPLITS:
        report(f"{info.name}: encoding {split}")
        splits[split] = _encode(tokenizer, read[split], folder, settings, split, report)
    for left_over in folder.glob(f"{PREFIX}*"):
        left_over.unlink()
    if info.name == "builtin":
        for split in SPLITS:
            (folder / f"{split}.txt").unlink()
    # a cut inside a character moves to its end
    slack = 3 if info.unit == "bytes" and settings.kind != "byte" else 0
    differs = prepared.differences(info, {split: getattr(counts, info.unit) for split, counts in splits.items()}, slack)
    marks = [] if info.name != "builtin" else [f"Python {extracted['python']}"]
    if info.name == "text":
        names = list(dict.fromkeys(section.path.name for section in found.sections["train"]))
        kinds = [_LABELS[settings.kind]] if settings.kind in _LABELS else []
        marks.append(", ".join([", ".join(names[:3]) + (" ..." if len(names) > 3 else ""), *kinds]))
    if differs:
        marks = ["slice"]
    if settings.line_start:
        marks.append(f"with {SOS}")
    if splits["train"].tokens == settings.max_tokens and not differs:
        marks.append(f"first {settings.max_tokens:,} tokens")
    prepared.write_record(
        folder, info, marks, splits, sources=sources, settings=dataclasses.asdict(settings), notes=found.notes,
        differs=differs, **extracted,
    )  # fmt: skip


# text to token ids


def _make_tokenizer(folder: Path, parts: Sequence[Part], settings: Settings, report: Report) -> Tokenizer:
    """The vocabulary of the training split (of its first `max_tokens`; BPE is trained on the whole split).

    Words are counted in files of `folder`: in memory are those of a part, and in the end those that are entries.
    Raises InputError if the text has no words.
    """
    if settings.kind == "byte":
        return ByteVocabulary(lowercase=settings.lowercase)
    doing = f"counting {settings.kind}s"
    lines = {"line_end": settings.line_end, "line_start": settings.line_start}
    if settings.kind == "bpe":
        size = settings.max_vocabulary or DEFAULT_BPE_SIZE
        with progress(doing, sum(part.bytes for part in parts), report) as advance:
            return train_bpe(_texts(parts, advance), size=size, lowercase=settings.lowercase, **lines)
    options: dict[str, Any] = {"lowercase": settings.lowercase}
    split_up: Callable[[str], Sequence[str]] = str.lower if settings.lowercase else str
    if words := settings.kind == "word":
        options |= {"split": settings.split, **lines}
        split_up = WordVocabulary([EOS, SOS], **options).words

    def count(part: Part, target: Path, limit: int | None) -> Counts:
        counts: Counter[str] = Counter()
        left = limit
        for text, begins, open_end in part.texts(exact=False, key="data.train"):
            units = split_up(text + "\n" * (words and open_end and settings.line_end))
            units = units[1:] if settings.line_start and not begins else units
            counts.update(units if left is None else units[:left])
            if left is not None and (left := left - len(units)) <= 0:
                break
        write_entries(target, _alphabetical(counts))
        return {"tokens": counts.total(), "marks": counts[EOS] + counts[SOS]}

    counted = finished(count, parts, folder, "counts", doing, report, limit=settings.max_tokens)
    if words and all(counts["tokens"] == counts["marks"] for _, counts in counted):
        raise InputError(f"data.train: {_names(parts)}: there are no words in this text")
    vocabulary: type[WordVocabulary | CharacterVocabulary] = WordVocabulary if words else CharacterVocabulary
    return vocabulary.from_counts(
        _sums([path for path, _ in counted], folder),
        min_count=settings.min_count, max_vocabulary=settings.max_vocabulary, **options,
    )  # fmt: skip


def _texts(parts: Sequence[Part], advance: Callable[[int], None]) -> Iterator[str]:
    for part in parts:
        yield from (text for text, _, _ in part.texts(exact=False, key="data.train"))
        advance(part.bytes)


def _names(parts: Sequence[Part]) -> str:
    return ", ".join(dict.fromkeys(str(part.path) for part in parts))


_Rows = Iterator[tuple[str, int]]


def _alphabetical(counts: Counter[str]) -> _Rows:
    return ((entry, counts[entry]) for entry in sorted(counts))


def _merged(sorted_rows: Iterable[_Rows]) -> _Rows:
    """The sum of each entry's counts in all rows, which are in alphabetical order, as the sums are."""
    same = itertools.groupby(heapq.merge(*sorted_rows), key=itemgetter(0))
    return ((entry, sum(count for _, count in rows)) for entry, rows in same)


def _sums(paths: Sequence[Path], folder: Path) -> _Rows:
    """The sum of each entry's counts in all files, in alphabetical order. Those of many types go through files of `folder`."""
    sums: list[Path] = []

    def written(rows: _Rows) -> Path:
        path = folder / f"{PREFIX}sums-{next(numbers)}"
        write_entries(path, rows)
        return path

    numbers, counts = itertools.count(), Counter[str]()
    for path in paths:
        for entry, count in entry_rows(path):
            counts[entry] += count
        if len(counts) > _TYPES_AT_ONCE:
            sums.append(written(_alphabetical(counts)))
            counts.clear()
    while len(sums) > _OPEN_FILES:
        sums = [*sums[_OPEN_FILES:], written(_merged(map(entry_rows, sums[:_OPEN_FILES])))]
    return _merged([*map(entry_rows, sums), _alphabetical(counts)]) if sums else _alphabetical(counts)


def _encode(
    tokenizer: Tokenizer,
    parts: Sequence[Part],
    folder: Path,
    settings: Settings,
    split: str,
    report: Report,
    key: str | None = None,
) -> Split:
    """Write the ids of a split into `folder` and count it. `max_tokens` cuts the training split.

    key: names the text in errors, `data.<split>` if not given.

    Raises InputError for text that cannot be encoded or has no token at all.
    """
    dtype, key = prepared.id_type(len(tokenizer)), key or f"data.{split}"
    exact = settings.kind == "byte"

    def encode(part: Part, target: Path, limit: int | None) -> Counts:
        total = words = characters = size = 0
        in_word = False  # the last piece ended inside a word
        with target.open("wb") as file:
            for text, begins, open_end in part.texts(exact=exact, key=key):
                ids = tokenizer.encode_array(text + "\n" * (open_end and settings.line_end), dtype)
                if settings.line_start and not begins:
                    ids = ids[1:]
                full = limit is not None and total + len(ids) >= limit
                if limit is not None and total + len(ids) > limit:
                    ids = ids[: limit - total]
                    text, open_end = tokenizer.decode(ids.tolist()), False
                words += len(text.split()) + text.count("\n") + open_end
                words -= in_word and bool(text) and not text[0].isspace()
                in_word = not text[-1:].isspace()
                characters += len(text)
                size += len(text.encode("utf-8", "surrogateescape"))
                file.write(ids.tobytes())
                total += len(ids)
                if full:
                    break
        return {"tokens": total, "words": words, "characters": characters, "bytes": size}

    limit = settings.max_tokens if split == "train" else None
    done = finished(encode, parts, folder, split, f"encoding {split}", report, limit=limit)
    tokens, words, characters, size = (
        sum(counts[key] for _, counts in done) for key in ("tokens", "words", "characters", "bytes")
    )
    if tokens == 0:
        raise InputError(f"{key}: {_names(parts)}: there is no token in this text")
    digest = hashlib.sha256()
    with (folder / f"{split}.bin").open("wb") as file:
        for path, _ in done:
            with path.open("rb") as part_file:
                while block := part_file.read(_COPIED_AT_ONCE):
                    file.write(block)
                    digest.update(block)
    return Split(tokens, words, characters, size, digest.hexdigest())
