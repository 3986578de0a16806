"""How sentence pairs become token ids: what the configuration leaves open, as is usual for the corpus."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError
from fullrank.data.files import file_digest
from fullrank.data.known import CorpusInfo
from fullrank.data.pair_lines import PairFiles
from fullrank.data.tokenizers import DEFAULT_BPE_SIZE


@dataclass(frozen=True)
class PairSettings:
    """How sentence pairs become token ids; every choice made.

    `segmenter`: `word`; `byte_bpe`, BPE over bytes, to which nothing is unknown; `codes`, BPE over characters as
    subword-nmt has it; `unigram`. `size`: entries of a vocabulary, merges of codes that are learned.
    """

    languages: tuple[str, str]
    tokens: str
    segmenter: Literal["word", "byte_bpe", "codes", "unigram"]
    codes: str | None  # sha256 of the file
    vocabulary: Literal["joint", "separate"]
    lowercase: bool
    moses: bool
    min_count: int
    size: int | None
    max_length: int | None
    max_ratio: float | None
    concatenate: int | None
    concatenate_splits: Literal["all", "train"]


@dataclass(frozen=True)
class _Usual:
    vocabulary: Literal["joint", "separate"] = "joint"
    lowercase: bool = False
    moses: bool | None = False  # None: where the files are tokenized
    size: int = DEFAULT_BPE_SIZE
    max_length: int | None = None
    max_ratio: float | None = None


_USUAL = {
    "parallel": _Usual(),
    "multi30k-de-en": _Usual(),
    "iwslt14-de-en": _Usual("separate", lowercase=True, moses=True, max_length=175, max_ratio=1.5),
    "synthetic-translation": _Usual("separate"),
    "wmt16-en-de": _Usual(moses=None, size=32_000),
}


def pair_settings(config: DataConfig, info: CorpusInfo, files: PairFiles) -> PairSettings:
    """Every `null` resolved; InputError for choices that do not go together.

    BPE is by the codes of `files` if there are any. Else one vocabulary for both languages is byte-level BPE, and where each
    has its own, merges are learned from both together and each language has the pieces that its training text uses.
    """
    usual = _USUAL[info.name]
    tokens = config.tokens or info.tokens
    vocabulary = config.vocabulary or usual.vocabulary
    size = config.max_vocabulary
    codes = files.codes if tokens == "bpe" else None
    segmenter: Literal["word", "byte_bpe", "codes", "unigram"]
    if tokens == "bpe":
        segmenter = "codes" if codes is not None or vocabulary == "separate" else "byte_bpe"
    else:
        segmenter = "unigram" if tokens == "unigram" else "word"
    if segmenter == "word":
        if size is not None and size <= 2:
            raise InputError(f"data.max_vocabulary: more than 2 (<eos> and <unk>), given {size}")
    else:
        size = None if codes is not None else size or usual.size
    tokenized = any(split.tokenized for split in files.splits.values())
    moses = tokenized if usual.moses is None else usual.moses
    return PairSettings(
        languages=files.languages,
        tokens=tokens,
        segmenter=segmenter,
        codes=None if codes is None else file_digest(codes, "data.codes"),
        vocabulary=vocabulary,
        lowercase=config.lowercase or usual.lowercase,
        moses=moses if config.moses is None else config.moses,
        min_count=config.min_count or 1,
        size=size,
        max_length=config.max_length or usual.max_length,
        max_ratio=config.max_ratio or usual.max_ratio,
        concatenate=config.concatenate,
        concatenate_splits=config.concatenate_splits or "all",
    )


def choices(settings: PairSettings) -> dict[str, Any]:
    """The settings as plain values."""
    return {**dataclasses.asdict(settings), "languages": list(settings.languages)}
