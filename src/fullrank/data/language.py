"""Tokenizers of sentences: one side of a corpus of sentence pairs, its lines to token ids and back.

A line goes through Moses' tokenizer and lower case (where asked for), then a segmenter splits it into pieces (words or
subwords), and a `Language` gives pieces their ids. Every segmenter splits at white space first, so the pieces of two joined
lines are those of the one and then those of the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fullrank.core.errors import InputError, pip_install
from fullrank.data.files import open_text
from fullrank.data.marks import BLOCK, BLOCK_OF_TEXT, EOS, NEVER, UNK
from fullrank.data.tokenizers import (
    TOKENIZER_FILE,
    byte_level_bpe,
    check_ids,
    digest,
    load_backend,
    load_vocabulary,
    read_entries,
)  # fmt: skip
from fullrank.files import mended, parse_json, text_of, write_checked

MARKS = (EOS, UNK)  # the first two entries of a language, known by their position: a text may hold the same words
_META, _STATE, _ENTRIES = "language.json", "segments.txt", "vocabulary.txt"
# of scripts that put no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Kana, Han
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003134f]"
)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BYTES = 256
_CACHED_WORDS = 1 << 20
_UNIGRAM_STEP = 1e-4  # of log probabilities, between the characters that UnigramTrainer adds
_WORD_END, _CONTINUED = "</w>", "@@"
_CODES_VERSION = "#version: 0.2"


class Segmenter:
    """Lines to pieces and back. `kind` names it in files, `state` is what `load_segmenter` makes it from again, if anything.

    `pieces` are all that it can give, None where that depends on the text. A word is split once, however often it stands in
    a text.
    """

    kind: str
    pieces: list[str] | None = None

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}

    def segment(self, lines: Sequence[str]) -> list[list[str]]:
        split, known = [line.split() for line in lines], self._known
        if len(known) > _CACHED_WORDS:
            known.clear()
        new = dict.fromkeys(word for words in split for word in words if word not in known)
        known.update(zip(new, self._split(list(new)), strict=True))
        return [[piece for word in words for piece in known[word]] for words in split]

    def _split(self, words: list[str]) -> list[list[str]]:
        """The pieces of each word."""
        raise NotImplementedError(f"{type(self).__name__} must define _split(words), the pieces of each word")

    def join(self, pieces: Sequence[str]) -> str:
        return " ".join(pieces)

    def state(self) -> str:
        return ""


class Words(Segmenter):
    """Words between white space."""

    kind = "word"

    def segment(self, lines: Sequence[str]) -> list[list[str]]:
        return [line.split() for line in lines]


class Subwords(Segmenter):
    """Byte-level BPE or a unigram model, by Hugging Face `tokenizers`.

    Both begin a word with its space (`Ġ`, `▁`) and never join two words, so words can be split one by one. To byte-level BPE
    nothing is unknown; to a unigram model, a character that the training text lacks is `<unk>`.
    """

    def __init__(self, kind: Literal["byte_bpe", "unigram"], backend: Any) -> None:
        super().__init__()
        self.kind, self._backend = kind, backend
        if kind == "unigram":  # its first piece stands for unknown characters
            self._names = [UNK, *(piece for piece, _ in parse_json(self.state())["model"]["vocab"][1:])]
            self.pieces = self._names[1:]
            if len(set(self._names)) != len(self._names):
                raise ValueError("a piece stands twice in the unigram model; prepare the corpus anew and train on it")
        else:
            table: dict[str, int] = backend.get_vocab(with_added_tokens=False)
            self.pieces = self._names = sorted(table, key=table.__getitem__)

    def _split(self, words: list[str]) -> list[list[str]]:
        if self.kind == "unigram":
            words = [word.replace(BLOCK, BLOCK_OF_TEXT) for word in words]
        encodings = self._backend.encode_batch_fast(words, add_special_tokens=False)
        return [[self._names[i] for i in encoding.ids] for encoding in encodings]

    def join(self, pieces: Sequence[str]) -> str:
        text = str(self._backend.decoder.decode(list(pieces)))
        if self.kind == "unigram":
            text = text.replace(BLOCK_OF_TEXT, BLOCK)
        return " ".join(text.split())  # bytes that a model put together need be no text, and may hold line breaks

    def state(self) -> str:
        return str(self._backend.to_str())


def learn_byte_bpe(lines: Iterable[str], size: int) -> Subwords:
    """Train byte-level BPE of at most `size` pieces."""
    if size < _BYTES:
        raise InputError(
            f"data.max_vocabulary: at least {_BYTES + 2} for data.tokens=bpe with one vocabulary (256 bytes, <eos> and "
            f"<unk>), given {size + 2}"
        )
    return Subwords("byte_bpe", byte_level_bpe(lines, size, marks=(), prefix_space=True))


def learn_unigram(lines: Iterable[str], size: int) -> Subwords:
    """Train a unigram model as in SentencePiece: at most `size` pieces, by expectation maximization; all characters stay."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=size + 1, special_tokens=[UNK], unk_token=UNK, show_progress=False)
    try:
        backend.train_from_iterator((line.replace(BLOCK, BLOCK_OF_TEXT) for line in lines), trainer)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"data.max_vocabulary: no unigram model of {size + 2:,} entries can be made of this text ({error}); give another "
            "number, or use data.tokens=bpe"
        ) from error
    return Subwords("unigram", Tokenizer.from_str(json.dumps(_reproducible(parse_json(backend.to_str())))))


