"""One side of a corpus of sentence pairs: its text to token ids and back."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from fullrank.core.errors import InputError, RunError
from fullrank.data.entries import EOS, UNK, check_ids, digest
from fullrank.data.moses import detokenized, tokenized
from fullrank.data.segment import Segmenter, restored
from fullrank.data.vocab_files import ENTRIES_FILE, read_entries, save_entries

_META, _STATE = "language.json", "segments.txt"
_SURROGATES = re.compile("[\ud800-\udfff]")
MARKS = (EOS, UNK)  # the first two entries, known by their place: a text may hold the same words


def plain(line: str) -> str:
    """A line as it is kept: single spaces, none at the ends, no line breaks, no halves of characters."""
    return " ".join(_SURROGATES.sub("\N{REPLACEMENT CHARACTER}", line).split())


class Language:
    """Text of one language to ids and back.

    A line goes through the Moses tokenizer (`moses`), lower case (`lowercase`) and the segmenter (words, BPE, unigram);
    every piece has an id, `<unk>` where it is not among `entries`. Any line is accepted: an empty one has no ids. `<eos>`
    is no part of a line, it is added where batches are made. Byte-level BPE knows every character; others do not.
    `fingerprint`: sha256 of segmenter and entries, the same for two languages with one vocabulary.
    """

    def __init__(
        self,
        name: str,
        segmenter: Segmenter,
        entries: Sequence[str],
        counts: Sequence[int] | None = None,
        *,
        moses: bool = False,
        lowercase: bool = False,
    ) -> None:
        if tuple(entries[:2]) != MARKS:
            raise InputError(f"the entries of a language begin with {' and '.join(MARKS)}, given {list(entries[:2])}")
        self.name, self.segmenter, self.moses, self.lowercase = name, segmenter, moses, lowercase
        self.entries = list(entries)
        self.counts = list(counts) if counts is not None else [0] * len(self.entries)
        self.eos_id, self.unk_id = 0, 1
        self._ids = {entry: i for i, entry in enumerate(self.entries) if i >= len(MARKS)}
        if len(self._ids) != len(self.entries) - len(MARKS):
            raise InputError("an entry stands twice in the vocabulary of a language")
        state = hashlib.sha256(segmenter.state().encode()).hexdigest()
        self.fingerprint = digest(segmenter.kind, [state, *self.entries])

    def __len__(self) -> int:
        return len(self.entries)

    def prepared(self, line: str) -> str:
        """A line of ordinary text as the segmenter takes it."""
        line = plain(line)
        if self.moses:
            line = tokenized(line, self.name)
        return line.lower() if self.lowercase else line

    def encode(self, line: str) -> list[int]:
        """The ids of a line of ordinary text, without `<eos>`."""
        return self.encode_prepared([self.prepared(line)])[0]

    def encode_prepared(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of lines that are tokenized and in lower case already, where this language is so."""
        ids, unk = self._ids, self.unk_id
        return [[ids.get(piece, unk) for piece in pieces] for pieces in self.segmenter.segment(lines)]

    def tokens(self, ids: Sequence[int]) -> str:
        """Words of the ids, with spaces between: subwords joined, but tokenized as the corpus is; `<eos>` is left out."""
        check_ids(ids, len(self))
        return self.segmenter.join([self.entries[i] for i in ids if i != self.eos_id])

    def decode(self, ids: Sequence[int]) -> str:
        """Ordinary text of the ids: what `tokens` gives, put together again where Moses took it apart."""
        return self.detokenized(self.tokens(ids))

    def detokenized(self, text: str) -> str:
        """Ordinary text of a tokenized line."""
        return detokenized(text, self.name) if self.moses else text

    def save(self, folder: Path) -> None:
        """Files that `load_language` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        save_entries(folder, self.entries, self.counts)
        (folder / _STATE).write_text(self.segmenter.state(), encoding="utf-8", newline="\n")
        meta = {
            "name": self.name, "kind": self.segmenter.kind, "entries": len(self), "fingerprint": self.fingerprint,
            "moses": self.moses, "lowercase": self.lowercase,
        }  # fmt: skip
        (folder / _META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_language(folder: Path) -> Language:
    """The language that `save` wrote into `folder`.

    Raises InputError if there is none, RunError if its files are damaged (they do not give the recorded fingerprint).
    """
    path = folder / _META
    if not path.is_file():
        raise InputError(
            f"{folder}: no {_META} there, so no vocabulary of a language; give the folder of a translation run or of "
            "prepared sentence pairs"
        )
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        state = (folder / _STATE).read_bytes().decode("utf-8")
        language = Language(
            meta["name"], restored(meta["kind"], state), *read_entries(folder / ENTRIES_FILE),
            moses=meta["moses"], lowercase=meta["lowercase"],
        )  # fmt: skip
        recorded = meta["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder}: the vocabulary files are damaged or incomplete ({error!r})") from error
    if language.fingerprint != recorded:
        raise RunError(f"{folder}: the vocabulary files are damaged: they do not give the fingerprint in {_META}")
    return language
