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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

import numpy as np

from fullrank.core.errors import InputError, RunError
from fullrank.data.marks import EOS, EOS_OF_TEXT, SOS, UNK, name_line_end
from fullrank.files import mended, parse_json, read_checked, write_checked

DEFAULT_BPE_SIZE = 10_000
META_FILE, TOKENIZER_FILE = "vocabulary.json", "tokenizer.json"
_OLD_ENTRIES_FILE = "vocabulary.txt"  # of runs of earlier versions
_UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_WORD_EOS = re.compile(rf"(?<!\S){EOS}(?!\S)")
_PUNCTUATION = re.compile(r"<unk>|<eos>\ufdd0?|\w+(?:['’]\w+)*|[^\w\s]")
_PUNCTUATION_WITH_SOS = re.compile(f"{SOS}|{_PUNCTUATION.pattern}")
_BYTES = 256


class Tokenizer:
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

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__(), the number of its entries")

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError(f"{type(self).__name__} must define encode(text)")

    def encode_array(self, text: str, dtype: np.dtype[Any]) -> np.ndarray:
        """Ids of `text` as an array; see `encode`."""
        return np.array(self.encode(text), dtype)

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError(f"{type(self).__name__} must define decode(ids)")

    def backend(self, *, masks: bool = False) -> Any:
        """A tokenizer of Hugging Face's library that gives the same ids; words with `masks` have `<mask>` as last entry."""
        raise NotImplementedError(f"{type(self).__name__} must define backend(), a tokenizer of Hugging Face's library")

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKENIZER_FILE).write_text(self.backend().to_str(), encoding="utf-8", newline="\n")
        options = {name: getattr(self, name) for name in self._options}
        if self.sos_id is not None:
            options["line_start"] = True
        meta = {"kind": self.kind, "entries": len(self), "fingerprint": self.fingerprint, **options}
        write_checked(folder / META_FILE, meta)


class _Vocabulary(Tokenizer):
    """Words or characters; `entries` stand in the order of their ids."""

    def __init__(self, entries: Sequence[str], lowercase: bool) -> None:
        self.entries, self.lowercase = list(entries), lowercase
        self._ids = {entry: i for i, entry in enumerate(self.entries)}
        if len(self._ids) != len(self.entries):
            twice = next(entry for i, entry in enumerate(self.entries) if self._ids[entry] != i)
            raise InputError(f"the entry {twice!r} stands twice in the vocabulary")
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
        **options: Any,
    ) -> Self:
        """The vocabulary of counted words or characters (`<eos>` and `<sos>` counted as words); see `ranked`."""
        keep = ["\n"] if cls is CharacterVocabulary else [EOS, SOS] if options.get("line_start") else [EOS]
        entries, _ = ranked(counts, keep=keep, unk=unk, min_count=min_count, max_vocabulary=max_vocabulary)
        return cls(entries, **options)

    def __len__(self) -> int:
        return len(self.entries)

    def _look_up(self, units: Iterable[str]) -> list[int]:
        """The ids of words or characters; InputError for an unseen one in a vocabulary without `<unk>`."""
        ids, unk = self._ids, self.unk_id
        if unk is not None:
            return [ids.get(entry, unk) for entry in units]
        try:
            return [ids[entry] for entry in units]
        except KeyError as error:
            raise InputError(
                f"the {self.kind} {error.args[0]!r} is not in this vocabulary of {len(ids):,} {self.kind}s, which has no "
                f"{UNK}; raise data.min_count to 2 or lower data.max_vocabulary when preparing the corpus"
            ) from None


