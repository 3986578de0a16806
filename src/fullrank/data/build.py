"""From text to a vocabulary and files of token ids, a megabyte of text at a time."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fullrank.core.errors import InputError
from fullrank.data.files import Section, pieces
from fullrank.data.tokenizers import (
    DEFAULT_BPE_SIZE,
    EOS,
    SOS,
    ByteVocabulary,
    CharacterVocabulary,
    Tokenizer,
    WordVocabulary,
    train_bpe,
)

Report = Callable[[str], None]
_TELL_EVERY = 64 << 20  # characters between two progress messages


@dataclass(frozen=True)
class Settings:
    """How text becomes tokens; every choice made."""

    kind: str
    lowercase: bool
    line_end: bool  # a newline is the token <eos>
    split: Literal["whitespace", "punctuation"]
    min_count: int
    max_vocabulary: int | None
    max_tokens: int | None  # of the training split
    line_start: bool = False  # <sos> stands before every line


@dataclass(frozen=True)
class Split:
    """One split: `tokens` (with `<eos>`), `words` (between white space, plus one for each line end, as published counts
    are), `characters`, `bytes` of its text, and the `sha256` of its token ids."""

    tokens: int
    words: int
    characters: int
    bytes: int
    sha256: str


def id_type(entries: int) -> np.dtype[Any]:
    """The type of stored ids: uint16 where every id fits, else int32."""
    return np.dtype("<u2") if entries <= 1 << 16 else np.dtype("<i4")


def _texts(
    sections: Sequence[Section], settings: Settings, key: str, doing: str, report: Report
) -> Iterator[tuple[str, bool]]:
    """(piece of text, whether it is the last of its section). A piece begins a line, unless the one before it is the
    beginning of a very long line."""
    done, told = 0, _TELL_EVERY
    for section in sections:
        before: str | None = None
        for text in pieces(section, exact=settings.kind == "byte", key=key):
            if before is not None:
                yield before, False
            before = text
            done += len(text)
            if done >= told:
                report(f"{doing}: {done / 1e6:,.0f} million characters")
                told += _TELL_EVERY
        if before is not None:
            yield before, True


def _counted_words(texts: Iterator[tuple[str, bool]], settings: Settings) -> Counter[str]:
    """How often each word occurs among the first `max_tokens`."""
    splitter = WordVocabulary(
        [EOS, SOS],
        lowercase=settings.lowercase,
        split=settings.split,
        line_end=settings.line_end,
        line_start=settings.line_start,
    )
    counts: Counter[str] = Counter()
    left = settings.max_tokens
    inside = False  # a line
    for text, last in texts:
        words = splitter.words(text)
        if inside and settings.line_start:
            del words[:1]
        inside = not last and not text.endswith("\n")
        if last and settings.line_end and not text.endswith("\n"):
            words.append(EOS)
        counts.update(words if left is None else words[:left])
        if left is not None:
            left -= len(words)
            if left <= 0:
                break
    return counts


def _counted_characters(texts: Iterator[tuple[str, bool]], settings: Settings) -> Counter[str]:
    counts: Counter[str] = Counter()
    left = settings.max_tokens
    for text, _ in texts:
        text = text.lower() if settings.lowercase else text
        counts.update(text if left is None else text[:left])
        if left is not None:
            left -= len(text)
            if left <= 0:
                break
    return counts


def build_tokenizer(sections: Sequence[Section], settings: Settings, report: Report) -> Tokenizer:
    """The vocabulary of the training split (of its first `max_tokens`; BPE is trained on the whole split).

    Raises InputError if the text has no words.
    """
    if settings.kind == "byte":
        return ByteVocabulary(lowercase=settings.lowercase)
    texts = _texts(sections, settings, "data.train", f"counting {settings.kind}s", report)
    if settings.kind == "bpe":
        size = settings.max_vocabulary or DEFAULT_BPE_SIZE
        return train_bpe(
            (text for text, _ in texts),
            size=size,
            lowercase=settings.lowercase,
            line_end=settings.line_end,
            line_start=settings.line_start,
        )
    limits = {
        "min_count": settings.min_count,
        "max_vocabulary": settings.max_vocabulary,
        "lowercase": settings.lowercase,
    }
    if settings.kind == "character":
        return CharacterVocabulary.from_counts(_counted_characters(texts, settings), **limits)  # type: ignore[arg-type]
    counts = _counted_words(texts, settings)
    if not counts.keys() - {EOS, SOS}:
        raise InputError(f"data.train: {', '.join(str(s.path) for s in sections)}: there are no words in this text")
    lines = {"line_end": settings.line_end, "line_start": settings.line_start}
    return WordVocabulary.from_counts(counts, split=settings.split, **lines, **limits)  # type: ignore[arg-type]


class _Tally:
    """Counts of a text that comes in pieces."""

    def __init__(self) -> None:
        self.words = self.characters = self.bytes = 0
        self._inside = False  # the last piece ended inside a word

    def add(self, text: str) -> None:
        self.words += len(text.split()) + text.count("\n")
        if self._inside and text and not text[0].isspace():
            self.words -= 1
        self._inside = bool(text) and not text[-1].isspace()
        self.characters += len(text)
        self.bytes += len(text.encode("utf-8", "surrogateescape"))


def encode_split(
    tokenizer: Tokenizer, sections: Sequence[Section], target: Path, settings: Settings, *, split: str, report: Report
) -> Split:
    """Writes the ids of a split to `target` and counts it. `max_tokens` cuts the training split.

    Raises InputError for text that cannot be encoded or has no token at all.
    """
    dtype = id_type(len(tokenizer))
    limit = settings.max_tokens if split == "train" else None
    digest, tally, total = hashlib.sha256(), _Tally(), 0
    inside = False  # a line
    with target.open("wb") as file:
        for text, last in _texts(sections, settings, f"data.{split}", f"encoding {split}", report):
            ids = tokenizer.encode(text)
            if inside and settings.line_start:
                del ids[:1]
            inside = not last and not text.endswith("\n")
            open_end = last and not text.endswith("\n")
            if open_end and settings.line_end and tokenizer.eos_id is not None:
                ids.append(tokenizer.eos_id)
            full = limit is not None and total + len(ids) >= limit
            if limit is not None and total + len(ids) > limit:
                ids = ids[: limit - total]
                text, open_end = tokenizer.decode(ids), False
            tally.add(text)
            tally.words += open_end
            data = np.asarray(ids, dtype=dtype).tobytes()
            file.write(data)
            digest.update(data)
            total += len(ids)
            if full:
                break
    if total == 0:
        raise InputError(f"data.{split}: {', '.join(str(s.path) for s in sections)}: there is no token in this text")
    return Split(total, tally.words, tally.characters, tally.bytes, digest.hexdigest())
