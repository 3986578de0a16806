"""Tokenizers of Hugging Face's `tokenizers`: trained ones, and those that give the ids of ours, for `tokenizer.json`.

Ours read words, characters and bytes themselves, which is 7 to 1,000 times faster, and BPE and unigram models through them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from fullrank.core.errors import InputError
from fullrank.data.marks import (
    BLOCK,
    BLOCK_OF_TEXT,
    EOS,
    EOS_OF_TEXT,
    LINE_START,
    MASK,
    NEVER,
    SOS,
    UNK,
    name_line_end,
)
from fullrank.files import parse_json

if TYPE_CHECKING:
    from fullrank.data.language import Segmenter

# white space of Python that is none in Rust
_SEPARATORS = normalizers.Replace(Regex("[\x1c-\x1f]"), " ")
# words `<eos>` of a text, which are not the mark
_WORD_EOS = normalizers.Replace(Regex(rf"(?<!\S){EOS}(?!\S)"), EOS_OF_TEXT)
# what a text has where a mark of ours has the same characters
_ANY_EOS = normalizers.Replace(EOS, EOS_OF_TEXT)
_BLOCKS = normalizers.Replace(BLOCK, BLOCK_OF_TEXT)
_WORD = r"[\p{L}\p{N}_]"
_PUNCTUATION = rf"<unk>|{EOS_OF_TEXT}|{_WORD}+(?:['’]{_WORD}+)*|[^\p{{L}}\p{{N}}_\s]"
# the one letter that Python writes in lower case by what stands around it
_FINAL_SIGMA = normalizers.Replace(Regex(r"(?<=\p{L})Σ(?!\p{L})"), "ς")
# words with a space before each
_SPACED = [decoders.Replace(Regex(r"\A"), " "), decoders.Fuse(), decoders.Replace(EOS_OF_TEXT, EOS)]
_BYTES = 256


def byte_signs() -> list[str]:
    """The character that stands for each byte in byte-level BPE."""
    printable = {*range(33, 127), *range(161, 173), *range(174, _BYTES)}
    others = iter(range(_BYTES, 2 * _BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(_BYTES)]


def train_byte_bpe(lines: Iterable[str], size: int, *, marks: Sequence[str], prefix_space: bool) -> Tokenizer:
    """Train byte-level BPE: marks, the 256 byte values, and the most frequent merges, each seen at least twice.

    prefix_space: a space is put before a line, so that its first word is a word like any other.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(marks),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(lines, trainer)
    return backend


