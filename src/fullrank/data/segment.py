"""Sentences to pieces (words or subwords) and back. A `Language` gives pieces their ids.

All split a line at white space first, so the pieces of two joined lines are those of the one and then those of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from fullrank.errors import InputError

_BYTES = 256


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

    @property
    def pieces(self) -> list[str] | None:
        return self._pieces

    def segment(self, lines: Sequence[str]) -> list[list[str]]:
        return _segmented(self._backend, self._pieces, lines)

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


def _in_order(backend: Any) -> list[str]:
    table: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    return sorted(table, key=table.__getitem__)


def _segmented(backend: Any, pieces: list[str], lines: Sequence[str]) -> list[list[str]]:
    encodings = backend.encode_batch_fast(list(lines), add_special_tokens=False)
    return [[pieces[i] for i in encoding.ids] for encoding in encodings]


def restored(kind: str, state: str) -> Segmenter:
    """The segmenter that gave `state`; ValueError if it is no such state."""
    match kind:
        case "word":
            return Words()
        case "byte_bpe":
            from tokenizers import Tokenizer

            try:
                return ByteBpe(Tokenizer.from_str(state))
            except Exception as error:  # the library raises bare Exception
                raise ValueError(f"no tokenizer of `tokenizers`: {error}") from error
        case _:
            raise ValueError(f"unknown kind of segmenter '{kind}'")
