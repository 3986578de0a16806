"""Texts as models read them: token ids in segments of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullrank.core.errors import InputError
from fullrank.data.language import Language
from fullrank.data.tokenizers import Tokenizer, cut_lines
from fullrank.files import Section, batched, lines, read_pieces
from fullrank.forward import check_ids

if TYPE_CHECKING:
    from fullrank.models import LoadedModel

_KEY = "--text"  # of a file, in errors
SEGMENT_LENGTH = 128  # where nothing else says
_BATCH_TOKENS = 1024  # that a model reads in one pass
_BATCH_LOGITS = 1 << 25  # that it makes in one pass
_PIECE = 1 << 16  # token ids


@dataclass(frozen=True)
class Text:
    """Token ids in segments.

    Iterating yields whole segments (B, N) int64, several at a time; the incomplete rest is left out. It raises InputError for a
    text shorter than a segment.

    Attributes:
        name: what it is called, in results and errors.
        read: begins to read the text, some ids at a time.
        segment_length: N.
        count: the most segments; None: all.
        start_id: stands before the first token of the text.
        bos_id: opens every segment.
        eos_id: closes every segment.
        batch_tokens: the most tokens of a batch.
    """

    name: str
    read: Callable[[], Iterator[Sequence[int]]]
    segment_length: int
    count: int | None = None
    start_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    batch_tokens: int = _BATCH_TOKENS

    @classmethod
    def from_ids(
        cls, ids: Tensor | Sequence[int], segment_length: int | None = None, *, name: str = "token ids"
    ) -> Text:
        """Make a text of token ids.

        Args:
            ids: (T,), or (B, N) with a segment in each row.
            segment_length: tokens of a segment; None for T or N.
            name: what it is called, in results and errors.

        Returns:
            The text.

        Raises:
            InputError: ids are no whole numbers, none at all, or have other dimensions.
        """
        tensor = torch.as_tensor(ids)
        if tensor.is_floating_point() or not 1 <= tensor.dim() <= 2 or not tensor.numel():
            raise InputError(f"ids: whole numbers (T,) or (B, N), given {tuple(tensor.shape)} {tensor.dtype}")
        parts = tensor.flatten().split(_PIECE)
        return cls(name, lambda: (piece.tolist() for piece in parts), segment_length or tensor.shape[-1])

    def with_length(self, segment_length: int) -> Text:
        return replace(self, segment_length=segment_length)

    def __iter__(self) -> Iterator[Tensor]:
        rows = 0
        for batch in self.segments():
            if batch.shape[1] != self.segment_length or rows == self.count:
                break
            batch = batch if self.count is None else batch[: self.count - rows]
            rows += len(batch)
            yield batch
        if rows == 0 and self.count != 0:
            raise InputError(
                f"{self.name}: no text to read, as it has fewer than {self.segment_length} tokens; give a longer --text"
            )

    def segments(self) -> Iterator[Tensor]:
        """Yield all segments (B, N), several at a time, and the incomplete rest of the text as the last one."""
        opening = [] if self.bos_id is None else [self.bos_id]
        closing = [] if self.eos_id is None else [self.eos_id]
        start = [] if self.start_id is None else [self.start_id]
        text_length = max(1, self.segment_length - len(opening) - len(closing))
        texts = batched(chain(start, self.ids()), text_length)
        segments = (opening + text + closing for text in texts)
        rows = max(1, self.batch_tokens // self.segment_length)
        for group in batched(segments, rows):
            is_full = len(group) == rows and len(group[-1]) == len(group[0])
            for batch in [group] if is_full else batched(group, 1):
                yield torch.tensor(batch)

    def rows(self, most: int | None = None) -> list[Tensor]:
        """Return the first `most` whole segments, each (1, N); None: `count` of them."""
        text = self if most is None else replace(self, count=most)
        rows = []
        for batch in text:
            rows += batch.split(1)
        return rows

    def ids(self) -> Iterator[int]:
        return chain.from_iterable(self.read())


def read_file(model: LoadedModel, path: Path, segment_length: int | None = None, *, count: int | None = None) -> Text:
    """Make the text of a file, by the tokenizer of a model. The file is read when the text is iterated.

    Args:
        model: what will read it.
        path: the file.
        segment_length: tokens of a segment; None for 128, or for what the model reads at most, if that is less.
        count: the most segments that are read; None for all.

    Returns:
        The text.

    Raises:
        InputError: the model has no tokenizer, or reads no segment of that length. A file that cannot be read is refused when
            the text is iterated.
    """
    model.require({"tokenizer"}, f"{_KEY} {path}")
    marks: dict[str, int | None] = {}
    match model.tokenizer:
        case Language() as language:
            read = partial(_encode_sentences, language, path)
        case Tokenizer() as tokenizer:
            marks["start_id"] = tokenizer.start_id
            read = partial(_encode_pieces, tokenizer, path)
        case foreign:
            closes = model.closes_segments
            marks["bos_id"] = foreign.cls_token_id if closes else foreign.bos_token_id
            marks["eos_id"] = foreign.sep_token_id if closes else None
            read = partial(_encode_lines, foreign, path)
    length = choose_length(model, segment_length)
    return Text(str(path), read, length, count, batch_tokens=batch_tokens(model), **marks)


def choose_length(model: LoadedModel, segment_length: int | None, default: int = SEGMENT_LENGTH) -> int:
    """Choose the number of tokens of a segment.

    Args:
        model: what will read it.
        segment_length: the number; None for `default`, or for what the model reads at most, if that is less.
        default: the number where none is given.

    Returns:
        The number.

    Raises:
        InputError: the model reads no segment of that length.
    """
    longest = model.max_length
    if segment_length is None:
        return min(default, longest or default)
    if longest is not None and segment_length > longest:
        raise InputError(
            f"--segment-length: {segment_length}, but {model.name} reads at most {longest} tokens; shorten it"
        )
    return segment_length


def rows_of(input_ids: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return all rows of token ids, each (1, N), of one length N.

    Raises InputError for other shapes, for several lengths, and for no row.
    """
    texts = []
    for ids in [input_ids] if isinstance(input_ids, Tensor) else input_ids:
        check_ids(ids)
        texts += ids.split(1)
    if not texts:
        raise InputError("input_ids: no text to read")
    lengths = {ids.shape[1] for ids in texts}
    if len(lengths) > 1:
        shown = " and ".join(map(str, sorted(lengths)))
        raise InputError(f"input_ids: texts of one length, given {shown} tokens")
    return texts


def batch_tokens(model: LoadedModel) -> int:
    """Return the most tokens that a model reads in one pass, so that its logits fit into memory."""
    return min(_BATCH_TOKENS, _BATCH_LOGITS // (model.vocab_size or 1))


def _encode_pieces(tokenizer: Tokenizer, path: Path) -> Iterator[Sequence[int]]:
    for piece in read_pieces(Section(path), exact=tokenizer.kind == "byte", key=_KEY):
        yield tokenizer.encode(piece.text)


def _encode_sentences(language: Language, path: Path) -> Iterator[Sequence[int]]:
    for line in lines(path, _KEY):
        yield [*language.encode(line), language.eos_id]


def _encode_lines(tokenizer: Any, path: Path) -> Iterator[Sequence[int]]:
    """Yield ids by a tokenizer of transformers, some lines at a time, without special tokens."""
    for piece in read_pieces(Section(path), exact=False, key=_KEY):
        for lines_of_piece in cut_lines(piece.text):
            yield tokenizer(lines_of_piece, add_special_tokens=False, verbose=False).input_ids
