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

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from fullrank.core.errors import InputError, pip_install
from fullrank.data import backends
from fullrank.data.files import open_text
from fullrank.data.marks import BLOCK, BLOCK_OF_TEXT, EOS, NEVER, UNK
from fullrank.data.tokenizers import MADE_OF_OPTIONS, Vocabulary, digest, load_tokenizer
from fullrank.files import mended, parse_json, text_of

MARKS = (EOS, UNK)  # the first two entries of a language, known by their position: a text may hold the same words
# of scripts that put no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Kana, Han
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003134f]"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CACHED_WORDS = 1 << 20
_UNIGRAM_STEP = 1e-4  # of log probabilities, between the characters that UnigramTrainer adds
_WORD_END, _CONTINUED = "</w>", "@@"
_CODES_VERSION = "#version: 0.2"


class Segmenter:
    """Lines to pieces and back, by words. `state` is what `load_segmenter` makes it from again, if anything.

    `pieces` are all that it can give, None where that depends on the text. A word is split once, however often it stands in
    a text.
    """

    kind: str
    state = ""
    pieces: list[str] | None = None

    def __init__(self) -> None:
        self._cache: dict[str, list[str]] = {}

    def segment(self, lines: Sequence[str]) -> list[list[str]]:
        split, cache = [line.split() for line in lines], self._cache
        if len(cache) > _CACHED_WORDS:
            cache.clear()
        new = dict.fromkeys(word for words in split for word in words if word not in cache)
        cache.update(zip(new, self._split(list(new)), strict=True))
        return [list(itertools.chain.from_iterable(cache[word] for word in words)) for words in split]

    def _split(self, words: list[str]) -> list[list[str]]:
        """The pieces of each word."""
        raise NotImplementedError(f"{type(self).__name__} must define _split(words), the pieces of each word")

    def join(self, pieces: Sequence[str]) -> str:
        return " ".join(pieces)


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
        self.kind, self._backend, self.state = kind, backend, str(backend.to_str())
        if kind == "unigram":  # its first piece stands for unknown characters
            self.pieces = [piece for piece, _ in parse_json(self.state)["model"]["vocab"][1:]]
            self._names = [UNK, *self.pieces]
        else:
            ids: dict[str, int] = backend.get_vocab(with_added_tokens=False)
            self.pieces = self._names = sorted(ids, key=ids.__getitem__)

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


def learn_byte_bpe(lines: Iterable[str], size: int) -> Subwords:
    """Train byte-level BPE of at most `size` pieces."""
    return Subwords("byte_bpe", backends.train_byte_bpe(lines, size, marks=(), prefix_space=True))


def learn_unigram(lines: Iterable[str], size: int) -> Subwords:
    """Train a unigram model as in SentencePiece: at most `size` pieces, by expectation maximization; all characters stay."""
    backend = Backend(models.Unigram())
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
    return Subwords("unigram", Backend.from_str(json.dumps(_make_reproducible(parse_json(backend.to_str())))))


def _make_reproducible(content: dict[str, Any]) -> dict[str, Any]:
    """A reproducible form of a trained unigram model: one text, one model.

    Sums of threads differ in their last digits, so log probabilities are rounded and sorted. Characters that stay only to be
    known have the lowest value plus some small steps, in any order: the steps are taken away. A mark in a text is text: none
    is a piece, and that of unknown characters is the least likely.
    """
    pieces = [(piece, score) for piece, score in content["model"]["vocab"][1:] if piece not in MARKS]
    lowest = min(score for _, score in pieces)

    def round_score(piece: str, score: float) -> float:
        steps = (score - lowest) / _UNIGRAM_STEP
        added = len(piece) == 1 and steps < len(pieces) and abs(steps - round(steps)) < 1e-3
        return round(lowest if added else score, 3)

    rounded = [(piece, round_score(piece, score)) for piece, score in pieces]
    ordered = sorted(rounded, key=lambda pair: (-pair[1], pair[0]))
    return content | {"added_tokens": [], "model": content["model"] | {"unk_id": 0, "vocab": [(UNK, NEVER), *ordered]}}


