"""Text, sentence pairs and tasks, from files to batches.

`tokenizers` and `language`: text to ids. `corpora`, `sources` and `builtin`: known corpora and their source files.
`preparation` prepares a corpus once, by `texts` and `pairs`; `prepared` keeps it. `batches`, `masked`, `pair_batches` and
`examples` make batches. `glue` and `squad`: tasks to fine-tune on. Batches need torch, imported with the first of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fullrank.data.corpora import CorpusInfo, known_corpora
from fullrank.data.language import Language, load_language
from fullrank.data.preparation import prepare
from fullrank.data.prepared import Corpus, Pairs, load_corpus, unigram_nats, unigram_perplexity
from fullrank.data.texts import encode_file
from fullrank.data.tokenizers import (
    BpeTokenizer,
    ByteVocabulary,
    CharacterVocabulary,
    Tokenizer,
    WordVocabulary,
    load_tokenizer,
    train_bpe,
)

if TYPE_CHECKING:
    from fullrank.data.batches import Batch, Blocks, Share, Streams
    from fullrank.data.masked import MaskedBatch, MaskedBatches, Masking, masked_blocks
    from fullrank.data.pair_batches import PairBatch, PairBatches, pair_batch

_BATCHES = {
    **dict.fromkeys(("Batch", "Blocks", "Share", "Streams"), "batches"),
    **dict.fromkeys(("MaskedBatch", "MaskedBatches", "Masking", "masked_blocks"), "masked"),
    **dict.fromkeys(("PairBatch", "PairBatches", "pair_batch"), "pair_batches"),
}

__all__ = [
    "Batch",
    "Blocks",
    "BpeTokenizer",
    "ByteVocabulary",
    "CharacterVocabulary",
    "Corpus",
    "CorpusInfo",
    "Language",
    "MaskedBatch",
    "MaskedBatches",
    "Masking",
    "PairBatch",
    "PairBatches",
    "Pairs",
    "Share",
    "Streams",
    "Tokenizer",
    "WordVocabulary",
    "encode_file",
    "known_corpora",
    "load_corpus",
    "load_language",
    "load_tokenizer",
    "masked_blocks",
    "pair_batch",
    "prepare",
    "train_bpe",
    "unigram_nats",
    "unigram_perplexity",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _BATCHES:
        raise AttributeError(f"module 'fullrank.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fullrank.data.{_BATCHES[name]}"), name)
