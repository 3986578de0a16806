"""The model section of a configuration: what a language model, a masked one or a translation model is made of.

`attention`, `input` and `output` are of a type that their `kind` decides, so that keys of different kinds cannot be combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from .errors import ConfigError
from .section import (
    Allowed,
    ByKind,
    Positive,
    Probability,
    Rate,
    Section,
    Share,
    Size,
    SizeOrZero,
    Slot,
    Stage,
    key,
    stage_name,
    stage_options,
)

# what is said of every figure of a model whose tokens see later ones
NOT_NEXT_TOKEN = "not a next-token perplexity: its tokens see later ones (model.attention.causal: as_published)"


# -- options of stages, read by the stages' own `Config` -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RelativeOptions(Section):
    """Options of relative scores (Transformer-XL)."""

    shared_biases: bool = key(True, "u and v are one pair for all layers")
    clamp_length: Size | None = key(None, "distances above this count as this one; null: none is clamped")
    as_published: bool = key(False, "measure distances as the released code of Skip Cross-head does, for comparison")


@dataclass(frozen=True, kw_only=True)
class PositionTermOptions(Section):
    """Options of the position term that the released code of multi-linear attention adds."""

    shared_biases: bool = key(True, "u and v are one pair for all layers")


@dataclass(frozen=True, kw_only=True)
class DenseSynthesizerOptions(Section):
    """Options of the dense synthesizer."""

    keep_key_projection: bool = key(False, "allocate the projection of keys that is never used, as the paper counts it")


@dataclass(frozen=True, kw_only=True)
class RandomMixingOptions(Section):
    """Options of mixing by random numbers that are never trained."""

    std: Positive | None = key(None, "standard deviation of the numbers; null: 1 / sqrt(number of heads)")


RELATIVE: dict[str, type | None] = {"relative": RelativeOptions}
Score = Annotated[
    Stage,
    Slot(
        "score",
        {"dot_product": None, "dense_synthesizer": DenseSynthesizerOptions, "random_synthesizer": None} | RELATIVE,
    ),
]
PositionTerm = Annotated[Stage, Slot("", {"dot_product": None, "relative": PositionTermOptions})]
Normalize = Annotated[Stage, Slot("normalize", {"softmax": None, "sigsoftmax": None})]
Mix = Annotated[
    Stage,
    Slot(
        "mix",
        {
            "none": None,
            "position_independent": None,
            "position_wise": None,
            "random": RandomMixingOptions,
            "average": None,
        },
    ),
]
Position = Annotated[str, Slot("position", dict.fromkeys(("sinusoidal", "learned", "relative", "rotary", "none")))]
Activation = Annotated[str, Slot("activation", dict.fromkeys(("relu", "gelu", "swiglu")))]
Initializer = Annotated[
    str, Slot("initializer", dict.fromkeys(("fairseq", "transformer_xl", "pytorch", "xavier_uniform")))
]


# -- attention -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ByKind):
    """Attention, of the type that `kind` says: a WeightedConfig or a MultiLinearConfig."""

    KEY = "model.attention"
    SLOT = "attend"
    MEMBERS: ClassVar[list[type[Any]]] = []
    WRITTEN: ClassVar[dict[str, Any]] = {
        "kind": None, "score": None, "normalize": "softmax", "mix": "none", "cross_head": 0.0, "bias": None,
        "cores": None, "rank": None, "causal": None, "core_weights": None, "output_map": None, "decays": None,
        "not_next_token_perplexity": False,
    }  # fmt: skip
    kind: str = key("weighted", "weighted values, or multi-linear attention without weights")
    score: Score = key("dot_product", "how much each query wants each key")
    bias: bool = key(True, "biases of the query, key, value and output projections")

    if TYPE_CHECKING:  # any key of the kind

        def __init__(self, *, kind: str = "weighted", **keys: Any) -> None: ...

    @property
    def sees_future(self) -> bool:
        """The output at a token depends on later ones, in a causal model too."""
        return False

    @property
    def tied_to_length(self) -> bool:
        """The output map has a row for each pair of positions."""
        return False

    def seeing_all(self) -> AttentionConfig:
        """The same where nothing is hidden."""
        return self


@dataclass(frozen=True, kw_only=True)
class WeightedConfig(AttentionConfig, built_in=True):
    """The attention pipeline: project -> permute heads -> score, mask, normalize, mix, dropout, weighted values -> merge."""

    kind: str = key("weighted", "weighted values, or multi-linear attention without weights")
    normalize: Normalize = key("softmax", "scores to weights that sum to one")
    mix: Mix = key("none", "exchange of attention between heads (Mixhead)")
    cross_head: Probability = key(
        0.0, "beta: probability that a training pass permutes the heads of keys and values (Skip Cross-head §2.2)"
    )


@dataclass(frozen=True, kw_only=True)
class MultiLinearConfig(AttentionConfig, built_in=True):
    """Multi-linear attention (Ma et al. 2019): a tensor of `cores` diagonal cores of rank `rank` in place of weights.

    `output_map: pairs` ties `max_position_embeddings` into the parameters. `score: relative` adds the position term of the
    released code. `causal: as_published` does not mask the future: a language model then needs
    `not_next_token_perplexity: true`.
    """

    kind: str = key("multilinear", "weighted values, or multi-linear attention without weights")
    score: PositionTerm = key("dot_product", "relative: add the position term of the released code")
    cores: Size = key(1, "number of cores C of multi-linear attention")
    rank: Size = key(40, "rank R of each core")
    causal: Literal["masked", "as_published"] = key(
        "masked", "as_published: the future is not masked, as in the paper's code"
    )
    core_weights: Literal["softmax", "free"] = key(
        "softmax", "a core is softmax(g) as in the paper, or g itself (free) as in the released code"
    )
    output_map: Literal["pairs", "decayed"] = key(
        "pairs", "a row for each pair of positions (the paper's), or decayed sums that serve any length"
    )
    decays: Size | None = key(None, "number of products of decayed sums; null: 8 with output_map decayed")
    not_next_token_perplexity: bool = key(
        False, "says that one knows that the perplexity of as_published is not a next-token perplexity"
    )

    @property
    def sees_future(self) -> bool:
        return self.causal == "as_published"

    @property
    def tied_to_length(self) -> bool:
        return self.output_map == "pairs"

    def seeing_all(self) -> AttentionConfig:
        return replace(self, causal="masked", not_next_token_perplexity=False) if self.sees_future else self

    def _resolve(self) -> None:
        if self.output_map == "decayed" and self.decays is None:
            self._set("decays", 8)

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if self.tied_to_length and self.decays is not None:
            yield (
                f"model.attention.decays: goes with `model.attention.output_map: decayed`, given {self.decays} with 'pairs'"
            )
        if not self.tied_to_length and stage_name(self.score) == "relative":
            yield (
                "model.attention.output_map: decayed knows distances already and takes no position term; set "
                "model.attention.score: dot_product and another model.position"
            )
        if not self.tied_to_length and self.sees_future:
            yield (
                "model.attention.causal: as_published is the paper's form, which has `model.attention.output_map: pairs`; "
                "given 'decayed', which sees no future by construction"
            )
        if self.not_next_token_perplexity and not self.sees_future:
            yield (
                "model.attention.not_next_token_perplexity: goes with `model.attention.causal: as_published`; a masked model "
                "has a next-token perplexity"
            )


# -- embedding and vocabulary layer ----------------------------------------------------------------------------------------

Cutoffs = Annotated[
    list[int],
    Allowed(
        "ids above 0 that increase strictly, as in [20000, 60000]",
        lambda ids: all(a < b for a, b in pairwise([0, *ids])),
    ),
]


def cluster_problems(
    key: str, cutoffs: list[int] | None, div_val: int | None, vocab_size: int | None, hidden_size: int
) -> list[str]:
    """Lines about clusters that cannot be, `key` being `model.input` or `model.output`; None is not known yet."""
    if not cutoffs:
        return [f"{key}.cutoffs: an adaptive layer needs the ids at which its clusters end, as in [20000, 60000]"]
    lines = []
    if vocab_size is not None and cutoffs[-1] >= vocab_size:
        lines.append(
            f"{key}.cutoffs: below model.vocab_size {vocab_size}, which ends the last cluster; given {cutoffs}"
        )
    if div_val is not None and hidden_size < div_val ** len(cutoffs):
        lines.append(
            f"{key}.div_val: the last of {len(cutoffs) + 1} clusters would have {hidden_size} / {div_val}^{len(cutoffs)} < 1 "
            f"dimensions; lower {key}.div_val or give fewer {key}.cutoffs"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class InputConfig(ByKind):
    """The embedding of token ids, of the type that `kind` says: a TokenConfig or an AdaptiveInputConfig."""

    KEY = "model.input"
    SLOT = "input"
    MEMBERS: ClassVar[list[type[Any]]] = []
    WRITTEN: ClassVar[dict[str, Any]] = {"kind": None, "cutoffs": [], "div_val": 1}
    kind: str = key("token", "one table of vectors, or clusters of them")

    if TYPE_CHECKING:

        def __init__(self, *, kind: str = "token", **keys: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TokenConfig(InputConfig, built_in=True):
    """One table of vectors."""

    kind: str = key("token", "one table of vectors, or clusters of them")


@dataclass(frozen=True, kw_only=True)
class AdaptiveInputConfig(InputConfig, built_in=True):
    """Adaptive input: ids are sorted by frequency, and vectors of cluster i have hidden_size / div_val^i dimensions."""

    kind: str = key("adaptive", "one table of vectors, or clusters of them")
    cutoffs: Cutoffs = key([], "ids at which clusters end; the last one ends at vocab_size")
    div_val: Size = key(1, "how many times narrower each cluster is than the one before")

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if not self.cutoffs:
            yield from cluster_problems(self.KEY, self.cutoffs, None, None, 1)


@dataclass(frozen=True, kw_only=True)
class OutputConfig(ByKind):
    """The vocabulary layer, of the type that `kind` says: a SoftmaxConfig, AdaptiveConfig, MixtureConfig or, where a mixture
    has clusters, AdaptiveMixtureConfig."""

    KEY = "model.output"
    SLOT = "output"
    MEMBERS: ClassVar[list[type[Any]]] = []
    WRITTEN: ClassVar[dict[str, Any]] = {
        "kind": None, "tied": None, "bias": None, "normalize": None,
        "mixtures": None, "components": None, "latent": None, "latent_dropout": 0.0, "latent_dropout_locked": False,
        "epsilon": 0.0,
        "cutoffs": None, "div_val": None, "form": None, "tied_projections": None, "tail_dropout": 0.0,
    }  # fmt: skip
    kind: str = key("softmax", "a softmax, clusters of them, or a mixture")
    tied: bool = key(False, "the matrix of the vocabulary layer is the embedding's")
    bias: bool | None = key(None, "biases of the vocabulary layer; null: exactly when it is not tied")
    normalize: Literal["softmax", "sigsoftmax"] = key("softmax", "logits to probabilities")

    if TYPE_CHECKING:

        def __init__(self, *, kind: str = "softmax", **keys: Any) -> None: ...

    @property
    def adaptive(self) -> bool:
        """The vocabulary is in clusters."""
        return isinstance(self, ClusteredConfig)

    @classmethod
    def member(cls, raw: Mapping[str, Any], key: str) -> type[Any]:
        found: type[Any] = super().member(raw, key)
        components = raw.get("components") or ("adaptive" if raw.get("cutoffs") else "softmax")
        return AdaptiveMixtureConfig if found is MixtureConfig and components == "adaptive" else found

    def _resolve(self) -> None:
        if self.bias is None:
            self._set("bias", not self.tied)


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(OutputConfig, built_in=True):
    """One softmax."""

    kind: str = key("softmax", "a softmax, clusters of them, or a mixture")


@dataclass(frozen=True, kw_only=True)
class ClusteredConfig(OutputConfig):
    """The keys of an adaptive softmax.

    `form` says whose it is: `fairseq`'s has no biases, and its head reads the hidden states themselves; `transformer_xl`'s
    has biases, and its head a projection of its own. Given without `bias` it decides that, too.
    """

    cutoffs: Cutoffs | None = key(None, "ids at which clusters end; null: those of an adaptive input")
    div_val: Size | None = key(
        None, "how many times narrower each cluster is; null: as in an adaptive input, or else 1"
    )
    form: Literal["fairseq", "transformer_xl"] | None = key(
        None, "whose adaptive softmax it is; null: transformer_xl where there are biases, fairseq where there are none"
    )
    tied_projections: bool | None = key(None, "the projections of the tails are the input's; null: like tied")
    tail_dropout: Rate = key(0.0, "dropout between the two matrices of a tail")

    def _resolve(self) -> None:
        if self.bias is None and self.form is not None:
            self._set("bias", self.form == "transformer_xl")
        super()._resolve()
        if self.form is None:
            self._set("form", "transformer_xl" if self.bias else "fairseq")
        if self.tied_projections is None:
            self._set("tied_projections", self.tied)

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if self.tied_projections and not self.tied:
            yield "model.output.tied_projections: goes with `model.output.tied: true`"


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(ClusteredConfig, built_in=True):
    """An adaptive softmax."""

    kind: str = key("adaptive", "a softmax, clusters of them, or a mixture")


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(OutputConfig, built_in=True):
    """A mixture of `mixtures` softmaxes over one matrix (Mixture of Softmaxes §3)."""

    ALSO = " with `model.output.components: softmax`"
    kind: str = key("mixture_of_softmaxes", "a softmax, clusters of them, or a mixture")
    mixtures: Size | None = key(None, "number of softmaxes K; null: 10, or 1 without latent states")
    components: Literal["softmax", "adaptive"] = key("softmax", "what is mixed; null: adaptive where cutoffs are given")
    latent: bool = key(True, "hidden states of the mixture are tanh(W g + b); without them mixtures is 1")
    latent_dropout: Rate = key(0.0, "dropout on the latent states")
    latent_dropout_locked: bool = key(False, "one dropout mask for all positions of a sequence")
    epsilon: Share = key(0.0, "added to probabilities before the logarithm, as the released codes do")

    def _resolve(self) -> None:
        if self.mixtures is None:
            self._set("mixtures", 10 if self.latent else 1)
        super()._resolve()

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if not self.latent and self.mixtures != 1:
            yield (
                f"model.output.latent: without it all softmaxes of the mixture are the same one; given {self.mixtures} of "
                "them, set model.output.mixtures to 1"
            )
        if not self.latent and self.latent_dropout:
            yield "model.output.latent_dropout: goes with `model.output.latent: true`"


@dataclass(frozen=True, kw_only=True)
class AdaptiveMixtureConfig(MixtureConfig, ClusteredConfig, built_in=True):
    """A mixture of adaptive softmaxes over one matrix."""

    ALSO = " with `model.output.components: adaptive`"
    components: Literal["softmax", "adaptive"] = key(
        "adaptive", "what is mixed; null: adaptive where cutoffs are given"
    )


# -- the whole model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DropoutConfig(Section):
    """Dropout by place."""

    KEY = "model.dropout"
    embedding: Rate = key(0.0, "dropout on embeddings plus positions")
    attention: Rate = key(0.0, "dropout on attention weights, after mixing")
    activation: Rate = key(0.0, "dropout inside the feed-forward layer")
    residual: Rate = key(0.0, "dropout on what attention and feed-forward add to the residual stream")
    output: Rate = key(0.0, "dropout on the last hidden states, before the vocabulary layer")
    locked: bool = key(False, "variational: one mask for all positions of a sequence, except on attention weights")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Section):
    """The encoder of a translation model; null: as in `model`."""

    KEY = "model.encoder"
    num_hidden_layers: Size | None = key(None, "layers of the encoder")
    vocab_size: Size | None = key(None, "entries of the source vocabulary")
    share_embedding: bool = key(False, "source and target tokens have one table (and one vocabulary)")
    attention: AttentionConfig | None = key(None, "self-attention of the encoder")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Section):
    """The decoder of a translation model; null: as in `model`.

    Without a `cross` of its own, `model.attention` serves, with a dot-product score: positions of two languages have no
    distance. The released code of Mixhead never mixes heads in cross-attention, nor in self-attention while it decodes token
    by token, though it was trained mixed. `released_cross` and `released_decoding` do as it does, for comparison.
    """

    KEY = "model.decoder"
    num_hidden_layers: Size | None = key(None, "layers of the decoder")
    attention: AttentionConfig | None = key(None, "self-attention of the decoder")
    cross: AttentionConfig | None = key(None, "attention from the decoder to the source")
    released_cross: bool = key(False, "cross-attention is never mixed, as in the released code of Mixhead")
    released_decoding: bool = key(False, "decoding token by token is not mixed, as in the released code of Mixhead")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A Transformer: a decoder-only language model, an encoder, or both of a translation model.

    `encoder` and `decoder` say what differs there; a language model has neither section.
    """

    KEY = "model"
    vocab_size: Size | None = key(None, "entries of the vocabulary; null: as many as the data has")
    hidden_size: Size = key(512, "width E of the hidden states")
    num_hidden_layers: Size = key(6, "layers L")
    num_attention_heads: Size = key(8, "attention heads H")
    head_dim: Size | None = key(
        None, "size D of a head, independent of the width (Mixhead §4.4.3); null: hidden_size / num_attention_heads"
    )
    intermediate_size: Size | None = key(None, "width of the feed-forward layer; null: 4 * hidden_size")
    hidden_act: Activation = key("relu", "activation of the feed-forward layer")
    mlp_bias: bool = key(True, "biases of the feed-forward layer")
    norm: Literal["pre", "post"] = key("pre", "layer norm before or after each sub-layer")
    final_norm: bool | None = key(None, "layer norm after the last layer; null: with pre-norm yes, with post-norm no")
    layer_norm_eps: Positive = key(1e-5, "added to the variance in layer norms")
    position: Position = key("sinusoidal", "how positions are told")
    max_position_embeddings: Size = key(1024, "the longest sequence")
    rope_theta: Positive = key(10000.0, "base of the angles of rotary positions")
    memory_length: SizeOrZero = key(0, "tokens before a segment that every layer remembers")
    memory_start: Literal["empty", "zeros"] = key("empty", "zeros: a memory of zeros that is attended, for comparison")
    same_length: bool = key(False, "every query sees memory_length keys, itself included, instead of all of the memory")
    scale_embedding: bool = key(False, "multiply embeddings by sqrt(hidden_size)")
    initializer: Initializer = key("fairseq", "how parameters start")
    dropout: DropoutConfig = key(DropoutConfig(), "dropout by place")
    attention: AttentionConfig = key(AttentionConfig(), "attention")
    input: InputConfig = key(InputConfig(), "embedding of token ids")
    output: OutputConfig = key(OutputConfig(), "vocabulary layer")
    encoder: EncoderConfig | None = key(None, "what differs in the encoder of a translation model")
    decoder: DecoderConfig | None = key(None, "what differs in the decoder of a translation model")

    def _resolve(self) -> None:
        divides = self.hidden_size % self.num_attention_heads == 0
        if self.head_dim is None and (divides or isinstance(self.attention, MultiLinearConfig)):
            self._set("head_dim", max(1, self.hidden_size // self.num_attention_heads))
        if self.intermediate_size is None:
            self._set("intermediate_size", 4 * self.hidden_size)
        if self.final_norm is None:
            self._set("final_norm", self.norm == "pre")
        if isinstance(self.output, ClusteredConfig):  # clusters left open are the input's
            cutoffs, div_val = self.output.cutoffs, self.output.div_val
            if isinstance(self.input, AdaptiveInputConfig):
                cutoffs = self.input.cutoffs if cutoffs is None else cutoffs
                div_val = self.input.div_val if div_val is None else div_val
            self._set("output", replace(self.output, cutoffs=cutoffs, div_val=1 if div_val is None else div_val))

    def _faults(self) -> Iterator[str]:
        score = stage_name(self.attention.score)
        if (score == "relative") != (self.position == "relative"):
            yield (
                "model.attention.score: 'relative' goes with model.position: relative and only with it; given "
                f"model.attention.score: {score} with model.position: {self.position}; change one of them"
            )
        if self.head_dim is None:
            yield (
                f"model.head_dim: model.hidden_size {self.hidden_size} is not divisible by model.num_attention_heads "
                f"{self.num_attention_heads}; change one of them or set model.head_dim"
            )
        elif self.position == "rotary" and self.head_dim % 2:
            yield f"model.head_dim: rotary positions need an even head size, given {self.head_dim}"
        if isinstance(self.attention, MultiLinearConfig):
            yield from self._faults_of_multilinear(self.attention)
        if self.same_length and not self.memory_length:
            yield "model.same_length: goes with a memory; set model.memory_length"
        if self.memory_start == "zeros" and not self.memory_length:
            yield "model.memory_start: zeros goes with a memory; set model.memory_length"
        if self.same_length and stage_options(self.attention.score).get("as_published") is True:
            yield (
                "model.same_length: not with as_published, which measures distances that no window bounds; set one of them to "
                "false"
            )
        yield from self._faults_of_clusters()
        if self.encoder is not None or self.decoder is not None:
            yield from self.problems_of_translation()

    def _faults_of_multilinear(self, attention: MultiLinearConfig) -> Iterator[str]:
        if self.position == "rotary":
            yield (
                "model.position: rotary turns queries and keys so that their dot product knows a distance; multi-linear "
                "attention has no dot product, choose sinusoidal, learned, relative or none"
            )
        alone = self.encoder is None and self.decoder is None  # else it is for the parts with weights
        if self.dropout.attention and alone:
            yield (
                f"model.dropout.attention: multi-linear attention has no attention weights to drop, given "
                f"{self.dropout.attention}; set it to 0 and use model.dropout.residual"
            )
        if attention is self._predicting and attention.sees_future and not attention.not_next_token_perplexity:
            yield (
                "model.attention.causal: as_published lets every token see the later ones of its segment, which it has to "
                "predict; use 'masked', or say with model.attention.not_next_token_perplexity: true that its "
                "perplexity is not a next-token perplexity"
            )
        if not attention.tied_to_length and self.same_length:
            yield (
                "model.same_length: not with model.attention.output_map: decayed, whose sums hold all earlier tokens; change "
                "one of them"
            )
        if attention.tied_to_length and self.memory_start == "zeros":
            yield (
                "model.memory_start: zeros stand before the text, where model.attention.output_map: pairs has no rows; choose "
                "empty, or output_map: decayed"
            )
        if attention.sees_future and self.memory_length:
            yield (
                f"model.memory_length: not with model.attention.causal: as_published, whose code drops the memory; given "
                f"{self.memory_length}, set it to 0"
            )

    def _faults_of_clusters(self) -> Iterator[str]:
        read, written = self.input, self.output
        if isinstance(read, AdaptiveInputConfig):
            yield from cluster_problems("model.input", read.cutoffs, read.div_val, self.vocab_size, self.hidden_size)
        if not isinstance(written, ClusteredConfig):
            return
        yield from cluster_problems("model.output", written.cutoffs, written.div_val, self.vocab_size, self.hidden_size)
        same = isinstance(read, AdaptiveInputConfig) and (read.cutoffs, read.div_val) == (
            written.cutoffs,
            written.div_val,
        )
        if written.tied and not same:
            given = f"kind '{read.kind}'"
            if isinstance(read, AdaptiveInputConfig):
                given = f"cutoffs {read.cutoffs} and div_val {read.div_val}"
            yield (
                f"model.output.tied: an adaptive softmax shares the vectors of an adaptive input with its own cutoffs "
                f"{written.cutoffs} and div_val {written.div_val}; model.input has {given}"
            )
        if written.tail_dropout and written.div_val == 1:
            yield (
                "model.output.tail_dropout: acts between the two matrices of a tail; with div_val 1 a tail has only one, "
                "use model.dropout.output"
            )

    # -- the parts of a translation model, each as a configuration of its own ----------------------------------------------

    def _attentions(self) -> tuple[AttentionConfig, AttentionConfig, AttentionConfig]:
        """Attention of the encoder, of the decoder, and from the decoder to the source."""
        encoder, decoder = self.encoder or EncoderConfig(), self.decoder or DecoderConfig()
        cross = decoder.cross or replace(self.attention, score="dot_product")
        if decoder.released_cross and isinstance(cross, WeightedConfig):
            cross = replace(cross, mix="none")
        return (
            (encoder.attention or self.attention).seeing_all(),
            decoder.attention or self.attention,
            cross.seeing_all(),
        )

    def _part(self, attention: AttentionConfig, num_hidden_layers: int | None, **changes: Any) -> ModelConfig:
        """One part; dropout of attention weights is for the parts that have some, if there are such."""
        weighted = [not isinstance(other, MultiLinearConfig) for other in self._attentions()]
        without = isinstance(attention, MultiLinearConfig) and any(weighted)
        return replace(
            self,
            attention=attention,
            num_hidden_layers=num_hidden_layers or self.num_hidden_layers,
            dropout=replace(self.dropout, attention=0.0) if without else self.dropout,
            encoder=None,
            decoder=None,
            **changes,
        )

    def of_encoder(self) -> ModelConfig:
        """Configuration of the encoder. Nothing is hidden there, so `as_published` and `masked` are one."""
        own = self.encoder or EncoderConfig()
        other = own.vocab_size not in (None, self.vocab_size)  # the output layer is of target words
        return self._part(
            self._attentions()[0],
            own.num_hidden_layers,
            vocab_size=own.vocab_size or self.vocab_size,
            output=OutputConfig() if other else self.output,
        )

    def of_decoder(self) -> ModelConfig:
        """Configuration of the decoder, its cross-attention apart."""
        return self._part(self._attentions()[1], (self.decoder or DecoderConfig()).num_hidden_layers)

    def of_cross(self) -> ModelConfig:
        """Configuration of cross-attention, without positions: those of two texts have no distance."""
        layers = (self.decoder or DecoderConfig()).num_hidden_layers
        return self._part(self._attentions()[2], layers, position="none")

    def problems_of_translation(self) -> list[str]:
        """Lines about why no translation model can be built of this; empty if one can."""
        lines = []
        if self.memory_length:
            lines.append(
                f"model.memory_length: a translation model reads sentences, not a running text; given {self.memory_length}, "
                "set it to 0"
            )
        cross = self._attentions()[2]
        if stage_name(cross.score) != "dot_product":
            lines.append(
                f"model.decoder.cross.score: '{stage_name(cross.score)}' scores positions and distances, and those of two "
                "texts have nothing to do with each other; use dot_product"
            )
        if isinstance(cross, MultiLinearConfig) and not cross.tied_to_length:
            lines.append(
                "model.decoder.cross: multi-linear attention with output_map decayed weighs distances, and between two texts "
                "there are none; give model.decoder.cross an output_map pairs, or kind: weighted"
            )
        own = self.encoder
        if own is not None and own.share_embedding and own.vocab_size not in (None, self.vocab_size):
            lines.append(
                f"model.encoder.share_embedding: one table for both vocabularies, but model.encoder.vocab_size is "
                f"{own.vocab_size} and model.vocab_size {self.vocab_size}; use one joint vocabulary (data.vocabulary: joint), "
                "or set it to false"
            )
        if not lines:
            lines += _renamed(
                self.of_encoder, "model.encoder.attention", own is not None and own.vocab_size is not None
            )
            lines += _renamed(self.of_decoder, "model.decoder.attention")
            lines += _renamed(self.of_cross, "model.decoder.cross")
        return lines

    def problems_of_masked(self) -> list[str]:
        """Lines about why no masked language model can be built of this; empty if one can."""
        lines = [
            f"model.{section}: a part of a translation model; an encoder alone is described by `model` itself, leave it out"
            for section, value in (("encoder", self.encoder), ("decoder", self.decoder))
            if value is not None
        ]
        if self.memory_length:
            lines.append(
                f"model.memory_length: a masked language model sees its segment whole and remembers nothing; given "
                f"{self.memory_length}, set it to 0"
            )
        if self.sees_future:
            lines.append(
                "model.attention.causal: as_published says what a causal model sees, and here every token sees every other; "
                "leave it out, and model.attention.not_next_token_perplexity too"
            )
        if self.vocab_size == 1:
            lines.append("model.vocab_size: at least 2, the last entry is <mask>; given 1")
        return lines

    @property
    def _predicting(self) -> AttentionConfig:
        """The self-attention of the part that predicts the next token."""
        own = None if self.decoder is None else self.decoder.attention
        return own or self.attention

    @property
    def sees_future(self) -> bool:
        """The output at a token depends on later ones: its perplexity is not a next-token perplexity.

        Of a translation model: at a token of the target. Its encoder sees everything, and has nothing to predict.
        """
        return self._predicting.sees_future


def _renamed(part: Callable[[], ModelConfig], key: str, own_vocabulary: bool = False) -> list[str]:
    """Lines about a part of a translation model that cannot be, with the keys of that part."""
    try:
        part()
    except ConfigError as error:
        lines = [line.replace("model.attention", key) for line in error.problems]
        if own_vocabulary:
            lines = [line.replace("model.vocab_size", "model.encoder.vocab_size") for line in lines]
        section = key.rpartition(".")[0]
        return [line if section in line else f"{line} ({key})" for line in lines]
    return []


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
        if isinstance(config.attention, MultiLinearConfig):
            raise ConfigError(
                f"clamp_length: the position term of multi-linear attention knows positions, not distances, and has none to "
                f"clamp; given {clamp_length} with model.attention.kind: multilinear, leave it out"
            )
        score = {"name": "relative", **stage_options(config.attention.score), "clamp_length": clamp_length}
        changes["attention"] = replace(config.attention, score=score)
    return replace(config, **changes)
