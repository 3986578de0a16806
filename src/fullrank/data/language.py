"""Tokenizers of sentences: one side of a corpus of sentence pairs, its lines to token ids and back.

A line goes through Moses' tokenizer and lower case (where asked for), then a tokenizer of Hugging Face's `tokenizers` cuts it
into pieces: words, byte-level BPE, BPE over characters as subword-nmt has it, or a unigram model. Each cuts at white space
first, so the pieces of two joined lines are those of the one and then those of the other.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from fullrank.core.errors import InputError, pip_install
from fullrank.data.tokenizers import (
    LINE_END,
    LOWER,
    UNK,
    Tokenizer,
    read_merges,
    train_byte_bpe,
    train_merges,
)
from fullrank.files import mended, open_text, parse_json, text_of

MARKS = (LINE_END, UNK)  # the first two entries of a language: <eos> and <unk>
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NEVER = -1e9  # log probability of a piece that no text has
_UNIGRAM_STEP = 1e-4  # of log probabilities, between the characters that UnigramTrainer adds
_WORD_END = "</w>"
# where the mark of an end is also part of words
_DECODER_OF_ENDS = decoders.Sequence(
    [decoders.Replace(UNK, UNK + _WORD_END), decoders.Replace(Regex(rf"{_WORD_END}\z"), " "), decoders.Fuse()]
)
_CODES_VERSION = "#version: 0.2"
_BLOCK = "\u2581"  # what begins a word of a unigram model
_BLOCK_OF_TEXT = "\x1f"  # what a text has for it
_SPLITS = {
    "word": pre_tokenizers.WhitespaceSplit(),
    "codes": pre_tokenizers.WhitespaceSplit(),
    "byte_bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    ),
    "unigram": pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    ),
}
_DECODERS = {
    "word": None,  # a space between words
    "codes": decoders.Sequence([decoders.Replace(UNK, UNK + _WORD_END), decoders.BPEDecoder(_WORD_END)]),
    "byte_bpe": decoders.ByteLevel(),
    "unigram": decoders.Sequence(
        [decoders.Metaspace(prepend_scheme="always"), decoders.Replace(_BLOCK_OF_TEXT, _BLOCK)]
    ),
}


class Pieces(NamedTuple):
    """Pieces of words: `word`, `byte_bpe`, `codes` or `unigram`.

    `names` are all that a word may be cut into; `merges` of BPE, `scores` of a unigram model.
    """

    kind: str
    names: Sequence[str]
    merges: Sequence[tuple[str, str]] = ()
    scores: Mapping[str, float] = {}


def find_words(lines: Iterable[str]) -> Pieces:
    """Find the words between white space, most frequent first."""
    counts = Counter(itertools.chain.from_iterable(map(str.split, lines)))
    return Pieces("word", [word for word, _ in counts.most_common()])


def learn_byte_bpe(lines: Iterable[str], size: int) -> Pieces:
    """Train byte-level BPE of at most `size` pieces; no part of a text is unknown to it."""
    trained = train_byte_bpe(lines, size, _SPLITS["byte_bpe"])
    ids = trained.get_vocab()
    names = sorted(ids, key=ids.__getitem__)
    return Pieces("byte_bpe", names, read_merges(trained))


def learn_unigram(lines: Iterable[str], size: int) -> Pieces:
    """Train a unigram model as in SentencePiece: at most `size` pieces, by expectation maximization; all characters stay.

    One text gives one model: sums of threads differ in their last digits, so log probabilities are rounded and sorted.
    Characters that stay only to be known have the lowest value plus some small steps, in any order: the steps are taken away.
    """
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Replace(_BLOCK, _BLOCK_OF_TEXT)
    backend.pre_tokenizer = _SPLITS["unigram"]
    trainer = trainers.UnigramTrainer(vocab_size=size + 1, special_tokens=[UNK], unk_token=UNK, show_progress=False)
    try:
        backend.train_from_iterator(lines, trainer)
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"data.max_vocabulary: no unigram model of {size + 2:,} entries can be made of this text ({error}); give another "
            "number, or use data.tokens=bpe"
        ) from error
    vocabulary = parse_json(backend.to_str())["model"]["vocab"]
    learned = {piece: score for piece, score in vocabulary if piece != UNK}
    lowest = min(learned.values())

    def round_score(piece: str, score: float) -> float:
        steps = (score - lowest) / _UNIGRAM_STEP
        added = len(piece) == 1 and steps < len(learned) and abs(steps - round(steps)) < 1e-3
        return round(lowest if added else score, 3)

    scores = {piece: round_score(piece, score) for piece, score in learned.items()}
    names = sorted(scores, key=lambda piece: (-scores[piece], piece))
    return Pieces("unigram", names, scores=scores)


def learn_codes(lines: Callable[[], Iterable[str]], merges: int) -> Pieces:
    """Learn at most `merges` merges of characters, of pairs seen at least twice. `lines` are read twice."""
    characters = _find_characters(lines())
    # as special tokens: pairs of equal counts are merged in the order of ids, without this by chance
    options = {"vocab_size": merges + len(characters), "special_tokens": characters, "end_of_word_suffix": _WORD_END}
    learned = read_merges(train_merges(lines(), _SPLITS["codes"], **options))[:merges]
    names = [*characters, *map("".join, learned)]
    return Pieces("codes", names, learned)


def read_codes(path: Path, lines: Iterable[str]) -> Pieces:
    """Read the merges of a codes file of subword-nmt, version 0.2 (Sennrich et al. 2016), and the characters of a text.

    Merges are pairs of symbols, best first. The last symbol of a word carries `</w>`; a character in no merge is a piece by
    itself. Raises InputError for a file that is missing, not text or no codes file, and names the line that is wrong.
    """
    with open_text(path, "data.codes") as file:
        text = text_of(file.read(), f"data.codes: {path}")
    rows = text.rstrip("\n").split("\n")
    if rows[0].split() != _CODES_VERSION.split():
        raise InputError(f"data.codes: {path}: line 1 is {rows[0]!r}; a file of BPE codes begins with {_CODES_VERSION}")
    merges: dict[tuple[str, str], None] = {}  # of a pair that stands twice the first counts
    for number, row in enumerate(rows[1:], start=2):
        try:
            left, right = row.strip(" ").split(" ")
        except ValueError:
            raise InputError(f"data.codes: {path}: line {number} is {row!r}; a merge is two symbols") from None
        merges[left, right] = None
    symbols = _find_characters(lines)
    for left, right in merges:
        symbols += [left, right, left + right]
    names = list(dict.fromkeys(symbols))
    return Pieces("codes", names, list(merges))


def write_piece(piece: str) -> str:
    """Write a piece of codes as subword-nmt does: `lo@@` inside a word, `wer` at its end."""
    if piece.endswith(_WORD_END):
        return piece.removesuffix(_WORD_END)
    return f"{piece}@@"


def _find_characters(lines: Iterable[str]) -> list[str]:
    """Find all characters of a text, and list each also as the end of a word."""
    characters = sorted(set(itertools.chain.from_iterable(lines)))
    at_end = [character + _WORD_END for character in characters]
    return characters + at_end


@lru_cache(maxsize=8)
def _moses(language: str) -> tuple[Any, Any]:
    """Load Moses' tokenizer and detokenizer, which translation corpora of the papers went through."""
    try:
        from sacremoses import MosesDetokenizer, MosesTokenizer
    except ImportError as error:
        raise InputError(
            f"Moses tokenization needs the package sacremoses: {pip_install('translate')}, or set data.moses=false"
        ) from error
    return MosesTokenizer(lang=language), MosesDetokenizer(lang=language)


