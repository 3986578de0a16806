"""The train, data and eval sections of a configuration, and the whole of a run that trains a model of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml

from fullrank.core import registry
from fullrank.core.config import NOT_NEXT_TOKEN, ModelConfig
from fullrank.core.errors import ConfigError, InputError, suggest
from fullrank.core.section import (
    Allowed,
    Count,
    CountOrZero,
    Fraction,
    Parts,
    Positive,
    PositiveOrZero,
    Probability,
    Section,
    Share,
    Size,
    SizeOrZero,
    Slot,
    hints_of,
    key,
)
from fullrank.files import SafeLoader

Optimizer = Annotated[str, Slot("optimizer", "sgd", "nag", "adam", "adamw", "muon")]
Schedule = Annotated[
    str, Slot("schedule", "constant", "cosine", "cosine_restarts", "cosine_wave", "linear", "inverse_sqrt", "plateau")
]


SIZES = {  # of `fullrank init`
    name: {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    for name, width, layers, heads in (
        ("tiny", 64, 2, 2),
        ("small", 128, 4, 4),
        ("medium", 256, 4, 8),
        ("large", 512, 6, 8),
    )
}
Threads = Annotated[int, Allowed("from 1 to 1024", lambda n: 1 <= n <= 1024)]
Device = Annotated[
    str, Allowed("auto, cpu, cuda or cuda:0", lambda name: bool(re.fullmatch("auto|cpu|cuda(:[0-9]{1,3})?", name)))
]
_STREAMS = "order=contiguous, task=language_model"  # what is of text that is read in streams
Betas = Annotated[list[Share], Allowed("a list of 2, each at least 0 and below 1", lambda betas: len(betas) == 2)]
AboveOne = Annotated[float, Allowed("a number above 1", lambda x: x > 1)]


@dataclass(frozen=True, kw_only=True)
class PlateauConfig(Section):
    """A phase ends at the evaluation where the best validation perplexity fell by less than `ppl` over `steps` updates."""

    KEY = "train.phases.plateau"
    ppl: Positive = key(0.2, "least fall of the best validation perplexity")
    steps: Count = key(64_000, "updates over which it has to fall")


@dataclass(frozen=True, kw_only=True)
class PhaseConfig(Section):
    """A part of training with its own Skip-Retain schedule (Skip Cross-head §2.1); it ends at whatever comes first.

    `skip`: which layers are skipped at a step, `none` or a schedule: `linear` (Eq. 1), `uniform`, `not_first`, `not_last`,
    `not_first_or_last` with probability `p` (Eq. 2 to 5).
    """

    KEY = "train.phases"
    name: str = key("", "what the phase is called")
    skip: str = key("none", "schedule of skipped layers", needs="task=language_model")
    p: float | None = key(None, "probability of the schedule")
    gaps: Literal["true", "drifting"] = key("true", "age of a skipped layer's memory; drifting: as released")
    steps: Count | None = key(None, "updates after which the phase ends")
    epochs: Positive | None = key(None, "epochs after which the phase ends", needs="steps=null")
    plateau: PlateauConfig | None = key(None, "the phase ends when validation perplexity falls no more")

    def _prefix(self) -> str:
        return f"train.phases.{self.name}." if self.name else "train.phases."

    def _faults(self) -> Iterator[str]:
        if not self.name:
            yield "train.phases: a phase needs a name"
        try:
            registry.lookup("skip", self.skip, f"{self._prefix()}skip")(self.p)
        except ConfigError as error:
            yield from error.problems
        except ValueError as error:
            yield f"{self._prefix()}p: {error}"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """Settings of every training, of a model of ours and of a pretrained one."""

    KEY = "train"
    steps: Count | None = key(None, "updates after which training ends")
    seed: CountOrZero = key(1, "seed of every random draw")
    gradient_accumulation_steps: Size = key(1, "batches of one update")
    optimizer: Optimizer = key("adamw", "optimizer", needs={"nag": "momentum"})
    eps: Positive = key(1e-8, "epsilon of adam, adamw and muon")
    orthogonality: PositiveOrZero = key(
        0.0, "coefficient of the orthogonality penalty (Mixhead Eq. 16)", needs="model.has_attention_weights=true"
    )
    overlap: PositiveOrZero = key(
        0.0, "coefficient of the overlap penalty (Mixhead Eq. 20)", needs="model.has_attention_weights=true"
    )
    precision: Literal["fp32", "bf16"] = key("fp32", "precision of the forward pass")
    device: Device = key("auto", "device of torch; auto: a GPU when there is one")
    threads: Threads | None = key(None, "threads of torch")
    sharding: Literal["ddp", "fsdp"] = key(
        "ddp", "several processes: each holds all parameters, or a part of each", needs="task!=finetuning"
    )
    activation_checkpointing: bool = key(False, "compute blocks again in the backward pass, to save memory")
    save_every_steps: Count | None = key(
        None, "updates between checkpoints; null: at every evaluation and every 5 minutes"
    )
    log_every_steps: Count = key(20, "updates between lines of metrics")
    track: list[Literal["tensorboard", "wandb"]] = key([], "other places that metrics are sent to")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingConfig):
    """Settings of training. Exactly one of `steps`, `epochs` and `tokens` says when training ends, or the last phase.

    Text is read in `batch_size` streams of `segment_length` tokens, sentence pairs in batches of `batch_tokens`; `tokens` are
    those that are predicted: of translations, their words and final <eos>, without padding. Where tokens are masked
    (`objective: masked`), `tokens` are those that are read.
    """

    epochs: Positive | None = key(None, "epochs after which training ends")
    tokens: Count | None = key(None, "tokens after which training ends")
    phases: list[PhaseConfig] = key([], "parts of training with their own schedules of skipped layers")
    objective: Literal["causal", "masked", "labels"] = key(
        "causal",
        "the next token, masked ones, or labels",
        needs={"masked": "data.content=text", "labels": "task=finetuning"},
    )
    mlm_probability: Fraction = key(0.15, "masked: share of the tokens that are predicted")
    mask_replace_prob: Probability = key(0.8, "masked: share of those that become <mask>")
    random_replace_prob: Probability = key(0.1, "masked: share of those that become any token")
    batch_size: Size = key(20, "parallel streams")
    segment_length: Size = key(64, "tokens of each stream per step")
    segment_deviation: PositiveOrZero = key(
        0.0, "standard deviation of random segment lengths, in tokens; 0: all alike", needs=_STREAMS
    )
    half_segments: Probability = key(0.0, "share of segments that are half as long", needs=_STREAMS)
    segment_multiple: Size = key(1, "random lengths are multiples of this: few shapes, as train.compile wants")
    context: SizeOrZero = key(
        0, "tokens before a segment that are read again, not predicted", needs=f"{_STREAMS}, model.memory_length=0"
    )
    partial_shuffle: bool = key(False, "every stream begins at another place in every epoch", needs=_STREAMS)
    batch_tokens: Size | None = key(
        None, "tokens of a batch, longer side, padding included", needs="data.content=sentence pairs"
    )
    order: Literal["contiguous", "shuffled"] | None = key(
        None, "streams, or shuffled blocks (null: if masked)", needs={"shuffled": "model.memory_length=0"}
    )
    learning_rate: Positive = key(1e-3, "learning rate after the warm-up")
    embedding_rate: Positive = key(1.0, "factor on learning_rate for the embedding; min_learning_rate stays")
    mixing_rate: Positive = key(1.0, "factor on every learning rate of what mixes heads")
    rate_by_length: bool = key(False, "learning rates are scaled by the tokens of the update")
    betas: Betas = key([0.9, 0.98], "decay of the means of adam, adamw and muon")
    momentum: Share = key(0.0, "momentum of sgd and nag; of muon, where 0 is 0.95")
    weight_decay: PositiveOrZero = key(
        0.0,
        "weight decay; never acts on mixing weights, biases and norms (adamw, muon: strong for little data, 0.8 to 3, "
        "arXiv 2509.14786)",
    )
    schedule: Schedule = key("constant", "schedule of the learning rate")
    warmup_steps: CountOrZero = key(0, "updates over which the learning rate rises")
    warmup_from: PositiveOrZero = key(0.0, "learning rate at which the warm-up begins")
    min_learning_rate: PositiveOrZero = key(0.0, "learning rate at the end of the schedule")
    decay_steps: Count | None = key(None, "updates after which the schedule is at its end; null: all of training")
    period: Count | None = key(
        None, "cosine_restarts: steps of each cosine; cosine_wave: steps down, as many up; null: all"
    )
    plateau_factor: AboveOne = key(2.0, "plateau: divide the learning rate by this")
    plateau_patience: CountOrZero = key(0, "plateau: after more than so many evaluations without improvement")
    max_grad_norm: Positive | None = key(None, "gradients are clipped to this norm")
    label_smoothing: Share = key(0.0, "e: the target is (1 - e) [v = y] + e / V")
    activation_regularization: PositiveOrZero = key(
        0.0, "AR: coefficient of the mean square of the last hidden states", needs="task=language_model"
    )
    temporal_regularization: PositiveOrZero = key(
        0.0, "TAR: the same of their change from one token to the next", needs="task=language_model"
    )
    start: str | None = key(
        None, "folder of a finished run, with whose weights and vocabulary training begins", needs="data.content=text"
    )
    parts: Annotated[dict[str, dict[str, Any]], Parts("training_part")] = key(
        {}, "what training adds to a model, of one's own, by name with options", needs="task=language_model"
    )
    compile: bool = key(False, "compile the model")
    averaging: Literal["none", "swa"] = key("none", "swa: the mean of the weights after `swa_start` is used")
    swa_start: Share = key(0.75, "swa: share of training after which weights are averaged")
    swa_learning_rate: Positive | None = key(
        None, "learning rate while weights are averaged; null: the schedule's", needs="averaging=swa"
    )
    patience: Count | None = key(None, "stop after so many evaluations without improvement of eval.metric")
    keep_checkpoints: Count | None = key(None, "weights that are kept of the last evaluations")

    def _ends(self) -> list[str]:
        return [end for end in ("steps", "epochs", "tokens") if getattr(self, end) is not None]

    def _has_limits(self) -> bool:
        """Return whether every phase says after how many steps or epochs it ends."""
        return bool(self.phases) and all(phase.steps or phase.epochs for phase in self.phases)

    def _resolve(self) -> None:
        if not self._ends() and not self._has_limits():
            self._set("epochs", 1.0)
        self._fill(order="shuffled" if self.objective == "masked" else "contiguous")

    def _faults(self) -> Iterator[str]:
        ends = self._ends()
        if self._has_limits() and ends:
            yield f"train.{ends[0]}: every phase says when it ends; leave it out, or the end of the last phase"
        if len(ends) > 1:
            yield f"train: give exactly one of steps, epochs, tokens; given {', '.join(ends)}"
        for phase in self.phases[:-1]:
            if not (phase.steps or phase.epochs or phase.plateau):
                yield f"train.phases.{phase.name}: give its end (steps, epochs or plateau); only the last phase may do without"
        yield from self._faults_of_bounds()
        names = [phase.name for phase in self.phases]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"train.phases: two phases are named '{name}'"
        if self.mask_replace_prob + self.random_replace_prob > 1 + 1e-9:
            values = f"given {self.random_replace_prob} and {self.mask_replace_prob}"
            yield f"train.random_replace_prob: together with train.mask_replace_prob at most 1; {values}"
        if self.half_segments and self.segment_length < 10:
            yield f"train.half_segments: for train.segment_length 10 or more, given {self.segment_length}"
        for name, share in (("segment_multiple", 5), ("segment_deviation", 4)):
            if getattr(self, name) > max(1, self.segment_length // share):
                most = f"train.segment_length / {share}, here {self.segment_length // share}"
                yield f"train.{name}: at most {most}; given {getattr(self, name):g}"
        if self.schedule == "cosine_wave" and self.period is not None and self.warmup_steps > self.period:
            yield f"train.warmup_steps: at most train.period {self.period} with cosine_wave, given {self.warmup_steps}"

    def _faults_of_bounds(self) -> Iterator[str]:
        """Yield a line about the first phase that never begins, as far as steps, or epochs, alone say so."""
        for end, limit in (("steps", self.steps), ("epochs", self.epochs)):
            before = 0.0
            for earlier, phase in pairwise([] if self._has_limits() else self.phases):
                before += 0 if earlier.plateau else getattr(earlier, end) or 0
                if limit is not None and before >= limit:
                    yield (
                        f"train.phases.{phase.name} would never begin: the phases before it take {before:g} {end}, and "
                        f"train.{end} is {limit:g}; shorten them or raise it"
                    )
                    return


# -- corpora, data, eval, and all of a run -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusInfo:
    """One corpus, as corpora.yaml lists it.

    `published` counts each split in `unit`; words are counted with one `<eos>` per line.
    `languages`: of the two sides of sentence pairs, source first; None for text of one language.
    `files`: accepted file names of each split, the published name first; of sentence pairs without the suffix of a language.
    `urls`: things to download, each with its mirrors; `{}` stands for every published file. `packed`: the files in them, where
    these are not those of `files`. `folder`: the name of its folder besides its own. `codes`: files of BPE merges beside it.
    `settings`: of sentence pairs, where the configuration leaves them open.
    `hub`: of a task to fine-tune on, its name on the Hugging Face hub and its configuration there.
    `sha256`: of files that are known byte by byte.
    """

    name: str
    tokens: str
    licence: str
    source: str
    unit: Literal["words", "characters", "bytes", "pairs", "rows", "questions"] = "words"
    languages: Sequence[str] | None = None
    published: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    urls: Sequence[Sequence[str]] = ()
    packed: Sequence[str] = ()
    folder: str = ""
    codes: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    hub: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def published_files(self) -> dict[str, str]:
        """The published file of each split, or of each `split.language`."""
        ends = [f".{language}" for language in self.languages or ()] or [""]
        return {f"{split}{end}": f"{names[0]}{end}" for split, names in self.files.items() for end in ends}

    def file_names(self) -> str:
        """List the files that make up the corpus, in words."""
        return ", ".join(self.published_files.values()) or self.source.rpartition(": ")[2]


Entry = TypeVar("Entry")


def read_table(file: str, make: Callable[..., Entry]) -> dict[str, Entry]:
    """Read the entries of a YAML file beside this one by name; make: their dataclass."""
    table = yaml.load(Path(__file__).with_name(file).read_bytes(), SafeLoader)
    return {name: make(name, **entry) for name, entry in table.items()}


@cache
def list_corpora() -> dict[str, CorpusInfo]:
    """List corpora by name: values of `data.name`, tasks to fine-tune on among them."""
    return read_table("corpora.yaml", CorpusInfo)


def register_corpus(corpus: CorpusInfo) -> CorpusInfo:
    """Make a text for language models known by its name, as `data.name`.

    Raises InputError for a name that is taken, and for sentence pairs.
    """
    if corpus.languages is not None or list_corpora().setdefault(corpus.name, corpus) != corpus:
        raise InputError(f"corpus {corpus.name}: a new name, and a text of one language; pairs are data.name=parallel")
    return corpus


def find_corpus(name: str) -> CorpusInfo:
    """Find the text, or the sentence pairs, of that name; InputError suggests the nearest name."""
    corpora = list_corpora()
    if name not in corpora or corpora[name].hub:
        raise InputError(f"data.name: unknown corpus '{name}'; {suggest(name, corpora, list_all=True)}")
    return corpora[name]


def has_pairs(name: str) -> bool:
    """Return whether a corpus is one of sentence pairs, for translation; all others are text for language models."""
    corpus = list_corpora().get(name)
    return corpus is not None and corpus.unit == "pairs"


Ratio = Annotated[float, Allowed("longer side over shorter side, so 1 or more", lambda x: x >= 1)]
_PAIRS = "content=sentence pairs"
_TEXT = "content=text"


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
            has_files = any((self.train, self.valid, self.test))
            two = self.source is not None or self.target is not None
            self._set("name", "parallel" if has_files and two else "text" if has_files else "builtin")

    @property
    def has_pairs(self) -> bool:
        """The corpus is one of sentence pairs."""
        return has_pairs(self.name)

    @property
    def content(self) -> str:
        """The content of the corpus: text or sentence pairs."""
        return "sentence pairs" if self.has_pairs else "text"

    @property
    def unit(self) -> str:
        """The unit of text: `tokens`, or what is usual for the corpus; empty for an unknown one."""
        corpus = list_corpora().get(self.name)
        return self.tokens or ("" if corpus is None else corpus.tokens)

    def _faults(self) -> Iterator[str]:
        try:
            corpus = find_corpus(self.name)
        except InputError as error:
            yield str(error)
            return
        if not self.has_pairs:
            yield from self._faults_of_text()
            return
        if self.source is not None and self.source == self.target:
            yield f"data.target: another language than data.source, given '{self.target}' for both"
        if self.min_count is not None and self.unit != "word":
            yield f"data.min_count: for data.tokens: word, given {self.min_count} with {self.unit}"
        vocabulary = self.vocabulary or corpus.settings.get("vocabulary")
        if self.codes is None:
            yield from self._faults_of_size({"word": 3, "bpe": 0 if vocabulary == "separate" else 258})

    def _faults_of_text(self) -> Iterator[str]:
        """Yield lines about keys that the unit of text has no use for."""
        unit = self.unit
        if (self.min_count or 1) > 1 and unit in ("byte", "bpe"):
            yield f"data.min_count: nothing is rare or unknown with data.tokens: {unit}; set it to null, given {self.min_count}"
        if self.sos and unit != "word":
            yield f"data.sos: <sos> begins lines of words, and data.tokens is {unit}; set it to word, or data.sos to false"
        if unit == "byte" and self.max_vocabulary is not None:
            yield f"data.max_vocabulary: byte tokens have 256 entries; set it to null, given {self.max_vocabulary}"
        # with <unk> and the end of a line; no byte is unknown
        yield from self._faults_of_size({"word": 3 + self.sos, "character": 3, "bpe": 257})

    def _faults_of_size(self, least_of: dict[str, int]) -> Iterator[str]:
        """Yield a line about a vocabulary with fewer entries than its unit must have."""
        least = least_of.get(self.unit, 0)
        if self.max_vocabulary is not None and self.max_vocabulary < least:
            yield (
                f"data.max_vocabulary: at least {least} for data.tokens: {self.unit}, marks and single bytes included, given "
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
SEARCH_KEYS = ("beams", "length_penalty", "no_repeat_ngram_size", "max_length_a", "max_length_b")  # of translations


@dataclass(frozen=True, kw_only=True)
class EvalConfig(ProtocolConfig):
    """Settings of evaluation. Both cadences `null`: once an epoch and at the end.

    `context`, `stride`, `memory_length`, `same_length`, `clamp_length` and `temperature` belong to the final figures and to
    `fullrank eval`; while training, a model is judged as it is trained, or as `valid` says, at temperature 1.
    """

    KEY = "eval"
    batch_size: Size = key(10, "parallel streams")
    every_steps: Count | None = key(None, "updates between evaluations")
    every_epochs: Positive | None = key(None, "epochs between evaluations", needs="every_steps=null")
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
    max_sentences: SizeOrZero | None = key(
        None, "translation: sentences translated while training; null: all", needs={"0": "metric=loss"}
    )
    metric: Literal["loss", "bleu"] = key(
        "loss", "what patience, plateau and the best checkpoint follow", needs={"bleu": "task=translation"}
    )
    valid: ProtocolConfig | None = key(
        None, "the protocol of validation text, where it differs; while training, too", needs="task=language_model"
    )
    test: ProtocolConfig | None = key(None, "the protocol of test text, where it differs", needs="task=language_model")

    def _faults(self) -> Iterator[str]:
        if self.max_length_a == 0 and self.max_length_b == 0:
            yield "eval.max_length_b: with eval.max_length_a 0 a translation could have no token; give 1 or more"


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """One run: what is trained, on what, how, and how it is judged."""

    DECIDED_BY: ClassVar = {
        "task": "data.name or train.objective",
        "data.content": "data.name",
        "model.sees_future": "model.attention.causal",
        "model.has_attention_weights": "model.attention.kind",
        "model.output.adaptive": "model.output.kind",
    }
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
                probability = registry.lookup("skip", phase.skip)(phase.p)
                layers = self.model.num_hidden_layers
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
        """Yield lines about a vocabulary of bytes, the one whose size is known without its text."""
        if self.translates or self.data.unit != "byte":
            return
        least = 256 + self.masks
        vocab_size = self.model.vocab_size
        if vocab_size is not None and vocab_size < least:
            entries = f"256 entries{' beside <mask>' if self.masks else ''}"
            yield f"model.vocab_size: {vocab_size}, but text of bytes has {entries}; set it to null or at least {least}"

    def _faults_of_text(self) -> Iterator[str]:
        train = self.train
        most = self.model.most_tokens
        longest = train.segment_length + 6 * train.segment_deviation  # no longer one is drawn
        if train.segment_deviation or train.half_segments:  # then all are stretched a little, and rounded
            longest = 1.1 * longest + train.segment_multiple
        if most is not None and longest + train.context > most:
            others = ("context", "segment_deviation", "half_segments")
            more = ", ".join(f"train.{other}" for other in others if getattr(train, other))
            yield (
                f"train.segment_length: {train.segment_length:,} tokens are more than the {most:,} positions of this "
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
