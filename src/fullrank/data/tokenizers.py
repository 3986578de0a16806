"""Tokenizers of running text: words, characters, bytes and byte-level BPE, each from text to ids and back.

Each is one tokenizer of Hugging Face's `tokenizers`, which a run folder holds as `tokenizer.json`: `PreTrainedTokenizerFast`
reads it as it is. `vocabulary.json` beside it has the kind, options and fingerprint.

Entries of words and characters are sorted by frequency, then alphabetically: the same text always gives the same ids, and
frequent words come first, as adaptive output layers want. `<unk>` stands for rare and unseen entries; published corpora hold
`<unk>` as a word, and it is the same entry. The end of a line, `<eos>`, is the entry newline: a word `<eos>` of a text is a
word like any other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, pairwise, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from fullrank.core.errors import InputError
from fullrank.files import mended, parse_json, write_checked

DEFAULT_BPE_SIZE = 10_000
META_FILE = "vocabulary.json"
TOKENIZER_FILE = "tokenizer.json"
LINE_END = "\n"
UNK = "<unk>"
SOS = "<sos>"
MASK = "<mask>"  # no entry of the text: a masked language model has one entry more than its vocabulary, the last
Split = Literal["whitespace", "punctuation"]
_PUNCTUATION = re.compile(r"\n|<unk>|\w+(?:['’]\w+)*|[^\w\s]")
_WORD = r"[\p{L}\p{N}_]"  # what is \w in Python
_PUNCTUATION_OF_BACKEND = Regex(rf"<unk>|{_WORD}+(?:['’]{_WORD}+)*|[^\p{{L}}\p{{N}}_\s]")
# the one letter that Python writes in lower case by what stands around it
_CASED = r"[\p{Cased}&&\P{Case_Ignorable}]"
_FINAL_SIGMA = Regex(rf"{_CASED}\p{{Case_Ignorable}}*\KΣ(?!\p{{Case_Ignorable}}*{_CASED})")
LOWER = [normalizers.Replace(_FINAL_SIGMA, "ς"), normalizers.Lowercase()]
_SEPARATORS = Regex("[\x1c-\x1f]")  # white space of Python that is none in Rust
_BYTES = 256
_LINE_BORDER = re.compile(r"(?<=\S)\n(?=\S)")
_PIECE = 1 << 14  # characters that a pretrained tokenizer is given at a time


class Tokenizer:
    """Text to ids and back. `backend` gives the same ids; words, characters and bytes are read here, which is 5 times as fast.

    kind: `word`, `character`, `byte` or `bpe`. split: of words, between white space, or runs of letters and digits and single
    punctuation marks. `start_id` is the context of the first token of a text. Words and BPE have `eos_id` at the end of a line;
    to characters and bytes a newline is an entry like any other. Where `sos` is set, `<sos>` begins every line
    (`sos_id`).
    """

    def __init__(self, backend: Backend, kind: str, **options: Any) -> None:
        self.backend = backend
        self.kind = kind
        self.options = options
        self.lowercase = options.get("lowercase", False)
        ids = backend.get_vocab(with_added_tokens=kind == "pretrained")
        names = {number: entry for entry, number in ids.items()}
        self.entries = [names.get(number, "") for number in range(max(names) + 1)]
        # frequent words side by side: looked up a third faster
        self._ids = {entry: number for number, entry in enumerate(self.entries)}
        line_end = LINE_END if LINE_END in ids else byte_signs()[ord(LINE_END)]
        self.start_id = ids[options.get("start", line_end)]
        eos = options.get("eos", None if kind in ("character", "byte") else line_end)
        self.eos_id = None if eos is None else ids[eos]
        self.unk_id = ids.get(UNK)
        self.sos_id = ids[SOS] if options.get("sos") else None
        self.fingerprint = self._compute_fingerprint()

    def _compute_fingerprint(self) -> str:
        """Compute the sha256 of the entries in their order; of BPE and unigram models, of all that ids depend on."""
        if self.kind == "word":
            entries = ["<eos>" if entry == LINE_END else entry for entry in self.entries]
        elif self.kind == "character":
            entries = self.entries
        elif self.kind == "byte":
            entries = []
        else:
            options = sorted(self.options.items())
            entries = [str(options), self.backend.to_str()]
        content = "\0".join((self.kind, *entries))
        return hashlib.sha256(content.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.entries)

    def cut(self, text: str) -> Sequence[str]:
        """Cut a text into words or characters; a newline is one of them."""
        if self.lowercase:
            text = text.lower()
        if self.kind == "character":
            return text
        if self.options["split"] == "punctuation":
            return _PUNCTUATION.findall(text)
        *lines, last = text.split("\n")
        start = [] if self.sos_id is None else [SOS]
        words = []
        for line in lines:
            words += [*start, *line.split(), LINE_END]
        if last:  # nothing begins after the last newline
            words += [*start, *last.split()]
        return words

    def encode(self, text: str) -> list[int]:
        """Encode a text; nothing is appended."""
        if self.kind == "byte":
            return list(self._to_bytes(text))
        if self.kind != "bpe":
            return list(map(self._ids.get, self.cut(text), repeat(self._ids[UNK])))
        encoded = []
        lines = mended(text).split("\n")
        for encoding in self.backend.encode_batch_fast(lines, add_special_tokens=False):
            encoded += encoding.ids
            encoded.append(self.start_id)
        return encoded[:-1]

    def encode_array(self, text: str, dtype: np.dtype[Any]) -> np.ndarray:
        """Encode a text as an array; see `encode`."""
        if self.kind == "byte":
            content = self._to_bytes(text)
            return np.frombuffer(content, np.uint8).astype(dtype)
        return np.array(self.encode(text), dtype)

    def _to_bytes(self, text: str) -> bytes:
        """Return the bytes of a text; lone surrogates stand for the bytes that Python's `surrogateescape` made them from."""
        if self.lowercase:
            text = text.lower()
        try:
            return text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # halves that stand for no byte
            return mended(text).encode()

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids: words have single spaces between; `<unk>` among characters and what is not UTF-8 become U+FFFD.

        Raises InputError for an id that the vocabulary has not.
        """
        size = len(self)
        bad = [i for i in ids if not 0 <= i < size]
        if bad:
            raise InputError(f"token id {bad[0]} is not in this vocabulary of {size:,} entries (ids 0 to {size - 1})")
        return self.backend.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        text = self.backend.to_str()
        (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8", newline="\n")
        meta = {"kind": self.kind, "fingerprint": self.fingerprint, **self.options}
        write_checked(folder / META_FILE, meta)


class PretrainedTokenizer(Tokenizer):
    """The tokenizer of a pretrained model. `start`: the mark that opens or ends its texts, context of the first token.

    A long text is cut after line ends that have no other white space around them: tokens of GPT-2 and its like go over no
    such border, and a tokenizer that puts a mark before a text puts it there, too. No special token is added.
    """

    def __init__(self, backend: Backend, kind: str = "pretrained", *, start: str, eos: str | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        super().__init__(backend, kind, start=start, eos=eos)

    def encode(self, text: str) -> list[int]:
        pieces = cut_lines(mended(text))
        encoded = []
        for encoding in self.backend.encode_batch_fast(pieces, add_special_tokens=False):
            encoded += encoding.ids
        return encoded


def cut_lines(text: str) -> list[str]:
    """Cut a text into pieces that end with a line, each of many characters."""
    ends = [0]
    for match in _LINE_BORDER.finditer(text):
        if match.end() - ends[-1] >= _PIECE:
            ends.append(match.end())
    return [text[start:end] for start, end in pairwise([*ends, len(text)]) if start < end]


def byte_signs() -> list[str]:
    """List the character that stands for each byte in byte-level BPE."""
    printable = {*range(33, 127), *range(161, 173), *range(174, _BYTES)}
    unused = count(_BYTES)
    return [chr(byte if byte in printable else next(unused)) for byte in range(_BYTES)]


def rank_entries(
    counts: Mapping[str, int],
    min_count: int = 1,
    max_vocabulary: int | None = None,
    marks: Sequence[str] = (),
) -> list[str]:
    """Rank the entries of a vocabulary of words or characters, most frequent first, ties alphabetically.

    Args:
        counts: of each entry in the training text.
        min_count: rarer entries are left out, and counted as `<unk>`.
        max_vocabulary: the most entries; the rarest beyond it are left out, too. None: all stay.
        marks: entries that always stay, beside `<unk>` and newline.

    Returns:
        The entries in the order of their ids.
    """
    marks = (UNK, LINE_END, *marks)  # always stay
    frequent = {entry: count for entry, count in counts.items() if count >= min_count and entry not in marks}
    ranked = sort_by_count(frequent)
    if max_vocabulary is not None:
        ranked = ranked[: max_vocabulary - len(marks)]
    totals = {entry: counts.get(entry, 0) for entry in (*ranked, *marks)}
    totals[UNK] += sum(counts.values()) - sum(totals.values())
    return sort_by_count(totals)


def sort_by_count(counts: Mapping[str, int]) -> list[str]:
    """Sort entries, most frequent first, ties alphabetically."""
    return sorted(counts, key=lambda entry: (-counts[entry], entry))


def build_words(
    entries: Sequence[str], *, lowercase: bool = False, split: Split = "whitespace", sos: bool = False
) -> Tokenizer:
    """Build a tokenizer of words.

    Args:
        entries: words in the order of their ids, `<unk>` and newline (`<eos>`) among them.
        lowercase: texts are written in lower case.
        split: what is a word. `whitespace`: all between white space; `punctuation`: runs of letters and digits, and single
            punctuation marks.
        sos: the entry `<sos>` stands before every line, as in the code of Transformer-MoS.

    Returns:
        The tokenizer.

    Raises:
        InputError: `<unk>` or newline is not among the entries.
    """
    backend = Backend(_number_entries(entries))
    steps = [normalizers.Replace(_SEPARATORS, " ")]
    options = {"lowercase": lowercase, "split": split}
    begin = Regex(r"\A")
    spaced = [decoders.Replace(begin, " "), decoders.Fuse()]  # with a space before each word
    if sos:
        begins = Regex(r"\A(?=[\s\S])|(?<=\n)(?=[\s\S])")
        steps.append(normalizers.Replace(begins, f"{SOS} "))
        units = Regex(r"\n|\S+")
        backend.pre_tokenizer = pre_tokenizers.Split(units, "removed", invert=True)
        spaced.append(decoders.Replace(f" {SOS}", ""))
        options["sos"] = True
    elif split == "whitespace":
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        backend.pre_tokenizer = pre_tokenizers.Split(_PUNCTUATION_OF_BACKEND, "removed", invert=True)
    lines = [decoders.Replace(" \n", "\n"), decoders.Replace("\n ", "\n"), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([*spaced, *lines])
    return _wrap_backend(backend, "word", LINE_END, steps, **options)


def build_characters(entries: Sequence[str], *, lowercase: bool = False) -> Tokenizer:
    """Build a tokenizer of characters (code points) in the order of their ids, `<unk>` and newline among them."""
    backend = Backend(_number_entries(entries))
    character = Regex(r"[\s\S]")
    backend.pre_tokenizer = pre_tokenizers.Split(character, "isolated")
    unknown = decoders.Replace(UNK, "\N{REPLACEMENT CHARACTER}")
    backend.decoder = decoders.Sequence([unknown, decoders.Fuse()])
    return _wrap_backend(backend, "character", LINE_END, lowercase=lowercase)


def build_bytes(*, lowercase: bool = False) -> Tokenizer:
    """Build a tokenizer of the 256 byte values of UTF-8 text; nothing is unknown."""
    signs = byte_signs()
    ids = {sign: byte for byte, sign in enumerate(signs)}
    backend = Backend(models.BPE(ids, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    start = signs[ord(LINE_END)]
    return _wrap_backend(backend, "byte", start, lowercase=lowercase)


def train_bpe(texts: Iterable[str], *, size: int = DEFAULT_BPE_SIZE, lowercase: bool = False) -> Tokenizer:
    """Train byte-level BPE: newline (`<eos>`), the 256 byte values and the most frequent merges.

    The same texts give the same entries. Nothing is unknown: what is not lower-cased comes back exactly as it went in.

    Args:
        texts: the training text, in parts.
        size: the most entries.
        lowercase: texts are written in lower case.

    Returns:
        The tokenizer.
    """
    lines = _split_lines(texts, lowercase)
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained = train_byte_bpe(lines, size, pre_tokenizer, [LINE_END])
    backend = Backend(trained.model)
    backend.pre_tokenizer = trained.pre_tokenizer
    return wrap_bpe(backend, lowercase=lowercase)


def wrap_bpe(backend: Backend, *, lowercase: bool = False) -> Tokenizer:
    """Wrap a trained byte-level BPE as a tokenizer."""
    backend.decoder = decoders.ByteLevel()
    return _wrap_backend(backend, "bpe", LINE_END, lowercase=lowercase)


def _split_lines(texts: Iterable[str], lowercase: bool) -> Iterator[str]:
    """Yield the lines of texts that are not empty."""
    for text in texts:
        if lowercase:
            text = text.lower()
        for line in mended(text).split("\n"):
            if line:
                yield line


def train_byte_bpe(lines: Iterable[str], size: int, pre_tokenizer: Any, marks: Sequence[str] = ()) -> Backend:
    """Train byte-level BPE: marks, the 256 byte values, and the most frequent merges, each seen at least twice.

    Args:
        lines: the training text.
        size: the most entries.
        pre_tokenizer: of the package tokenizers; it cuts lines into words, which merges do not cross.
        marks: special entries, the first ids.

    Returns:
        The trained tokenizer, without a decoder.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return train_merges(lines, pre_tokenizer, vocab_size=size, special_tokens=list(marks), initial_alphabet=alphabet)


