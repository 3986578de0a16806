"""Vocabularies of runs as tokenizers of Hugging Face, which give the same ids for the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fullrank.config.load import build, read_yaml
from fullrank.core.errors import InputError
from fullrank.data import (
    BpeTokenizer,
    ByteVocabulary,
    CharacterVocabulary,
    Language,
    WordVocabulary,
    load_language,
    load_tokenizer,
)
from fullrank.data.language import BLOCK, BLOCK_OF_TEXT, NEVER
from fullrank.data.tokenizers import EOS, EOS_OF_TEXT, MASK, SOS, UNK
from fullrank.files import parse_json

# white space of Python that is none in Rust
_SEPARATORS = normalizers.Replace(Regex("[\x1c-\x1f]"), " ")
# words `<eos>` of a text, which are not the mark
_WORD_EOS = normalizers.Replace(Regex(rf"(?<!\S){EOS}(?!\S)"), EOS_OF_TEXT)
_WORD = r"[\p{L}\p{N}_]"
_PUNCTUATION = rf"<unk>|{EOS_OF_TEXT}|{_WORD}+(?:['’]{_WORD}+)*|[^\p{{L}}\p{{N}}_\s]"
# names that no text has: Unicode keeps these characters for such uses
_PAD, _LINE_END, _LINE_START = "<pad>\ufdd0", "\ufdd1", "\ufdd2"
_NO_BYTE = bytes_to_unicode()[0xFF]  # in no UTF-8
# the one letter that Python writes in lower case by what stands around it
_FINAL_SIGMA = normalizers.Replace(Regex(r"(?<=\p{L})Σ(?!\p{L})"), "ς")


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


def of_vocabulary(own: Any, *, masks: bool = False) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a `fullrank.data.Tokenizer`; `masks`: with `<mask>` as last entry."""
    match own:
        case WordVocabulary():
            backend = _of_words(own, masks)
        case BpeTokenizer():
            backend = _of_bpe(own)
        case CharacterVocabulary():
            backend = _of_characters(own)
        case ByteVocabulary():
            backend = _of_bytes(own)
        case _:
            raise InputError(f"no tokenizer of Hugging Face is known for a vocabulary of kind '{own.kind}'")
    begin = backend.id_to_token(own.start_id)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin}:0 $A:0", pair=f"{begin}:0 $A:0 $B:1", special_tokens=[(begin, own.start_id)]
    )
    as_text = True  # marks inside a text; but `<mask>` is found where no word can be one
    marks: dict[str, Any] = {}
    if isinstance(own, WordVocabulary) and own.unk_id is not None:
        marks["unk_token"] = UNK
    if masks:
        marks["mask_token"] = MASK
        as_text = isinstance(own, WordVocabulary)
    # Decoding may leave out every token that has a name here, so that a newline has none.
    if isinstance(own, WordVocabulary | BpeTokenizer) and not own.line_end:
        marks |= {"eos_token": EOS, "bos_token": EOS}
    elif not isinstance(own, ByteVocabulary):
        name = "\n" if isinstance(own, CharacterVocabulary) else _line_end(own)
        backend.add_tokens([AddedToken(name, special=False, normalized=True)])
    is_bytes = isinstance(own, BpeTokenizer | ByteVocabulary)
    return _finished(backend, marks, as_text, MASK if masks else _NO_BYTE if is_bytes else _PAD)


def of_language(own: Language) -> PreTrainedTokenizerFast:
    """Build the tokenizer of one side of a translation run; a text ends in `<eos>`.

    Raises InputError for Moses' tokenizer and for merges of subword-nmt, which that library has not.
    """
    missing = "Moses' tokenizer" if own.moses else "BPE of subword-nmt" if own.segmenter.kind == "codes" else None
    if missing:
        raise InputError(
            f"{own.name}: its text goes through {missing}, which Hugging Face's tokenizers lack; use `fullrank translate`, or "
            "train with data.moses: false and data.tokens: unigram, or bpe without data.codes"
        )
    backend = _of_pieces(own)
    eos = backend.id_to_token(own.eos_id)
    backend.normalizer = normalizers.Sequence(
        [*_lowered(own.lowercase), _SEPARATORS, *_TEXTS.get(own.segmenter.kind, ())]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A:0 {eos}:0", pair=f"$A:0 {eos}:0 $B:1 {eos}:1", special_tokens=[(eos, own.eos_id)]
    )
    padding = _NO_BYTE if own.segmenter.kind == "byte_bpe" else _PAD
    return _finished(backend, {"eos_token": eos, "unk_token": UNK}, True, padding)


