"""Vocabularies of runs as tokenizers of Hugging Face, which give the same ids for the same text."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from fullrank.config.load import build, read_yaml
from fullrank.core.errors import InputError
from fullrank.data import Tokenizer, load_tokenizer
from fullrank.data.tokenizers import MASK, UNK, byte_signs

_PAD = "<pad>\ufdd0"  # a name that no text has: Unicode keeps this character for such uses
_NO_BYTE = byte_signs()[0xFF]  # in no UTF-8


def tokenizer_of(folder: str | Path) -> PreTrainedTokenizerFast:
    """Build the Hugging Face tokenizer of the language model in a run folder.

    Without special tokens it gives the ids that our own gives. With them, a text begins with the token that our models read
    first (`<eos>`, or a newline of bytes and characters). The end of a line is the token newline. That is no special token,
    so that decoding keeps the ends of lines also with `skip_special_tokens`. Marks in a text are text. The vocabulary of a
    masked language model has `<mask>` as its last entry.

    Padding is on the right, with an entry that no text has: a byte that is no UTF-8, `<mask>`, or an entry beyond the
    vocabulary, which our models take for padding. Set `padding_side="left"` for `generate`.
    Raises InputError where no tokenizer of that library gives the same ids, for a translation run, and for a folder that is no
    run.
    """
    folder = Path(folder)
    config = build(read_yaml(folder / "config.yaml"))
    if config.data.has_pairs:
        raise InputError(f"{folder}: a translation run, which has two vocabularies; use fullrank translate")
    return tokenizer_of_vocabulary(load_tokenizer(folder), masks=config.masks)


def tokenizer_of_vocabulary(tokenizer: Tokenizer, *, masks: bool = False) -> PreTrainedTokenizerFast:
    """Build the Hugging Face tokenizer of a `fullrank.data.Tokenizer`, with `masks` one with `<mask>` as last entry."""
    marks = {"mask_token": MASK} if masks else {}
    if tokenizer.kind == "word" and not masks:
        marks["unk_token"] = UNK
    # Decoding may leave out every token that has a name here, so that a newline has none.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        split_special_tokens=not masks,  # marks in a text are text
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        pad_token=MASK if masks else _NO_BYTE if tokenizer.kind in ("byte", "bpe") else _PAD,
        **marks,
    )
