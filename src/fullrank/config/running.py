"""The data, train and eval sections of a configuration, and the whole of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from fullrank.config import registry
from fullrank.config.checks import COUNTS, SIZES, THREADS, Strict, check_numbers, check_stage, raise_problems
from fullrank.config.masking import masked_problems, objective_problems
from fullrank.config.model import ModelConfig, with_memory
from fullrank.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DataConfig(Strict):
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
    sos: bool = False  # ... and begin every line with <sos>, as the code of Transformer-MoS does
    min_count: int | None = None  # rarer words and characters become <unk>; null: 1, for builtin words 3
    max_vocabulary: int | None = None  # keep the most frequent; for bpe, the number of entries
    max_tokens: int | None = None  # use only the beginning of the training split

    def __post_init__(self) -> None:
        problems: list[str] = []
        check_numbers(problems, self, "data", ("min_count", "max_vocabulary", "max_tokens"), below=COUNTS)
        if self.name == "text" and self.train is None:
            problems.append("data.train: `data.name: text` needs at least one training file")
        raise_problems(problems)


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
    """How a model is trained. Exactly one of `steps`, `epochs` and `tokens` says when training ends, or the last phase does."""

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    phases: list[PhaseConfig] = field(default_factory=list)
    seed: int = 1
    objective: Literal["causal", "masked"] = "causal"  # predict the next token, or masked ones, as BERT does
    mlm_probability: float = 0.15  # `masked`: share of the tokens that are to be predicted ...
    mask_replace_prob: float = 0.8  # ... of which this share becomes <mask>
    random_replace_prob: float = 0.1  # ... and this one a random token; the rest stay as they are
    batch_size: int = 20  # parallel streams
    segment_length: int = 64  # tokens of each stream per step
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
    label_smoothing: float = 0.0
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
    patience: int | None = None  # stop after so many evaluations without improvement
    save_every_steps: int | None = None  # null: at every evaluation
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
        counts = ("steps", "tokens", "patience", "period", "save_every_steps", "log_every_steps")
        check_numbers(problems, self, "train", counts, below=COUNTS)
        check_numbers(
            problems, self, "train", ("batch_size", "segment_length", "gradient_accumulation_steps"), below=SIZES
        )
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


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Strict):
    """How and how often a model is evaluated. Both cadences `null`: once an epoch and at the end.

    `context`, `stride`, `memory_length`, `same_length` and `clamp_length` belong to the final figures and to `fullrank eval`;
    while training, a model is judged as it is trained.
    """

    batch_size: int = 10  # parallel streams
    segment_length: int | None = None  # null: train.segment_length
    context: int | None = None  # tokens before those that are scored, that a model without memory reads again (fairseq)
    stride: int | None = None  # ... and tokens scored at a time; null: what is left of segment_length
    memory_length: int | None = None  # null: model.memory_length
    same_length: bool | None = None  # null: model.same_length
    clamp_length: int | None = None  # of relative positions; null: as trained
    every_steps: int | None = None
    every_epochs: float | None = None
    max_tokens: int | None = None  # of the validation split, while training; the final figures use all
    mask_seed: int = 0  # with train.objective: masked: which tokens are asked for, the same ones in every run

    def __post_init__(self) -> None:
        problems: list[str] = []
        check_numbers(problems, self, "eval", ("batch_size", "segment_length", "stride", "clamp_length"), below=SIZES)
        check_numbers(problems, self, "eval", ("context", "memory_length"), zero=True, below=SIZES)
        check_numbers(problems, self, "eval", ("mask_seed",), zero=True, below=COUNTS)
        check_numbers(problems, self, "eval", ("every_steps", "max_tokens"), below=COUNTS)
        check_numbers(problems, self, "eval", ("every_epochs",))
        if self.every_steps is not None and self.every_epochs is not None:
            problems.append("eval: give at most one of every_steps and every_epochs")
        raise_problems(problems)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Strict):
    """One run: what is trained, on what, how, and how it is judged."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        problems = masked_problems(self)
        causal = self.train.objective == "causal"
        if causal and self.model.memory_length and self.train.order != "contiguous":
            problems.append(
                f"train.order: a model with memory (model.memory_length {self.model.memory_length}) reads its text in order; "
                f"given '{self.train.order}', allowed: contiguous"
            )
        remembers = self.model.memory_length if self.eval.memory_length is None else self.eval.memory_length
        slides = self.eval.context is not None or self.eval.stride is not None
        if slides and remembers:
            problems.append(
                "eval.context: a sliding window is for models without memory; leave eval.context and eval.stride out, or "
                "set eval.memory_length to 0"
            )
        segment = self.eval.segment_length or self.train.segment_length
        for key, other, most in (("context", "stride", segment - 1), ("stride", "context", segment)):
            value = getattr(self.eval, key)
            if value is not None and getattr(self.eval, other) is None and value > most:
                problems.append(
                    f"eval.{key}: at most {most}, for a window has eval.segment_length (else train.segment_length) tokens, "
                    f"here {segment}; given {value}; lower it, or give eval.{other} too"
                )
        if self.eval.same_length and not remembers:
            problems.append("eval.same_length: goes with a memory; set eval.memory_length")
        if self.eval.clamp_length is not None and self.model.position != "relative":
            problems.append(
                f"eval.clamp_length: goes with model.position: relative, given model.position: {self.model.position}"
            )
        if not problems:
            problems += self._unlike_the_model()
        if self.model.attention.kind == "multilinear":
            problems += [
                f"train.{key}: a penalty on attention weights, and multi-linear attention has none; given "
                f"{getattr(self.train, key)} with model.attention.kind: multilinear, set it to 0 or use kind: weighted"
                for key in ("orthogonality", "overlap")
                if getattr(self.train, key)
            ]
        raise_problems(problems)

    def _unlike_the_model(self) -> list[str]:
        """What `eval` asks of the model that it cannot have: found here, not after training."""
        asked = self.eval
        try:
            with_memory(self.model, asked.memory_length, same_length=asked.same_length, clamp_length=asked.clamp_length)
        except ConfigError as error:
            given = {key: getattr(asked, key) for key in ("memory_length", "same_length", "clamp_length")}
            words = ", ".join(f"eval.{key}: {value}" for key, value in given.items() if value is not None)
            return [f"{words} does not fit the model: {problem}" for problem in error.problems]
        return []