def _reproducible(content: dict[str, Any]) -> dict[str, Any]:
    """A reproducible form of a trained unigram model: one text, one model.

    Sums of threads differ in their last digits, so log probabilities are rounded and sorted. Characters that stay only to be
    known have the lowest value plus some small steps, in any order: the steps are taken away. A mark in a text is text: none
    is a piece, and that of unknown characters is the least likely.
    """
    rest = [[piece, score] for piece, score in content["model"]["vocab"][1:] if piece not in MARKS]
    lowest = min(score for _, score in rest)

    def settled(piece: str, score: float) -> float:
        steps = (score - lowest) / _UNIGRAM_STEP
        added = len(piece) == 1 and steps < len(rest) and abs(steps - round(steps)) < 1e-3
        return round(lowest if added else score, 3)

    rounded = sorted(([piece, settled(piece, score)] for piece, score in rest), key=lambda item: (-item[1], item[0]))
    return content | {"added_tokens": [], "model": content["model"] | {"unk_id": 0, "vocab": [[UNK, NEVER], *rounded]}}


class Codes(Segmenter):
    """BPE over characters by a list of merges, as subword-nmt applies its codes files (Sennrich et al. 2016).

    `merges`: pairs of symbols, best first; of a pair that stands twice the first counts. The last symbol of a word carries
    `</w>`; every piece but the last of a word carries `@@`: "lo@@ wer". `old`: codes of version 0.1, where `</w>` is a symbol
    of its own. A character that is in no merge is a piece by itself. Differs from subword-nmt only for words that end in
    `@@`, which it cannot join again: the last character of the word is a piece by itself.
    """

    kind = "codes"

    def __init__(self, merges: Sequence[tuple[str, str]], *, old: bool = False) -> None:
        super().__init__()
        self.merges, self._old = list(merges), old
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(self.merges)))}

    def _split(self, words: list[str]) -> list[list[str]]:
        return [self._pieces(word) for word in words]

    def join(self, pieces: Sequence[str]) -> str:
        words = (p.removesuffix(_CONTINUED) if p.endswith(_CONTINUED) else f"{p} " for p in pieces)
        return "".join(words).strip()

    def state(self) -> str:
        """The text of a codes file."""
        first = [] if self._old else [_CODES_VERSION]
        return "".join(f"{line}\n" for line in [*first, *(" ".join(pair) for pair in self.merges)])

    def _pieces(self, word: str) -> list[str]:
        """The pieces of a word: the best pair is merged wherever it stands, from left to right, until none is left."""
        if len(word) == 1:
            return [word]
        symbols = [*word, _WORD_END] if self._old else [*word[:-1], word[-1] + _WORD_END]
        while len(symbols) > 1:
            best = min(itertools.pairwise(symbols), key=lambda pair: self._ranks.get(pair, math.inf))
            if best not in self._ranks:
                break
            merged: list[str] = []
            for symbol in symbols:
                if merged and (merged[-1], symbol) == best:
                    merged[-1] += symbol
                else:
                    merged.append(symbol)
            symbols = merged
        if symbols[-1] == _WORD_END:
            symbols.pop()
        else:
            symbols[-1] = symbols[-1].removesuffix(_WORD_END)
        if symbols[-1].endswith(_CONTINUED):
            symbols[-1:] = [symbols[-1][:-1], symbols[-1][-1]]
        return [*(symbol + _CONTINUED for symbol in symbols[:-1]), symbols[-1]]