class Codes(Segmenter):
    """BPE over characters by a list of merges, as subword-nmt applies its codes files (Sennrich et al. 2016).

    `merges`: pairs of symbols, best first; of a pair that stands twice the first counts. The last symbol of a word carries
    `</w>`; every piece but the last of a word carries `@@`: "lo@@ wer". A character that is in no merge is a piece by itself.
    Differs from subword-nmt only for words that end in `@@`, which it cannot join again: the last character of the word is a
    piece by itself.
    """

    kind = "codes"

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.merges = list(merges)
        self.state = "".join(f"{line}\n" for line in [_CODES_VERSION, *(" ".join(pair) for pair in self.merges)])
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(self.merges)))}

    def _split(self, words: list[str]) -> list[list[str]]:
        return [self._split_word(word) for word in words]

    def join(self, pieces: Sequence[str]) -> str:
        words = (p.removesuffix(_CONTINUED) if p.endswith(_CONTINUED) else f"{p} " for p in pieces)
        return "".join(words).strip()

    def _split_word(self, word: str) -> list[str]:
        """The pieces of a word: the best pair is merged wherever it stands, from left to right, until none is left."""
        symbols = [*word[:-1], word[-1] + _WORD_END]
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
        symbols[-1] = symbols[-1].removesuffix(_WORD_END)
        if symbols[-1].endswith(_CONTINUED):
            symbols[-1:] = [symbols[-1][:-1], symbols[-1][-1]]
        return [*(symbol + _CONTINUED for symbol in symbols[:-1]), symbols[-1]]


def read_codes(text: str, name: str) -> Codes:
    """The merges of a codes file of version 0.2; InputError names the line that is none."""
    rows = text.rstrip("\n").split("\n")
    if rows[0].split() != _CODES_VERSION.split():
        raise InputError(f"data.codes: {name}: line 1 is {rows[0]!r}; a file of BPE codes begins with {_CODES_VERSION}")
    merges = []
    for number, row in enumerate(rows[1:], start=2):
        pair = row.strip(" ").split(" ")
        if len(pair) != 2:
            raise InputError(
                f"data.codes: {name}: line {number} is {row!r}; a merge is two symbols with a space between, as "
                "subword-nmt learn-bpe writes them"
            )
        merges.append((pair[0], pair[1]))
    return Codes(merges)


def load_codes(path: Path) -> Codes:
    """The codes file of `data.codes`; InputError if it is missing, not text or no codes file."""
    with open_text(path, "data.codes") as file:
        return read_codes(text_of(file.read(), f"data.codes: {path}"), str(path))


def learn_codes(lines: Callable[[], Iterable[str]], merges: int) -> Codes:
    """Learn at most `merges` merges, of pairs seen at least twice, by Hugging Face `tokenizers`. `lines` are read twice."""
    characters = sorted(set(itertools.chain.from_iterable(lines())))
    backend = Backend(models.BPE(end_of_word_suffix=_WORD_END))
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
    return Codes(backends.split_merges(learned[:merges]))


def load_segmenter(kind: str, state: str) -> Segmenter:
    """The segmenter whose `state` was saved; ValueError if it is damaged."""
    if kind == "word":
        return Words()
    if kind == "codes":
        return read_codes(state, "the saved merges")
    try:
        return Subwords("unigram" if kind == "unigram" else "byte_bpe", Backend.from_str(state))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"no tokenizer of `tokenizers`: {error}") from error


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


def clean_line(line: str) -> str:
    """A line as it is kept: single spaces, none at the ends, no line breaks, no halves of characters."""
    return " ".join(mended(line).split())


def is_unspaced(lines: Iterable[str]) -> bool:
    """The text is written without spaces between its words: most of it Chinese, Japanese, Thai, Lao, Khmer, Burmese or Tibetan
    characters, of which more than four stand together on average. A thousand lines are read."""
    words = [word for line in itertools.islice(lines, 1000) for word in line.split()]
    characters = sum(len(_UNSPACED.findall(word)) for word in words)
    return characters > 4 * len(words) and 2 * characters > sum(map(len, words))


