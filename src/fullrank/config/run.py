"""The data and eval sections of a configuration, and the whole of a run that trains a model of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fullrank.config.training import TrainConfig
from fullrank.core import registry
from fullrank.core.config import NOT_NEXT_TOKEN, ModelConfig
from fullrank.core.section import (
    Allowed,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Section,
    Size,
    SizeOrZero,
    hints_of,
    key,
)

# corpora of sentence pairs, for translation; all others are text for language models
PAIR_CORPORA = ("parallel", "multi30k-de-en", "iwslt14-de-en", "wmt16-en-de", "synthetic-translation")
Ratio = Annotated[float, Allowed("longer side over shorter side, so 1 or more", lambda x: x >= 1)]
# tokens of text where `data.tokens` is null; a corpus of one's own says its own
USUAL_TOKENS = dict.fromkeys(("builtin", "text", "ptb", "wikitext-2", "wikitext-103", "lm1b"), "word") | {
    "enwik8": "byte",
    "text8": "character",
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


# what is said of every figure of a model that predicts masked tokens
MASKED_TOKEN = "a masked-token perplexity, not comparable with next-token perplexity"

Temperature = Annotated[float, Allowed("a number from 0.01 to 100", lambda x: 0.01 <= x <= 100)]
Tokenization = Literal["13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"]
Exponent = Annotated[float, Allowed("an exponent from -10 to 10", lambda x: -10 <= x <= 10)]


@dataclass(frozen=True, kw_only=True)
class ProtocolConfig(Section):
    """Segments and memory of a running text. Null: of a split, as `eval` says, and there as trained."""

    segment_length: Size | None = key(None, "tokens of a segment", needs="task!=translation")
    context: SizeOrZero | None = key(
        None, "tokens read again before those that are scored (fairseq)", needs="task=language_model"
    )
    stride: Size | None = key(
        None, "tokens scored at a time; null: what context leaves of segment_length", needs="task=language_model"
    )
    memory_length: SizeOrZero | None = key(None, "tokens of memory", needs="task=language_model")
    same_length: bool | None = key(None, "a window of the memory's length", needs="task=language_model")
    clamp_length: Size | None = key(
        None, "clamp of relative positions", needs="task=language_model, model.position=relative"
    )
    temperature: Temperature | None = key(
        None, "divides the logits; null: 1", needs="task=language_model, model.output.normalize=softmax"
    )


PROTOCOL_KEYS = tuple(hints_of(ProtocolConfig))


@dataclass(frozen=True, kw_only=True)
class EvalConfig(ProtocolConfig):
    """Settings of evaluation. Both cadences `null`: once an epoch and at the end.

    `context`, `stride`, `memory_length`, `same_length`, `clamp_length` and `temperature` belong to the final figures and to
    `fullrank eval`; while training, a model is judged as it is trained, or as `valid` says, at temperature 1.
    """

    KEY = "eval"
    batch_size: Size = key(10, "parallel streams")
    every_steps: Count | None = key(None, "updates between evaluations")
    every_epochs: Positive | None = key(None, "epochs between evaluations")
    max_tokens: Count | None = key(None, "tokens of the validation split while training; the final figures use all")
    mask_seed: CountOrZero = key(0, "masked: seed of the tokens that are predicted, the same ones in every run")
    beams: Size = key(5, "translation: width of the beam")
    length_penalty: Exponent = key(1.0, "translation: a translation scores log p / tokens ** this")
    no_repeat_ngram_size: SizeOrZero = key(0, "translation: no n-gram of this length comes twice; 0: it may")
    max_length_a: PositiveOrZero = key(1.2, "translation: of M tokens come at most a M + b; a")
    max_length_b: SizeOrZero = key(10, "translation: of M tokens come at most a M + b; b")
    bleu_tokenize: Tokenization | None = key(
        None, "translation: tokens of BLEU, named as in sacreBLEU; null: its choice for the target language"
    )
    max_sentences: SizeOrZero | None = key(None, "translation: sentences translated while training; null: all")
    metric: Literal["loss", "bleu"] = key(
        "loss", "what patience, plateau and the best checkpoint follow", needs={"bleu": "task=translation"}
    )
    valid: ProtocolConfig | None = key(
        None, "the protocol of validation text, where it differs; while training, too", needs="task=language_model"
    )
    test: ProtocolConfig | None = key(None, "the protocol of test text, where it differs", needs="task=language_model")

    def protocol_setting(self, name: str, split: str | None) -> tuple[Any, str]:
        """The value of a key of the protocol for a split (None: of every other text), and the key that gives it."""
        own = {"valid": self.valid, "test": self.test}.get(split or "")
        if own is not None and getattr(own, name) is not None:
            return getattr(own, name), f"eval.{split}.{name}"
        return getattr(self, name), f"eval.{name}"

    def _faults(self) -> Iterator[str]:
        if self.max_length_a == 0 and self.max_length_b == 0:
            yield "eval.max_length_b: with eval.max_length_a 0 a translation could have no token; give 1 or more"
        if self.metric == "bleu" and self.max_sentences == 0:
            yield "eval.max_sentences: 0 translates nothing while training, but eval.metric: bleu judges translations"
        if self.every_steps is not None and self.every_epochs is not None:
            yield "eval: give at most one of every_steps and every_epochs"


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """One run: what is trained, on what, how, and how it is judged."""

    DECIDED_BY: ClassVar = {
        "task": "data.name or train.objective", "data.content": "data.name", "model.sees_future": "model.attention.causal",
        "model.has_attention_weights": "model.attention.kind", "model.output.adaptive": "model.output.kind",
    }  # fmt: skip
    model: ModelConfig = key(ModelConfig(), "what the model is made of")
    data: DataConfig = key(DataConfig(), "a corpus, and how its text becomes token ids")
    train: TrainConfig = key(TrainConfig(), "how the model is trained")
    eval: EvalConfig = key(EvalConfig(), "how the model is evaluated")

    @property
    def task(self) -> Literal["language_model", "masked_model", "translation"]:
        """Task of the run, by its corpus and its objective."""
        if self.translates:
            return "translation"
        return "masked_model" if self.masks else "language_model"

    @property
    def translates(self) -> bool:
        """The corpus is one of sentence pairs, so that a translation model is trained."""
        return self.data.has_pairs

    @property
    def masks(self) -> bool:
        """Tokens are masked and predicted: a masked language model is trained."""
        return self.train.objective == "masked" and not self.translates

    @property
    def remark(self) -> str | None:
        """Remark on the perplexity of a run that does not predict the next token."""
        if self.masks:
            return MASKED_TOKEN
        return NOT_NEXT_TOKEN if self.model.sees_future and not self.translates else None

    def _faults(self) -> Iterator[str]:
        yield from self._faults_of_bytes()
        for phase in self.train.phases:
            try:
                probability, layers = registry.lookup("skip", phase.skip)(phase.p), self.model.num_hidden_layers
                for layer in range(layers):
                    probability(layer, layers)
            except ValueError as error:
                yield f"train.phases.{phase.name}.p: {error}"
        if self.translates:
            yield from self._faults_of_translation()
        else:
            yield from self.model.problems_of_masked() if self.masks else ()
            yield from self._faults_of_text()

    def _faults_of_bytes(self) -> Iterator[str]:
        """Lines about a vocabulary of bytes, the one whose size is known without its text."""
        if self.translates or (self.data.tokens or USUAL_TOKENS.get(self.data.name)) != "byte":
            return
        least, given = 256 + self.masks, self.model.vocab_size
        if given is not None and given < least:
            entries = f"256 entries{' beside <mask>' if self.masks else ''}"
            yield f"model.vocab_size: {given}, but text of bytes has {entries}; set it to null or at least {least}"

    def _faults_of_text(self) -> Iterator[str]:
        most, longest = self.model.most_tokens, self.train.segment_length + self.train.context
        if most is not None and longest + 6 * self.train.segment_deviation > most:  # no longer one is drawn
            more = ", ".join(f"train.{one}" for one in ("context", "segment_deviation") if getattr(self.train, one))
            yield (
                f"train.segment_length: {self.train.segment_length:,} tokens are more than the {most:,} positions of this "
                f"model{f', with {more}' if more else ''}; lower it, or raise model.max_position_embeddings"
            )

    def _faults_of_translation(self) -> Iterator[str]:
        problems = self.model.problems_of_translation()
        yield from problems
        if not problems and self.model.get_decoder_config().sees_future:
            yield (
                "model.decoder.attention.causal: a translation is written token by token, and with as_published earlier tokens "
                "see later ones; use masked"
            )
        if self.train.batch_tokens is None:
            yield (
                f"train.batch_tokens: data.name: {self.data.name} is sentence pairs, which are read in batches of so many "
                "tokens; set it (4096 is usual). train.batch_size and train.segment_length are for text of one language"
            )
