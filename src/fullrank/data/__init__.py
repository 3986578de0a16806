"""Text, sentence pairs and tasks, from files to batches.

`tokenizers` and `language`: text to ids. `corpora`, `builtin` and `invented`: their source files.
`preparation` prepares a corpus once, pairs by `pairs`; `prepared` keeps it. `batches` and `padded_batches` need torch. `tasks`:
GLUE and SQuAD.
"""

from fullrank.config.run import CorpusInfo as CorpusInfo
from fullrank.config.run import register_corpus as register_corpus
from fullrank.data.language import Language as Language
from fullrank.data.preparation import encode_file as encode_file
from fullrank.data.preparation import prepare as prepare
from fullrank.data.prepared import Corpus as Corpus
from fullrank.data.prepared import Pairs as Pairs
from fullrank.data.prepared import load_corpus as load_corpus
from fullrank.data.prepared import load_language as load_language
from fullrank.data.prepared import load_tokenizer as load_tokenizer
from fullrank.data.prepared import unigram_nats as unigram_nats
from fullrank.data.prepared import unigram_perplexity as unigram_perplexity
from fullrank.data.tokenizers import Tokenizer as Tokenizer
from fullrank.data.tokenizers import build_bytes as build_bytes
from fullrank.data.tokenizers import build_characters as build_characters
from fullrank.data.tokenizers import build_words as build_words
from fullrank.data.tokenizers import rank_entries as rank_entries
from fullrank.data.tokenizers import train_bpe as train_bpe