class Language(Vocabulary):
    """Text of one language to ids and back.

    Every piece of a line has an id, `<unk>` where it is not among `entries`. Any line is accepted; an empty one has no ids.
    `<eos>` is no part of a line, it is added where batches are made.
    `fingerprint`: sha256 of segmenter and entries, the same for two languages with one vocabulary.
    """

    kind = "sentences"
    eos_id: int
    unk_id: int

    def __init__(
        self, name: str, segmenter: Segmenter, entries: Sequence[str], *, moses: bool = False, lowercase: bool = False
    ) -> None:
        if tuple(entries[:2]) != MARKS:
            raise InputError(f"the entries of a language begin with {' and '.join(MARKS)}, given {list(entries[:2])}")
        super().__init__(entries, lowercase, len(MARKS))
        self.name, self.segmenter, self.moses = name, segmenter, moses
        self.start_id = self.eos_id = 0
        self.unk_id = 1
        state = hashlib.sha256(segmenter.state.encode()).hexdigest()
        self.fingerprint = digest(segmenter.kind, [state, *self.entries])

    def normalize(self, line: str) -> str:
        """A line of ordinary text as the segmenter takes it."""
        line = clean_line(line)
        if self.moses:  # `&`, quotes, brackets and bars are escaped as Moses does (`&quot;`)
            tokenizer, _ = _moses(self.name)
            line = clean_line(str(tokenizer.tokenize(_CONTROL.sub(" ", line), return_str=True, escape=True)))
        return line.lower() if self.lowercase else line

    def encode(self, line: str) -> list[int]:
        """The ids of a line of ordinary text, without `<eos>`."""
        return self.encode_normalized([self.normalize(line)])[0]

    def encode_normalized(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of lines that went through `normalize` already."""
        return [self._look_up(pieces) for pieces in self.segmenter.segment(lines)]

    def tokens(self, ids: Sequence[int]) -> str:
        """Words of the ids, with spaces between: subwords joined, but tokenized as the corpus is; `<eos>` is left out."""
        self._check_ids(ids)
        return self.segmenter.join([self.entries[i] for i in ids if i != self.eos_id])

    def decode(self, ids: Sequence[int]) -> str:
        """Ordinary text of the ids: `tokens`, put together again where Moses took it apart."""
        return self.detokenize(self.tokens(ids))

    def detokenize(self, text: str) -> str:
        """Ordinary text of a tokenized line; escapes are undone."""
        if not self.moses:
            return text
        _, detokenizer = _moses(self.name)
        return " ".join(str(detokenizer.detokenize(text.split(), return_str=True, unescape=True)).split())

    def backend(self, *, masks: bool = False) -> Any:
        """A tokenizer of Hugging Face's `tokenizers` that gives the same ids, and `<eos>` after them.

        Raises InputError for Moses' tokenizer, for merges of subword-nmt and for left-out pieces, which that library has not.
        """
        if missing := "Moses' tokenizer" if self.moses else "BPE of subword-nmt" * (self.segmenter.kind == "codes"):
            raise InputError(
                f"{self.name}: its text goes through {missing}, which Hugging Face's tokenizers lack; use `fullrank "
                "translate`, or train with data.moses: false and data.tokens: unigram, or bpe without data.codes"
            )
        return backends.build_pieces(self.name, self.segmenter, self.entries, lowercase=self.lowercase)

    def _save_backend(self, path: Path) -> None:
        with contextlib.suppress(InputError):  # of what that library has not
            super()._save_backend(path)

    def _read_options(self) -> dict[str, Any]:
        saved = {"segmenter": self.segmenter.kind, "state": self.segmenter.state, "pieces": self.entries}
        return {"name": self.name, "lowercase": self.lowercase, "moses": self.moses, **saved}

    @classmethod
    def from_saved(cls, name: str, segmenter: str, state: str, pieces: list[str], **options: bool) -> Language:
        """The language of the options that `save` wrote."""
        return cls(name, load_segmenter(segmenter, state), pieces, **options)


MADE_OF_OPTIONS[Language.kind] = Language.from_saved


def load_language(folder: Path) -> Language:
    """The language that `save` wrote into `folder`; errors as in `load_tokenizer`."""
    language = load_tokenizer(folder)
    if not isinstance(language, Language):
        raise InputError(f"{folder}: the tokenizer there is that of a text; give a side of a translation run")
    return language
