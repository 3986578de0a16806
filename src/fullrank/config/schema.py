"""The typed configuration of a run: frozen dataclasses, defaults here and nowhere else.

Words follow Hugging Face configurations (`hidden_size`, `num_hidden_layers`, ...). The module imports neither torch nor
pydantic; `load.py` builds these classes from YAML through pydantic and reports every fault at once.
A field left at `None` is resolved from the others on construction, so that a saved configuration states every value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from fullrank.config import registry
from fullrank.config.clusters import cluster_problems
from fullrank.errors import ConfigError, suggest

# A stage by name, or `{name: ..., option: value}` where its class declares a nested `Config` dataclass of options.
Stage = str | dict[str, Any]
Probability = float

_SIZES = 2**31  # sizes are below this: what a tensor's dimension may reasonably be
_COUNTS = 2**63  # and counts and seeds below this
_THREADS = 1024


def stage_name(stage: Stage) -> str:
    """The name of a stage given as a bare word or as `{name: ..., ...}`."""
    return stage if isinstance(stage, str) else str(stage.get("name", ""))


def stage_options(stage: Stage) -> dict[str, Any]:
    """The options of a stage given as `{name: ..., ...}`; a bare word has none."""
    return {} if isinstance(stage, str) else {key: value for key, value in stage.items() if key != "name"}


def _check_stage(problems: list[str], slot: str, stage: Stage, key: str) -> None:
    try:
        found = registry.lookup(slot, stage_name(stage), key)
    except ConfigError as error:
        problems.extend(error.problems)
        return
    options = stage_options(stage)
    if options:
        config = getattr(found, "Config", None)
        if config is None:
            problems.append(f"{key}: '{stage_name(stage)}' takes no options, given {sorted(options)}")
            return
        known = [option.name for option in fields(config)]
        if unknown := sorted(set(options) - set(known)):
            problems.extend(f"{key}: '{stage_name(stage)}' has no option '{o}'; {suggest(o, known)}" for o in unknown)
            return
        try:
            config(**options)
        except (TypeError, ValueError) as error:
            problems.append(f"{key}: {error}")


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError(*problems)


def _check_numbers(
    problems: list[str],
    config: object,
    section: str,
    keys: Iterable[str],
    *,
    zero: bool = False,
    below: float = math.inf,
) -> None:
    """A line for every key that is not above 0 (from 0 on with `zero`) and not below `below`; NaN is neither."""
    for key in keys:
        value = getattr(config, key)
        if value is None:
            continue
        if not (value > 0 or (zero and value == 0)):
            problems.append(f"{section}.{key}: {'zero or more' if zero else 'a positive number'}, given {value}")
        elif not value < below:
            limit = "a finite number" if below == math.inf else f"below {below:,}"
            problems.append(f"{section}.{key}: {limit}, given {value}")


class _Strict:
    """Read by pydantic: an unknown key is an error, a number may stand for a string."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "coerce_numbers_to_str": True}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(_Strict):
    """The attention pipeline: project -> route -> attend (score, mask, normalize, mix, dropout, weighted values) -> merge."""

    kind: str = "weighted"
    score: Stage = "dot_product"
    normalize: Stage = "softmax"
    mix: Stage = "none"
    cross_head: Probability = 0.0  # beta: probability that a training pass permutes key and value heads
    bias: bool = True  # of the query, key, value and output projections

    def __post_init__(self) -> None:
        problems: list[str] = []
        _check_stage(problems, "attend", self.kind, "model.attention.kind")
        _check_stage(problems, "score", self.score, "model.attention.score")
        _check_stage(problems, "normalize", self.normalize, "model.attention.normalize")
        _check_stage(problems, "mix", self.mix, "model.attention.mix")
        if not 0 <= self.cross_head <= 1:
            problems.append(f"model.attention.cross_head: a probability from 0 to 1, given {self.cross_head}")
        _raise(problems)


@dataclass(frozen=True, kw_only=True)
class InputConfig(_Strict):
    """The embedding of token ids.

    `adaptive`: ids are sorted by frequency and `cutoffs` are where clusters end (the last one ends at vocab_size); cluster i
    has vectors of hidden_size / div_val^i dimensions.
    """

    kind: str = "token"
    cutoffs: list[int] = field(default_factory=list)
    div_val: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "cutoffs", list(self.cutoffs))
        problems: list[str] = []
        _check_stage(problems, "input", self.kind, "model.input.kind")
        if self.kind == "adaptive":
            problems += cluster_problems("model.input", self.cutoffs, self.div_val, None, None)
        elif self.kind == "token" and self.cutoffs:
            problems.append(
                f"model.input.cutoffs: go with `model.input.kind: adaptive`, given {self.cutoffs} with 'token'"
            )
        _raise(problems)


