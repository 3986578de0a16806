"""Vocabularies: text to token ids and back.

Word and character vocabularies are sorted by frequency, then alphabetically, so that the same text always gives the same
ids (and frequent words come first, as adaptive output layers want). `<eos>` ends a line, and on request `<sos>` begins it;
`<unk>` stands for what is rare or unseen; published corpora hold `<unk>` as a word, and it is the same entry. BPE lives in
`bpe.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from fullrank.core.errors import InputError, RunError
from fullrank.data.entries import EOS, SOS, UNK, check_ids, digest, index, ranked
from fullrank.data.vocab_files import ENTRIES_FILE, META_FILE, read_entries, save_entries, save_meta

UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_PUNCTUATION = re.compile(r"<unk>|<eos>|\w+(?:['’]\w+)*|[^\w\s]")
_PUNCTUATION_WITH_SOS = re.compile(f"{SOS}|{_PUNCTUATION.pattern}")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. `start_id` is the context of the first token of a text.

    `encode` appends nothing; where lines end in `<eos>`, a newline inside the text is that `<eos>`, and `decode` makes it
    a newline again. Where lines begin with `<sos>` (`sos_id`), `encode` puts one before every line, an empty one too, and
    `decode` leaves it out. `fingerprint` is the sha256 of the entries in their order.
    """

    @property
    def kind(self) -> str: ...
    @property
    def start_id(self) -> int: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def sos_id(self) -> int | None: ...
    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class WordVocabulary:
    """Words: between white space, or (`split="punctuation"`) runs of letters and digits and single punctuation marks.

    `entries` in the order of their ids, among them `<eos>`. Without `<unk>`, an unseen word is an InputError.
    `line_end`: a newline is `<eos>`; otherwise it is white space. `line_start`: `<sos>` stands before every line.
    Decoding joins words with single spaces.
    """

    kind = "word"

    def __init__(
        self,
        entries: Sequence[str],
        counts: Sequence[int] | None = None,
        *,
        lowercase: bool = False,
        split: Literal["whitespace", "punctuation"] = "whitespace",
        line_end: bool = True,
        line_start: bool = False,
    ) -> None:
        self.entries = list(entries)
        self.counts = list(counts) if counts is not None else [0] * len(self.entries)
        self.lowercase, self.split, self.line_end, self.line_start = lowercase, split, line_end, line_start
        self._pattern = _PUNCTUATION_WITH_SOS if line_start else _PUNCTUATION
        self._ids = index(self.entries, self.counts)
        if EOS not in self._ids:
            raise InputError(f"a word vocabulary needs the entry {EOS}: it is the context of the first word")
        if line_start and (SOS not in self._ids or not line_end):
            raise InputError(f"lines that begin with {SOS} need it as an entry, and end in {EOS}")
        self.eos_id: int | None = self._ids[EOS]
        self.sos_id: int | None = self._ids[SOS] if line_start else None
        self.start_id = self._ids[EOS]
        self.unk_id = self._ids.get(UNK)
        self.fingerprint = digest(self.kind, self.entries)

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        *,
        min_count: int = 1,
        max_vocabulary: int | None = None,
        unk: bool = True,
        lowercase: bool = False,
        split: Literal["whitespace", "punctuation"] = "whitespace",
        line_end: bool = True,
        line_start: bool = False,
    ) -> WordVocabulary:
        """The vocabulary of counted words (`<eos>` and `<sos>` counted as words); see `ranked`."""
        keep = [EOS, SOS] if line_start else [EOS]
        entries, totals = ranked(counts, keep=keep, unk=unk, min_count=min_count, max_vocabulary=max_vocabulary)
        return cls(entries, totals, lowercase=lowercase, split=split, line_end=line_end, line_start=line_start)

    def __len__(self) -> int:
        return len(self.entries)

    def words(self, text: str) -> list[str]:
        """The text as words, `<eos>` where a line ends and, with `line_start`, `<sos>` where one begins."""
        if self.lowercase:
            text = text.lower()
        if self.line_start and text:
            inner, last = (text[:-1], f" {EOS}") if text.endswith("\n") else (text, "")
            text = f"{SOS} " + inner.replace("\n", f" {EOS} {SOS} ") + last
        elif self.line_end:
            text = text.replace("\n", f" {EOS} ")
        return text.split() if self.split == "whitespace" else self._pattern.findall(text)

    def encode(self, text: str) -> list[int]:
        words = self.words(text)
        ids, unk = self._ids, self.unk_id
        if unk is not None:
            return [ids.get(word, unk) for word in words]
        try:
            return [ids[word] for word in words]
        except KeyError as error:
            raise InputError(
                f"the word {error.args[0]!r} is not in this vocabulary of {len(self):,} words, which has no {UNK}; "
                "raise data.min_count to 2 or lower data.max_vocabulary when preparing the corpus"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, len(self))
        lines: list[list[str]] = [[]]
        for i in ids:
            if i == self.eos_id:
                lines.append([])
            elif i != self.sos_id:
                lines[-1].append(self.entries[i])
        return "\n".join(" ".join(line) for line in lines)

    def save(self, folder: Path) -> None:
        save_entries(folder, self.entries, self.counts)
        options = {"lowercase": self.lowercase, "split": self.split, "line_end": self.line_end}
        if self.line_start:
            options["line_start"] = True
        save_meta(folder, self.kind, len(self), self.fingerprint, options)


