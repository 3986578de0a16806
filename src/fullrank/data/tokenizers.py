"""Tokenizers of running text: words, characters, bytes and byte-level BPE, each from text to ids and back.

Word and character vocabularies are sorted by frequency, then alphabetically: the same text always gives the same ids, and
frequent words come first, as adaptive output layers want. `<eos>` ends a line and, on request, `<sos>` begins it; where a text
holds the word `<eos>`, it is a word like any other. `<unk>` stands for rare and unseen entries; published corpora hold `<unk>`
as a word, and it is the same entry.

A saved tokenizer is `tokenizer.json`, which Hugging Face's `tokenizers` and `PreTrainedTokenizerFast` read as it is, with
`vocabulary.json` (kind, options and fingerprint) beside it.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from fullrank.core.errors import InputError, RunError
from fullrank.data import backends
from fullrank.data.marks import EOS, EOS_OF_TEXT, SOS, UNK, name_line_end
from fullrank.files import mended, parse_json, read_checked, write_checked

DEFAULT_BPE_SIZE = 10_000
META_FILE, TOKENIZER_FILE = "vocabulary.json", "tokenizer.json"
_WORD_EOS = re.compile(rf"(?<!\S){EOS}(?!\S)")
_PUNCTUATION = re.compile(r"<unk>|<eos>\ufdd0?|\w+(?:['’]\w+)*|[^\w\s]")
_PUNCTUATION_WITH_SOS = re.compile(f"{SOS}|{_PUNCTUATION.pattern}")
_BYTES = 256


class Tokenizer(ABC):
    """Text to ids and back. `start_id` is the context of the first token of a text.

    `encode` appends nothing. Where lines end in `<eos>`, a newline inside the text is that `<eos>`, and `decode` makes it
    a newline again. Where lines begin with `<sos>` (`sos_id`), `encode` puts one before every line, empty ones included,
    and `decode` leaves it out. `fingerprint` is the sha256 of the entries in their order.
    """

    kind: str
    lowercase: bool
    start_id: int
    eos_id: int | None = None
    sos_id: int | None = None
    fingerprint: str
    _options: tuple[str, ...] = ("lowercase",)  # attributes that are saved

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    @abstractmethod
    def backend(self, *, masks: bool = False) -> Any:
        """A tokenizer of Hugging Face's library that gives the same ids; words with `masks` have `<mask>` as last entry.

        Raises InputError where that library has none.
        """

    def encode_array(self, text: str, dtype: np.dtype[Any]) -> np.ndarray:
        """Ids of `text` as an array; see `encode`."""
        return np.array(self.encode(text), dtype)

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        self._save_backend(folder / TOKENIZER_FILE)
        meta = {"kind": self.kind, "entries": len(self), "fingerprint": self.fingerprint, **self._read_options()}
        write_checked(folder / META_FILE, meta)

    def _read_options(self) -> dict[str, Any]:
        """What the tokenizer is made from again, beside the entries in `tokenizer.json`."""
        return {name: getattr(self, name) for name in self._options}

    def _save_backend(self, path: Path) -> None:
        path.write_text(self.backend().to_str(), encoding="utf-8", newline="\n")

    def _check_ids(self, ids: Sequence[int]) -> None:
        """InputError unless every id is that of an entry."""
        if len(ids) and (min(ids) < 0 or max(ids) >= len(self)):
            bad = next(i for i in ids if not 0 <= i < len(self))
            raise InputError(
                f"token id {bad} is not in this vocabulary of {len(self):,} entries (ids 0 to {len(self) - 1})"
            )

    def _cut_lines(self, ids: Sequence[int]) -> list[list[int]]:
        """The ids of each line, without the marks that end and begin it."""
        self._check_ids(ids)
        lines: list[list[int]] = [[]]
        for i in ids:
            if i == self.start_id:
                lines.append([])
            elif i != self.sos_id:
                lines[-1].append(int(i))
        return lines


class Vocabulary(Tokenizer):
    """Entries in the order of their ids, which text is split into; an unseen one is `<unk>`."""

    def __init__(self, entries: Sequence[str], lowercase: bool, marks: int = 0) -> None:
        """marks: entries at the beginning that a text may hold as words, which are others."""
        self.entries, self.lowercase = list(entries), lowercase
        self._ids = {entry: i for i, entry in enumerate(self.entries) if i >= marks}
        self.unk_id = self._ids.get(UNK)
        self.fingerprint = digest(self.kind, self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _look_up(self, units: Iterable[str]) -> list[int]:
        """The ids of words, characters or pieces; InputError for an unseen one in a vocabulary without `<unk>`."""
        ids, unk = self._ids, self.unk_id
        if unk is not None:
            return [ids.get(unit, unk) for unit in units]
        try:
            return [ids[unit] for unit in units]
        except KeyError as error:
            raise InputError(
                f"the {self.kind} {error.args[0]!r} is not in this vocabulary, which has no {UNK}"
            ) from None


class WordVocabulary(Vocabulary):
    """Words between white space, or (`split="punctuation"`) runs of letters and digits and single punctuation marks.

    `<eos>` is among the `entries`. `line_end`: a newline is `<eos>`; otherwise it is white space. `line_start`: `<sos>` stands
    before every line. Decoding joins words with single spaces.
    """

    kind = "word"
    _options = ("lowercase", "split", "line_end", "line_start")

    def __init__(
        self,
        entries: Sequence[str],
        *,
        lowercase: bool = False,
        split: Literal["whitespace", "punctuation"] = "whitespace",
        line_end: bool = True,
        line_start: bool = False,
    ) -> None:
        super().__init__(entries, lowercase)
        self.split, self.line_end, self.line_start = split, line_end, line_start
        self._pattern = _PUNCTUATION_WITH_SOS if line_start else _PUNCTUATION
        if EOS not in self._ids:
            raise InputError(f"a word vocabulary needs the entry {EOS}: it is the context of the first word")
        self.start_id = self.eos_id = self._ids[EOS]
        self.sos_id = self._ids[SOS] if line_start else None

    @classmethod
    def from_counts(
        cls, counts: Mapping[str, int], *, min_count: int = 1, max_vocabulary: int | None = None, **options: Any
    ) -> Self:
        """The vocabulary of counted words, marks among them; see `rank_entries`."""
        marks = (UNK, EOS, SOS) if options.get("line_start") else (UNK, EOS)
        return cls(rank_entries(counts, marks, min_count, max_vocabulary), **options)

    def words(self, text: str) -> list[str]:
        """Words of the text, with `<eos>` at the end of a line and, with `line_start`, `<sos>` at its beginning."""
        if self.lowercase:
            text = text.lower()
        if EOS in text:
            is_punctuation = self.split == "punctuation"
            text = text.replace(EOS, EOS_OF_TEXT) if is_punctuation else _WORD_EOS.sub(EOS_OF_TEXT, text)
        if self.line_start and text:
            inner, last = (text[:-1], f" {EOS}") if text.endswith("\n") else (text, "")
            text = f"{SOS} " + inner.replace("\n", f" {EOS} {SOS} ") + last
        elif self.line_end:
            text = text.replace("\n", f" {EOS} ")
        return text.split() if self.split == "whitespace" else self._pattern.findall(text)

    def encode(self, text: str) -> list[int]:
        return self._look_up(self.words(text))

    def decode(self, ids: Sequence[int]) -> str:
        lines = (" ".join(self.entries[i] for i in line) for line in self._cut_lines(ids))
        return "\n".join(lines).replace(EOS_OF_TEXT, EOS)

    def backend(self, *, masks: bool = False) -> Any:
        return backends.build_words(self.entries, masks=masks, **self._read_options())


class CharacterVocabulary(Vocabulary):
    """Characters (code points). The newline is an entry like any other; `<unk>` decodes to U+FFFD."""

    kind = "character"

    def __init__(self, entries: Sequence[str], *, lowercase: bool = False) -> None:
        super().__init__(entries, lowercase)
        if "\n" not in self._ids:
            raise InputError("a character vocabulary needs the newline: it is the context of the first character")
        self.start_id = self._ids["\n"]

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        *,
        min_count: int = 1,
        max_vocabulary: int | None = None,
        lowercase: bool = False,
    ) -> Self:
        """The vocabulary of counted characters; see `rank_entries`."""
        return cls(rank_entries(counts, (UNK, "\n"), min_count, max_vocabulary), lowercase=lowercase)

    def encode(self, text: str) -> list[int]:
        return self._look_up(text.lower() if self.lowercase else text)

    def decode(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        return "".join("\N{REPLACEMENT CHARACTER}" if i == self.unk_id else self.entries[i] for i in ids)

    def backend(self, *, masks: bool = False) -> Any:
        return backends.build_characters(self.entries, lowercase=self.lowercase)


class ByteVocabulary(Tokenizer):
    """The 256 byte values of UTF-8 text; nothing is unknown. Bytes that are not UTF-8 decode to U+FFFD."""

    kind = "byte"
    start_id = ord("\n")

    def __init__(self, *, lowercase: bool = False) -> None:
        self.lowercase = lowercase
        self.fingerprint = digest(self.kind, ())

    def __len__(self) -> int:
        return _BYTES

    def encode(self, text: str) -> list[int]:
        """Bytes of the text; lone surrogates stand for the bytes that Python's `surrogateescape` made them from."""
        return list(self._to_bytes(text))

    def encode_array(self, text: str, dtype: np.dtype[Any]) -> np.ndarray:
        return np.frombuffer(self._to_bytes(text), np.uint8).astype(dtype)

    def _to_bytes(self, text: str) -> bytes:
        text = text.lower() if self.lowercase else text
        try:
            return text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # halves that stand for no byte
            return mended(text).encode()

    def decode(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        return bytes(int(i) for i in ids).decode("utf-8", "replace")

    def backend(self, *, masks: bool = False) -> Any:
        return backends.build_bytes(lowercase=self.lowercase)


class BpeTokenizer(Tokenizer):
    """A trained byte-level BPE of Hugging Face `tokenizers`; nothing is unknown to it.

    `line_end`: a newline is `<eos>`; otherwise it is encoded as text. `line_start`: `<sos>` stands before every line.
    A mark in a text is text: what is not lower-cased comes back exactly as it went in, but for half surrogates (U+FFFD).
    """

    kind = "bpe"
    _options = ("lowercase", "line_end", "line_start")

    def __init__(
        self, trained: Any, *, lowercase: bool = False, line_end: bool = True, line_start: bool = False
    ) -> None:
        self._trained = trained
        trained.encode_special_tokens = True
        self.lowercase, self.line_end, self.line_start = lowercase, line_end, line_start
        self.start_id = self.eos_id = trained.token_to_id(EOS)
        self.sos_id = trained.token_to_id(SOS) if line_start else None
        self.fingerprint = hashlib.sha256(trained.to_str().encode()).hexdigest()

    def backend(self, *, masks: bool = False) -> Any:
        return backends.build_bpe(self._trained.to_str(), **self._read_options())

    def __len__(self) -> int:
        return int(self._trained.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        lines = mended(text.lower() if self.lowercase else text).split("\n")
        if not self.line_end:  # a newline stays with the line that it ends
            lines = [line + "\n" for line in lines[:-1]] + lines[-1:]
        last = len(lines) - 1
        ids: list[int] = []
        for number, encoding in enumerate(self._trained.encode_batch_fast(lines, add_special_tokens=False)):
            if number and self.line_end:
                ids.append(self.start_id)
            begins = number < last or bool(lines[last])  # after the last newline of a text no line begins
            if self.sos_id is not None and begins:
                ids.append(self.sos_id)
            ids.extend(encoding.ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "\n".join(self._trained.decode_batch(self._cut_lines(ids), skip_special_tokens=False))


# kinds of tokenizers whose options are all that they are made from; `language` adds its own
MADE_OF_OPTIONS: dict[str, Callable[..., Tokenizer]] = {ByteVocabulary.kind: ByteVocabulary}


def train_bpe(
    texts: Iterable[str],
    *,
    size: int = DEFAULT_BPE_SIZE,
    lowercase: bool = False,
    line_end: bool = True,
    line_start: bool = False,
) -> BpeTokenizer:
    """Train byte-level BPE: at most `size` entries, `<eos>` (and `<sos>`) first. The same texts give the same entries."""
    marks = [EOS, SOS] if line_start else [EOS]
    lines = (line for text in texts for line in mended(text.lower() if lowercase else text).split("\n") if line)
    trained = backends.train_byte_bpe(lines, size, marks=marks, prefix_space=False)
    return BpeTokenizer(trained, lowercase=lowercase, line_end=line_end, line_start=line_start)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer, or the `Language` of sentences, that `save` wrote into `folder`.

    Raises InputError if there is none, RunError if its files are damaged (they do not give the recorded fingerprint).
    """
    if not (folder / META_FILE).is_file():
        raise InputError(
            f"{folder}: no {META_FILE} there, so no vocabulary; give a run folder, of a translation run its tokenizer/source, "
            "or a prepared corpus"
        )
    try:
        meta = read_checked(folder / META_FILE)
        tokenizer = _build_tokenizer(folder, meta)
        if tokenizer.fingerprint != meta["fingerprint"]:
            raise ValueError("they do not give the recorded fingerprint")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder}: the vocabulary files are damaged or incomplete ({error})") from error
    return tokenizer


def _build_tokenizer(folder: Path, meta: Mapping[str, Any]) -> Tokenizer:
    options = {key: meta[key] for key in meta if key not in ("kind", "entries", "fingerprint")}
    if meta["kind"] in MADE_OF_OPTIONS:
        return MADE_OF_OPTIONS[meta["kind"]](**options)
    state = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    lines = {key: bool(meta.get(key)) for key in ("line_end", "line_start")}
    if meta["kind"] == "bpe":
        return BpeTokenizer(backends.read_bpe(state, **lines), **options)
    ids = parse_json(state)["model"]["vocab"]
    if meta["kind"] == "character":
        return CharacterVocabulary(sorted(ids, key=ids.__getitem__), **options)
    end = name_line_end(**lines)
    return WordVocabulary([EOS if name == end else name for name in sorted(ids, key=ids.__getitem__)], **options)


def rank_entries(
    counts: Mapping[str, int], marks: Sequence[str], min_count: int = 1, most: int | None = None
) -> list[str]:
    """Entries of a vocabulary, most frequent first, ties alphabetically: `marks`, `<unk>` first, always stay.

    Others that are rarer than `min_count` or beyond `most` entries are left out, and counted as `<unk>`.
    """
    ranked = sorted(
        (entry for entry, count in counts.items() if count >= min_count and entry not in marks),
        key=lambda entry: (-counts[entry], entry),
    )
    stay = [*ranked[: None if most is None else most - len(marks)], *marks]
    totals = {entry: counts.get(entry, 0) for entry in stay}
    totals[UNK] += sum(counts.values()) - sum(totals.values())
    return sorted(totals, key=lambda entry: (-totals[entry], entry))


def digest(kind: str, entries: Iterable[str]) -> str:
    """sha256 of a vocabulary: its kind and its entries in order."""
    return hashlib.sha256("\0".join((kind, *entries)).encode()).hexdigest()