@dataclass(frozen=True, kw_only=True)
class OutputConfig(_Strict):
    """The vocabulary layer. `tied`: its matrix is the embedding's. `bias`: by default, exactly when not tied.

    `adaptive` has clusters as the input has; `cutoffs` and `div_val` left at null are the adaptive input's.
    `form` says whose adaptive softmax it is: `fairseq`'s has no biases, and its head reads the hidden states themselves;
    `transformer_xl`'s has biases, and its head a projection of its own. Given without `bias` it decides that, too; null
    means `transformer_xl` where there are biases and `fairseq` where there are none.
    """

    kind: str = "softmax"
    tied: bool = False
    bias: bool | None = None
    cutoffs: list[int] | None = None
    div_val: int | None = None
    form: Literal["fairseq", "transformer_xl"] | None = None
    tied_projections: bool | None = None  # the tails' projections are the input's; null: like `tied`
    tail_dropout: Probability = 0.0  # between the two matrices of a tail

    def __post_init__(self) -> None:
        adaptive = self.kind == "adaptive"
        if self.bias is None:
            by_form = adaptive and self.form is not None
            object.__setattr__(self, "bias", self.form == "transformer_xl" if by_form else not self.tied)
        problems: list[str] = []
        _check_stage(problems, "output", self.kind, "model.output.kind")
        if self.cutoffs is not None:
            object.__setattr__(self, "cutoffs", list(self.cutoffs))
        if adaptive:
            if self.form is None:
                object.__setattr__(self, "form", "transformer_xl" if self.bias else "fairseq")
            if self.tied_projections is None:
                object.__setattr__(self, "tied_projections", self.tied)
            self._check_adaptive(problems)
        elif self.kind == "softmax" and self.cutoffs:
            problems.append(
                f"model.output.cutoffs: go with `model.output.kind: adaptive`, given {self.cutoffs} with 'softmax'"
            )
        _raise(problems)

    def _check_adaptive(self, problems: list[str]) -> None:
        if self.cutoffs is not None:  # else the input's, which the model knows
            problems += cluster_problems("model.output", self.cutoffs, self.div_val, None, None)
        if self.form not in ("fairseq", "transformer_xl"):
            problems.append(f"model.output.form: 'fairseq' or 'transformer_xl', given '{self.form}'")
        if self.tied_projections and not self.tied:
            problems.append("model.output.tied_projections: goes with `model.output.tied: true`")
        if not 0 <= self.tail_dropout < 1:
            problems.append(f"model.output.tail_dropout: a probability below 1, given {self.tail_dropout}")


