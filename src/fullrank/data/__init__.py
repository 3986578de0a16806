"""Text, sentence pairs and tasks, from files to batches.

`tokenizers` and `language`: text to ids. `corpora`, `builtin` and `invented`: their source files.
`preparation` prepares a corpus once, pairs by `pairs`; `prepared` keeps it. `batches` and `padded_batches` need torch. `tasks`:
GLUE and SQuAD.
"""

from fullrank.config.run import CorpusInfo, register_corpus
from fullrank.data.language import Language
from fullrank.data.preparation import encode_file, prepare
from fullrank.data.prepared import (
    Corpus,
    Pairs,
    load_corpus,
    load_language,
    load_tokenizer,
    unigram_nats,
    unigram_perplexity,
)
from fullrank.data.tokenizers import Tokenizer, build_bytes, build_characters, build_words, rank_entries, train_bpe

__all__ = [
    "Corpus",
    "CorpusInfo",
    "Language",
    "Pairs",
    "Tokenizer",
    "build_bytes",
    "build_characters",
    "build_words",
    "encode_file",
    "load_corpus",
    "load_language",
    "load_tokenizer",
    "prepare",
    "rank_entries",
    "register_corpus",
    "train_bpe",
    "unigram_nats",
    "unigram_perplexity",
]  # fmt: skip