class WordVocabulary(_Vocabulary):
    """Words between white space, or (`split="punctuation"`) runs of letters and digits and single punctuation marks.

    `<eos>` is among the `entries`. Without `<unk>`, an unseen word is an InputError.
    `line_end`: a newline is `<eos>`; otherwise it is white space. `line_start`: `<sos>` stands before every line.
    Decoding joins words with single spaces.
    """

    kind = "word"
    _options = ("lowercase", "split", "line_end")

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
        if line_start and (SOS not in self._ids or not line_end):
            raise InputError(f"lines that begin with {SOS} need it as an entry, and end in {EOS}")
        self.start_id = self.eos_id = self._ids[EOS]
        self.sos_id = self._ids[SOS] if line_start else None

    def words(self, text: str) -> list[str]:
        """Words of the text, with `<eos>` at the end of a line and, with `line_start`, `<sos>` at its beginning."""
        if self.lowercase:
            text = text.lower()
        if EOS in text:
            whole = self.split == "punctuation"
            text = text.replace(EOS, EOS_OF_TEXT) if whole else _WORD_EOS.sub(EOS_OF_TEXT, text)
        if self.line_start and text:
            inner, last = (text[:-1], f" {EOS}") if text.endswith("\n") else (text, "")
            text = f"{SOS} " + inner.replace("\n", f" {EOS} {SOS} ") + last
        elif self.line_end:
            text = text.replace("\n", f" {EOS} ")
        return text.split() if self.split == "whitespace" else self._pattern.findall(text)

    def encode(self, text: str) -> list[int]:
        return self._look_up(self.words(text))

    def decode(self, ids: Sequence[int]) -> str:
        lines = _lines_of(ids, len(self), self.start_id, self.sos_id)
        return "\n".join(" ".join(self.entries[i] for i in line) for line in lines).replace(EOS_OF_TEXT, EOS)

    def backend(self, *, masks: bool = False) -> Any:
        from fullrank.data.backends import build_words

        options = {name: getattr(self, name) for name in (*self._options, "line_start")}
        return build_words(self.entries, masks=masks, **options)


class CharacterVocabulary(_Vocabulary):
    """Characters (code points). The newline is an entry like any other; `<unk>` decodes to U+FFFD."""

    kind = "character"

    def __init__(self, entries: Sequence[str], *, lowercase: bool = False) -> None:
        super().__init__(entries, lowercase)
        if "\n" not in self._ids:
            raise InputError("a character vocabulary needs the newline: it is the context of the first character")
        self.start_id = self._ids["\n"]

    def encode(self, text: str) -> list[int]:
        return self._look_up(text.lower() if self.lowercase else text)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, len(self))
        return "".join(_UNKNOWN_CHARACTER if i == self.unk_id else self.entries[i] for i in ids)

    def backend(self, *, masks: bool = False) -> Any:
        from fullrank.data.backends import build_characters

        return build_characters(self.entries, lowercase=self.lowercase)


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
        return list(self._bytes(text))

    def encode_array(self, text: str, dtype: np.dtype[Any]) -> np.ndarray:
        return np.frombuffer(self._bytes(text), np.uint8).astype(dtype)

    def _bytes(self, text: str) -> bytes:
        text = text.lower() if self.lowercase else text
        try:
            return text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # halves that stand for no byte
            return mended(text).encode()

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, _BYTES)
        return bytes(int(i) for i in ids).decode("utf-8", "replace")

    def backend(self, *, masks: bool = False) -> Any:
        from fullrank.data.backends import build_bytes

        return build_bytes(lowercase=self.lowercase)


