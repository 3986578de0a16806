"""Text to batches: `vocab` (tokenizers), `corpus` (prepared corpora on disk), `stream` (blocks and parallel streams),
`masking` (text with some tokens masked).

Sentence pairs: `language` (text of one side to ids), `pairs` (prepared corpora), `pair_batches`.
"""

from fullrank.data.build import Split
from fullrank.data.corpus import Corpus, load_corpus, prepare
from fullrank.data.known import CorpusInfo
from fullrank.data.known_tasks import known_corpora
from fullrank.data.language import Language, load_language
from fullrank.data.masking import MaskedBatch, MaskedBatches, Masking, masked_blocks
from fullrank.data.pair_batches import PairBatch, PairBatches, pair_batch
from fullrank.data.pair_store import PairSplit
from fullrank.data.pairs import PairCorpus, Pairs, load_pairs, prepare_pairs
from fullrank.data.stream import Batch, Blocks, Streams, Windows
from fullrank.data.tokenizers import (
    BpeTokenizer,
    ByteVocabulary,
    CharacterVocabulary,
    Tokenizer,
    WordVocabulary,
    load_tokenizer,
    train_bpe,
)
from fullrank.data.unigram import unigram_nats, unigram_perplexity

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
    "PairCorpus",
    "PairSplit",
    "Pairs",
    "Split",
    "Streams",
    "Tokenizer",
    "Windows",
    "WordVocabulary",
    "known_corpora",
    "load_corpus",
    "load_language",
    "load_pairs",
    "load_tokenizer",
    "masked_blocks",
    "pair_batch",
    "prepare",
    "prepare_pairs",
    "train_bpe",
    "unigram_nats",
    "unigram_perplexity",
]