@dataclass(frozen=True, kw_only=True)
class DropoutConfig(_Strict):
    """Dropout by place. `locked` (variational): one mask for all positions of a sequence, except on attention weights."""

    embedding: Probability = 0.0  # on embeddings plus positions
    attention: Probability = 0.0  # on attention weights, after mixing
    activation: Probability = 0.0  # inside the feed-forward layer
    residual: Probability = 0.0  # on what attention and feed-forward add to the residual stream
    output: Probability = 0.0  # on the last hidden states, before the vocabulary layer
    locked: bool = False

    def __post_init__(self) -> None:
        _raise(
            [
                f"model.dropout.{place}: a probability below 1, given {value}"
                for place in ("embedding", "attention", "activation", "residual", "output")
                if not 0 <= (value := getattr(self, place)) < 1
            ]
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Strict):
    """A decoder-only Transformer language model.

    `head_dim` is independent of the width (Mixhead §4.4.3; Fixhead is `head_dim` = sequence length).
    `vocab_size: null` means: as many as the data has.
    """

    vocab_size: int | None = None
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    head_dim: int | None = None  # null: hidden_size / num_attention_heads
    intermediate_size: int | None = None  # null: 4 * hidden_size
    hidden_act: str = "relu"
    mlp_bias: bool = True
    norm: Literal["pre", "post"] = "pre"
    final_norm: bool | None = None  # null: with pre-norm yes, with post-norm no
    layer_norm_eps: float = 1e-5
    position: str = "sinusoidal"
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    memory_length: int = 0
    scale_embedding: bool = False  # multiply embeddings by sqrt(hidden_size)
    initializer: str = "fairseq"
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    input: InputConfig = field(default_factory=InputConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        problems: list[str] = []
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                    "intermediate_size", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, key)
            if value is not None and not (type(value) is int and value > 0):
                problems.append(f"model.{key}: a positive whole number, given {value!r}")
            elif value is not None and not value < _SIZES:
                problems.append(f"model.{key}: below {_SIZES:,}, given {value}")
        if self.head_dim is None and not problems:  # nothing is derived from wrong sizes
            if self.hidden_size % self.num_attention_heads:
                problems.append(
                    f"model.head_dim: hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                    f"{self.num_attention_heads}; change one of them or set model.head_dim"
                )
            object.__setattr__(self, "head_dim", max(1, self.hidden_size // self.num_attention_heads))
        if self.intermediate_size is None and not problems:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        if self.final_norm is None:
            object.__setattr__(self, "final_norm", self.norm == "pre")
        before = len(problems)
        _check_stage(problems, "position", self.position, "model.position")
        score = stage_name(self.attention.score)
        if len(problems) == before and (score == "relative") != (self.position == "relative"):
            problems.append(
                "model.attention.score: 'relative' goes with model.position: relative and only with it; given "
                f"model.attention.score: {score} with model.position: {self.position}; change one of them"
            )
        _check_stage(problems, "activation", self.hidden_act, "model.hidden_act")
        _check_stage(problems, "initializer", self.initializer, "model.initializer")
        _check_numbers(problems, self, "model", ("layer_norm_eps", "rope_theta"))
        if self.norm not in ("pre", "post"):
            problems.append(f"model.norm: 'pre' or 'post', given '{self.norm}'")
        if self.position == "rotary" and isinstance(self.head_dim, int) and self.head_dim % 2:
            problems.append(f"model.head_dim: rotary positions need an even head size, given {self.head_dim}")
        if self.memory_length != 0:
            problems.append(
                f"model.memory_length: this version has models without memory (0), given {self.memory_length}"
            )
        self._check_adaptive(problems)
        _raise(problems)

    def _check_adaptive(self, problems: list[str]) -> None:
        """Clusters of the input and the output layer; what the output leaves open is the input's."""
        read, written = self.input, self.output
        vocab_size = self.vocab_size if type(self.vocab_size) is int else None
        hidden_size = self.hidden_size if type(self.hidden_size) is int else None
        if read.kind == "adaptive":
            problems += cluster_problems("model.input", read.cutoffs, read.div_val, vocab_size, hidden_size)
        if written.kind != "adaptive":
            return
        both = read.kind == "adaptive"
        cutoffs = written.cutoffs if written.cutoffs is not None else read.cutoffs if both else None
        div_val = written.div_val if written.div_val is not None else read.div_val if both else 1
        problems += cluster_problems("model.output", cutoffs, div_val, vocab_size, hidden_size)
        if written.tied and not (both and (cutoffs, div_val) == (read.cutoffs, read.div_val)):
            given = f"cutoffs {read.cutoffs} and div_val {read.div_val}" if both else f"kind '{read.kind}'"
            problems.append(
                f"model.output.tied: an adaptive softmax shares the vectors of an adaptive input with its own cutoffs "
                f"{cutoffs} and div_val {div_val}; model.input has {given}"
            )
        if written.tail_dropout and div_val == 1:
            problems.append(
                "model.output.tail_dropout: acts between the two matrices of a tail; with div_val 1 a tail has only one, "
                "use model.dropout.output"
            )
        object.__setattr__(self, "output", replace(written, cutoffs=cutoffs, div_val=div_val))


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Strict):
    """A corpus and how its text becomes token ids. `null` means: what is usual for the corpus."""

    name: str = "builtin"
    train: str | list[str] | None = None  # `name: text`: files of each split
    valid: str | list[str] | None = None
    test: str | list[str] | None = None
    tokens: Literal["word", "byte", "character", "bpe"] | None = None
    dir: str | None = None  # a local folder that holds the corpus
    cache: str | None = None  # where prepared corpora are kept; null: $FULLRANK_CACHE or ~/.cache/fullrank
    lowercase: bool = False
    eos: bool | None = None  # append <eos> to every line
    min_count: int | None = None  # rarer words and characters become <unk>; null: 1, for builtin words 3
    max_vocabulary: int | None = None  # keep the most frequent; for bpe, the number of entries
    max_tokens: int | None = None  # use only the beginning of the training split

    def __post_init__(self) -> None:
        problems: list[str] = []
        _check_numbers(problems, self, "data", ("min_count", "max_vocabulary", "max_tokens"), below=_COUNTS)
        if self.name == "text" and self.train is None:
            problems.append("data.train: `data.name: text` needs at least one training file")
        _raise(problems)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Strict):
    """How a model is trained. Exactly one of `steps`, `epochs` and `tokens` says when training ends."""

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    seed: int = 1
    batch_size: int = 20  # parallel streams
    segment_length: int = 64  # tokens of each stream per step
    order: Literal["contiguous", "shuffled"] = "contiguous"  # streams in reading order, or blocks shuffled every epoch
    gradient_accumulation_steps: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0  # never acts on mixing weights, biases and norms
    schedule: str = "constant"
    warmup_steps: int = 0
    warmup_from: float = 0.0
    min_learning_rate: float = 0.0
    period: int | None = None  # `cosine_restarts`: steps of the first period; null: all that follow the warm-up
    t_mult: float = 1.0  # ... how much longer each period is than the one before
    lr_shrink: float = 1.0  # ... and what its rates are multiplied by
    plateau_factor: float = 2.0  # `plateau`: divide the learning rate by this ...
    plateau_patience: int = 0  # ... after more than so many evaluations without improvement
    max_grad_norm: float | None = None
    label_smoothing: float = 0.0
    orthogonality: float = 0.0  # coefficient of Mixhead Eq. 16
    overlap: float = 0.0  # coefficient of Mixhead Eq. 20
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "auto"  # auto: a GPU when there is one
    threads: int | None = None
    compile: bool = False
    averaging: Literal["none", "ema", "swa"] = "none"
    ema_decay: float = 0.999
    swa_start: float = 0.75  # share of training after which weights are averaged
    patience: int | None = None  # stop after so many evaluations without improvement
    save_every_steps: int | None = None  # null: at every evaluation
    log_every_steps: int = 20
    track: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)

    def __post_init__(self) -> None:
        problems: list[str] = []
        given = [key for key in ("steps", "epochs", "tokens") if getattr(self, key) is not None]
        if not given:
            object.__setattr__(self, "epochs", 1.0)
            given = ["epochs"]
        if len(given) > 1:
            problems.append(f"train: give exactly one of steps, epochs, tokens; given {', '.join(given)}")
        counts = ("steps", "tokens", "patience", "period", "save_every_steps", "log_every_steps")
        _check_numbers(problems, self, "train", counts, below=_COUNTS)
        _check_numbers(
            problems, self, "train", ("batch_size", "segment_length", "gradient_accumulation_steps"), below=_SIZES
        )
        _check_numbers(problems, self, "train", ("epochs", "learning_rate", "eps", "max_grad_norm", "lr_shrink"))
        from_zero = ("warmup_from", "min_learning_rate", "weight_decay", "orthogonality", "overlap")
        _check_numbers(problems, self, "train", from_zero, zero=True)
        _check_numbers(problems, self, "train", ("seed", "warmup_steps", "plateau_patience"), zero=True, below=_COUNTS)
        if self.threads is not None and not 1 <= self.threads <= _THREADS:
            problems.append(f"train.threads: from 1 to {_THREADS}, given {self.threads}")
        for key in ("label_smoothing", "swa_start", "momentum"):
            if not 0 <= getattr(self, key) < 1:
                problems.append(f"train.{key}: at least 0 and below 1, given {getattr(self, key)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            problems.append(f"train.betas: two numbers, each at least 0 and below 1, given {list(self.betas)}")
        if not 1 < self.plateau_factor < math.inf:
            problems.append(f"train.plateau_factor: above 1 and finite, given {self.plateau_factor}")
        if not 1 <= self.t_mult < math.inf:
            problems.append(f"train.t_mult: 1 or more and finite, given {self.t_mult}")
        if not 0 < self.ema_decay < 1:
            problems.append(f"train.ema_decay: between 0 and 1, given {self.ema_decay}")
        _check_stage(problems, "optimizer", self.optimizer, "train.optimizer")
        _check_stage(problems, "schedule", self.schedule, "train.schedule")
        _raise(problems)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(_Strict):
    """How and how often a model is evaluated. Both cadences `null`: once an epoch and at the end."""

    batch_size: int = 10  # parallel streams
    segment_length: int | None = None  # null: train.segment_length
    every_steps: int | None = None
    every_epochs: float | None = None
    max_tokens: int | None = None  # of the validation split, while training; the final figures use all

    def __post_init__(self) -> None:
        problems: list[str] = []
        _check_numbers(problems, self, "eval", ("batch_size", "segment_length"), below=_SIZES)
        _check_numbers(problems, self, "eval", ("every_steps", "max_tokens"), below=_COUNTS)
        _check_numbers(problems, self, "eval", ("every_epochs",))
        if self.every_steps is not None and self.every_epochs is not None:
            problems.append("eval: give at most one of every_steps and every_epochs")
        _raise(problems)


@dataclass(frozen=True, kw_only=True)
class RunConfig(_Strict):
    """One run: what is trained, on what, how, and how it is judged."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