def _of_pieces(own: Language) -> Tokenizer:
    """Words, or pieces of a model of Hugging Face's library, under the ids that they have here."""
    first, *rest = own.entries
    if own.segmenter.kind == "word":
        entries = [first, *(EOS_OF_TEXT if entry == EOS else entry for entry in rest)]
        words = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=UNK))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.decoder = decoders.Sequence([*_SPACED, decoders.Strip(" ", 1, 0)])
        return words
    ids = {entry: i for i, entry in enumerate(own.entries)}
    state = parse_json(own.segmenter.state())
    if left := [piece for piece in own.segmenter.pieces or () if piece not in ids]:
        raise InputError(
            f"{own.name}: its vocabulary leaves out pieces, {left[0]!r} for one, which no tokenizer of Hugging Face does; use "
            "`fullrank translate`, or train with data.vocabulary: joint"
        )
    if own.segmenter.kind == "unigram":
        scores = dict(state["model"]["vocab"])
        if not {*EOS} <= ids.keys():  # characters that are unknown would make the mark the best piece
            first = EOS_OF_TEXT
        listed = [(entry, scores.get(entry, NEVER)) for entry in (first, *rest)]
        pieces = Tokenizer(models.Unigram(listed, unk_id=own.unk_id))
        inner: Any = pre_tokenizers.Metaspace(prepend_scheme="always")
        pieces.decoder = decoders.Sequence(
            [decoders.Metaspace(prepend_scheme="always"), decoders.Replace(BLOCK_OF_TEXT, BLOCK)]
        )
    else:
        merges: Any = [pair.split(" ") if isinstance(pair, str) else pair for pair in state["model"]["merges"]]
        pieces = Tokenizer(models.BPE(ids, [(left, right) for left, right in merges]))
        inner = pre_tokenizers.ByteLevel(add_prefix_space=True)
        pieces.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    pieces.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), inner])  # word by word, as ours
    return pieces


def _of_words(own: WordVocabulary, masks: bool) -> Tokenizer:
    entries = [_line_end(own) if entry == EOS else entry for entry in own.entries] + [MASK] * masks
    unk = {} if own.unk_id is None else {"unk_token": UNK}
    backend = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, **unk))
    whole = own.split == "whitespace"
    backend.normalizer = normalizers.Sequence(
        [*_lowered(own.lowercase), _SEPARATORS, _WORD_EOS if whole else _ANY_EOS, *_lines(own, SOS, " ")]
    )
    if whole:
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        marks = f"{SOS}|" * own.line_start + f"{MASK}|" * masks
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(marks + _PUNCTUATION), "removed", invert=True)
    backend.decoder = decoders.Sequence(
        [
            *_SPACED,
            *[decoders.Replace(f" {SOS}", "")] * own.line_start,
            decoders.Replace(f" {_line_end(own)}", "\n"),
            decoders.Replace("\n ", "\n"),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


# what a text has where a mark or sign of ours has the same characters
_ANY_EOS = normalizers.Replace(EOS, EOS_OF_TEXT)
# words with a space before each
_SPACED = [decoders.Replace(Regex(r"\A"), " "), decoders.Fuse(), decoders.Replace(EOS_OF_TEXT, EOS)]
_TEXTS = {"word": [_WORD_EOS], "unigram": [normalizers.Replace(BLOCK, BLOCK_OF_TEXT)]}


def _line_end(own: WordVocabulary | BpeTokenizer) -> str:
    """The name of `<eos>`: newline where it is the end of a line, or a sign for it where `<sos>` has to be put behind it."""
    return EOS if not own.line_end else _LINE_END if own.line_start else "\n"


def _lines(own: WordVocabulary | BpeTokenizer, start: str, space: str) -> list[Any]:
    """With `line_start` a line begins with <sos>, whose name is `start`."""
    if not own.line_end or not own.line_start:
        return []
    # a text that is one mark which no text has stays that: so the library finds marks in what this has made
    end = _line_end(own)
    first = normalizers.Replace(Regex(rf"\A(?![{_LINE_END}{_LINE_START}]\z)(?=[\s\S])"), f"{start}{space}")
    last = normalizers.Replace(Regex(r"\n\z"), end)
    return [first, last, normalizers.Replace("\n", f"{end}{start}{space}")]


def _of_bpe(own: BpeTokenizer) -> Tokenizer:
    state = parse_json(own.backend_state())
    vocabulary = state["model"]["vocab"]
    renamed = {EOS: _line_end(own)} if own.line_end else {}
    if own.line_start:
        renamed[SOS] = _LINE_START
    for mark, name in renamed.items():
        vocabulary[name] = vocabulary.pop(mark)
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in renamed]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.normalizer = normalizers.Sequence([*_lowered(own.lowercase), *_lines(own, _LINE_START, "")])
    if not own.line_end:  # a newline stays with the line that it ends
        lines = pre_tokenizers.Split("\n", "merged_with_previous")
        backend.pre_tokenizer = pre_tokenizers.Sequence([lines, backend.pre_tokenizer])
    ends: list[Any] = [
        decoders.Replace(_line_end(own), bytes_to_unicode()[ord("\n")]),
        *[decoders.Replace(_LINE_START, "")] * own.line_start,
    ]
    backend.decoder = decoders.Sequence([*ends, backend.decoder])
    if own.line_start:
        backend.add_tokens([AddedToken(_LINE_START, special=False, normalized=True)])
    return backend


def _of_characters(own: CharacterVocabulary) -> Tokenizer:
    unk = {} if own.unk_id is None else {"unk_token": UNK}
    backend = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(own.entries)}, **unk))
    backend.normalizer = normalizers.Sequence(_lowered(own.lowercase))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(UNK, "\N{REPLACEMENT CHARACTER}"), decoders.Fuse()])
    return backend


def _of_bytes(own: ByteVocabulary) -> Tokenizer:
    backend = Tokenizer(models.BPE({sign: value for value, sign in bytes_to_unicode().items()}, []))
    backend.normalizer = normalizers.Sequence(_lowered(own.lowercase))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _lowered(lowercase: bool) -> list[Any]:
    return [_FINAL_SIGMA, normalizers.Lowercase()] if lowercase else []


def _finished(backend: Tokenizer, marks: dict[str, Any], as_text: bool, padding: str) -> PreTrainedTokenizerFast:
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
