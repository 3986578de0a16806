"""The train section of a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from fullrank.config import registry
from fullrank.config.checks import COUNTS, SIZES, THREADS, Strict, check_numbers, check_stage, raise_problems
from fullrank.config.masking import objective_problems
from fullrank.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlateauConfig(Strict):
    """A phase ends at the evaluation where the best validation perplexity fell by less than `ppl` over `steps` updates."""

    ppl: float = 0.2
    steps: int = 64_000

    def __post_init__(self) -> None:
        problems: list[str] = []
        check_numbers(problems, self, "train.phases.plateau", ("ppl",))
        check_numbers(problems, self, "train.phases.plateau", ("steps",), below=COUNTS)
        raise_problems(problems)


@dataclass(frozen=True, kw_only=True)
class PhaseConfig(Strict):
    """A part of training with its own Skip-Retain schedule (Skip Cross-head §2.1); it ends at whatever comes first.

    `skip`: which layers rest at a step, `none` or a schedule: `linear` (Eq. 1), `uniform`, `not_first`, `not_last`,
    `not_first_or_last` with probability `p` (Eq. 2 to 5), `listed` with one `p` for each layer.
    `gaps`: the memory of a layer that rested keeps its `true` age; `drifting` labels it as the released code does, for
    comparison only.
    """

    name: str
    skip: str = "none"
    p: float | list[float] | None = None
    gaps: Literal["true", "drifting"] = "true"
    steps: int | None = None
    epochs: float | None = None
    plateau: PlateauConfig | None = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        key = f"train.phases.{self.name}"
        if not self.name:
            problems.append("train.phases: a phase needs a name")
        check_numbers(problems, self, key, ("steps",), below=COUNTS)
        check_numbers(problems, self, key, ("epochs",))
        if self.steps is not None and self.epochs is not None:
            problems.append(f"{key}: give at most one of steps and epochs")
        if self.gaps not in ("true", "drifting"):
            problems.append(f"{key}.gaps: 'true' or 'drifting', given '{self.gaps}'")
        try:
            schedule = registry.lookup("skip", self.skip, f"{key}.skip")
        except ConfigError as error:
            problems.extend(error.problems)
        else:
            try:
                schedule(self.p)
            except ValueError as error:
                problems.append(f"{key}.p: {error}")
        raise_problems(problems)

    @property
    def ends(self) -> bool:
        """Whether the phase says when it ends."""
        return self.steps is not None or self.epochs is not None or self.plateau is not None


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Strict):
    """How a model is trained. Exactly one of `steps`, `epochs` and `tokens` says when training ends, or the last phase does.

    Text is read in `batch_size` streams of `segment_length` tokens, sentence pairs in batches of `batch_tokens`; `tokens` are
    those that are predicted: of translations, their words and final <eos>, without padding. Where tokens are masked
    (`objective: masked`), `tokens` are those that are read.
    """

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    phases: list[PhaseConfig] = field(default_factory=list)
    seed: int = 1
    # name the next token, or masked ones, as BERT does; `labels` is that of fine-tuning
    objective: Literal["causal", "masked", "labels"] = "causal"
    mlm_probability: float = 0.15  # `masked`: share of the tokens that are asked for ...
    mask_replace_prob: float = 0.8  # ... of which this share becomes <mask>
    random_replace_prob: float = 0.1  # ... and this one any token at random; the rest stay as they are
    batch_size: int = 20  # parallel streams
    segment_length: int = 64  # tokens of each stream per step
    batch_tokens: int | None = None  # of a batch of sentence pairs: their longer side, padding included (4096 is usual)
    # streams in reading order, or blocks shuffled every epoch; null: contiguous, with `objective: masked` shuffled
    order: Literal["contiguous", "shuffled"] | None = None
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
    label_smoothing: float = 0.0  # e: the target is (1 - e) [v = y] + e / V
    orthogonality: float = 0.0  # coefficient of Mixhead Eq. 16
    overlap: float = 0.0  # coefficient of Mixhead Eq. 20
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "auto"  # auto: a GPU when there is one
    threads: int | None = None
    compile: bool = False
    cuda_graphs: bool = False  # with `compile`, on a GPU: blocks are recorded once and replayed (not measured yet)
    averaging: Literal["none", "ema", "swa"] = "none"
    ema_decay: float = 0.999
    swa_start: float = 0.75  # share of training after which weights are averaged
    patience: int | None = None  # stop after so many evaluations without improvement of `eval.metric`
    save_every_steps: int | None = None  # null: at every evaluation
    keep_checkpoints: int | None = None  # keep the weights of the last so many evaluations, for `fullrank average`
    log_every_steps: int = 20
    track: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)

    def __post_init__(self) -> None:
        problems: list[str] = []
        given = [key for key in ("steps", "epochs", "tokens") if getattr(self, key) is not None]
        bounded = bool(self.phases) and all(phase.steps or phase.epochs for phase in self.phases)
        if bounded and given:
            problems.append(
                f"train.{given[0]}: every phase says when it ends; leave it out, or the end of the last phase"
            )
        if not given and not bounded:
            object.__setattr__(self, "epochs", 1.0)
            given = ["epochs"]
        if len(given) > 1:
            problems.append(f"train: give exactly one of steps, epochs, tokens; given {', '.join(given)}")
        problems += [
            f"train.phases.{phase.name}: give its end (steps, epochs or plateau); only the last phase may do without"
            for phase in self.phases[:-1]
            if not phase.ends
        ]
        names = [phase.name for phase in self.phases]
        problems += [f"train.phases: two phases are named '{n}'" for n in sorted(set(names)) if names.count(n) > 1]
        counts = (
            "steps", "tokens", "patience", "period", "save_every_steps", "log_every_steps", "keep_checkpoints"
        )  # fmt: skip
        check_numbers(problems, self, "train", counts, below=COUNTS)
        sizes = ("batch_size", "segment_length", "batch_tokens", "gradient_accumulation_steps")
        check_numbers(problems, self, "train", sizes, below=SIZES)
        check_numbers(problems, self, "train", ("epochs", "learning_rate", "eps", "max_grad_norm", "lr_shrink"))
        from_zero = ("warmup_from", "min_learning_rate", "weight_decay", "orthogonality", "overlap")
        check_numbers(problems, self, "train", from_zero, zero=True)
        check_numbers(problems, self, "train", ("seed", "warmup_steps", "plateau_patience"), zero=True, below=COUNTS)
        if self.threads is not None and not 1 <= self.threads <= THREADS:
            problems.append(f"train.threads: from 1 to {THREADS}, given {self.threads}")
        if self.cuda_graphs:
            problems += self._against_cuda_graphs()
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
        problems += objective_problems(self)
        if self.order is None:
            object.__setattr__(self, "order", "shuffled" if self.objective == "masked" else "contiguous")
        check_stage(problems, "optimizer", self.optimizer, "train.optimizer")
        check_stage(problems, "schedule", self.schedule, "train.schedule")
        raise_problems(problems)

    def _against_cuda_graphs(self) -> list[str]:
        """What a recorded graph cannot do: it is one sequence of operations on the same memory, step after step."""
        found: list[str] = []
        if not self.compile:
            found.append("train.cuda_graphs: blocks are recorded as they are compiled; set train.compile: true")
        if self.gradient_accumulation_steps > 1:
            found.append(
                "train.cuda_graphs: gradients of one batch lie where those of the next one are written; set "
                f"train.gradient_accumulation_steps: 1 (given {self.gradient_accumulation_steps})"
            )
        found += [
            f"train.cuda_graphs: layers that rest make every step another one; train.phases.{phase.name}.skip is "
            f"'{phase.skip}', allowed is 'none'"
            for phase in self.phases
            if phase.skip != "none"
        ]
        return found