def clean_line(line: str) -> str:
    """Clean a line: single spaces, none at the ends, no line breaks, no halves of characters."""
    return " ".join(mended(line).split())


def normalize_line(line: str, language: str, *, moses: bool, lowercase: bool) -> str:
    """Normalize a line of ordinary text, before it is cut into pieces.

    Args:
        line: the text.
        language: its code, such as `de`, for Moses' rules.
        moses: tokenize it by Moses' rules; special characters are escaped (`&quot;`).
        lowercase: write it in lower case.

    Returns:
        The line as `clean_line` leaves it, tokenized and in lower case where that is asked for.

    Raises:
        InputError: Moses' tokenizer is not installed.
    """
    line = clean_line(line)
    if moses:  # `&`, quotes, brackets and bars are escaped as Moses does (`&quot;`)
        tokenizer, _ = _moses(language)
        without_control = _CONTROL.sub(" ", line)
        tokenized = tokenizer.tokenize(without_control, return_str=True, escape=True)
        line = clean_line(tokenized)
    return line.lower() if lowercase else line


class Language(Tokenizer):
    """Text of one language to ids and back.

    Any line is accepted; an empty one has no ids. `<eos>` is no part of a line, it is added where batches are made. Ids from
    `size` on are those of pieces that the language leaves out: they become `<unk>`. Two languages with one vocabulary have one
    fingerprint.
    """

    eos_id: int
    unk_id: int

    def __init__(self, backend: Backend, kind: str, *, name: str, size: int, **options: bool) -> None:
        super().__init__(backend, kind, size=size, **options)
        self.options["name"] = name  # no part of the fingerprint
        self.name = name
        self.moses = options["moses"]
        del self.entries[size:]

    def encode(self, text: str) -> list[int]:
        """Encode a line of ordinary text, without `<eos>`."""
        line = normalize_line(text, self.name, moses=self.moses, lowercase=self.lowercase)
        (ids,) = self.encode_normalized([line])
        return ids

    def encode_normalized(self, lines: Sequence[str]) -> list[list[int]]:
        """Encode lines that went through `normalize_line` already."""
        encodings = self.backend.encode_batch_fast(lines, add_special_tokens=False)
        size = len(self)
        unk = self.unk_id
        encoded = []
        for encoding in encodings:
            encoded.append([i if i < size else unk for i in encoding.ids])
        return encoded

    def tokens(self, ids: Sequence[int]) -> str:
        """Join the words of ids, with spaces between.

        Subwords are joined, the text stays tokenized as the corpus is, and `<eos>` is left out.
        """
        words = [int(i) for i in ids if i != self.eos_id]
        # bytes that a model put together need be no text, and may hold line breaks
        text = super().decode(words)
        return " ".join(text.split())

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to ordinary text: the text of `tokens` without Moses' tokenization."""
        tokenized = self.tokens(ids)
        return self.detokenize(tokenized)

    def detokenize(self, text: str) -> str:
        """Turn a tokenized line into ordinary text; escapes are undone."""
        if not self.moses:
            return text
        _, detokenizer = _moses(self.name)
        ordinary = detokenizer.detokenize(text.split(), return_str=True, unescape=True)
        return " ".join(ordinary.split())


