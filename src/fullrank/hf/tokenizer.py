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
    Tokenizer,
    WordVocabulary,
    load_tokenizer,
)
from fullrank.data.backends import byte_signs
from fullrank.data.marks import EOS, MASK, UNK

_PAD = "<pad>\ufdd0"  # a name that no text has: Unicode keeps this character for such uses
_NO_BYTE = byte_signs()[0xFF]  # in no UTF-8


def tokenizer_of(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the language model in the run folder `folder`.

    Without special tokens it gives the ids that our own gives. With them, a text begins with the token that our models read
    first (`<eos>`, or a newline of bytes and characters). Where lines end in `<eos>`, that token is called newline and is no
    special one, so that decoding keeps the ends of lines also with `skip_special_tokens`. Marks in a text are text. A masked
    language model's has `<mask>` as its last entry.

    Padding is on the right, and by an entry that no text has: a byte that is no UTF-8, `<mask>`, or an entry beyond the
    vocabulary, which our models take for padding. `padding_side="left"` is for `generate`.
    Raises InputError where no tokenizer of that library gives the same ids, and where the folder is no run.
    """
    folder = Path(folder)
    config = build(read_yaml(folder / "config.yaml"))
    if config.data.has_pairs:
        raise InputError(f"{folder}: a translation run, which has two vocabularies; use fullrank translate")
    return tokenizer_of_vocabulary(load_tokenizer(folder), masks=config.masks)


def tokenizer_of_vocabulary(own: Tokenizer, *, masks: bool = False) -> PreTrainedTokenizerFast:
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
    return PreTrainedTokenizerFast(
        tokenizer_object=own.backend(masks=masks),
        split_special_tokens=words
        or not masks,  # marks in a text are text, but `<mask>` is found where no word can be one
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        pad_token=MASK if masks else _NO_BYTE if is_bytes else _PAD,
        **marks,
    )
