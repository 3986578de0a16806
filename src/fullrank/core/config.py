"""The model section of a configuration: frozen dataclasses with their defaults and checks. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

from . import registry
from .errors import ConfigError, suggest

# A stage by name, or `{name: ..., option: value}` where its class declares a nested `Config` dataclass of options.
Stage = str | dict[str, Any]
Probability = float

SIZES = 2**31  # sizes are below this: what a tensor's dimension may reasonably be
COUNTS = 2**63  # and counts and seeds below this
THREADS = 1024


def stage_name(stage: Stage) -> str:
    """The name of a stage given as a bare word or as `{name: ..., ...}`."""
    return stage if isinstance(stage, str) else str(stage.get("name", ""))


def stage_options(stage: Stage) -> dict[str, Any]:
    """The options of a stage given as `{name: ..., ...}`; a bare word has none."""
    return {} if isinstance(stage, str) else {key: value for key, value in stage.items() if key != "name"}


def check_stage(problems: list[str], slot: str, stage: Stage, key: str) -> None:
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


def raise_problems(problems: list[str]) -> None:
    if problems:
        raise ConfigError(*problems)


def check_numbers(
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


class Strict:
    """Read by pydantic: an unknown key is an error, a number may stand for a string."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "coerce_numbers_to_str": True}


def cluster_problems(
    key: str, cutoffs: list[int] | None, div_val: int | None, vocab_size: int | None, hidden_size: int | None
) -> list[str]:
    """What is wrong with them, `key` being `model.input` or `model.output`; what is None is not known yet."""
    if not cutoffs:
        return [f"{key}.cutoffs: an adaptive layer needs the ids at which its clusters end, as in [20000, 60000]"]
    if not all(type(cutoff) is int for cutoff in cutoffs) or any(a >= b for a, b in pairwise([0, *cutoffs])):
        return [f"{key}.cutoffs: whole numbers above 0 that increase strictly, given {cutoffs}"]
    problems = []
    if vocab_size is not None and cutoffs[-1] >= vocab_size:
        problems.append(
            f"{key}.cutoffs: below model.vocab_size {vocab_size}, which ends the last cluster; given {cutoffs}"
        )
    if div_val is not None and not (type(div_val) is int and div_val >= 1):
        problems.append(f"{key}.div_val: a whole number, 1 or more, given {div_val!r}")
    elif div_val is not None and hidden_size is not None and hidden_size < div_val ** len(cutoffs):
        problems.append(
            f"{key}.div_val: the last of {len(cutoffs) + 1} clusters would have {hidden_size} / {div_val}^{len(cutoffs)} < 1 "
            f"dimensions; lower {key}.div_val or give fewer {key}.cutoffs"
        )
    return problems


# what is said of every figure of a model whose tokens see later ones
NOT_NEXT_TOKEN = "not a next-token perplexity: its tokens see later ones (model.attention.causal: as_published)"