def read_codes(text: str, name: str) -> Codes:
    """The merges of a codes file; InputError names the line that is none."""
    rows = text.rstrip("\n").split("\n")
    old, first = True, 1
    if rows[0].startswith("#version:"):
        version = re.sub(r"(\.0+)*$", "", rows.pop(0).split()[-1])
        if version not in ("0.1", "0.2"):
            raise InputError(f"data.codes: {name}: version {version} of BPE codes; known are 0.1 and 0.2")
        old, first = version == "0.1", 2
    merges = []
    for number, row in enumerate(rows, start=first):
        pair = row.strip(" ").split(" ")
        if len(pair) != 2:
            raise InputError(
                f"data.codes: {name}: line {number} is {row!r}; a merge is two symbols with a space between, as "
                "subword-nmt learn-bpe writes them"
            )
        merges.append((pair[0], pair[1]))
    return Codes(merges, old=old)


def load_codes(path: Path) -> Codes:
    """The codes file of `data.codes`; InputError if it is missing, not text or no codes file."""
    with open_text(path, "data.codes") as file:
        return read_codes(text_of(file.read(), f"data.codes: {path}"), str(path))


def learn_codes(lines: Callable[[], Iterable[str]], merges: int) -> Codes:
    """Learn at most `merges` merges, of pairs seen at least twice, by Hugging Face `tokenizers`. `lines` are read twice."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    characters = sorted({character for line in lines() for character in line})
    backend = Tokenizer(models.BPE(end_of_word_suffix=_WORD_END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(  # its size counts characters too, with and without </w>
        vocab_size=merges + 2 * len(characters),
        min_frequency=2,
        # pairs of equal counts are merged in the order of ids; without this, final characters get theirs by chance
        special_tokens=[*characters, *(character + _WORD_END for character in characters)],
        end_of_word_suffix=_WORD_END,
        show_progress=False,
    )
    backend.train_from_iterator(lines(), trainer)
    learned = parse_json(backend.to_str())["model"]["merges"]
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in learned[:merges]]
    return Codes([(left, right) for left, right in pairs])


def load_segmenter(kind: str, state: str) -> Segmenter:
    """The segmenter whose `state` was saved; ValueError if it is damaged."""
    match kind:
        case "word":
            return Words()
        case "codes":
            return read_codes(state, _STATE)
        case "byte_bpe" | "unigram":
            return Subwords("byte_bpe" if kind == "byte_bpe" else "unigram", load_backend(state))
        case _:
            raise ValueError(f"unknown kind of segmenter '{kind}'")


@lru_cache(maxsize=8)
def _moses(language: str) -> tuple[Any, Any]:
    """Moses' tokenizer and detokenizer, which translation corpora of the papers went through."""
    try:
        from sacremoses import MosesDetokenizer, MosesTokenizer
    except ImportError as error:
        raise InputError(
            f"Moses tokenization needs the package sacremoses: {pip_install('translate')}, or set data.moses=false"
        ) from error
    return MosesTokenizer(lang=language), MosesDetokenizer(lang=language)


def plain(line: str) -> str:
    """A line as it is kept: single spaces, none at the ends, no line breaks, no halves of characters."""
    return " ".join(mended(line).split())


