"""The input and output sections of a model's configuration: embedding and vocabulary layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fullrank.config.checks import SIZES, Probability, Strict, check_numbers, check_stage, raise_problems
from fullrank.config.clusters import cluster_problems


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
