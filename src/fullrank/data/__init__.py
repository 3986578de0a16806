"""Text to batches: `vocab` (tokenizers), `corpus` (prepared corpora on disk), `stream` (blocks and parallel streams)."""

from fullrank.data.bpe import BpeTokenizer, train_bpe
from fullrank.data.build import Split
from fullrank.data.corpus import Corpus, load_corpus, prepare
from fullrank.data.known import CorpusInfo, known_corpora
from fullrank.data.masking import MaskedBatch, MaskedBatches, Masking, masked_blocks
from fullrank.data.stream import Batch, Blocks, Streams, Windows
from fullrank.data.unigram import unigram_nats, unigram_perplexity
from fullrank.data.vocab import ByteVocabulary, CharacterVocabulary, Tokenizer, WordVocabulary, load_tokenizer

__all__ = [
    "Batch",
    "Blocks",
    "BpeTokenizer",
    "ByteVocabulary",
    "CharacterVocabulary",
    "Corpus",
    "CorpusInfo",
    "MaskedBatch",
    "MaskedBatches",
    "Masking",
    "Split",
    "Streams",
    "Tokenizer",
    "Windows",
    "WordVocabulary",
    "known_corpora",
    "load_corpus",
    "load_tokenizer",
    "masked_blocks",
    "prepare",
    "train_bpe",
    "unigram_nats",
    "unigram_perplexity",
]