class CharacterVocabulary:
    """Characters (code points); the newline is an entry like any other, `<unk>` decodes to U+FFFD."""

    kind = "character"
    eos_id: int | None = None
    sos_id: int | None = None

    def __init__(self, entries: Sequence[str], counts: Sequence[int] | None = None, *, lowercase: bool = False) -> None:
        self.entries = list(entries)
        self.counts = list(counts) if counts is not None else [0] * len(self.entries)
        self.lowercase = lowercase
        self._ids = index(self.entries, self.counts)
        if "\n" not in self._ids:
            raise InputError("a character vocabulary needs the newline: it is the context of the first character")
        self.start_id = self._ids["\n"]
        self.unk_id = self._ids.get(UNK)
        self.fingerprint = digest(self.kind, self.entries)

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        *,
        min_count: int = 1,
        max_vocabulary: int | None = None,
        unk: bool = True,
        lowercase: bool = False,
    ) -> CharacterVocabulary:
        """The vocabulary of counted characters; see `ranked`."""
        entries, totals = ranked(counts, keep=["\n"], unk=unk, min_count=min_count, max_vocabulary=max_vocabulary)
        return cls(entries, totals, lowercase=lowercase)

    def __len__(self) -> int:
        return len(self.entries)

    def encode(self, text: str) -> list[int]:
        ids, unk = self._ids, self.unk_id
        if self.lowercase:
            text = text.lower()
        if unk is not None:
            return [ids.get(character, unk) for character in text]
        try:
            return [ids[character] for character in text]
        except KeyError as error:
            raise InputError(
                f"the character {error.args[0]!r} is not in this vocabulary of {len(self)} characters, which has no {UNK}; "
                "raise data.min_count to 2 or lower data.max_vocabulary when preparing the corpus"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, len(self))
        return "".join(UNKNOWN_CHARACTER if i == self.unk_id else self.entries[i] for i in ids)

    def save(self, folder: Path) -> None:
        save_entries(folder, self.entries, self.counts)
        save_meta(folder, self.kind, len(self), self.fingerprint, {"lowercase": self.lowercase})


class ByteVocabulary:
    """The 256 byte values of UTF-8 text; nothing is unknown. Bytes that are not UTF-8 decode to U+FFFD."""

    kind = "byte"
    start_id = ord("\n")
    eos_id: int | None = None
    sos_id: int | None = None

    def __init__(self, *, lowercase: bool = False) -> None:
        self.lowercase = lowercase
        self.fingerprint = digest(self.kind, ())

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> list[int]:
        """Bytes of the text; lone surrogates stand for the bytes that Python's `surrogateescape` made them from."""
        return list((text.lower() if self.lowercase else text).encode("utf-8", "surrogateescape"))

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, 256)
        return bytes(int(i) for i in ids).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        save_meta(folder, self.kind, 256, self.fingerprint, {"lowercase": self.lowercase})


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote into `folder`.

    Raises InputError if there is none, RunError if its files are damaged (they do not give the recorded fingerprint).
    """
    meta_path = folder / META_FILE
    if not meta_path.is_file():
        raise InputError(f"{folder}: no {META_FILE} there, so no vocabulary; give a run folder or a prepared corpus")
    tokenizer: Tokenizer
    try:
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        match meta["kind"]:
            case "word":
                tokenizer = WordVocabulary(
                    *read_entries(folder / ENTRIES_FILE),
                    lowercase=meta["lowercase"], split=meta["split"], line_end=meta["line_end"],
                    line_start=meta.get("line_start", False),
                )  # fmt: skip
            case "character":
                tokenizer = CharacterVocabulary(*read_entries(folder / ENTRIES_FILE), lowercase=meta["lowercase"])
            case "byte":
                tokenizer = ByteVocabulary(lowercase=meta["lowercase"])
            case "bpe":
                from fullrank.data.bpe import load_bpe

                tokenizer = load_bpe(
                    folder,
                    lowercase=meta["lowercase"],
                    line_end=meta["line_end"],
                    line_start=meta.get("line_start", False),
                )
            case other:
                raise RunError(f"{meta_path}: unknown kind of vocabulary '{other}' (known: word, byte, character, bpe)")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder}: the vocabulary files are damaged or incomplete ({error!r})") from error
    if tokenizer.fingerprint != meta["fingerprint"]:
        raise RunError(f"{folder}: the vocabulary files are damaged: they do not give the fingerprint in {META_FILE}")
    return tokenizer