def is_unspaced(lines: Iterable[str]) -> bool:
    """The text is written without spaces between its words: most of it Chinese, Japanese, Thai, Lao, Khmer, Burmese or Tibetan
    characters, of which more than four stand together on average. A thousand lines are read."""
    words = [word for line in itertools.islice(lines, 1000) for word in line.split()]
    characters = sum(len(_UNSPACED.findall(word)) for word in words)
    return characters > 4 * len(words) and 2 * characters > sum(map(len, words))


class Language:
    """Text of one language to ids and back.

    Every piece of a line has an id, `<unk>` where it is not among `entries`. Any line is accepted; an empty one has no ids.
    `<eos>` is no part of a line, it is added where batches are made.
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
        self.entries, self.counts = list(entries), list(counts or [0] * len(entries))
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
        if self.moses:  # `&`, quotes, brackets and bars are escaped as Moses does (`&quot;`)
            tokenizer, _ = _moses(self.name)
            line = plain(str(tokenizer.tokenize(_CONTROL.sub(" ", line), return_str=True, escape=True)))
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
        """Ordinary text of the ids: `tokens`, put together again where Moses took it apart."""
        return self.detokenized(self.tokens(ids))

    def detokenized(self, text: str) -> str:
        """Ordinary text of a tokenized line; escapes are undone."""
        if not self.moses:
            return text
        _, detokenizer = _moses(self.name)
        return " ".join(str(detokenizer.detokenize(text.split(), return_str=True, unescape=True)).split())

    def backend(self) -> Any:
        """A tokenizer of Hugging Face's `tokenizers` that gives the same ids, and `<eos>` after them.

        Raises InputError for Moses' tokenizer, for merges of subword-nmt and for left-out pieces, which that library has not.
        """
        from fullrank.data.backends import build_pieces

        kind = self.segmenter.kind
        if missing := "Moses' tokenizer" if self.moses else "BPE of subword-nmt" if kind == "codes" else None:
            raise InputError(
                f"{self.name}: its text goes through {missing}, which Hugging Face's tokenizers lack; use `fullrank "
                "translate`, or train with data.moses: false and data.tokens: unigram, or bpe without data.codes"
            )
        pieces, state = self.segmenter.pieces or (), self.segmenter.state()
        return build_pieces(self.name, kind, state, self.entries, pieces, lowercase=self.lowercase)

    def save(self, folder: Path) -> None:
        """Write the files that `load_language` reads, and `tokenizer.json` where Hugging Face's library has the same."""
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(InputError):
            (folder / TOKENIZER_FILE).write_text(self.backend().to_str(), encoding="utf-8", newline="\n")
        _write_entries(folder / _ENTRIES, self.entries, self.counts)
        (folder / _STATE).write_text(self.segmenter.state(), encoding="utf-8", newline="\n")
        meta = {
            "name": self.name,
            "kind": self.segmenter.kind,
            "entries": len(self),
            "fingerprint": self.fingerprint,
            "moses": self.moses,
            "lowercase": self.lowercase,
        }
        write_checked(folder / _META, meta)


def _write_entries(path: Path, entries: Sequence[str], counts: Sequence[int]) -> None:
    """Write what `read_entries` reads; unprintable characters are escaped."""

    def escaped(entry: str) -> str:
        plain = entry.isprintable() and "\\" not in entry
        return entry if plain else entry.encode("unicode_escape").decode("ascii")

    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{escaped(entry)}\t{count}\n" for entry, count in zip(entries, counts, strict=True))


def load_language(folder: Path) -> Language:
    """The language that `save` wrote into `folder`.

    Raises InputError if there is none, RunError if its files are damaged (they do not give the recorded fingerprint).
    """

    def load(meta: dict[str, Any]) -> Language:
        segmenter = load_segmenter(meta["kind"], (folder / _STATE).read_bytes().decode("utf-8"))
        entries, counts = read_entries(folder / _ENTRIES)
        return Language(meta["name"], segmenter, entries, counts, moses=meta["moses"], lowercase=meta["lowercase"])

    missing = "no vocabulary of a language; give the folder of a translation run or of prepared sentence pairs"
    return load_vocabulary(folder / _META, load, missing)
