"""The model section of a configuration: what a language model is made of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fullrank.config import parts
from fullrank.config.attention import AttentionConfig
from fullrank.config.checks import (
    SIZES,
    Probability,
    Strict,
    check_numbers,
    check_stage,
    raise_problems,
    stage_name,
    stage_options,
)
from fullrank.config.clusters import cluster_problems
from fullrank.config.translation import DecoderConfig, EncoderConfig
from fullrank.config.vocabulary import InputConfig, OutputConfig
from fullrank.errors import ConfigError


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
        return parts.of_encoder(self)

    def of_decoder(self) -> ModelConfig:
        """What a decoder is built from, its cross-attention apart."""
        return parts.of_decoder(self)

    def of_cross(self) -> ModelConfig:
        """What cross-attention is built from: no positions, for those of two texts have no distance."""
        return parts.of_cross(self)

    def problems_of_translation(self) -> list[str]:
        """Why no translation model can be built of this; empty if one can."""
        return parts.problems(self)

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
