"""Text for language models: found or downloaded, divided into splits, counted, and made token ids, a megabyte at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError
from fullrank.data import builtin, prepared
from fullrank.data.corpora import CorpusInfo, text_corpus
from fullrank.data.files import Report, Section, cache_root, pieces
from fullrank.data.prepared import Corpus, Split
from fullrank.data.sources import SPLITS, TextSources, find_text
from fullrank.data.tokenizers import (
    DEFAULT_BPE_SIZE,
    EOS,
    SOS,
    ByteVocabulary,
    CharacterVocabulary,
    Tokenizer,
    WordVocabulary,
    train_bpe,
)  # fmt: skip

_BUILTIN_MIN_COUNT = 3
_REPORT_EVERY = 64 << 20  # characters between two progress messages
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


def prepare(config: DataConfig, *, report: Report | None = None, allow_slice: bool = True) -> Corpus:
    """The text of a configuration: found or downloaded, checked against published counts, tokenized, and kept.

    A second call with the same text and settings only opens it. `report` is called with a line at each step and with
    every departure from the published corpus. `allow_slice=False` (paper scale) refuses a corpus whose counts differ.
    Raises InputError for bad data or settings, RunError for a failed download or a full disk.
    """
    say = report or (lambda line: None)
    info = text_corpus(config.name)
    settings = _settings(config, info)
    cache = cache_root(config.cache)
    found = None if info.name == "builtin" else find_text(config, info, cache, say)
    sources = [] if found is None else found.rows()
    choices = dataclasses.asdict(settings)
    if not settings.line_start:  # so that corpora prepared before there was a choice are found
        del choices["line_start"]
    identity = {}
    if info.name == "builtin":
        extraction = hashlib.sha256(Path(builtin.__file__).read_bytes()).hexdigest()
        identity = {"python": builtin.signature(), "extraction": extraction}
    key = prepared.key_of(info, choices, sources, learned=settings.kind == "bpe", **identity)
    folder = cache / "corpora" / f"{info.name}-{settings.kind}-{key}"

    def build(target: Path) -> None:
        _build(target, info, settings, found, sources, say)

    return prepared.open_or_build(folder, prepared.load_corpus, build, say, allow_slice=allow_slice)


def _settings(config: DataConfig, info: CorpusInfo) -> Settings:
    """Every `null` resolved; InputError for keys that the kind of tokens has no use for."""
    kind = config.tokens or info.tokens
    if config.eos and kind in ("byte", "character"):
        raise InputError(f"data.eos: {kind} tokens keep the newline itself; set data.eos=false or data.tokens=word")
    if (config.min_count or 1) > 1 and kind in ("byte", "bpe"):
        raise InputError(
            f"data.min_count: nothing is rare or unknown with data.tokens={kind}; set it to null, given {config.min_count}"
        )
    if config.max_vocabulary is not None and kind == "byte":
        raise InputError(
            f"data.max_vocabulary: byte tokens have 256 entries; set it to null, given {config.max_vocabulary}"
        )
    line_end = kind in ("word", "bpe") if config.eos is None else config.eos
    if config.sos and not line_end:
        raise InputError(
            f"data.sos: {SOS} begins lines that end in {EOS}, which {kind} tokens have "
            + (f"with data.eos=true; given {config.eos}" if kind in ("word", "bpe") else "not; set data.tokens=word")
        )
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
) -> None:
    extracted: Mapping[str, Any] = {}
    if found is None:
        report("builtin: reading the documentation of the running Python")
        extracted = builtin.write(folder)
        found = TextSources({split: [Section(folder / f"{split}.txt")] for split in SPLITS})
    report(f"{info.name}: making a {settings.kind} vocabulary")
    tokenizer = _make_tokenizer(found.sections["train"], settings, report)
    tokenizer.save(folder)
    splits = {}
    for split in SPLITS:
        report(f"{info.name}: encoding {split}")
        splits[split] = _encode(tokenizer, found.sections[split], folder / f"{split}.bin", settings, split, report)
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


def _texts(
    sections: Sequence[Section], settings: Settings, key: str, doing: str, report: Report
) -> Iterator[tuple[str, bool, bool]]:
    """(piece of text, it begins a line, it ends its section without a newline). Within a long line pieces begin no line."""
    done, reported = 0, 0
    for section in sections:
        begins = True
        read = pieces(section, exact=settings.kind == "byte", key=key)
        for text, following in itertools.pairwise(itertools.chain[str | None](read, [None])):
            assert text is not None  # only the last is
            yield text, begins, following is None and not text.endswith("\n")
            begins = text.endswith("\n")
            done += len(text)
            if done // _REPORT_EVERY > reported:
                reported = done // _REPORT_EVERY
                report(f"{doing}: {done / 1e6:,.0f} million characters")


def _make_tokenizer(sections: Sequence[Section], settings: Settings, report: Report) -> Tokenizer:
    """The vocabulary of the training split (of its first `max_tokens`; BPE is trained on the whole split).

    Raises InputError if the text has no words.
    """
    if settings.kind == "byte":
        return ByteVocabulary(lowercase=settings.lowercase)
    texts = _texts(sections, settings, "data.train", f"counting {settings.kind}s", report)
    lines = {"line_end": settings.line_end, "line_start": settings.line_start}
    if settings.kind == "bpe":
        size = settings.max_vocabulary or DEFAULT_BPE_SIZE
        return train_bpe((text for text, _, _ in texts), size=size, lowercase=settings.lowercase, **lines)
    min_count, max_vocabulary = settings.min_count, settings.max_vocabulary
    if settings.kind == "character":
        characters = _counted((text.lower() if settings.lowercase else text for text, _, _ in texts), settings)
        return CharacterVocabulary.from_counts(
            characters, min_count=min_count, max_vocabulary=max_vocabulary, lowercase=settings.lowercase
        )
    options: dict[str, Any] = {"lowercase": settings.lowercase, "split": settings.split, **lines}
    splitter = WordVocabulary([EOS, SOS], **options)

    def words() -> Iterator[list[str]]:
        for text, begins, open_end in texts:
            read = splitter.words(text + "\n" * (open_end and settings.line_end))
            yield read[1:] if settings.line_start and not begins else read

    counts = _counted(words(), settings)
    if not counts.keys() - {EOS, SOS}:
        raise InputError(f"data.train: {', '.join(str(s.path) for s in sections)}: there are no words in this text")
    return WordVocabulary.from_counts(counts, min_count=min_count, max_vocabulary=max_vocabulary, **options)


def _counted(parts: Iterator[Sequence[str]] | Iterator[str], settings: Settings) -> Counter[str]:
    """Counts of each word or character among the first `max_tokens`."""
    counts: Counter[str] = Counter()
    left = settings.max_tokens
    for part in parts:
        counts.update(part if left is None else part[:left])
        if left is not None:
            left -= len(part)
            if left <= 0:
                break
    return counts


def _encode(
    tokenizer: Tokenizer, sections: Sequence[Section], target: Path, settings: Settings, split: str, report: Report
) -> Split:
    """Write the ids of a split to `target` and count it. `max_tokens` cuts the training split.

    Raises InputError for text that cannot be encoded or has no token at all.
    """
    dtype = prepared.id_type(len(tokenizer))
    limit = settings.max_tokens if split == "train" else None
    digest, total = hashlib.sha256(), 0
    words = characters = size = 0
    in_word = False  # the last piece ended inside a word
    with target.open("wb") as file:
        for text, begins, open_end in _texts(sections, settings, f"data.{split}", f"encoding {split}", report):
            ids = tokenizer.encode(text + "\n" * (open_end and settings.line_end))
            if settings.line_start and not begins:
                del ids[:1]
            full = limit is not None and total + len(ids) >= limit
            if limit is not None and total + len(ids) > limit:
                ids = ids[: limit - total]
                text, open_end = tokenizer.decode(ids), False
            words += len(text.split()) + text.count("\n") + open_end
            words -= in_word and bool(text) and not text[0].isspace()
            in_word = not text[-1:].isspace()
            characters += len(text)
            size += len(text.encode("utf-8", "surrogateescape"))
            data = np.asarray(ids, dtype=dtype).tobytes()
            file.write(data)
            digest.update(data)
            total += len(ids)
            if full:
                break
    if total == 0:
        raise InputError(f"data.{split}: {', '.join(str(s.path) for s in sections)}: there is no token in this text")
    return Split(total, words, characters, size, digest.hexdigest())
