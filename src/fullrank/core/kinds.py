"""Attention, input and output sections of a model's configuration, each of a type that its `kind` decides.

The options of the built-in stages stand here too, so that a configuration is checked without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from .section import Allowed, ByKind, Positive, Probability, Rate, Section, Share, Size, Slot, Stage, key

# -- options of stages, read by the stages' own `Config` -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RelativeOptions(Section):
    """Options of relative scores (Transformer-XL)."""

    shared_biases: bool = key(True, "u and v are one pair for all layers")
    shared_projection: bool = key(False, "distances are projected as tokens are; u and v are the query of distance 0")
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
class LearnedMixingOptions(Section):
    """Options of learned mixing."""

    start: Literal["identity", "random", "uniform"] = key(
        "identity",
        "the matrix M, or B, before training (Mixhead §3.2): I, normal with variance 1 / H, or 1 / H everywhere",
    )


@dataclass(frozen=True, kw_only=True)
class RandomMixingOptions(Section):
    """Options of mixing by random numbers that are never trained."""

    std: Positive | None = key(None, "standard deviation of the numbers; null: 1 / sqrt(number of heads)")


Score = Annotated[
    Stage,
    Slot(
        "score",
        "dot_product",
        "random_synthesizer",
        relative=RelativeOptions,
        dense_synthesizer=DenseSynthesizerOptions,
    ),
]
PositionTerm = Annotated[Stage, Slot("", "dot_product", relative=PositionTermOptions)]
Normalize = Annotated[Stage, Slot("normalize", "softmax", "sigsoftmax")]
Mix = Annotated[
    Stage,
    Slot(
        "mix",
        "none",
        "average",
        position_independent=LearnedMixingOptions,
        position_wise=LearnedMixingOptions,
        random=RandomMixingOptions,
    ),
]


# -- attention -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ByKind):
    """Attention, of the type that `kind` says: a WeightedConfig or a MultiLinearConfig."""

    KEY = "model.attention"
    SLOT = "attend"
    WRITTEN: ClassVar[dict[str, Any]] = {
        "kind": None, "score": None, "normalize": "softmax", "mix": "none", "cross_head": 0.0,
        "gate": "none", "bias": None,
        "pattern": "full", "stride": None,
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
        """This attention over a text of which every token is visible."""
        return self


@dataclass(frozen=True, kw_only=True)
class WeightedConfig(AttentionConfig, built_in=True):
    """The attention pipeline: project -> permute heads -> score, mask, normalize, mix, dropout, weighted values, gate -> merge.

    `pattern: strided` is the merged head of the Sparse Transformer (Child et al. 2019, §4.3): a query sees the keys that are
    at most `stride` tokens away and those whose distance is a multiple of it, of those that it would see otherwise.
    """

    kind: str = "weighted"
    normalize: Normalize = key("softmax", "scores to weights that sum to one")
    mix: Mix = key("none", "exchange of attention between heads (Mixhead)")
    cross_head: Probability = key(0.0, "probability beta of permuted heads in training (Skip Cross-head §2.2)")
    gate: Literal["none", "head"] = key("none", "head: each query scales each head's output (Qiu et al. 2025)")
    pattern: Literal["full", "strided"] = key(
        "full", "the keys that a query sees: all, or those at a stride", needs={"strided": "stride"}
    )
    stride: Size | None = key(
        None, "stride of pattern strided, near the square root of the length", needs="pattern=strided"
    )


@dataclass(frozen=True, kw_only=True)
class MultiLinearConfig(AttentionConfig, built_in=True):
    """Multi-linear attention (Ma et al. 2019): a tensor of `cores` diagonal cores of rank `rank` in place of weights.

    `output_map: pairs` ties `max_position_embeddings` into the parameters. `score: relative` adds the position term of the
    released code. `causal: as_published` does not mask the future: a language model then needs
    `not_next_token_perplexity: true`.
    """

    kind: str = "multilinear"
    score: PositionTerm = key(
        "dot_product", "relative: add the position term of the released code", needs="output_map=pairs"
    )
    cores: Size = key(1, "number of cores C of multi-linear attention")
    rank: Size = key(40, "rank R of each core")
    causal: Literal["masked", "as_published"] = key(
        "masked", "as_published: not masked, as released", needs="output_map=pairs, model.memory_length=0"
    )
    core_weights: Literal["softmax", "free"] = key("softmax", "a core is softmax(g), or g itself (released)")
    output_map: Literal["pairs", "decayed"] = key(
        "pairs",
        "rows for pairs of positions, or decayed sums",
        needs={"pairs": "model.memory_start=empty", "decayed": "model.same_length=false"},
    )
    decays: Size | None = key(
        None, "number of products of decayed sums; null: 8 with output_map decayed", needs="output_map=decayed"
    )
    not_next_token_perplexity: bool = key(
        False, "one knows what as_published does to perplexity", needs="causal=as_published"
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


# -- embedding and vocabulary layer ----------------------------------------------------------------------------------------

Cutoffs = Annotated[
    list[int],
    Allowed(
        "ids above 0 that increase strictly, as in [20000, 60000]",
        lambda ids: all(a < b for a, b in pairwise([0, *ids])),
    ),
]

Shape = Annotated[
    list[list[Size]],
    Allowed(
        "two lists of as many positive whole numbers, as [[22, 22, 21], [4, 8, 8]]",
        lambda shape: len(shape) == 2 and len(shape[0]) == len(shape[1]) > 0,
    ),
]


def cluster_problems(
    key: str, cutoffs: list[int] | None, div_val: int | None, vocab_size: int | None, hidden_size: int
) -> Iterator[str]:
    """Lines about clusters that cannot be, `key` being `model.input` or `model.output`; None is not known yet."""
    if not cutoffs:
        yield f"{key}.cutoffs: an adaptive layer needs the ids at which its clusters end, as in [20000, 60000]"
        return
    if vocab_size is not None and cutoffs[-1] >= vocab_size:
        yield f"{key}.cutoffs: below model.vocab_size {vocab_size}, which ends the last cluster; given {cutoffs}"
    if div_val is not None and hidden_size < div_val ** len(cutoffs):
        yield (
            f"{key}.div_val: the last of {len(cutoffs) + 1} clusters would have {hidden_size} / {div_val}^{len(cutoffs)} < 1 "
            f"dimensions; lower {key}.div_val or give fewer {key}.cutoffs"
        )


@dataclass(frozen=True, kw_only=True)
class InputConfig(ByKind):
    """The embedding of token ids, of the type that `kind` says: a TokenConfig, AdaptiveInputConfig or TensorTrainConfig."""

    KEY = "model.input"
    SLOT = "input"
    WRITTEN: ClassVar[dict[str, Any]] = {
        "kind": None, "cutoffs": [], "div_val": 1, "rank": None, "cores": None, "shape": None
    }  # fmt: skip
    kind: str = key("token", "one table of vectors, clusters of them, or a product of small tensors")

    if TYPE_CHECKING:

        def __init__(self, *, kind: str = "token", **keys: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TokenConfig(InputConfig, built_in=True):
    """One table of vectors."""

    kind: str = "token"


@dataclass(frozen=True, kw_only=True)
class AdaptiveInputConfig(InputConfig, built_in=True):
    """Adaptive input: ids are sorted by frequency, and vectors of cluster i have hidden_size / div_val^i dimensions."""

    kind: str = "adaptive"
    cutoffs: Cutoffs = key([], "ids at which clusters end; the last one ends at vocab_size")
    div_val: Size = key(1, "how many times narrower each cluster is than the one before")

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if not self.cutoffs:
            yield from cluster_problems(self.KEY, self.cutoffs, None, None, 1)


@dataclass(frozen=True, kw_only=True)
class TensorTrainConfig(InputConfig, built_in=True):
    """A table of vectors as a tensor train (Khrulkov et al. 2019): a product of `cores` small tensors of rank `rank`."""

    kind: str = "tensor_train"
    rank: Size = key(16, "rank of the product, the same between all cores")
    cores: Size | None = key(None, "number of cores; null: as many as `shape` has, or 3")
    shape: Shape | None = key(
        None, "factors of vocabulary and width, as [[22, 22, 21], [4, 8, 8]]; null: nearly equal ones"
    )

    def _resolve(self) -> None:
        if self.cores is None:
            self._set("cores", len(self.shape[0]) if self.shape else 3)

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if self.shape is not None and self.cores != len(self.shape[0]):
            factors = len(self.shape[0])
            yield f"model.input.cores: model.input.shape has {factors} factors each, given {self.cores}; leave it out"

    def misfits(self, vocab_size: int | None, hidden_size: int) -> Iterator[str]:
        """Lines about a shape that is not of these sizes; None is not known yet."""
        if self.shape is None:
            return
        words, width = map(math.prod, self.shape)
        if vocab_size is not None and words < vocab_size:
            yield f"model.input.shape: the first factors make {words} words, model.vocab_size is {vocab_size}; raise them"
        if width != hidden_size:
            yield f"model.input.shape: the second factors make a width of {width}, model.hidden_size is {hidden_size}"


@dataclass(frozen=True, kw_only=True)
class OutputConfig(ByKind):
    """The vocabulary layer, of the type that `kind` says: a SoftmaxConfig, AdaptiveConfig, MixtureConfig or, where a mixture
    has clusters, AdaptiveMixtureConfig."""

    KEY = "model.output"
    SLOT = "output"
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

    kind: str = "softmax"


@dataclass(frozen=True, kw_only=True)
class ClusteredConfig(OutputConfig):
    """The keys of an adaptive softmax.

    `form` says whose it is: `fairseq`'s has no biases, and its head reads the hidden states themselves; `transformer_xl`'s
    has biases, and its head a projection of its own. Given without `bias` it decides that, too.
    """

    cutoffs: Cutoffs | None = key(None, "ids at which clusters end; null: those of an adaptive input")
    div_val: Size | None = key(None, "narrowing of each cluster; null: as in the input, or 1")
    form: Literal["fairseq", "transformer_xl"] | None = key(None, "null: transformer_xl if there are biases")
    tied_projections: bool | None = key(
        None, "the projections of the tails are the input's; null: like tied", needs={"true": "tied=true"}
    )
    tail_dropout: Rate = key(0.0, "dropout between the two matrices of a tail")

    def _resolve(self) -> None:
        if self.bias is None and self.form is not None:
            self._set("bias", self.form == "transformer_xl")
        super()._resolve()
        if self.form is None:
            self._set("form", "transformer_xl" if self.bias else "fairseq")
        if self.tied_projections is None:
            self._set("tied_projections", self.tied)


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(ClusteredConfig, built_in=True):
    """An adaptive softmax."""

    kind: str = "adaptive"


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(OutputConfig, built_in=True):
    """A mixture of `mixtures` softmaxes over one matrix (Mixture of Softmaxes §3)."""

    kind: str = "mixture_of_softmaxes"
    mixtures: Size | None = key(None, "number of softmaxes K; null: 10, or 1 without latent states")
    components: Literal["softmax", "adaptive"] = key("softmax", "what is mixed; null: adaptive with cutoffs")
    latent: bool | Literal["residual"] = key(
        True,
        "states of the mixture: tanh(W g + b), residual: g + tanh(W g + b), or g alone with one softmax",
        needs={"false": "mixtures=1"},
    )
    latent_dropout: Rate = key(0.0, "dropout on the latent states", needs="latent")
    latent_dropout_locked: bool = key(False, "one dropout mask for all positions of a sequence")
    epsilon: Share = key(0.0, "added to probabilities before the logarithm, as the released codes do")

    def _resolve(self) -> None:
        if self.mixtures is None:
            self._set("mixtures", 10 if self.latent else 1)
        super()._resolve()


@dataclass(frozen=True, kw_only=True)
class AdaptiveMixtureConfig(MixtureConfig, ClusteredConfig, built_in=True):
    """A mixture of adaptive softmaxes over one matrix."""

    components: Literal["softmax", "adaptive"] = key("adaptive", "what is mixed; null: adaptive with cutoffs")