# keys that only multi-linear attention has, and what they are there when left at null; those of `decayed` come last
_MULTILINEAR: dict[str, Any] = {
    "cores": 1, "rank": 40, "causal": "masked", "core_weights": "softmax", "output_map": "pairs", "decays": None,
}  # fmt: skip
_CHOICES = {
    "causal": ("masked", "as_published"),
    "core_weights": ("softmax", "free"),
    "output_map": ("pairs", "decayed"),
}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Strict):
    """The attention pipeline: project -> route -> attend (score, mask, normalize, mix, dropout, weighted values) -> merge.

    `kind: multilinear` has a tensor of `cores` diagonal cores of rank `rank` in place of weights: there is nothing to
    normalize, to mix or to route, and heads play no part. `core_weights`: a core is softmax(g), as in the paper, or g itself
    (`free`, as in the released code). `output_map`: a row for each pair of positions (`pairs`, the paper's; it ties
    `max_position_embeddings` into the parameters), or `decayed`, whose `decays` (null: 8) products of decayed sums serve any
    length. `score: relative` adds the position term of the released code, shared_biases as in Transformer-XL.
    `causal: as_published` does not mask the future: a language model then needs `not_next_token_perplexity: true`.
    """

    kind: str = "weighted"
    score: Stage = "dot_product"
    normalize: Stage = "softmax"
    mix: Stage = "none"
    cross_head: Probability = 0.0  # beta: probability that a training pass permutes key and value heads
    bias: bool = True  # of the query, key, value and output projections
    cores: int | None = None
    rank: int | None = None
    causal: Literal["masked", "as_published"] | None = None
    core_weights: Literal["softmax", "free"] | None = None
    output_map: Literal["pairs", "decayed"] | None = None
    decays: int | None = None
    not_next_token_perplexity: bool = False  # says that one knows what the perplexity of `as_published` is not

    def __post_init__(self) -> None:
        problems: list[str] = []
        check_stage(problems, "attend", self.kind, "model.attention.kind")
        check_stage(problems, "score", self.score, "model.attention.score")
        check_stage(problems, "normalize", self.normalize, "model.attention.normalize")
        check_stage(problems, "mix", self.mix, "model.attention.mix")
        if not 0 <= self.cross_head <= 1:
            problems.append(f"model.attention.cross_head: a probability from 0 to 1, given {self.cross_head}")
        if self.kind == "multilinear":
            self._check_multilinear(problems)
        elif self.kind == "weighted":
            given = [key for key in _MULTILINEAR if getattr(self, key) is not None]
            given += ["not_next_token_perplexity"] * self.not_next_token_perplexity
            problems += [
                f"model.attention.{key}: goes with `model.attention.kind: multilinear`, given "
                f"{getattr(self, key)} with 'weighted'"
                for key in given
            ]
        raise_problems(problems)

    @property
    def sees_future(self) -> bool:
        """Whether the output at a token depends on later ones, in a causal model too."""
        return self.causal == "as_published"

    @property
    def tied_to_length(self) -> bool:
        """Whether multi-linear attention has a row of its output map for each pair of positions."""
        return self.output_map == "pairs"

    def _check_multilinear(self, problems: list[str]) -> None:
        for key, value in _MULTILINEAR.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        if self.output_map == "decayed" and self.decays is None:
            object.__setattr__(self, "decays", 8)
        for key, allowed in _CHOICES.items():
            if getattr(self, key) not in allowed:
                words = " or ".join(f"'{word}'" for word in allowed)
                problems.append(f"model.attention.{key}: {words}, given '{getattr(self, key)}'")
        for key in ("cores", "rank", "decays"):
            value = getattr(self, key)
            if value is not None and not (type(value) is int and 0 < value < SIZES):
                problems.append(f"model.attention.{key}: a positive whole number, given {value!r}")
        if self.output_map == "pairs" and self.decays is not None:
            problems.append(
                f"model.attention.decays: goes with `model.attention.output_map: decayed`, given {self.decays} with 'pairs'"
            )
        score = stage_name(self.score)
        plain = {"normalize": "softmax", "mix": "none"}
        for key, value in plain.items():
            if stage_name(getattr(self, key)) != value:
                problems.append(
                    f"model.attention.{key}: multi-linear attention has no attention weights to act on; given "
                    f"'{stage_name(getattr(self, key))}', leave it at '{value}' or set model.attention.kind: weighted"
                )
        if self.cross_head:
            problems.append(
                f"model.attention.cross_head: multi-linear attention has one head; given {self.cross_head}, set it to 0 or "
                "model.attention.kind: weighted"
            )
        if score not in ("dot_product", "relative"):
            problems.append(
                f"model.attention.score: multi-linear attention has its own; given '{score}', allowed: dot_product (nothing is "
                "added) or relative (the position term of the released code)"
            )
        if score == "relative":
            if other := sorted(stage_options(self.score).keys() - {"shared_biases"}):
                problems.append(
                    f"model.attention.score: the position term of multi-linear attention has the option shared_biases only, "
                    f"given {', '.join(other)}"
                )
            if self.output_map == "decayed":
                problems.append(
                    "model.attention.output_map: decayed knows distances already and takes no position term; set "
                    "model.attention.score: dot_product and another model.position"
                )
        if self.sees_future and self.output_map == "decayed":
            problems.append(
                "model.attention.causal: as_published is the paper's form, which has `model.attention.output_map: pairs`; "
                "given 'decayed', which sees no future by construction"
            )
        if self.not_next_token_perplexity and not self.sees_future:
            problems.append(
                "model.attention.not_next_token_perplexity: goes with `model.attention.causal: as_published`; a masked model "
                "has a next-token perplexity"
            )


