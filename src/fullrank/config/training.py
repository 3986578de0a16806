"""The train section of a configuration: how a model is trained, and in which phases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from fullrank.core import registry
from fullrank.core.errors import ConfigError
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
    key,
)

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
    epochs: Positive | None = key(None, "epochs after which the phase ends")
    plateau: PlateauConfig | None = key(None, "the phase ends when validation perplexity falls no more")

    def _prefix(self) -> str:
        return f"train.phases.{self.name}." if self.name else "train.phases."

    def _faults(self) -> Iterator[str]:
        if not self.name:
            yield "train.phases: a phase needs a name"
        if self.steps is not None and self.epochs is not None:
            yield f"{self._prefix()}steps: give at most one of steps and epochs"
        try:
            registry.lookup("skip", self.skip, f"{self._prefix()}skip")(self.p)
        except ConfigError as error:
            yield from error.problems
        except ValueError as error:
            yield f"{self._prefix()}p: {error}"

    @property
    def ends(self) -> bool:
        """The phase says when it ends."""
        return self.steps is not None or self.epochs is not None or self.plateau is not None


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
    betas: tuple[Share, Share] = key((0.9, 0.98), "decay of the means of adam, adamw and muon")
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
        """Every phase says after how many steps or epochs it ends."""
        return bool(self.phases) and all(phase.steps or phase.epochs for phase in self.phases)

    def _resolve(self) -> None:
        if not self._ends() and not self._has_limits():
            self._set("epochs", 1.0)
        if self.order is None:
            self._set("order", "shuffled" if self.objective == "masked" else "contiguous")

    def _faults(self) -> Iterator[str]:
        ends = self._ends()
        if self._has_limits() and ends:
            yield f"train.{ends[0]}: every phase says when it ends; leave it out, or the end of the last phase"
        if len(ends) > 1:
            yield f"train: give exactly one of steps, epochs, tokens; given {', '.join(ends)}"
        for phase in self.phases[:-1]:
            if not phase.ends:
                yield f"train.phases.{phase.name}: give its end (steps, epochs or plateau); only the last phase may do without"
        yield from self._faults_of_bounds()
        names = [phase.name for phase in self.phases]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"train.phases: two phases are named '{name}'"
        if self.mask_replace_prob + self.random_replace_prob > 1 + 1e-9:
            both = f"given {self.random_replace_prob} and {self.mask_replace_prob}"
            yield f"train.random_replace_prob: together with train.mask_replace_prob at most 1; {both}"
        if self.half_segments and self.segment_length < 10:
            yield f"train.half_segments: for train.segment_length 10 or more, given {self.segment_length}"
        for name, share in (("segment_multiple", 5), ("segment_deviation", 4)):
            if getattr(self, name) > max(1, self.segment_length // share):
                most = f"train.segment_length / {share}, here {self.segment_length // share}"
                yield f"train.{name}: at most {most}; given {getattr(self, name):g}"
        if self.schedule == "cosine_wave" and self.period is not None and self.warmup_steps > self.period:
            yield f"train.warmup_steps: at most train.period {self.period} with cosine_wave, given {self.warmup_steps}"

    def _faults_of_bounds(self) -> Iterator[str]:
        """A line about the first phase that never begins, as far as steps, or epochs, alone say so."""
        for end, whole in (("steps", self.steps), ("epochs", self.epochs)):
            before = 0.0
            for earlier, phase in pairwise([] if self._has_limits() else self.phases):
                before += 0 if earlier.plateau else getattr(earlier, end) or 0
                if whole is not None and before >= whole:
                    yield (
                        f"train.phases.{phase.name} would never begin: the phases before it take {before:g} {end}, and "
                        f"train.{end} is {whole:g}; shorten them or raise it"
                    )
                    return
