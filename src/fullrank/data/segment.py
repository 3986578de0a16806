"""Sentences to pieces (words or subwords) and back. A `Language` gives pieces their ids.

All split a line at white space first, so the pieces of two joined lines are those of the one and then those of the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from fullrank.core.errors import InputError
from fullrank.data.codes import read_codes
from fullrank.data.entries import UNK
from fullrank.data.word_cache import WordCache

_BYTES = 256
_STEP = 1e-4  # of log probabilities, between the characters that UnigramTrainer adds


class Segmenter(Protocol):
    """`kind` names it in files; `pieces` are all that it can give, None where that depends on the text.

    `state` is what `restored` makes it from again.
    """

    @property
    def kind(self) -> str: ...
    @property
    def pieces(self) -> list[str] | None: ...
    def segment(self, lines: Sequence[str]) -> list[list[str]]: ...
    def join(self, pieces: Sequence[str]) -> str: ...
    def state(self) -> str: ...


class Words:
    """What stands between white space."""

    kind = "word"
    pieces: list[str] | None = None

    def segment(self, lines: Sequence[str]) -> list[list[str]]:
        return [line.split() for line in lines]

    def join(self, pieces: Sequence[str]) -> str:
        return " ".join(pieces)

    def state(self) -> str:
        return ""


class ByteBpe:
    """Byte-level BPE of Hugging Face `tokenizers`: every text has pieces, and every character comes back."""

    kind = "byte_bpe"

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._pieces = _in_order(backend)
        self._words = _words(backend, self._pieces)

    @property
    def pieces(self) -> list[str] | None:
        return self._pieces

    def segment(self, lines: Sequence[str]) -> list[list[str]]:
        return self._words.segment(lines)

    def join(self, pieces: Sequence[str]) -> str:
        # bytes that a model put together need be no text, and may hold line breaks
        return " ".join(str(self._backend.decoder.decode(list(pieces))).split())

    def state(self) -> str:
        return str(self._backend.to_str())


def learn_byte_bpe(lines: Iterable[str], size: int) -> ByteBpe:
    """At most `size` pieces: the 256 byte values and the most frequent merges, each seen at least twice."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < _BYTES:
        raise InputError(
            f"data.max_vocabulary: at least {_BYTES + 2} for data.tokens=bpe with one vocabulary (256 bytes, <eos> and "
            f"<unk>), given {size + 2}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(lines, trainer)
    return ByteBpe(backend)


class Unigram:
    """A unigram model as in SentencePiece, by Hugging Face `tokenizers`: the most probable pieces of a line.

    A space is `▁`, at the beginning of a word. A character that the training text lacks is `<unk>`.
    """

    kind = "unigram"

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._all = _in_order(backend)
        self._words = _words(backend, self._all)

    @property
    def pieces(self) -> list[str] | None:
        return self._all[1:]  # the first is <unk>

    def segment(self, lines: Sequence[str]) -> list[list[str]]:
        return self._words.segment(lines)

    def join(self, pieces: Sequence[str]) -> str:
        return " ".join(str(self._backend.decoder.decode(list(pieces))).split())

    def state(self) -> str:
        return str(self._backend.to_str())


def learn_unigram(lines: Iterable[str], size: int) -> Unigram:
    """At most `size` pieces, by expectation maximization from the most frequent parts of words; all characters stay."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=size + 1, special_tokens=[UNK], unk_token=UNK, show_progress=False
    )  # fmt: skip
    try:
        backend.train_from_iterator(lines, trainer)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"data.max_vocabulary: no unigram model of {size + 2:,} entries can be made of this text ({error}); give another "
            "number, or use data.tokens=bpe"
        ) from error
    return Unigram(Tokenizer.from_str(json.dumps(_settled(json.loads(backend.to_str())))))


def _settled(content: dict[str, Any]) -> dict[str, Any]:
    """The same model for the same text. Sums of threads differ in their last digits, so log probabilities are rounded and
    sorted. Characters that stay only to be known have the lowest value and some small steps, in any order: without them.
    """
    unk, *rest = content["model"]["vocab"]
    lowest = min(score for _, score in rest)

    def settled(piece: str, score: float) -> float:
        steps = (score - lowest) / _STEP
        added = len(piece) == 1 and steps < len(rest) and abs(steps - round(steps)) < 1e-3
        return round(lowest if added else score, 3)

    rounded = sorted(([piece, settled(piece, score)] for piece, score in rest), key=lambda item: (-item[1], item[0]))
    # `added_tokens` would make <unk> of a text the mark
    return content | {"added_tokens": [], "model": content["model"] | {"unk_id": 0, "vocab": [unk, *rounded]}}


def _in_order(backend: Any) -> list[str]:
    table: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    return sorted(table, key=table.__getitem__)


def _words(backend: Any, pieces: list[str]) -> WordCache:
    """Both models begin a word with its space and never join two words, so words can be split one by one."""

    def pieces_of(words: list[str]) -> list[list[str]]:
        encodings = backend.encode_batch_fast(words, add_special_tokens=False)
        return [[pieces[i] for i in encoding.ids] for encoding in encodings]

    return WordCache(pieces_of)


def restored(kind: str, state: str) -> Segmenter:
    """The segmenter that gave `state`; ValueError if it is no such state."""
    match kind:
        case "word":
            return Words()
        case "codes":
            return read_codes(state, "segments.txt")
        case "byte_bpe" | "unigram":
            from tokenizers import Tokenizer

            try:
                backend = Tokenizer.from_str(state)
            except Exception as error:  # the library raises bare Exception
                raise ValueError(f"no tokenizer of `tokenizers`: {error}") from error
            return ByteBpe(backend) if kind == "byte_bpe" else Unigram(backend)
        case _:
            raise ValueError(f"unknown kind of segmenter '{kind}'")