@dataclass(frozen=True, kw_only=True)
class InputConfig(Strict):
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
        check_stage(problems, "input", self.kind, "model.input.kind")
        if self.kind == "adaptive":
            problems += cluster_problems("model.input", self.cutoffs, self.div_val, None, None)
        elif self.kind == "token" and self.cutoffs:
            problems.append(
                f"model.input.cutoffs: go with `model.input.kind: adaptive`, given {self.cutoffs} with 'token'"
            )
        raise_problems(problems)


@dataclass(frozen=True, kw_only=True)
class OutputConfig(Strict):
    """The vocabulary layer. `tied`: its matrix is the embedding's. `bias`: by default, exactly when not tied.

    `adaptive` has clusters as the input has; `cutoffs` and `div_val` left at null are the adaptive input's.
    `form` says whose adaptive softmax it is: `fairseq`'s has no biases, and its head reads the hidden states themselves;
    `transformer_xl`'s has biases, and its head a projection of its own. Given without `bias` it decides that, too; null
    means `transformer_xl` where there are biases and `fairseq` where there are none.
    `mixture_of_softmaxes` mixes `mixtures` softmaxes over one matrix, or adaptive ones (`components`; null: adaptive where
    `cutoffs` are given). `epsilon` is what the released codes add to probabilities before the logarithm.
    """

    kind: str = "softmax"
    tied: bool = False
    bias: bool | None = None
    normalize: Literal["softmax", "sigsoftmax"] = "softmax"
    mixtures: int | None = None  # K; null: 10 where there is a mixture with latent states
    components: Literal["softmax", "adaptive"] | None = None
    latent: bool | None = None  # hidden states of the mixture are tanh(W g + b); without it mixtures is 1. null: yes
    latent_dropout: Probability = 0.0  # on them
    latent_dropout_locked: bool = False  # one mask for all positions of a sequence
    epsilon: float = 0.0
    cutoffs: list[int] | None = None
    div_val: int | None = None
    form: Literal["fairseq", "transformer_xl"] | None = None
    tied_projections: bool | None = None  # the tails' projections are the input's; null: like `tied`
    tail_dropout: Probability = 0.0  # between the two matrices of a tail

    def __post_init__(self) -> None:
        if self.kind == "mixture_of_softmaxes":
            for key, value in (
                ("mixtures", 1 if self.latent is False else 10),
                ("components", "adaptive" if self.cutoffs else "softmax"),
                ("latent", True),
            ):
                if getattr(self, key) is None:
                    object.__setattr__(self, key, value)
        if self.bias is None:
            by_form = self.adaptive and self.form is not None
            object.__setattr__(self, "bias", self.form == "transformer_xl" if by_form else not self.tied)
        problems: list[str] = []
        check_stage(problems, "output", self.kind, "model.output.kind")
        if self.normalize not in ("softmax", "sigsoftmax"):
            problems.append(f"model.output.normalize: 'softmax' or 'sigsoftmax', given '{self.normalize}'")
        if self.cutoffs is not None:
            object.__setattr__(self, "cutoffs", list(self.cutoffs))
        if self.adaptive:
            if self.form is None:
                object.__setattr__(self, "form", "transformer_xl" if self.bias else "fairseq")
            if self.tied_projections is None:
                object.__setattr__(self, "tied_projections", self.tied)
            self._check_adaptive(problems)
        elif self.kind in ("softmax", "mixture_of_softmaxes"):
            given = {
                key: getattr(self, key) for key in ("cutoffs", "div_val", "form", "tied_projections", "tail_dropout")
            }
            problems += [
                f"model.output.{key}: goes with `model.output.kind: adaptive`, or a mixture with `components: adaptive`; given "
                f"{value} with '{self.kind}'"
                for key, value in given.items()
                if value
            ]
        self._check_mixture(problems)
        raise_problems(problems)

    @property
    def adaptive(self) -> bool:
        """Whether the vocabulary is in clusters."""
        return self.kind == "adaptive" or (self.kind == "mixture_of_softmaxes" and self.components == "adaptive")

    def _check_mixture(self, problems: list[str]) -> None:
        if self.kind in ("softmax", "adaptive"):
            given = [key for key in ("mixtures", "components", "latent") if getattr(self, key) is not None]
            given += [key for key in ("latent_dropout", "latent_dropout_locked", "epsilon") if getattr(self, key)]
            problems += [
                f"model.output.{key}: goes with `model.output.kind: mixture_of_softmaxes`, given with '{self.kind}'"
                for key in given
            ]
            return
        if self.kind != "mixture_of_softmaxes":
            return
        if not (type(self.mixtures) is int and 0 < self.mixtures < SIZES):
            problems.append(f"model.output.mixtures: a positive whole number, given {self.mixtures!r}")
        elif self.latent is False and self.mixtures > 1:
            problems.append(
                f"model.output.latent: without it all softmaxes of the mixture are the same one; given {self.mixtures} of "
                "them, set model.output.mixtures to 1"
            )
        if self.components not in ("softmax", "adaptive"):
            problems.append(f"model.output.components: 'softmax' or 'adaptive', given '{self.components}'")
        if not 0 <= self.latent_dropout < 1:
            problems.append(f"model.output.latent_dropout: a probability below 1, given {self.latent_dropout}")
        elif self.latent_dropout and self.latent is False:
            problems.append("model.output.latent_dropout: goes with `model.output.latent: true`")
        check_numbers(problems, self, "model.output", ("epsilon",), zero=True, below=1)

    def _check_adaptive(self, problems: list[str]) -> None:
        if self.cutoffs is not None:  # else the input's, which the model knows
            problems += cluster_problems("model.output", self.cutoffs, self.div_val, None, None)
        if self.form not in ("fairseq", "transformer_xl"):
            problems.append(f"model.output.form: 'fairseq' or 'transformer_xl', given '{self.form}'")
        if self.tied_projections and not self.tied:
            problems.append("model.output.tied_projections: goes with `model.output.tied: true`")
        if not 0 <= self.tail_dropout < 1:
            problems.append(f"model.output.tail_dropout: a probability below 1, given {self.tail_dropout}")


