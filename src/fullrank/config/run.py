"""The train and eval sections of a configuration, and the whole of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from fullrank.config.data import PAIR_CORPORA, DataConfig
from fullrank.core import registry
from fullrank.core.config import (
    COUNTS,
    NOT_NEXT_TOKEN,
    SIZES,
    THREADS,
    ModelConfig,
    Strict,
    check_numbers,
    check_stage,
    raise_problems,
    with_memory,
)
from fullrank.core.errors import ConfigError

# what is said of every figure of a model that predicts masked tokens
MASKED_TOKEN = "a masked-token perplexity, not comparable with next-token perplexity"


def objective_problems(train: TrainConfig) -> list[str]:
    """Faults in what `train` says about the objective and about masking."""
    problems: list[str] = []
    if train.objective not in ("causal", "masked", "labels"):
        problems.append(f"train.objective: 'causal' or 'masked', given '{train.objective}'")
    if not 0 < train.mlm_probability < 1:
        problems.append(f"train.mlm_probability: between 0 and 1, given {train.mlm_probability}")
    replaced, drawn = train.mask_replace_prob, train.random_replace_prob
    for key, value in (("mask_replace_prob", replaced), ("random_replace_prob", drawn)):
        if not 0 <= value <= 1:
            problems.append(f"train.{key}: a probability from 0 to 1, given {value}")
    if not problems and replaced + drawn > 1 + 1e-9:
        problems.append(
            f"train.random_replace_prob: together with train.mask_replace_prob at most 1; given {drawn} and {replaced}"
        )
    if train.objective == "masked":
        problems += [
            f"train.phases.{phase.name}.skip: layers rest for the sake of their memory, and with train.objective: masked "
            f"there is none; given '{phase.skip}', allowed is 'none'"
            for phase in train.phases
            if phase.skip != "none"
        ]
    return problems


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
    # of translation models
    beams: int = 5
    length_penalty: float = 1.0  # a translation scores log p / tokens ** length_penalty, <eos> counted, as in fairseq
    no_repeat_ngram_size: int = 0  # no translation has the same so many tokens in a row twice; 0: it may
    max_length_a: float = 1.2  # of M source tokens with <eos> come at most a M + b, with <eos>
    max_length_b: int = 10
    max_sentences: int | None = None  # of the validation split, translated greedily while training; 0: none, null: all
    metric: Literal["loss", "bleu"] = "loss"  # what makes a checkpoint the best, and what patience and `plateau` follow

    def __post_init__(self) -> None:
        problems: list[str] = []
        check_numbers(problems, self, "eval", ("beams",), below=SIZES)
        check_numbers(
            problems, self, "eval", ("no_repeat_ngram_size", "max_length_b", "max_sentences"), zero=True, below=SIZES
        )
        check_numbers(problems, self, "eval", ("max_length_a",), zero=True)
        if not -10 <= self.length_penalty <= 10:
            problems.append(f"eval.length_penalty: an exponent from -10 to 10, given {self.length_penalty}")
        if self.max_length_a == 0 and self.max_length_b == 0:
            problems.append(
                "eval.max_length_b: with eval.max_length_a 0 a translation could have no token; give 1 or more"
            )
        if self.metric == "bleu" and self.max_sentences == 0:
            problems.append(
                "eval.max_sentences: 0 translates nothing while training, but eval.metric: bleu judges translations"
            )
        if self.metric not in ("loss", "bleu"):
            problems.append(f"eval.metric: 'loss' or 'bleu', given '{self.metric}'")
        check_numbers(problems, self, "eval", ("batch_size", "segment_length", "stride", "clamp_length"), below=SIZES)
        check_numbers(problems, self, "eval", ("context", "memory_length"), zero=True, below=SIZES)
        check_numbers(problems, self, "eval", ("mask_seed",), zero=True, below=COUNTS)
        check_numbers(problems, self, "eval", ("every_steps", "max_tokens"), below=COUNTS)
        check_numbers(problems, self, "eval", ("every_epochs",))
        if self.every_steps is not None and self.every_epochs is not None:
            problems.append("eval: give at most one of every_steps and every_epochs")
        raise_problems(problems)


# keys of `eval` that say how a running text is cut, and what is remembered of it
_OF_SEGMENTS = ("segment_length", "context", "stride", "memory_length", "same_length", "clamp_length")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Strict):
    """One run: what is trained, on what, how, and how it is judged."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        problems = masked_problems(self) if self.masks else []
        if self.train.objective == "labels":
            problems.append(
                "train.objective: labels is the objective of fine-tuning (data.name: glue/cola and others); for "
                f"data.name: {self.data.name} choose causal or masked"
            )
        if not problems:
            problems += self._unlike_sentences() if self.translates else self._unlike_text()
        if not problems:
            problems += self._unlike_the_model()
        kinds = {part.attention.kind for part in self._parts()}
        if "weighted" not in kinds and "multilinear" in kinds:
            problems += [
                f"train.{key}: a penalty on attention weights, and multi-linear attention has none; given "
                f"{getattr(self.train, key)} with model.attention.kind: multilinear, set it to 0 or use kind: weighted"
                for key in ("orthogonality", "overlap")
                if getattr(self.train, key)
            ]
        raise_problems(problems)

    @property
    def translates(self) -> bool:
        """Whether the corpus is one of sentence pairs, so that a translation model is trained."""
        return self.data.has_pairs

    @property
    def masks(self) -> bool:
        """Whether tokens are masked and named again: a masked language model is trained."""
        return self.train.objective == "masked"

    @property
    def remark(self) -> str | None:
        """What is said of the perplexity of the run where it is not one of next tokens."""
        if self.masks:
            return MASKED_TOKEN
        return NOT_NEXT_TOKEN if self.model.sees_future and not self.translates else None

    def _parts(self) -> list[ModelConfig]:
        """What has attention of its own; of a translation model that cannot be built, its common section."""
        if not self.translates or self.model.problems_of_translation():
            return [self.model]
        return [self.model.of_encoder(), self.model.of_decoder(), self.model.of_cross()]

    def _unlike_text(self) -> list[str]:
        """What does not go together in a run of a language model."""
        problems = [
            f"model.{section}: a section of translation models, and data.name: {self.data.name} is text of one language; "
            f"leave it out, or choose sentence pairs (data.name: {', '.join(PAIR_CORPORA)})"
            for section in ("encoder", "decoder")
            if getattr(self.model, section) is not None
        ]
        if self.train.batch_tokens is not None:
            problems.append(
                f"train.batch_tokens: of sentence pairs, and data.name: {self.data.name} is text of one language; given "
                f"{self.train.batch_tokens}, leave it out and use train.batch_size and train.segment_length"
            )
        if self.eval.metric == "bleu":
            problems.append(
                f"eval.metric: bleu judges translations, and data.name: {self.data.name} is text of one language; use loss"
            )
        if self.model.memory_length and self.train.order != "contiguous":
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
        return problems

    def _unlike_sentences(self) -> list[str]:
        """What does not go together in a run of a translation model."""
        name = f"data.name: {self.data.name} is sentence pairs"
        problems = list(self.model.problems_of_translation())
        if self.train.batch_tokens is None:
            problems.append(
                f"train.batch_tokens: {name}, which are read in batches of so many tokens; set it (4096 is usual). "
                "train.batch_size and train.segment_length are for text of one language"
            )
        problems += [
            f"train.phases.{phase.name}.skip: layers rest in models with memory, and {name}, translated without any; given "
            f"'{phase.skip}', allowed is none"
            for phase in self.train.phases
            if phase.skip != "none"
        ]
        problems += [
            f"eval.{key}: of the segments of a running text, and {name}; given {getattr(self.eval, key)}, leave it out"
            for key in _OF_SEGMENTS
            if getattr(self.eval, key) is not None
        ]
        shared = self.model.encoder is not None and self.model.encoder.share_embedding
        if shared and self.data.vocabulary == "separate":
            problems.append(
                "model.encoder.share_embedding: one table for both languages needs one vocabulary; set data.vocabulary: joint "
                "(given separate), or model.encoder.share_embedding: false"
            )
        return problems

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


def masked_problems(run: RunConfig) -> list[str]:
    """What of a run does not go with `train.objective: masked`."""
    if run.translates:
        return [
            f"train.objective: masked reads text of one language, and data.name: {run.data.name} has sentence pairs; choose "
            "another corpus, or objective: causal"
        ]
    problems = run.model.problems_of_masked()
    problems += [
        f"eval.{key}: says how next tokens are read, and with train.objective: masked there are none; given "
        f"{getattr(run.eval, key)}, leave it out"
        for key in ("context", "stride", "memory_length", "same_length", "clamp_length")
        if getattr(run.eval, key)
    ]
    return problems
