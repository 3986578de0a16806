"""Byte-level BPE by Hugging Face `tokenizers`: trained on the training split, and nothing is unknown to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fullrank.core.errors import InputError, RunError
from fullrank.data.entries import EOS, SOS, check_ids
from fullrank.data.vocab_files import save_meta

DEFAULT_SIZE = 10_000
_BYTES = 256
_FILE = "tokenizer.json"


class BpeTokenizer:
    """A trained byte-level BPE. `line_end`: a newline is `<eos>`; otherwise it is encoded as text. `line_start`: `<sos>`
    stands before every line.

    Text that is not lower-cased comes back exactly as it went in (a literal `<eos>` comes back as a newline).
    """

    kind = "bpe"

    def __init__(
        self, backend: Any, *, lowercase: bool = False, line_end: bool = True, line_start: bool = False
    ) -> None:
        self._backend = backend
        self.lowercase, self.line_end, self.line_start = lowercase, line_end, line_start
        eos = backend.token_to_id(EOS)
        if eos is None:
            raise InputError(f"a BPE tokenizer needs the special token {EOS}: it is the context of the first token")
        self.start_id: int = eos
        self.eos_id: int | None = eos
        self.sos_id: int | None = backend.token_to_id(SOS) if line_start else None
        if line_start and (self.sos_id is None or not line_end):
            raise InputError(f"lines that begin with {SOS} need it as a special token, and end in {EOS}")
        self.fingerprint = hashlib.sha256(backend.to_str().encode()).hexdigest()

    def backend_state(self) -> str:
        """What Hugging Face `tokenizers` restores its part from; lines and lower case are not in it."""
        return str(self._backend.to_str())

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        if self.lowercase:
            text = text.lower()
        lines = text.split("\n")
        if not self.line_end:  # a newline stays with the line that it ends
            lines = [line + "\n" for line in lines[:-1]] + lines[-1:]
        last = len(lines) - 1
        ids: list[int] = []
        for place, encoding in enumerate(self._backend.encode_batch_fast(lines, add_special_tokens=False)):
            if place and self.line_end:
                ids.append(self.start_id)
            begins = place < last or bool(lines[last])  # after the last newline of a text no line begins
            if self.sos_id is not None and begins:
                ids.append(self.sos_id)
            ids.extend(encoding.ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, len(self))
        lines: list[list[int]] = [[]]
        for i in ids:
            if i == self.start_id:
                lines.append([])
            elif i != self.sos_id:
                lines[-1].append(int(i))
        return "\n".join(self._backend.decode_batch(lines, skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """`tokenizer.json` in the format of Hugging Face `tokenizers`, and `vocabulary.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(self._backend.to_str(), encoding="utf-8", newline="\n")
        options = {"lowercase": self.lowercase, "line_end": self.line_end}
        if self.line_start:
            options["line_start"] = True
        save_meta(folder, self.kind, len(self), self.fingerprint, options)


def train_bpe(
    texts: Iterable[str],
    *,
    size: int = DEFAULT_SIZE,
    lowercase: bool = False,
    line_end: bool = True,
    line_start: bool = False,
) -> BpeTokenizer:
    """At most `size` entries: `<eos>` (and `<sos>`), the 256 byte values, and the most frequent merges, each seen at least
    twice.

    The same texts give the same entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    marks = [EOS, SOS] if line_start else [EOS]
    if size < _BYTES + len(marks):
        raise InputError(
            f"data.max_vocabulary: at least {_BYTES + len(marks)} for data.tokens=bpe (256 bytes and {' and '.join(marks)}), "
            f"given {size}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=marks,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
    )  # fmt: skip
    lines = (line for text in texts for line in (text.lower() if lowercase else text).split("\n") if line)
    backend.train_from_iterator(lines, trainer)
    return BpeTokenizer(backend, lowercase=lowercase, line_end=line_end, line_start=line_start)


def load_bpe(folder: Path, *, lowercase: bool, line_end: bool, line_start: bool) -> BpeTokenizer:
    """The tokenizer saved in `folder`; RunError if its file is damaged."""
    from tokenizers import Tokenizer

    text = (folder / _FILE).read_text(encoding="utf-8")
    try:
        backend = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise RunError(f"{folder / _FILE}: damaged ({error})") from error
    return BpeTokenizer(backend, lowercase=lowercase, line_end=line_end, line_start=line_start)