def train_merges(lines: Iterable[str], pre_tokenizer: Any, **options: Any) -> Backend:
    """Train BPE with merges that are seen at least twice.

    Args:
        lines: the training text.
        pre_tokenizer: of the package tokenizers; it cuts lines into words, which merges do not cross.
        **options: further arguments of `tokenizers.trainers.BpeTrainer`.

    Returns:
        The trained tokenizer, without a decoder.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(min_frequency=2, show_progress=False, **options)
    backend.train_from_iterator(lines, trainer)
    return backend


def read_merges(backend: Backend) -> list[tuple[str, str]]:
    """Read the merges of a trained BPE."""
    merges = parse_json(backend.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def _number_entries(entries: Sequence[str]) -> models.WordLevel:
    for mark in (UNK, LINE_END):
        if mark not in entries:
            raise InputError(f"a vocabulary has the entries {UNK} and newline (the end of a line), this lacks {mark!r}")
    ids = {entry: number for number, entry in enumerate(entries)}
    return models.WordLevel(ids, unk_token=UNK)


def _wrap_backend(backend: Backend, kind: str, start: str, steps: Sequence[Any] = (), **options: Any) -> Tokenizer:
    """Wrap a backend as a tokenizer; a text begins with the token that our models read first.

    `steps` of the normalizer come after lower case.
    """
    lower = LOWER if options["lowercase"] else []
    backend.normalizer = normalizers.Sequence([*lower, *steps])
    start_id = backend.token_to_id(start)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start}:0 $A:0", pair=f"{start}:0 $A:0 $B:1", special_tokens=[(start, start_id)]
    )
    if start == LINE_END and not options.get("sos"):
        line_end = AddedToken(LINE_END, special=False, normalized=True)
        backend.add_tokens([line_end])
    return Tokenizer(backend, kind, **options)