class BpeTokenizer(Tokenizer):
    """A trained byte-level BPE of Hugging Face `tokenizers`; nothing is unknown to it.

    `line_end`: a newline is `<eos>`; otherwise it is encoded as text. `line_start`: `<sos>` stands before every line.
    A mark in a text is text: what is not lower-cased comes back exactly as it went in, but for half surrogates (U+FFFD).
    """

    kind = "bpe"
    _options = ("lowercase", "line_end")

    def __init__(
        self, trained: Any, *, lowercase: bool = False, line_end: bool = True, line_start: bool = False
    ) -> None:
        self._backend = backend = trained
        backend.encode_special_tokens = True
        self.lowercase, self.line_end, self.line_start = lowercase, line_end, line_start
        eos = backend.token_to_id(EOS)
        if eos is None:
            raise InputError(f"a BPE tokenizer needs the special token {EOS}: it is the context of the first token")
        self.start_id = self.eos_id = eos
        self.sos_id = backend.token_to_id(SOS) if line_start else None
        if line_start and (self.sos_id is None or not line_end):
            raise InputError(f"lines that begin with {SOS} need it as a special token, and end in {EOS}")
        self.fingerprint = hashlib.sha256(backend.to_str().encode()).hexdigest()

    def backend(self, *, masks: bool = False) -> Any:
        from fullrank.data.backends import build_bpe

        lines = {"line_end": self.line_end, "line_start": self.line_start}
        return build_bpe(self._backend.to_str(), lowercase=self.lowercase, **lines)

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        lines = mended(text.lower() if self.lowercase else text).split("\n")
        if not self.line_end:  # a newline stays with the line that it ends
            lines = [line + "\n" for line in lines[:-1]] + lines[-1:]
        last = len(lines) - 1
        ids: list[int] = []
        for number, encoding in enumerate(self._backend.encode_batch_fast(lines, add_special_tokens=False)):
            if number and self.line_end:
                ids.append(self.start_id)
            begins = number < last or bool(lines[last])  # after the last newline of a text no line begins
            if self.sos_id is not None and begins:
                ids.append(self.sos_id)
            ids.extend(encoding.ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        lines = _lines_of(ids, len(self), self.start_id, self.sos_id)
        return "\n".join(self._backend.decode_batch(lines, skip_special_tokens=False))


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
    if size < _BYTES + len(marks):
        raise InputError(
            f"data.max_vocabulary: at least {_BYTES + len(marks)} for data.tokens=bpe (256 bytes and {' and '.join(marks)}), "
            f"given {size}"
        )
    lines = (line for text in texts for line in mended(text.lower() if lowercase else text).split("\n") if line)
    backend = byte_level_bpe(lines, size, marks=marks, prefix_space=False)
    return BpeTokenizer(backend, lowercase=lowercase, line_end=line_end, line_start=line_start)


def byte_level_bpe(lines: Iterable[str], size: int, *, marks: Sequence[str], prefix_space: bool) -> Any:
    """A trained tokenizer of Hugging Face `tokenizers`: marks, the 256 byte values, and the most frequent merges, each seen at
    least twice. `prefix_space`: a space is put before a line, so that its first word is a word like any other.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(marks),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(lines, trainer)
    return backend


def load_backend(state: str) -> Any:
    """The tokenizer of Hugging Face `tokenizers` that was saved as JSON; ValueError if it is damaged."""
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(state)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"no tokenizer of `tokenizers`: {error}") from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote into `folder`.

    Raises InputError if there is none, RunError if its files are damaged (they do not give the recorded fingerprint).
    """

    def load(meta: dict[str, Any]) -> Tokenizer:
        options = {key: meta[key] for key in meta if key not in ("kind", "entries", "fingerprint")}
        lines = {key: bool(meta.get(key)) for key in ("line_end", "line_start")}
        match meta["kind"]:
            case "word":
                return WordVocabulary(_read_entries(folder, name_line_end(**lines)), **options)
            case "character":
                return CharacterVocabulary(_read_entries(folder, EOS), **options)
            case "byte":
                return ByteVocabulary(**options)
            case "bpe":
                from fullrank.data.backends import trained_bpe

                state = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
                return BpeTokenizer(trained_bpe(state, **lines), **options)
        raise RunError(
            f"{folder / META_FILE}: unknown kind of vocabulary '{meta['kind']}' (known: word, byte, character, bpe)"
        )

    return load_vocabulary(folder / META_FILE, load, "no vocabulary; give a run folder or a prepared corpus")


def _read_entries(folder: Path, line_end: str) -> list[str]:
    """The words or characters of a saved tokenizer, in which `<eos>` has the name `line_end`."""
    if (folder / _OLD_ENTRIES_FILE).exists():
        return read_entries(folder / _OLD_ENTRIES_FILE)[0]
    ids = parse_json((folder / TOKENIZER_FILE).read_bytes())["model"]["vocab"]
    return [EOS if name == line_end else name for name in sorted(ids, key=ids.__getitem__)]


class _Fingerprinted(Protocol):
    fingerprint: str


_F = TypeVar("_F", bound=_Fingerprinted)


def load_vocabulary(path: Path, load: Callable[[dict[str, Any]], _F], missing: str) -> _F:
    """Load a vocabulary by its JSON in `path` and the files beside it.

    Raises InputError if there is none, RunError if its files are damaged (they do not give the recorded fingerprint).
    """
    if not path.is_file():
        raise InputError(f"{path.parent}: no {path.name} there, so {missing}")
    try:
        meta = read_checked(path)
        loaded, recorded = load(meta), meta["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path.parent}: the vocabulary files are damaged or incomplete ({error!r})") from error
    if loaded.fingerprint != recorded:
        raise RunError(
            f"{path.parent}: the vocabulary files are damaged: they do not give the fingerprint in {path.name}"
        )
    return loaded


# entries of a vocabulary: their order, their ids, their file


def ranked(
    counts: Mapping[str, int], *, keep: Sequence[str], unk: bool, min_count: int, max_vocabulary: int | None
) -> tuple[list[str], list[int]]:
    """Entries and counts, most frequent first, ties alphabetically. Entries in `keep` never drop out.

    Entries rarer than `min_count` or beyond `max_vocabulary` are counted under `<unk>`.
    Raises InputError if an entry drops out and `unk` is False, or if there is no room for the entries in `keep`.
    """
    marks = dict.fromkeys([UNK, *keep] if unk else keep)
    room = None if max_vocabulary is None else max_vocabulary - len(marks)
    if room is not None and room <= 0:
        raise InputError(
            f"data.max_vocabulary: more than {len(marks)} ({', '.join(map(repr, marks))}), given {max_vocabulary}"
        )

    def by_rank(entries: Iterable[str]) -> list[str]:
        return sorted(entries, key=lambda entry: (-totals[entry], entry))

    totals = {entry: count for entry, count in counts.items() if entry not in marks and count >= min_count}
    totals = {entry: totals[entry] for entry in by_rank(totals)[:room]}
    totals |= {mark: counts.get(mark, 0) for mark in marks}
    lost = sum(counts.values()) - sum(totals.values())
    if unk:
        totals[UNK] += lost
    elif lost:
        raise InputError(
            f"a vocabulary without {UNK} cannot leave entries out (min_count {min_count}, max_vocabulary {max_vocabulary})"
        )
    entries = by_rank(totals)
    return entries, [totals[entry] for entry in entries]


def check_ids(ids: Sequence[int], size: int) -> None:
    """InputError unless every id is in [0, size)."""
    if len(ids) and (min(ids) < 0 or max(ids) >= size):
        bad = next(i for i in ids if not 0 <= i < size)
        raise InputError(f"token id {bad} is not in this vocabulary of {size:,} entries (ids 0 to {size - 1})")


def digest(kind: str, entries: Iterable[str]) -> str:
    """sha256 of a vocabulary: its kind and its entries in order."""
    return hashlib.sha256("\0".join((kind, *entries)).encode()).hexdigest()


def read_entries(path: Path) -> tuple[list[str], list[int]]:
    """Entries and counts of a `vocabulary.txt`: an entry and its count a line, in the order of ids."""
    entries, counts = list[str](), list[int]()
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            entry, _, count = line.rstrip("\n").rpartition("\t")
            entries.append(entry.encode("ascii").decode("unicode_escape") if "\\" in entry else entry)
            counts.append(int(count))
    return entries, counts


def _lines_of(ids: Sequence[int], size: int, eos_id: int, sos_id: int | None) -> list[list[int]]:
    """The ids of each line, without the marks that end and begin it."""
    check_ids(ids, size)
    lines: list[list[int]] = [[]]
    for i in ids:
        if i == eos_id:
            lines.append([])
        elif i != sos_id:
            lines[-1].append(int(i))
    return lines
