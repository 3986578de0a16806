"""The data section of a configuration: a corpus, and how its text becomes token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fullrank.core.section import Allowed, Count, Section, key

# corpora of sentence pairs, for translation; all others are text for language models
PAIR_CORPORA = ("parallel", "multi30k-de-en", "iwslt14-de-en", "wmt16-en-de", "synthetic-translation")
Ratio = Annotated[float, Allowed("longer side over shorter side, so 1 or more", lambda x: x >= 1)]
# tokens of text where `data.tokens` is null; a corpus of one's own says its own
USUAL_TOKENS = dict.fromkeys(("builtin", "text", "ptb", "wikitext-2", "wikitext-103", "lm1b"), "word") | {
    "enwik8": "byte"
}
_PAIRS, _TEXT = "content=sentence pairs", "content=text"


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """A corpus and how its text becomes token ids. `null` means: what is usual for the corpus.

    `parallel` and the named corpora of sentence pairs are for translation: a file for each language, a sentence a line.
    `concatenate` joins neighbouring sentences, source with source and target with target, while neither side has more than
    so many tokens (Mixhead §4.2, sequences of about 240 tokens). The paper does not say whether the test set was joined
    too; here every split is, so that a model is measured on lengths that it was trained on.
    """

    KEY = "data"
    DECIDED_BY: ClassVar = {"content": "data.name"}
    name: str = key(
        "",
        "a corpus by name; left out: builtin, with files of one's own text, or parallel for two languages",
        needs={"text": "train", "parallel": "train, source, target"},
    )
    train: str | list[str] | None = key(
        None, "files of the training split; parallel: a prefix of two files", needs="name=text|parallel"
    )
    valid: str | list[str] | None = key(None, "the same of the validation split", needs="name=text|parallel")
    test: str | list[str] | None = key(None, "the same of the test split", needs="name=text|parallel")
    source: str | None = key(None, "the suffix of the files of the source language, such as `de`", needs=_PAIRS)
    target: str | None = key(None, "the suffix of the files of the target language", needs=_PAIRS)
    tokens: Literal["word", "byte", "character", "bpe", "unigram"] | None = key(
        None, "the unit of text", needs={"byte": _TEXT, "character": _TEXT, "unigram": _PAIRS}
    )
    vocabulary: Literal["joint", "separate"] | None = key(None, "one for both languages, or one for each", needs=_PAIRS)
    codes: str | None = key(
        None,
        "a file of BPE merges by subword-nmt, instead of learning them",
        needs=f"{_PAIRS}, tokens=null|bpe, max_vocabulary=null",
    )
    moses: bool | None = key(None, "tokens by the Moses rules, undone in translations", needs=_PAIRS)
    dir: str | None = key(None, "a local folder that holds the corpus")
    cache: str | None = key(None, "where prepared corpora are kept; null: $FULLRANK_CACHE or ~/.cache/fullrank")
    lowercase: bool = key(False, "lower all letters")
    sos: bool = key(False, "begin every line of words with <sos>, as the code of Transformer-MoS does", needs=_TEXT)
    min_count: Count | None = key(None, "rarer words and characters become <unk>; null: 1, for builtin words 3")
    max_vocabulary: Count | None = key(None, "keep the most frequent; bpe and unigram: the number of entries")
    documents: str | None = key(
        None,
        "the token between documents of a text, or `line`: no token sees another document, positions restart",
        needs="task=language_model, model.memory_length=0",
    )
    max_tokens: Count | None = key(None, "use only the beginning of the training split", needs=_TEXT)
    max_length: Count | None = key(None, "words; training pairs with a longer side are dropped", needs=_PAIRS)
    max_ratio: Ratio | None = key(None, "longer over shorter side; training pairs above it are dropped", needs=_PAIRS)
    concatenate: Count | None = key(
        None, "join neighbouring sentences while neither side has more tokens than this", needs=_PAIRS
    )

    def _resolve(self) -> None:
        if not self.name:
            own, two = any((self.train, self.valid, self.test)), self.source is not None or self.target is not None
            self._set("name", "parallel" if own and two else "text" if own else "builtin")

    @property
    def has_pairs(self) -> bool:
        """The corpus is one of sentence pairs."""
        return self.name in PAIR_CORPORA

    @property
    def content(self) -> str:
        """The content of the corpus: text or sentence pairs."""
        return "sentence pairs" if self.has_pairs else "text"

    def _faults(self) -> Iterator[str]:
        if not self.has_pairs:
            yield from self.problems_of_tokens(self.tokens or USUAL_TOKENS.get(self.name, ""))
            return
        kind = self.tokens or ("word" if self.name == "synthetic-translation" else "bpe")
        if self.source is not None and self.source == self.target:
            yield f"data.target: another language than data.source, given '{self.target}' for both"
        if self.min_count is not None and kind != "word":
            yield f"data.min_count: for data.tokens: word, given {self.min_count} with {kind}"
        is_separate = self.vocabulary == "separate" or (self.vocabulary is None and self.name == "iwslt14-de-en")
        if self.codes is None:
            yield from self._problems_of_size({"word": 3, "bpe": 0 if is_separate else 258}.get(kind, 0), kind)

    def problems_of_tokens(self, kind: str) -> Iterator[str]:
        """Lines about keys that a kind of tokens of text has no use for."""
        if (self.min_count or 1) > 1 and kind in ("byte", "bpe"):
            yield f"data.min_count: nothing is rare or unknown with data.tokens: {kind}; set it to null, given {self.min_count}"
        if self.sos and kind != "word":
            yield f"data.sos: <sos> begins lines of words, and data.tokens is {kind}; set it to word, or data.sos to false"
        if kind == "byte" and self.max_vocabulary is not None:
            yield f"data.max_vocabulary: byte tokens have 256 entries; set it to null, given {self.max_vocabulary}"
        least = {
            "word": 3 + self.sos,
            "character": 3,
            "bpe": 257,
        }  # with <unk> and the end of a line; no byte is unknown
        yield from self._problems_of_size(least.get(kind, 0), kind)

    def _problems_of_size(self, least: int, kind: str) -> Iterator[str]:
        if self.max_vocabulary is not None and self.max_vocabulary < least:
            yield (
                f"data.max_vocabulary: at least {least} for data.tokens: {kind}, marks and single bytes included, given "
                f"{self.max_vocabulary}"
            )