def _check_sizes(section: str, **values: int | None) -> None:
    raise_problems(
        [
            f"model.{section}.{key}: a positive whole number below {SIZES:,}, given {value!r}"
            for key, value in values.items()
            if value is not None and not (type(value) is int and 0 < value < SIZES)
        ]
    )


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Strict):
    """The encoder of a translation model; null: as in `model`.

    `vocab_size` is the source vocabulary's. `share_embedding`: source and target tokens have one table (and one vocabulary).
    """

    num_hidden_layers: int | None = None
    vocab_size: int | None = None
    share_embedding: bool = False
    attention: AttentionConfig | None = None

    def __post_init__(self) -> None:
        _check_sizes("encoder", num_hidden_layers=self.num_hidden_layers, vocab_size=self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Strict):
    """The decoder of a translation model; null: as in `model`.

    `attention` is its self-attention, `cross` what it reads the source with. Without a `cross` of its own, `model.attention`
    serves, with a dot-product score: positions of two languages have no distance.
    The released code of Mixhead never mixes heads in cross-attention, nor in self-attention while it decodes token by
    token, though it was trained mixed. `released_cross` and `released_decoding` do as it does, for comparison.
    """

    num_hidden_layers: int | None = None
    attention: AttentionConfig | None = None
    cross: AttentionConfig | None = None
    released_cross: bool = False
    released_decoding: bool = False

    def __post_init__(self) -> None:
        _check_sizes("decoder", num_hidden_layers=self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class DropoutConfig(Strict):
    """Dropout by place. `locked` (variational): one mask for all positions of a sequence, except on attention weights."""

    embedding: Probability = 0.0  # on embeddings plus positions
    attention: Probability = 0.0  # on attention weights, after mixing
    activation: Probability = 0.0  # inside the feed-forward layer
    residual: Probability = 0.0  # on what attention and feed-forward add to the residual stream
    output: Probability = 0.0  # on the last hidden states, before the vocabulary layer
    locked: bool = False

    def __post_init__(self) -> None:
        raise_problems(
            [
                f"model.dropout.{place}: a probability below 1, given {value}"
                for place in ("embedding", "attention", "activation", "residual", "output")
                if not 0 <= (value := getattr(self, place)) < 1
            ]
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Strict):
    """A Transformer: a decoder-only language model, an encoder, or both of a translation model.

    `encoder` and `decoder` say what differs there; a language model has neither section.
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
    memory_length: int = 0  # tokens before a segment that every layer remembers
    memory_start: Literal["empty", "zeros"] = "empty"  # zeros: a memory of zeros that is attended, for comparison
    same_length: bool = False  # every query sees memory_length keys, itself included, instead of all of the memory
    scale_embedding: bool = False  # multiply embeddings by sqrt(hidden_size)
    initializer: str = "fairseq"
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    input: InputConfig = field(default_factory=InputConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    encoder: EncoderConfig | None = None
    decoder: DecoderConfig | None = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                    "intermediate_size", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, key)
            if value is not None and not (type(value) is int and value > 0):
                problems.append(f"model.{key}: a positive whole number, given {value!r}")
            elif value is not None and not value < SIZES:
                problems.append(f"model.{key}: below {SIZES:,}, given {value}")
        headless = self.attention.kind == "multilinear"  # one tensor of its own rank
        if self.head_dim is None and not problems:  # nothing is derived from wrong sizes
            if self.hidden_size % self.num_attention_heads and not headless:
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
        check_stage(problems, "position", self.position, "model.position")
        score = stage_name(self.attention.score)
        if len(problems) == before and (score == "relative") != (self.position == "relative"):
            problems.append(
                "model.attention.score: 'relative' goes with model.position: relative and only with it; given "
                f"model.attention.score: {score} with model.position: {self.position}; change one of them"
            )
        check_stage(problems, "activation", self.hidden_act, "model.hidden_act")
        check_stage(problems, "initializer", self.initializer, "model.initializer")
        check_numbers(problems, self, "model", ("layer_norm_eps", "rope_theta"))
        if self.norm not in ("pre", "post"):
            problems.append(f"model.norm: 'pre' or 'post', given '{self.norm}'")
        if self.position == "rotary" and isinstance(self.head_dim, int) and self.head_dim % 2:
            problems.append(f"model.head_dim: rotary positions need an even head size, given {self.head_dim}")
        if headless:
            self._check_multilinear(problems)
        self._check_memory(problems)
        self._check_adaptive(problems)
        if not problems and (self.encoder is not None or self.decoder is not None):
            problems += self.problems_of_translation()
        raise_problems(problems)

    # -- the parts of a translation model, each as a configuration of its own ----------------------------------------------

    def of_encoder(self) -> ModelConfig:
        """What an encoder is built from. Nothing is hidden there, so `as_published` and `masked` are one."""
        return _of_encoder(self)

    def of_decoder(self) -> ModelConfig:
        """What a decoder is built from, its cross-attention apart."""
        return _of_decoder(self)

    def of_cross(self) -> ModelConfig:
        """What cross-attention is built from: no positions, for those of two texts have no distance."""
        return _of_cross(self)

    def problems_of_translation(self) -> list[str]:
        """Why no translation model can be built of this; empty if one can."""
        return _problems_of_translation(self)

    def problems_of_masked(self) -> list[str]:
        """Why no masked language model can be built of this; empty if one can."""
        problems = [
            f"model.{section}: a part of a translation model; an encoder alone is described by `model` itself, leave it out"
            for section in ("encoder", "decoder")
            if getattr(self, section) is not None
        ]
        if self.memory_length:
            problems.append(
                f"model.memory_length: a masked language model sees its segment whole and remembers nothing; given "
                f"{self.memory_length}, set it to 0"
            )
        if self.sees_future:
            problems.append(
                "model.attention.causal: as_published says what a causal model sees, and here every token sees every other; "
                "leave it out, and model.attention.not_next_token_perplexity too"
            )
        if self.vocab_size == 1:
            problems.append("model.vocab_size: at least 2, the last entry is <mask>; given 1")
        return problems

    @property
    def sees_future(self) -> bool:
        """Whether what is computed for a token depends on later ones: then its perplexity is not a next-token perplexity.

        Of a translation model: for a token of the target. Its encoder sees everything, and has nothing to predict.
        """
        return self._that_predicts.sees_future

    @property
    def _that_predicts(self) -> AttentionConfig:
        """The self-attention of what predicts the next token."""
        own = None if self.decoder is None else self.decoder.attention
        return own or self.attention

    def _check_multilinear(self, problems: list[str]) -> None:
        attention = self.attention
        if self.position == "rotary":
            problems.append(
                "model.position: rotary turns queries and keys so that their dot product knows a distance; multi-linear "
                "attention has no dot product, choose sinusoidal, learned, relative or none"
            )
        alone = self.encoder is None and self.decoder is None  # else it is for the places with weights
        if self.dropout.attention and alone:
            problems.append(
                f"model.dropout.attention: multi-linear attention has no attention weights to drop, given "
                f"{self.dropout.attention}; set it to 0 and use model.dropout.residual"
            )
        if attention is self._that_predicts and attention.sees_future and not attention.not_next_token_perplexity:
            problems.append(
                "model.attention.causal: as_published lets every token see the later ones of its segment, which it has to "
                "predict; use 'masked', or say with model.attention.not_next_token_perplexity: true that its "
                "perplexity is not a next-token perplexity"
            )
        if attention.output_map == "decayed" and self.same_length is True:
            problems.append(
                "model.same_length: not with model.attention.output_map: decayed, whose sums hold all earlier tokens; change "
                "one of them"
            )
        if attention.tied_to_length and self.memory_start == "zeros":
            problems.append(
                "model.memory_start: zeros stand before the text, where model.attention.output_map: pairs has no rows; choose "
                "empty, or output_map: decayed"
            )
        if attention.sees_future and self.memory_length:
            problems.append(
                f"model.memory_length: not with model.attention.causal: as_published, whose code drops the memory; given "
                f"{self.memory_length}, set it to 0"
            )

    def _check_memory(self, problems: list[str]) -> None:
        length = self.memory_length
        if type(length) is not int or not 0 <= length < SIZES:
            problems.append(f"model.memory_length: 0, or a whole number of tokens below {SIZES:,}, given {length!r}")
            return
        if self.memory_start not in ("empty", "zeros"):
            problems.append(f"model.memory_start: 'empty' or 'zeros', given '{self.memory_start}'")
        if type(self.same_length) is not bool:
            problems.append(f"model.same_length: true or false, given {self.same_length!r}")
        if length == 0:
            if self.same_length is True:
                problems.append("model.same_length: goes with a memory; set model.memory_length")
            if self.memory_start == "zeros":
                problems.append("model.memory_start: zeros goes with a memory; set model.memory_length")
        if self.same_length is True and stage_options(self.attention.score).get("as_published") is True:
            problems.append(
                "model.same_length: not with as_published, which measures distances that no window bounds; set one of them to "
                "false"
            )

    def _check_adaptive(self, problems: list[str]) -> None:
        """Clusters of the input and the output layer; what the output leaves open is the input's."""
        read, written = self.input, self.output
        vocab_size = self.vocab_size if type(self.vocab_size) is int else None
        hidden_size = self.hidden_size if type(self.hidden_size) is int else None
        if read.kind == "adaptive":
            problems += cluster_problems("model.input", read.cutoffs, read.div_val, vocab_size, hidden_size)
        if not written.adaptive:
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


def with_memory(
    config: ModelConfig,
    memory_length: int | None = None,
    *,
    same_length: bool | None = None,
    clamp_length: int | None = None,
) -> ModelConfig:
    """`config` with another memory, window or clamp; None: as it is. Without memory there is no window and no start of it.

    Raises ConfigError for values that the model cannot have.
    """
    changes: dict[str, Any] = {}
    if memory_length is not None:
        changes["memory_length"] = memory_length
        if memory_length == 0:
            changes |= {"same_length": False, "memory_start": "empty"}
    if same_length is not None:
        changes["same_length"] = same_length
    if clamp_length is not None:
        if config.position != "relative":
            raise ConfigError(
                f"clamp_length: goes with model.position: relative, given {clamp_length} with model.position: {config.position}"
            )
        if config.attention.kind == "multilinear":
            raise ConfigError(
                f"clamp_length: the position term of multi-linear attention knows places, not distances, and has none to "
                f"clamp; given {clamp_length} with model.attention.kind: multilinear, leave it out"
            )
        score = {"name": "relative", **stage_options(config.attention.score), "clamp_length": clamp_length}
        changes["attention"] = replace(config.attention, score=score)
    return replace(config, **changes)


def _of_encoder(model: ModelConfig) -> ModelConfig:
    """See `ModelConfig.of_encoder`."""
    own = model.encoder or EncoderConfig()
    other = own.vocab_size not in (None, model.vocab_size)
    return _part(
        model,
        _seeing_all(_attentions(model)["encoder"]),
        vocab_size=own.vocab_size or model.vocab_size,
        num_hidden_layers=own.num_hidden_layers or model.num_hidden_layers,
        output=OutputConfig() if other else model.output,  # which is of target words
    )


def _of_decoder(model: ModelConfig) -> ModelConfig:
    """See `ModelConfig.of_decoder`."""
    own = model.decoder or DecoderConfig()
    layers = own.num_hidden_layers or model.num_hidden_layers
    return _part(model, _attentions(model)["decoder"], num_hidden_layers=layers)


def _of_cross(model: ModelConfig) -> ModelConfig:
    """See `ModelConfig.of_cross`."""
    own = model.decoder or DecoderConfig()
    layers = own.num_hidden_layers or model.num_hidden_layers
    return _part(model, _seeing_all(_attentions(model)["cross"]), num_hidden_layers=layers, position="none")


def _problems_of_translation(model: ModelConfig) -> list[str]:
    """See `ModelConfig.problems_of_translation`."""
    found: list[str] = []
    if model.memory_length:
        found.append(
            f"model.memory_length: a translation model reads sentences, not a running text; given {model.memory_length}, "
            "set it to 0"
        )
    cross = model.decoder.cross if model.decoder is not None else None
    if cross is not None and stage_name(cross.score) != "dot_product":
        found.append(
            f"model.decoder.cross.score: '{stage_name(cross.score)}' scores places and distances, and those of two texts "
            "have nothing to do with each other; use dot_product"
        )
    if (cross or model.attention).output_map == "decayed":
        found.append(
            "model.decoder.cross: multi-linear attention with output_map decayed weighs distances, and between two texts "
            "there are none; give model.decoder.cross an output_map pairs, or kind: weighted"
        )
    own = model.encoder
    if own is not None and own.share_embedding and own.vocab_size not in (None, model.vocab_size):
        found.append(
            f"model.encoder.share_embedding: one table for both vocabularies, but model.encoder.vocab_size is "
            f"{own.vocab_size} and model.vocab_size {model.vocab_size}; use one joint vocabulary (data.vocabulary: joint), or "
            "set it to false"
        )
    if found:
        return found
    for key, part in (
        ("model.encoder.attention", _of_encoder),
        ("model.decoder.attention", _of_decoder),
        ("model.decoder.cross", _of_cross),
    ):
        found += _faults(model, key, part)
    return found


def _faults(model: ModelConfig, key: str, part: Callable[[ModelConfig], ModelConfig]) -> list[str]:
    """What keeps a part from being built, with the keys that are meant there."""
    try:
        part(model)
    except ConfigError as error:
        named = [problem.replace("model.attention", key) for problem in error.problems]
        if part is _of_encoder and model.encoder is not None and model.encoder.vocab_size is not None:
            named = [problem.replace("model.vocab_size", "model.encoder.vocab_size") for problem in named]
        section = key.rpartition(".")[0]
        return [problem if section in problem else f"{problem} ({key})" for problem in named]
    return []


def _attentions(model: ModelConfig) -> dict[str, AttentionConfig]:
    """What each place attends with."""
    encoder, decoder = model.encoder or EncoderConfig(), model.decoder or DecoderConfig()
    cross = decoder.cross or replace(model.attention, score="dot_product")
    if decoder.released_cross:
        cross = replace(cross, mix="none")
    return {
        "encoder": encoder.attention or model.attention,
        "decoder": decoder.attention or model.attention,
        "cross": cross,
    }


def _part(model: ModelConfig, attention: AttentionConfig, **changes: object) -> ModelConfig:
    """Dropout of attention weights is for the places that have some, if there are such."""
    dropout, kinds = model.dropout, {stages.kind for stages in _attentions(model).values()}
    if attention.kind == "multilinear" and kinds != {"multilinear"}:
        dropout = replace(dropout, attention=0.0)
    return replace(model, attention=attention, dropout=dropout, encoder=None, decoder=None, **changes)  # type: ignore[arg-type]


def _seeing_all(attention: AttentionConfig) -> AttentionConfig:
    """Where nothing is hidden, `as_published` and `masked` are one."""
    if attention.sees_future:
        return replace(attention, causal="masked", not_next_token_perplexity=False)
    return attention
