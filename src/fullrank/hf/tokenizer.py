"""Vocabularies of runs as tokenizers of Hugging Face, which give the same ids for the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from fullrank.config.load import build, read_yaml
from fullrank.core.errors import InputError
from fullrank.data import (
    BpeTokenizer,
    ByteVocabulary,
    Language,
    Tokenizer,
    WordVocabulary,
    load_language,
    load_tokenizer,
)
from fullrank.data.backends import byte_signs
from fullrank.data.marks import EOS, MASK, UNK

_PAD = "<pad>\ufdd0"  # a name that no text has: Unicode keeps this character for such uses
_NO_BYTE = byte_signs()[0xFF]  # in no UTF-8


def tokenizer_of(folder: str | Path, side: str = "target") -> PreTrainedTokenizerFast:
    """The tokenizer of the run in `folder`; for a translation run of one `side`, `source` or `target`.

    Without special tokens it gives the ids that our own gives. With them, a text begins with the token that our models read
    first (`<eos>`, or a newline of bytes and characters); a sentence of a translation ends in `<eos>`. Where lines end in
    `<eos>`, that token is called newline and is no special one, so that decoding keeps the ends of lines also with
    `skip_special_tokens`. Marks in a text are text. A masked language model's has `<mask>` as its last entry.

    Padding is on the right, and by an entry that no text has: a byte that is no UTF-8, `<mask>`, or an entry beyond the
    vocabulary, which our models take for padding. `padding_side="left"` is for `generate`.
    Raises InputError where no tokenizer of that library gives the same ids, and where the folder is no run.
    """
    folder = Path(folder)
    config = build(read_yaml(folder / "config.yaml"))
    if config.data.has_pairs:
        if side not in ("source", "target"):
            raise InputError(f"side: source or target, given '{side}'")
        return of_language(load_language(folder / "tokenizer" / side))
    return of_vocabulary(load_tokenizer(folder), masks=config.masks)


def of_vocabulary(own: Tokenizer, *, masks: bool = False) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a `fullrank.data.Tokenizer`; `masks`: with `<mask>` as last entry."""
    words, is_bytes = isinstance(own, WordVocabulary), isinstance(own, BpeTokenizer | ByteVocabulary)
    marks: dict[str, Any] = {}
    if isinstance(own, WordVocabulary) and own.unk_id is not None:
        marks["unk_token"] = UNK
    if masks:
        marks["mask_token"] = MASK
    # Decoding may leave out every token that has a name here, so that a newline has none.
    if isinstance(own, WordVocabulary | BpeTokenizer) and not own.line_end:
        marks |= {"eos_token": EOS, "bos_token": EOS}
    padding = MASK if masks else _NO_BYTE if is_bytes else _PAD
    # marks inside a text are text; but `<mask>` is found where no word can be one
    return _finish(own.backend(masks=masks), marks, words or not masks, padding)


def of_language(own: Language) -> PreTrainedTokenizerFast:
    """Build the tokenizer of one side of a translation run; a text ends in `<eos>`.

    Raises InputError for Moses' tokenizer and for merges of subword-nmt, which that library has not.
    """
    backend = own.backend()
    padding = _NO_BYTE if own.segmenter.kind == "byte_bpe" else _PAD
    return _finish(backend, {"eos_token": backend.id_to_token(own.eos_id), "unk_token": UNK}, True, padding)


def _finish(backend: Any, marks: dict[str, Any], as_text: bool, padding: str) -> PreTrainedTokenizerFast:
    """`as_text`: marks that stand in a text are read by the model like any other text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        split_special_tokens=as_text,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        pad_token=padding,
        **marks,
    )
