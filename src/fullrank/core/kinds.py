"""Attention, input and output sections of a model's configuration, each of a type that its `kind` decides.

The options of the built-in stages stand here too, so that a configuration is checked without importing torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

from .section import Allowed, ByKind, Positive, Probability, Rate, Section, Size, Slot, Stage, key, stage_name


@dataclass(frozen=True, kw_only=True)
class DotProductOptions(Section):
    """Options of dot products."""

    scale: Positive | None = key(None, "factor of the scores; null: 1 / sqrt(head_dim), T5 has 1")


@dataclass(frozen=True, kw_only=True)
class RelativeOptions(Section):
    """Options of relative scores (Transformer-XL)."""

    shared_biases: bool = key(True, "u and v are one pair for all layers")
    shared_projection: bool = key(False, "distances are projected as tokens are; u and v are the query of distance 0")
    clamp_length: Size | None = key(None, "distances above this count as this one; null: none is clamped")
    as_published: bool = key(False, "measure distances as the released code of Skip Cross-head does, for comparison")


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
class LowRankMixingOptions(Section):
    """Options of low-rank mixing."""

    rank: Size = key(2, "rank R of what is added to the identity")


@dataclass(frozen=True, kw_only=True)
class DynamicOptions(Section):
    """Options of dynamically composed heads."""

    rank: Size = key(2, "rank R of what the query and the key add to the identity")
    hidden: Size | None = key(None, "inner width K of the generator; null: four times the heads")
    keys: bool = key(True, "the key's token has a part, too; false: a matrix of the query, which every kernel computes")


@dataclass(frozen=True, kw_only=True)
class MultiTokenOptions(Section):
    """Options of multi-token attention."""

    queries: Size = key(6, "queries that the kernel covers: the token's own and those before it")
    keys: Annotated[int, Allowed("an odd positive number", lambda n: n > 0 and n % 2 == 1)] = key(
        11, "keys that the kernel covers, as many on either side"
    )


@dataclass(frozen=True, kw_only=True)
class KnockingOptions(Section):
    """Options of knocking heads."""

    form: Literal["mlp", "linear"] = key(
        "mlp", "mlp: a gated map of values; linear: matrices of queries, keys and values"
    )


@dataclass(frozen=True, kw_only=True)
class InterleavedOptions(Section):
    """Options of interleaved heads."""

    pseudo_heads: Size = key(2, "tokens P at each position, each of its own combination of heads: P^2 patterns a head")


@dataclass(frozen=True, kw_only=True)
class ExclusiveOptions(Section):
    """Options of exclusive self-attention."""

    learned: bool = key(False, "how much of the own value each head leaves out is learned, from nothing")


Score = Annotated[
    Stage,
    Slot(
        "score",
        "random_synthesizer",
        dot_product=DotProductOptions,
        relative=RelativeOptions,
        dense_synthesizer=DenseSynthesizerOptions,
    ),
]
Normalize = Annotated[Stage, Slot("normalize", "softmax", "sigsoftmax")]
Mix = Annotated[
    Stage,
    Slot(
        "mix",
        "none",
        "average",
        "random",
        "differential",
        talking_heads=LearnedMixingOptions,
        position_independent=LearnedMixingOptions,
        position_wise=LearnedMixingOptions,
        low_rank=LowRankMixingOptions,
        dynamic=DynamicOptions,
    ),
]
MixQkv = Annotated[Stage, Slot("mix_qkv", "none", knocking=KnockingOptions, interleaved=InterleavedOptions)]
MixScores = Annotated[
    Stage,
    Slot(
        "mix_scores",
        "none",
        talking_heads=LearnedMixingOptions,
        dynamic=DynamicOptions,
        multi_token=MultiTokenOptions,
    ),
]
Gate = Annotated[Stage, Slot("gate", "none", "head", "elementwise", "differential", exclusive=ExclusiveOptions)]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ByKind):
    """Attention, of the type that `kind` says: a WeightedConfig or a MultiLinearConfig."""

    KEY = "model.attention"
    SLOT = "attend"
    kind: str = key("weighted", "weighted values, or multi-linear attention without weights")
    score: Score = key("dot_product", "how much each query wants each key")
    bias: bool = key(True, "biases of the query, key, value and output projections")

    if TYPE_CHECKING:  # with any key of the kind

        def __init__(self, *, kind: str = "weighted", **keys: Any) -> None: ...

    @property
    def sees_future(self) -> bool:
        """True if the output at a token depends on later ones, in a causal model too."""
        return False

    @property
    def tied_to_length(self) -> bool:
        """True if the output map has a row for each pair of positions."""
        return False

    def seeing_all(self) -> AttentionConfig:
        """Return this attention over a text of which every token is visible."""
        return self

    def across(self) -> AttentionConfig:
        """Return this attention over another text than the queries'.

        Stages that read distances or the query's own value are left out.
        """
        score = self.score if stage_name(self.score) == "dot_product" else "dot_product"
        return replace(self, score=score)

    def problems_of_heads(self, key: str, heads: int, key_value_heads: int) -> Iterator[str]:
        """Yield the reasons why this attention cannot have so many heads.

        Args:
            key: full name of this section, which begins each reason.
            heads: number of heads H of queries.
            key_value_heads: number of heads G of keys and values.
        """
        return iter(())


@dataclass(frozen=True, kw_only=True)
class WeightedConfig(AttentionConfig, built_in=True):
    """The attention pipeline, from the projection of heads to their merge.

        project, mix Q, K, V -> permute heads -> score, mix scores, mask, normalize, mix, dropout,
        weighted values, gate -> merge

    `pattern: strided` is the merged head of the Sparse Transformer (Child et al. 2019, §4.3): a query sees the keys that are
    at most `stride` tokens away and those whose distance is a multiple of it, of those that it would see otherwise.
    """

    kind: str = "weighted"
    normalize: Normalize = key("softmax", "scores to weights that sum to one")
    mix_qkv: MixQkv = key(
        "none",
        "exchange of queries, keys and values between heads, before the scores",
        needs={
            "interleaved": "score=dot_product, mix_scores=none|talking_heads, mix!=dynamic, gate!=exclusive, pattern=full, "
            "model.position!=alibi|t5"
        },
    )
    mix_scores: MixScores = key(
        "none",
        "exchange of scores between heads and tokens, before the softmax",
        needs={
            "multi_token": "score=dot_product, model.memory_length=0, model.position!=alibi|t5, model.document_token_id=null"
        },
    )
    mix: Mix = key("none", "exchange of attention between heads (Mixhead)")
    qk_norm: bool = key(False, "RMS norms over each head's queries and keys, before rotary positions (Qwen3)")
    cross_head: Probability = key(0.0, "probability beta of permuted heads in training (Skip Cross-head §2.2)")
    gate: Gate = key("none", "what each query does to the heads' output (Qiu et al. 2025, Zhai 2026)")
    pattern: Literal["full", "strided"] = key(
        "full", "the keys that a query sees: all, or those at a stride", needs={"strided": "stride"}
    )
    stride: Size | None = key(
        None, "stride of pattern strided, near the square root of the length", needs="pattern=strided"
    )

    def problems_of_heads(self, key: str, heads: int, key_value_heads: int) -> Iterator[str]:
        if stage_name(self.mix) == "differential" and heads % 2:
            yield (
                f"{key}.mix: 'differential' takes heads in pairs; model.num_attention_heads must be even, given {heads}"
            )
        if stage_name(self.gate) == "differential" and heads // key_value_heads % 2:
            yield (
                f"{key}.gate: 'differential' subtracts heads that share keys and values, so that an even number of query heads "
                f"reads each; given model.num_attention_heads {heads} with model.num_key_value_heads {key_value_heads}"
            )
        if stage_name(self.mix_qkv) == "interleaved" and key_value_heads < heads:
            yield (
                f"{key}.mix_qkv: 'interleaved' combines each head's query, key and value; leave model.num_key_value_heads out, "
                f"given {key_value_heads}"
            )

    @property
    def same_text_stages(self) -> dict[str, str]:
        """Chosen stages, by slot, for which queries and keys must be of one text."""
        chosen = {slot: stage_name(getattr(self, slot)) for slot in ("gate", "mix", "mix_qkv", "mix_scores")}
        readers = {"dynamic", "exclusive", "interleaved", "multi_token"}
        return {slot: name for slot, name in chosen.items() if name in readers}

    def across(self) -> AttentionConfig:
        plain: dict[str, Any] = dict.fromkeys(self.same_text_stages, "none")
        return replace(self, score=super().across().score, pattern="full", stride=None, **plain)


@dataclass(frozen=True, kw_only=True)
class MultiLinearConfig(AttentionConfig, built_in=True):
    """Multi-linear attention (Ma et al. 2019): a tensor of `cores` diagonal cores of rank `rank` in place of weights.

    `output_map: pairs` ties `max_position_embeddings` into the parameters. `causal: as_published` does not mask the future: a
    language model then needs `not_next_token_perplexity: true`.
    """

    kind: str = "multilinear"
    score: Literal["dot_product", "relative"] = key(
        "dot_product", "relative: add the position term of the released code", needs={"relative": "output_map=pairs"}
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
        return replace(self, causal="masked", not_next_token_perplexity=False)

    def _resolve(self) -> None:
        if self.output_map == "decayed" and self.decays is None:
            self._set("decays", 8)


Cutoffs = Annotated[
    list[int],
    Allowed(
        "ids above 0 that increase strictly, as in [20000, 60000]",
        lambda ids: all(a < b for a, b in pairwise([0, *ids])),
    ),
]


@dataclass(frozen=True, kw_only=True)
class InputConfig(ByKind):
    """The embedding of token ids, of the type that `kind` says: a TokenConfig, AdaptiveInputConfig or TensorTrainConfig."""

    KEY = "model.input"
    SLOT = "input"
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


@dataclass(frozen=True, kw_only=True)
class TensorTrainConfig(InputConfig, built_in=True):
    """A table of vectors as a tensor train (Khrulkov et al. 2019): a product of `cores` small tensors of rank `rank`."""

    kind: str = "tensor_train"
    rank: Size = key(16, "rank of the product, the same between all cores")
    cores: Size = key(3, "number of cores")


@dataclass(frozen=True, kw_only=True)
class OutputConfig(ByKind):
    """The vocabulary layer, of the type that `kind` says: a SoftmaxConfig, AdaptiveConfig or MixtureConfig."""

    KEY = "model.output"
    SLOT = "output"
    kind: str = key("softmax", "a softmax, clusters of them, or a mixture")
    tied: bool = key(False, "the matrix of the vocabulary layer is the embedding's")
    bias: bool | None = key(None, "biases of the vocabulary layer; null: exactly when it is not tied")
    normalize: Literal["softmax", "sigsoftmax"] = key("softmax", "logits to probabilities")

    if TYPE_CHECKING:

        def __init__(self, *, kind: str = "softmax", **keys: Any) -> None: ...

    @property
    def adaptive(self) -> bool:
        """True if the vocabulary is in clusters."""
        return isinstance(self, AdaptiveConfig)

    def _resolve(self) -> None:
        if self.bias is None:
            self._set("bias", not self.tied)


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(OutputConfig, built_in=True):
    """One softmax."""

    kind: str = "softmax"


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(OutputConfig, built_in=True):
    """An adaptive softmax.

    `form` says whose it is: `fairseq`'s has no biases, and its head reads the hidden states themselves; `transformer_xl`'s
    has biases, and its head a projection of its own. Given without `bias` it decides that, too.
    """

    kind: str = "adaptive"
    cutoffs: Cutoffs | None = key(None, "ids at which clusters end; null: those of an adaptive input")
    div_val: Size | None = key(None, "narrowing of each cluster; null: as in the input, or 1")
    form: Literal["fairseq", "transformer_xl"] | None = key(None, "null: transformer_xl if there are biases")
    tied_projections: bool | None = key(
        None, "the projections of the tails are the input's; null: like tied", needs={"true": "tied=true"}
    )
    tail_dropout: Rate = key(0.0, "dropout between the two matrices of a tail", needs="div_val!=1")

    def _resolve(self) -> None:
        if self.bias is None and self.form is not None:
            self._set("bias", self.form == "transformer_xl")
        super()._resolve()
        if self.form is None:
            self._set("form", "transformer_xl" if self.bias else "fairseq")
        if self.tied_projections is None:
            self._set("tied_projections", self.tied)


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(OutputConfig, built_in=True):
    """A mixture of `mixtures` softmaxes over one matrix (Mixture of Softmaxes §3)."""

    kind: str = "mixture_of_softmaxes"
    mixtures: Size = key(10, "number of softmaxes K")
    latent: Literal[True, "residual"] = key(
        True, "states of the mixture: tanh(W g + b), or residual: g + tanh(W g + b)"
    )
    latent_dropout: Rate = key(0.0, "dropout on the latent states")
