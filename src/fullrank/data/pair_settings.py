"""How sentence pairs become token ids: what the configuration leaves open, as is usual for the corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullrank.config.schema import DataConfig
from fullrank.data.bpe import DEFAULT_SIZE
from fullrank.data.known import CorpusInfo
from fullrank.data.pair_build import PairSettings
from fullrank.data.parallel import PairFiles
from fullrank.errors import InputError


@dataclass(frozen=True)
class _Usual:
    vocabulary: Literal["joint", "separate"] = "joint"
    lowercase: bool = False
    moses: bool = False
    size: int = DEFAULT_SIZE
    max_length: int | None = None
    max_ratio: float | None = None


_USUAL = {
    "parallel": _Usual(), "multi30k-de-en": _Usual(), "synthetic-translation": _Usual(vocabulary="separate")
}  # fmt: skip


def pair_settings(config: DataConfig, info: CorpusInfo, files: PairFiles) -> PairSettings:
    """Every `null` resolved; InputError for choices that do not go together."""
    usual = _USUAL[info.name]
    kind = config.tokens or info.tokens
    vocabulary = config.vocabulary or usual.vocabulary
    size = config.max_vocabulary
    if kind != "word":
        size = size or usual.size
    elif size is not None and size <= 2:
        raise InputError(f"data.max_vocabulary: more than 2 (<eos> and <unk>), given {size}")
    return PairSettings(
        languages=files.languages,
        kind=kind,
        vocabulary=vocabulary,
        lowercase=config.lowercase or usual.lowercase,
        moses=usual.moses if config.moses is None else config.moses,
        min_count=config.min_count or 1,
        max_vocabulary=size,
        max_length=config.max_length or usual.max_length,
        max_ratio=config.max_ratio or usual.max_ratio,
        concatenate=config.concatenate,
        concatenate_splits=config.concatenate_splits or "all",
    )