def split_merges(merges: Iterable[Any]) -> list[tuple[str, str]]:
    """Pairs of pieces, which some versions of the library write as one text with a space between."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    return [(left, right) for left, right in pairs]


# running text


def build_words(
    entries: Sequence[str], *, lowercase: bool, split: str, line_end: bool, line_start: bool, masks: bool
) -> Tokenizer:
    """Words with their ids; `masks`: with `<mask>` as last entry."""
    end = name_line_end(line_end, line_start)
    names = [end if entry == EOS else entry for entry in entries] + [MASK] * masks
    backend = Tokenizer(_levels(names))
    is_whitespace = split == "whitespace"
    steps = [*_lower(lowercase), _SEPARATORS, _WORD_EOS if is_whitespace else _ANY_EOS]
    backend.normalizer = normalizers.Sequence([*steps, *(_begin_lines(SOS, " ") if line_start else ())])
    if is_whitespace:
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        marks = f"{SOS}|" * line_start + f"{MASK}|" * masks
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(marks + _PUNCTUATION), "removed", invert=True)
    lines = [decoders.Replace(f" {end}", "\n"), decoders.Replace("\n ", "\n"), decoders.Strip(" ", 1, 0)]
    begins = [decoders.Replace(f" {SOS}", "")] * line_start
    backend.decoder = decoders.Sequence([*_SPACED, *begins, *lines])
    return _finish(backend, entries.index(EOS), end if line_end else None)


def build_characters(entries: Sequence[str], *, lowercase: bool) -> Tokenizer:
    """Characters with their ids."""
    backend = Tokenizer(_levels(entries))
    backend.normalizer = normalizers.Sequence(_lower(lowercase))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(UNK, "\N{REPLACEMENT CHARACTER}"), decoders.Fuse()])
    return _finish(backend, entries.index("\n"), "\n")


def build_bytes(*, lowercase: bool) -> Tokenizer:
    """The 256 bytes of UTF-8."""
    backend = Tokenizer(models.BPE({sign: byte for byte, sign in enumerate(byte_signs())}, []))
    backend.normalizer = normalizers.Sequence(_lower(lowercase))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, ord("\n"), None)


def build_bpe(trained: str, *, lowercase: bool, line_end: bool, line_start: bool) -> Tokenizer:
    """Byte-level BPE; `trained`: as `byte_level_bpe` makes it, without lines and lower case."""
    state = parse_json(trained)
    vocabulary = state["model"]["vocab"]
    end = name_line_end(line_end, line_start)
    renamed = ({EOS: end} if line_end else {}) | ({SOS: LINE_START} if line_start else {})
    for mark, name in renamed.items():
        vocabulary[name] = vocabulary.pop(mark)
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in renamed]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.normalizer = normalizers.Sequence(
        [*_lower(lowercase), *(_begin_lines(LINE_START, "") if line_start else ())]
    )
    if not line_end:  # a newline stays with the line that it ends
        lines = pre_tokenizers.Split("\n", "merged_with_previous")
        backend.pre_tokenizer = pre_tokenizers.Sequence([lines, backend.pre_tokenizer])
    begins = [decoders.Replace(LINE_START, "")] * line_start
    ends = decoders.Replace(end, byte_signs()[ord("\n")])
    backend.decoder = decoders.Sequence([ends, *begins, backend.decoder])
    if line_start:
        backend.add_tokens([AddedToken(LINE_START, special=False, normalized=True)])
    return _finish(backend, vocabulary[end], end if line_end else None)


def read_bpe(state: str, *, line_end: bool, line_start: bool) -> Tokenizer:
    """What `build_bpe` was made from; ValueError if it is damaged."""
    model = parse_json(state)["model"]
    names = {name_line_end(line_end, line_start): EOS, LINE_START: SOS}
    vocabulary = {names.get(name, name): number for name, number in model["vocab"].items()}
    try:
        backend = Tokenizer(models.BPE(vocabulary, split_merges(model["merges"])))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"no tokenizer of `tokenizers`: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, SOS] if line_start else [EOS])
    return backend


def _levels(names: Sequence[str]) -> models.WordLevel:
    unk = {"unk_token": UNK} if UNK in names else {}
    return models.WordLevel({name: number for number, name in enumerate(names)}, **unk)


def _lower(lowercase: bool) -> list[Any]:
    return [_FINAL_SIGMA, normalizers.Lowercase()] if lowercase else []


def _begin_lines(start: str, space: str) -> list[Any]:
    """A line begins with `<sos>`, whose name is `start`."""
    end = name_line_end(True, True)
    # a text that is one mark which no text has stays that: so the library finds marks in what this has made
    first = normalizers.Replace(Regex(rf"\A(?!(?:{end}|{LINE_START})\z)(?=[\s\S])"), f"{start}{space}")
    last = normalizers.Replace(Regex(r"\n\z"), end)
    return [first, last, normalizers.Replace("\n", f"{end}{start}{space}")]


def _finish(backend: Tokenizer, start_id: int, newline: str | None) -> Tokenizer:
    """A text begins with the token that our models read first; `newline` is a token where it has a name."""
    begin = backend.id_to_token(start_id)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin}:0 $A:0", pair=f"{begin}:0 $A:0 $B:1", special_tokens=[(begin, start_id)]
    )
    if newline is not None:
        backend.add_tokens([AddedToken(newline, special=False, normalized=True)])
    return backend


# sentences


def build_pieces(name: str, segmenter: Segmenter, entries: Sequence[str], *, lowercase: bool) -> Tokenizer:
    """Words, or pieces of a BPE or unigram model, of one side of sentence pairs; a text ends in `<eos>`.

    InputError where `entries` leave out pieces of the segmenter, which the library has not.
    """
    ids = {entry: number for number, entry in enumerate(entries)}
    if missing := [piece for piece in segmenter.pieces or () if piece not in ids]:
        raise InputError(
            f"{name}: its vocabulary leaves out pieces, {missing[0]!r} for one, which no tokenizer of Hugging Face does; use "
            "`fullrank translate`, or train with data.vocabulary: joint"
        )
    eos, *rest = entries
    steps: list[Any] = []
    split: list[Any] = []
    if segmenter.kind == "word":
        backend = Tokenizer(_levels([eos, *(EOS_OF_TEXT if entry == EOS else entry for entry in rest)]))
        backend.decoder = decoders.Sequence([*_SPACED, decoders.Strip(" ", 1, 0)])
        steps = [_WORD_EOS]
    elif segmenter.kind == "unigram":
        scores = dict(parse_json(segmenter.state)["model"]["vocab"])
        if not {*EOS} <= ids.keys():  # characters that are unknown would make the mark the best piece
            eos = EOS_OF_TEXT
        listed = [(entry, scores.get(entry, NEVER)) for entry in (eos, *rest)]
        backend = Tokenizer(models.Unigram(listed, unk_id=ids[UNK]))
        backend.decoder = decoders.Sequence(
            [decoders.Metaspace(prepend_scheme="always"), decoders.Replace(BLOCK_OF_TEXT, BLOCK)]
        )
        steps, split = [_BLOCKS], [pre_tokenizers.Metaspace(prepend_scheme="always")]
    else:
        backend = Tokenizer(models.BPE(ids, split_merges(parse_json(segmenter.state)["model"]["merges"])))
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        split = [pre_tokenizers.ByteLevel(add_prefix_space=True)]
    backend.normalizer = normalizers.Sequence([*_lower(lowercase), _SEPARATORS, *steps])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), *split])  # word by word, as ours
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A:0 {eos}:0", pair=f"$A:0 {eos}:0 $B:1 {eos}:1", special_tokens=[(eos, 0)]
    )
    return backend
