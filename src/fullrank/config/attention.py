"""The attention section of a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fullrank.config.checks import (
    SIZES,
    Probability,
    Stage,
    Strict,
    check_stage,
    raise_problems,
    stage_name,
    stage_options,
)

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
