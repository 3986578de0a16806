"""The data section of a configuration: a corpus, and how its text becomes token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullrank.core.config import COUNTS, Strict, check_numbers, raise_problems

# corpora of sentence pairs, for translation; all others are text for language models
PAIR_CORPORA = ("parallel", "multi30k-de-en", "iwslt14-de-en", "wmt16-en-de", "synthetic-translation")
_PAIRS_ONLY = (
    "source", "target", "vocabulary", "codes", "moses", "max_length", "max_ratio", "concatenate", "concatenate_splits",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataConfig(Strict):
    """A corpus and how its text becomes token ids. `null` means: what is usual for the corpus.

    `parallel` and the named corpora of sentence pairs are for translation: a file for each language, a sentence a line.
    `concatenate` joins neighbouring sentences, source with source and target with target, while neither side has more than
    so many tokens (Mixhead §4.2, sequences of about 240 tokens). The paper does not say whether the test set was joined
    too; `concatenate_splits: all` joins every split, so that a model is measured on lengths that it was trained on.
    """

    name: str = "builtin"
    train: str | list[str] | None = None  # `name: text`: files of each split; `name: parallel`: a prefix of two files
    valid: str | list[str] | None = None
    test: str | list[str] | None = None
    source: str | None = None  # of sentence pairs: the suffix of the files of the source language, such as `de`
    target: str | None = None
    tokens: Literal["word", "byte", "character", "bpe", "unigram"] | None = None
    vocabulary: Literal["joint", "separate"] | None = None  # of sentence pairs: one for both languages, or one for each
    codes: str | None = None  # ... a file of BPE merges by subword-nmt, instead of learning them
    moses: bool | None = None  # ... tokenized with the Moses rules, and translations put together again
    dir: str | None = None  # a local folder that holds the corpus
    cache: str | None = None  # where prepared corpora are kept; null: $FULLRANK_CACHE or ~/.cache/fullrank
    lowercase: bool = False
    eos: bool | None = None  # append <eos> to every line
    sos: bool = False  # ... and begin every line with <sos>, as the code of Transformer-MoS does
    min_count: int | None = None  # rarer words and characters become <unk>; null: 1, for builtin words 3
    max_vocabulary: int | None = None  # keep the most frequent; for bpe and unigram, the number of entries
    max_tokens: int | None = None  # use only the beginning of the training split
    max_length: int | None = None  # words; training pairs with a longer side are dropped
    max_ratio: float | None = None  # ... and pairs with a side more than so many times as long as the other
    concatenate: int | None = None  # join neighbouring sentences while neither side has more tokens than this
    concatenate_splits: Literal["all", "train"] | None = None  # null: all

    def __post_init__(self) -> None:
        problems: list[str] = []
        counts = ("min_count", "max_vocabulary", "max_tokens", "max_length", "concatenate")
        check_numbers(problems, self, "data", counts, below=COUNTS)
        check_numbers(problems, self, "data", ("max_ratio",))
        if self.max_ratio is not None and 0 < self.max_ratio < 1:
            problems.append(f"data.max_ratio: longer side over shorter side, so 1 or more, given {self.max_ratio}")
        problems += self._unlike_pairs() if self.has_pairs else self._unlike_text()
        raise_problems(problems)

    @property
    def has_pairs(self) -> bool:
        """Whether the corpus is one of sentence pairs."""
        return self.name in PAIR_CORPORA

    def _unlike_text(self) -> list[str]:
        """Keys that a corpus for language models has no use for."""
        pairs = f"a key of sentence pairs (data.name: {', '.join(PAIR_CORPORA)})"
        found = [
            f"data.{key}: {pairs}; leave it out with data.name: {self.name}, given {getattr(self, key)}"
            for key in _PAIRS_ONLY
            if getattr(self, key) is not None
        ]
        if self.tokens == "unigram":
            found.append(
                f"data.tokens: unigram is for sentence pairs; with data.name: {self.name} use word, byte, character or bpe"
            )
        if self.name == "text" and self.train is None:
            found.append("data.train: `data.name: text` needs at least one training file")
        return found

    def _unlike_pairs(self) -> list[str]:
        """Keys that sentence pairs have no use for, or that exclude each other."""
        found: list[str] = []
        if self.name == "parallel":
            found += [
                f"data.{key}: `data.name: parallel` needs the prefix of the files of this split, as in data.{key}: "
                f"corpus/{key} for corpus/{key}.{self.source or 'de'} and corpus/{key}.{self.target or 'en'}"
                for key in ("train", "valid", "test")
                if getattr(self, key) is None
            ]
            found += [
                f"data.{key}: `data.name: parallel` needs the suffix of the files of the {key} language, as in de"
                for key in ("source", "target")
                if getattr(self, key) is None
            ]
        else:
            found += [
                f"data.{key}: the files of {self.name} are known by name; give their folder as data.dir, or use data.name: "
                "parallel"
                for key in ("train", "valid", "test")
                if getattr(self, key) is not None
            ]
        if self.source is not None and self.source == self.target:
            found.append(f"data.target: another language than data.source, given '{self.target}' for both")
        if self.tokens in ("byte", "character"):
            found.append(f"data.tokens: sentence pairs take word, bpe or unigram, given {self.tokens}")
        if self.min_count is not None and self.tokens != "word":
            found.append(
                f"data.min_count: for data.tokens: word; with subwords nothing is rare, given {self.min_count} with "
                f"data.tokens: {self.tokens or 'bpe (the usual)'}"
            )
        if self.codes is not None and self.tokens not in (None, "bpe"):
            found.append(f"data.codes: merges of BPE; set data.tokens: bpe, given {self.tokens}")
        if self.codes is not None and self.max_vocabulary is not None:
            found.append(
                "data.max_vocabulary: the codes file says how many merges there are; leave one of data.codes and "
                "data.max_vocabulary out"
            )
        if self.concatenate_splits is not None and self.concatenate is None:
            found.append("data.concatenate_splits: goes with data.concatenate: N tokens")
        if self.eos is not None:
            found.append(f"data.eos: every sentence of a pair ends in <eos>; leave it out, given {self.eos}")
        if self.sos:
            found.append("data.sos: sentence pairs have no <sos>, a translation begins after <eos>; set it to false")
        if self.max_tokens is not None:
            found.append(f"data.max_tokens: for language models; leave it out with data.name: {self.name}")
        return found