def build_language(
    name: str, pieces: Pieces, entries: Sequence[str] | None = None, *, moses: bool = False, lowercase: bool = False
) -> Language:
    """Build a language with the entries `<eos>`, `<unk>` and then those given.

    Args:
        name: its code, such as `de`.
        pieces: what its words are cut into.
        entries: pieces that get ids; None for all. The others become `<unk>`.
        moses: lines are tokenized by Moses' rules.
        lowercase: lines are written in lower case.

    Returns:
        The tokenizer of the language.
    """
    if entries is None:
        entries = pieces.names
    entries = list(dict.fromkeys([*MARKS, *entries]))
    names = entries
    if pieces.kind != "word":
        names = list(dict.fromkeys([*entries, *pieces.names]))
    ids = {entry: number for number, entry in enumerate(names)}
    steps = [*LOWER] if lowercase else []
    model: Any
    if pieces.kind == "word":
        model = models.WordLevel(ids, unk_token=UNK)
    elif pieces.kind == "unigram":
        scores = [(entry, pieces.scores.get(entry, _NEVER)) for entry in names]
        model = models.Unigram(scores, unk_id=ids[UNK])
        steps.append(normalizers.Replace(_BLOCK, _BLOCK_OF_TEXT))
    elif pieces.kind == "codes":
        model = models.BPE(ids, list(pieces.merges), unk_token=UNK, end_of_word_suffix=_WORD_END)
    else:
        model = models.BPE(ids, list(pieces.merges))
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = _SPLITS[pieces.kind]
    decoder = _DECODERS[pieces.kind]
    if pieces.kind == "codes" and any(_WORD_END in name.removesuffix(_WORD_END) for name in names):
        decoder = _DECODER_OF_ENDS
    if decoder is not None:
        backend.decoder = decoder
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A:0 {LINE_END}:0", pair=f"$A:0 {LINE_END}:0 $B:1 {LINE_END}:1", special_tokens=[(LINE_END, 0)]
    )
    return Language(backend, pieces.kind, name=name, size=len(entries), moses=moses, lowercase=lowercase)
