"""The files of prepared sentence pairs, and reading them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.core.errors import RunError
from fullrank.data.build import id_type
from fullrank.data.language import Language
from fullrank.data.pair_lines import SIDES


@dataclass(frozen=True)
class PairSplit:
    """One split: how many `pairs`; of each side its `tokens` (with one `<eos>` a sentence), `words` and tokens `unknown`
    to the vocabulary; the `sha256` of each of its files."""

    pairs: int
    source_tokens: int
    target_tokens: int
    source_words: int
    target_words: int
    source_unknown: int
    target_unknown: int
    sha256: dict[str, str]


def raw_file(folder: Path, split: str, side: str) -> Path:
    """The lines as they were given, where Moses changed them."""
    return folder / f"{split}.{side}.raw.txt"


def text_file(folder: Path, split: str, side: str) -> Path:
    """The lines as they were encoded: tokenized and in lower case where the corpus is so."""
    return folder / f"{split}.{side}.txt"


def ids_file(folder: Path, split: str, side: str) -> Path:
    return folder / f"{split}.{side}.bin"


def offsets_file(folder: Path, split: str, side: str) -> Path:
    """int64: sentence i is ids[offsets[i] : offsets[i + 1]]."""
    return folder / f"{split}.{side}.offsets"


class Pairs:
    """The encoded sentences of a split, memory-mapped: sentence i of the one side is a translation of i of the other.

    `source(i)`, `target(i)`: token ids without `<eos>`; none for an empty line.
    """

    def __init__(self, folder: Path, split: str, languages: tuple[Language, Language]) -> None:
        self._folder, self.split, self._languages = folder, split, languages
        self._ids, self._offsets = [], []
        for side, language in zip(SIDES, languages, strict=True):
            self._ids.append(_mapped(ids_file(folder, split, side), id_type(len(language))))
            self._offsets.append(_mapped(offsets_file(folder, split, side), np.dtype("<i8")))
        if len(self._offsets[0]) != len(self._offsets[1]):
            raise RunError(f"{folder}: the two sides of {split} have different numbers of sentences")

    def __len__(self) -> int:
        return len(self._offsets[0]) - 1

    @property
    def source_eos_id(self) -> int:
        return self._languages[0].eos_id

    @property
    def target_eos_id(self) -> int:
        return self._languages[1].eos_id

    def source(self, i: int) -> np.ndarray:
        return self._sentence(0, i)

    def target(self, i: int) -> np.ndarray:
        return self._sentence(1, i)

    def _sentence(self, side: int, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"pair {i} of {len(self)}")
        start, end = self._offsets[side][i : i + 2]
        return self._ids[side][start:end]

    @cached_property
    def source_lengths(self) -> np.ndarray:
        """(pairs,) int64: tokens of each source sentence, without `<eos>`."""
        return np.diff(self._offsets[0])

    @cached_property
    def target_lengths(self) -> np.ndarray:
        """(pairs,) int64: tokens of each target sentence, without `<eos>`."""
        return np.diff(self._offsets[1])

    def sources(self) -> list[str]:
        """The source lines as ordinary text, what `Language.encode` takes."""
        return self._texts(0)

    def references(self) -> list[str]:
        """The target lines as ordinary text, what BLEU compares with `Language.decode`; in lower case if the corpus is."""
        return self._texts(1)

    def source_tokens(self) -> list[str]:
        """The source lines as they were encoded: tokenized where the corpus is, words not split."""
        return self._read(text_file(self._folder, self.split, SIDES[0]))

    def reference_tokens(self) -> list[str]:
        """The target lines as they were encoded, what tokenized BLEU compares with `Language.tokens`."""
        return self._read(text_file(self._folder, self.split, SIDES[1]))

    def _texts(self, side: int) -> list[str]:
        language, raw = self._languages[side], raw_file(self._folder, self.split, SIDES[side])
        if raw.exists():
            found = self._read(raw)
            return [line.lower() for line in found] if language.lowercase else found
        return [language.detokenized(line) for line in self._read(text_file(self._folder, self.split, SIDES[side]))]

    @staticmethod
    def _read(path: Path) -> list[str]:
        return path.read_bytes().decode("utf-8").split("\n")[:-1]


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if path.stat().st_size == 0:  # no token at all: nothing can be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
