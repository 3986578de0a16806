"""The train and eval sections of a configuration, and the whole of a run that trains a model of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from fullrank.config.data import PAIR_CORPORA, DataConfig
from fullrank.core import registry
from fullrank.core.config import NOT_NEXT_TOKEN, ModelConfig, MultiLinearConfig, with_memory
from fullrank.core.errors import ConfigError
from fullrank.core.section import (
    Allowed,
    AtLeastOne,
    Count,
    CountOrZero,
    Fraction,
    Positive,
    PositiveOrZero,
    Probability,
    Section,
    Share,
    Size,
    SizeOrZero,
    Slot,
    hints_of,
    key,
)

# what is said of every figure of a model that predicts masked tokens
MASKED_TOKEN = "a masked-token perplexity, not comparable with next-token perplexity"

Optimizer = Annotated[str, Slot("optimizer", "sgd", "nag", "adam", "adamw", "muon")]
Schedule = Annotated[
    str, Slot("schedule", "constant", "cosine", "cosine_restarts", "cosine_wave", "linear", "inverse_sqrt", "plateau")
]


class Budget(NamedTuple):
    """Budget of a training: tokens, or seconds from start to figures. cpu: seconds of the processor, not on the wall."""

    tokens: int = 0
    seconds: float | None = None
    cpu: bool = False


_BUDGET = re.compile(
    r"(\d+(?:\.\d*)?(?:e\d+)?)(?:\s*(?P<many>[kmb]?)\s*tokens?|\s+(?P<cpu>cpu\s+)?(?P<unit>second|minute|hour)s?)?",
    re.I,
)
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def read_budget(text: str) -> Budget | None:
    """The budget that a text such as `10 minutes`, `5 CPU minutes`, `3M tokens` or `3000000` states; None if it is none."""
    found = _BUDGET.fullmatch(text.strip())
    unit = ((found and (found["unit"] or found["many"])) or "").lower()
    amount = float(found[1]) * _UNITS[unit] if found else 0.0
    if not found or not 1 <= amount < 2**63:
        return None
    return Budget(seconds=amount, cpu=bool(found["cpu"])) if found["unit"] else Budget(int(amount))


SIZES = {  # model.size
    name: {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    for name, width, layers, heads in (
        ("tiny", 64, 2, 2),
        ("small", 128, 4, 4),
        ("medium", 256, 4, 8),
        ("large", 512, 6, 8),
    )
}
_BUDGETS = "a time as `10 minutes` or `5 CPU minutes`, or tokens as `3M tokens`"
BudgetText = Annotated[str, Allowed(_BUDGETS, lambda text: read_budget(text) is not None)]
Threads = Annotated[int, Allowed("from 1 to 1024", lambda n: 1 <= n <= 1024)]
AboveOne = Annotated[float, Allowed("a number above 1", lambda x: x > 1)]
Temperature = Annotated[float, Allowed("a number from 0.01 to 100", lambda x: 0.01 <= x <= 100)] | Literal["valid"]
Exponent = Annotated[float, Allowed("an exponent from -10 to 10", lambda x: -10 <= x <= 10)]


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
    `not_first_or_last` with probability `p` (Eq. 2 to 5), `listed` with one `p` for each layer.
    """

    KEY = "train.phases"
    name: str = key("", "what the phase is called")
    skip: str = key("none", "schedule of skipped layers")
    p: float | list[float] | None = key(None, "probability of the schedule; one for each layer with `skip: listed`")
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
class DistillConfig(Section):
    """Self-distillation (born-again networks, Furlanello et al. 2018): the teacher is a finished run on the same text.

        loss = (1 - w) CE(targets, p) + w T^2 CE(q_T, p_T)

    w = `weight`, T = `temperature`, q and p the distributions of teacher and model, q_T proportional to q^(1/T).
    """

    KEY = "train.distill"
    run: str = key("", "folder of the finished run whose best checkpoint is the teacher")
    weight: Probability = key(0.5, "weight of the teacher's distribution; 1: the targets count for nothing")
    temperature: Positive = key(1.0, "temperature of both distributions")

    def _faults(self) -> Iterator[str]:
        if not self.run:
            yield "train.distill.run: give the folder of the finished run that teaches, or leave train.distill out"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """Settings of every training, of a model of ours and of a pretrained one."""

    KEY = "train"
    steps: Count | None = key(None, "updates after which training ends")
    seed: CountOrZero = key(1, "seed of every random draw")
    gradient_accumulation_steps: Size = key(1, "batches of one update")
    optimizer: Optimizer = key("adamw", "optimizer")
    eps: Positive = key(1e-8, "epsilon of adam, adamw and muon")
    orthogonality: PositiveOrZero = key(0.0, "coefficient of the orthogonality penalty (Mixhead Eq. 16)")
    overlap: PositiveOrZero = key(0.0, "coefficient of the overlap penalty (Mixhead Eq. 20)")
    precision: Literal["fp32", "bf16"] = key("fp32", "precision of the forward pass")
    device: str = key("auto", "device of torch; auto: a GPU when there is one")
    threads: Threads | None = key(None, "threads of torch")
    sharding: Literal["ddp", "fsdp"] = key("ddp", "several processes: each holds all parameters, or a part of each")
    activation_checkpointing: bool = key(False, "compute blocks again in the backward pass, to save memory")
    save_every_steps: Count | None = key(
        None, "updates between checkpoints; null: at every evaluation and every 5 minutes"
    )
    log_every_steps: Count = key(20, "updates between lines of metrics")
    track: list[Literal["tensorboard", "wandb"]] = key([], "other places that metrics are sent to")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingConfig):
    """Settings of training. Exactly one of `steps`, `epochs`, `tokens` and `budget` says when training ends, or the last phase.

    With a `budget`, what is not stated is by rules, from the text and the model (docs/own_text.md).

    Text is read in `batch_size` streams of `segment_length` tokens, sentence pairs in batches of `batch_tokens`; `tokens` are
    those that are predicted: of translations, their words and final <eos>, without padding. Where tokens are masked
    (`objective: masked`), `tokens` are those that are read.
    """

    epochs: Positive | None = key(None, "epochs after which training ends")
    tokens: Count | None = key(None, "tokens after which training ends")
    budget: Count | BudgetText | None = key(
        None, "`10 minutes`, `5 CPU minutes` or `3M tokens`: all that is not stated is by rules"
    )
    phases: list[PhaseConfig] = key([], "parts of training with their own schedules of skipped layers")
    objective: Literal["causal", "masked", "labels"] = key("causal", "the next token, masked ones, or labels")
    mlm_probability: Fraction = key(0.15, "masked: share of the tokens that are predicted")
    mask_replace_prob: Probability = key(0.8, "masked: share of those that become <mask>")
    random_replace_prob: Probability = key(0.1, "masked: share of those that become any token")
    batch_size: Size = key(20, "parallel streams")
    segment_length: Size = key(64, "tokens of each stream per step")
    segment_deviation: PositiveOrZero = key(
        0.0, "standard deviation of random segment lengths, in tokens; 0: all alike"
    )
    half_segments: Probability = key(0.0, "share of segments that are half as long")
    segment_multiple: Size = key(1, "random lengths are multiples of this: few shapes, as train.cuda_graphs wants")
    context: SizeOrZero = key(0, "tokens before a segment that are read again, not predicted")
    partial_shuffle: bool = key(False, "every stream begins at another place in every epoch")
    batch_tokens: Size | None = key(None, "sentence pairs: tokens of a batch, longer side, padding included")
    order: Literal["contiguous", "shuffled"] | None = key(None, "streams, or shuffled blocks (null: if masked)")
    learning_rate: Positive = key(1e-3, "learning rate after the warm-up")
    embedding_rate: Positive = key(1.0, "factor on learning_rate for the embedding; min_learning_rate stays")
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
        None, "cosine_restarts: steps of the first; cosine_wave: steps down, as many up; null: all"
    )
    t_mult: AtLeastOne = key(1.0, "cosine_restarts: how much longer each period is than the one before")
    lr_shrink: Positive = key(1.0, "cosine_restarts: what the learning rates of each further period are multiplied by")
    plateau_factor: AboveOne = key(2.0, "plateau: divide the learning rate by this")
    plateau_patience: CountOrZero = key(0, "plateau: after more than so many evaluations without improvement")
    max_grad_norm: Positive | None = key(None, "gradients are clipped to this norm")
    label_smoothing: Share = key(0.0, "e: the target is (1 - e) [v = y] + e / V")
    activation_regularization: PositiveOrZero = key(0.0, "AR: coefficient of the mean square of the last hidden states")
    temporal_regularization: PositiveOrZero = key(0.0, "TAR: the same of their change from one token to the next")
    distill: DistillConfig | None = key(None, "learn the next-token distribution of a finished run, too")
    past_decode: PositiveOrZero = key(0.0, "coefficient of past-decode regularization (0.001 is usual)")
    input_mask: Share = key(0.0, "probability that a learned vector replaces an input token in training")
    compile: bool = key(False, "compile the model")
    cuda_graphs: bool = key(False, "with compile, on a GPU: blocks are recorded once and replayed (not measured yet)")
    averaging: Literal["none", "ema", "swa"] = key("none", "average of the weights over training")
    ema_decay: Fraction = key(0.999, "ema: decay of the average")
    swa_start: Share = key(0.75, "swa: share of training after which weights are averaged")
    swa_learning_rate: Positive | None = key(
        None, "swa: learning rate while weights are averaged; null: the schedule's"
    )
    patience: Count | None = key(None, "stop after so many evaluations without improvement of eval.metric")
    keep_checkpoints: Count | None = key(None, "weights that are kept of the last evaluations")

    def _ends(self) -> list[str]:
        return [end for end in ("steps", "epochs", "tokens", "budget") if getattr(self, end) is not None]

    def _bounded(self) -> bool:
        """Every phase says after how many steps or epochs it ends."""
        return bool(self.phases) and all(phase.steps or phase.epochs for phase in self.phases)

    def _resolve(self) -> None:
        if not self._ends() and not self._bounded():
            self._set("epochs", 1.0)
        if self.order is None:
            self._set("order", "shuffled" if self.objective == "masked" else "contiguous")

    def _faults(self) -> Iterator[str]:
        ends = self._ends()
        if self._bounded() and ends:
            yield f"train.{ends[0]}: every phase says when it ends; leave it out, or the end of the last phase"
        if len(ends) > 1:
            yield f"train: give exactly one of steps, epochs, tokens, budget; given {', '.join(ends)}"
        for phase in self.phases[:-1]:
            if not phase.ends:
                yield f"train.phases.{phase.name}: give its end (steps, epochs or plateau); only the last phase may do without"
        names = [phase.name for phase in self.phases]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"train.phases: two phases are named '{name}'"
        if self.mask_replace_prob + self.random_replace_prob > 1 + 1e-9:
            both = f"given {self.random_replace_prob} and {self.mask_replace_prob}"
            yield f"train.random_replace_prob: together with train.mask_replace_prob at most 1; {both}"
        if self.order != "contiguous":
            for name in STREAM_KEYS:
                if given := getattr(self, name):
                    yield f"train.{name}: of text that is read in streams; set train.order: contiguous, given {given}"
        for name in ("segment_deviation", "half_segments"):
            if getattr(self, name) and self.segment_length < 10:
                yield f"train.{name}: for segments of 10 tokens or more; given train.segment_length {self.segment_length}"
        if self.segment_multiple > max(1, self.segment_length // 5):
            yield (
                f"train.segment_multiple: at most a fifth of train.segment_length, here {self.segment_length // 5}; given "
                f"{self.segment_multiple}"
            )
        if self.segment_deviation > self.segment_length / 4:
            yield (
                f"train.segment_deviation: at most a quarter of train.segment_length, here {self.segment_length / 4:g}; given "
                f"{self.segment_deviation:g}"
            )
        if self.distill is not None and self.sharding == "fsdp":
            yield "train.sharding: with train.distill each process holds all parameters; given 'fsdp', allowed is 'ddp'"
        if self.swa_learning_rate is not None and self.averaging != "swa":
            yield f"train.swa_learning_rate: goes with train.averaging: swa, given averaging: {self.averaging}"
        if self.schedule == "cosine_wave" and self.period is not None and self.warmup_steps > self.period:
            yield f"train.warmup_steps: at most train.period {self.period} with cosine_wave, given {self.warmup_steps}"
        if self.cuda_graphs and not self.compile:
            yield "train.cuda_graphs: blocks are recorded as they are compiled; set train.compile: true"
        if self.cuda_graphs and self.gradient_accumulation_steps > 1:
            given = self.gradient_accumulation_steps
            yield f"train.cuda_graphs: goes with train.gradient_accumulation_steps: 1, given {given}"
        for phase in self.phases:
            if phase.skip != "none" and self.cuda_graphs:
                yield f"train.cuda_graphs: skips no layers; train.phases.{phase.name}.skip is '{phase.skip}', allowed is 'none'"
            if phase.skip != "none" and self.objective == "masked":
                memory = "for models with memory, and with train.objective: masked there is none"
                yield f"train.phases.{phase.name}.skip: {memory}; given '{phase.skip}', allowed is 'none'"


STREAM_KEYS = ("segment_deviation", "half_segments", "context", "partial_shuffle")
RUNNING_TEXT_KEYS = (*STREAM_KEYS, "activation_regularization", "temporal_regularization", "distill")


@dataclass(frozen=True, kw_only=True)
class ProtocolConfig(Section):
    """Segments and memory of a running text. Null: of a split, as `eval` says, and there as trained."""

    segment_length: Size | None = key(None, "tokens of a segment")
    context: SizeOrZero | None = key(None, "tokens read again before those that are scored (fairseq)")
    stride: Size | None = key(None, "tokens scored at a time; null: what context leaves of segment_length")
    memory_length: SizeOrZero | None = key(None, "tokens of memory")
    same_length: bool | None = key(None, "a window of the memory's length")
    clamp_length: Size | None = key(None, "clamp of relative positions")
    temperature: Temperature | None = key(None, "divides the logits; valid: chosen on the validation text; null: 1")


PROTOCOL_KEYS = tuple(hints_of(ProtocolConfig))


@dataclass(frozen=True, kw_only=True)
class DynamicConfig(Section):
    """Dynamic evaluation (Krause et al. 2018): a gradient step on every segment, after it was scored.

    Of several rates and decays, the pair that gives the validation text the least nll is used for every text.
    """

    KEY = "eval.dynamic"
    rate: Positive | list[Positive] = key([3e-5, 1e-4, 3e-4], "size of a step")
    decay: Probability | list[Probability] = key([0.0, 1e-3], "share of the way back to the trained parameters")

    def grid(self) -> list[tuple[float, float]]:
        """All pairs of a rate and a decay."""
        rates, decays = (one if isinstance(one, list) else [one] for one in (self.rate, self.decay))
        return [(rate, decay) for rate in rates for decay in decays]

    def _faults(self) -> Iterator[str]:
        for name in ("rate", "decay"):
            if getattr(self, name) == []:
                yield f"eval.dynamic.{name}: a number, or a list of one at least; given []"


@dataclass(frozen=True, kw_only=True)
class EvalConfig(ProtocolConfig):
    """Settings of evaluation. Both cadences `null`: once an epoch and at the end.

    `context`, `stride`, `memory_length`, `same_length`, `clamp_length` and `temperature` belong to the final figures and to
    `fullrank eval`; while training, a model is judged as it is trained, or as `valid` says, at temperature 1.
    """

    KEY = "eval"
    batch_size: Size = key(10, "parallel streams")
    every_steps: Count | None = key(None, "updates between evaluations")
    every_epochs: Positive | None = key(None, "epochs between evaluations")
    max_tokens: Count | None = key(None, "tokens of the validation split while training; the final figures use all")
    mask_seed: CountOrZero = key(0, "masked: seed of the tokens that are predicted, the same ones in every run")
    beams: Size = key(5, "translation: width of the beam")
    length_penalty: Exponent = key(1.0, "translation: a translation scores log p / tokens ** this")
    no_repeat_ngram_size: SizeOrZero = key(0, "translation: no n-gram of this length comes twice; 0: it may")
    max_length_a: PositiveOrZero = key(1.2, "translation: of M tokens come at most a M + b; a")
    max_length_b: SizeOrZero = key(10, "translation: of M tokens come at most a M + b; b")
    max_sentences: SizeOrZero | None = key(None, "translation: sentences translated while training; null: all")
    metric: Literal["loss", "bleu"] = key("loss", "what patience, plateau and the best checkpoint follow")
    keep_log_probabilities: bool = key(False, "language models: keep those of every token of the final evaluation")
    dynamic: DynamicConfig | None = key(None, "figures of dynamic evaluation beside the final ones; null: none")
    valid: ProtocolConfig | None = key(None, "the protocol of validation text, where it differs; while training, too")
    test: ProtocolConfig | None = key(None, "the protocol of test text, where it differs")

    def protocol_setting(self, name: str, split: str | None) -> tuple[Any, str]:
        """The value of a key of the protocol for a split (None: of every other text), and the key that gives it."""
        own = {"valid": self.valid, "test": self.test}.get(split or "")
        if own is not None and getattr(own, name) is not None:
            return getattr(own, name), f"eval.{split}.{name}"
        return getattr(self, name), f"eval.{name}"

    def _faults(self) -> Iterator[str]:
        if self.max_length_a == 0 and self.max_length_b == 0:
            yield "eval.max_length_b: with eval.max_length_a 0 a translation could have no token; give 1 or more"
        if self.metric == "bleu" and self.max_sentences == 0:
            yield "eval.max_sentences: 0 translates nothing while training, but eval.metric: bleu judges translations"
        if self.every_steps is not None and self.every_epochs is not None:
            yield "eval: give at most one of every_steps and every_epochs"


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """One run: what is trained, on what, how, and how it is judged."""

    model: ModelConfig = key(ModelConfig(), "what the model is made of")
    data: DataConfig = key(DataConfig(), "a corpus, and how its text becomes token ids")
    train: TrainConfig = key(TrainConfig(), "how the model is trained")
    eval: EvalConfig = key(EvalConfig(), "how the model is evaluated")

    @property
    def task(self) -> Literal["language_model", "masked_model", "translation"]:
        """Task of the run, by its corpus and its objective."""
        if self.translates:
            return "translation"
        return "masked_model" if self.masks else "language_model"

    @property
    def translates(self) -> bool:
        """The corpus is one of sentence pairs, so that a translation model is trained."""
        return self.data.has_pairs

    @property
    def masks(self) -> bool:
        """Tokens are masked and predicted: a masked language model is trained."""
        return self.train.objective == "masked"

    @property
    def remark(self) -> str | None:
        """Remark on the perplexity of a run that does not predict the next token."""
        if self.masks:
            return MASKED_TOKEN
        return NOT_NEXT_TOKEN if self.model.sees_future and not self.translates else None

    def _faults(self) -> Iterator[str]:
        if self.train.objective == "labels":
            yield (
                "train.objective: labels is the objective of fine-tuning (data.name: glue/cola and others); for "
                f"data.name: {self.data.name} choose causal or masked"
            )
        for name in ("keep_log_probabilities", "dynamic"):
            if getattr(self.eval, name) and self.task != "language_model":
                yield f"eval.{name}: for models that predict the next token of a text; leave it out"
        if self.eval.dynamic and self.model.sees_future:
            yield "eval.dynamic: for models whose tokens see no later ones; set model.attention.causal: masked, or leave it out"
        if any(part.value_residual for part in self._parts()):
            yield from self._faults_of_value_residual()
        for name in ("past_decode", "input_mask"):
            if (given := getattr(self.train, name)) and self.task != "language_model":
                yield f"train.{name}: for models that predict the next token of a text; given {given}, leave it out"
        output = self.model.output
        decodes = output.tied and output.kind in ("softmax", "mixture_of_softmaxes") and not output.adaptive
        if self.train.past_decode and not decodes:
            yield (
                "train.past_decode: decodes with the embedding, which the output layer has to share; set model.output.tied: "
                f"true and model.output.kind: softmax or mixture_of_softmaxes (without adaptive components), given tied: "
                f"{str(output.tied).lower()}, kind: {output.kind}; or leave it out"
            )
        lines = list(self._faults_of_masked()) if self.masks else []
        lines = lines or list(self._faults_of_translation() if self.translates else self._faults_of_text())
        yield from lines or self._faults_of_protocol()
        if all(isinstance(one, MultiLinearConfig) for part in self._parts() for one in part.attentions):
            for penalty in ("orthogonality", "overlap"):
                if coefficient := getattr(self.train, penalty):
                    yield (
                        f"train.{penalty}: a penalty on attention weights, and multi-linear attention has none; given "
                        f"{coefficient} with model.attention.kind: multilinear, set it to 0 or use kind: weighted"
                    )

    def _faults_of_value_residual(self) -> Iterator[str]:
        for phase in self.train.phases:
            if phase.skip != "none":
                yield (
                    f"train.phases.{phase.name}.skip: with model.attention.value_residual all layers remember the same tokens; "
                    f"given '{phase.skip}', allowed is none"
                )
        if self.train.sharding == "fsdp":
            yield "train.sharding: model.attention.value_residual reads into the first block; given 'fsdp', allowed is 'ddp'"

    def _parts(self) -> list[ModelConfig]:
        """The parts that have attention of their own; of a translation model that cannot be built, its common section."""
        if not self.translates or self.model.problems_of_translation():
            return [self.model]
        return [self.model.of_encoder(), self.model.of_decoder(), self.model.of_cross()]

    def _faults_of_masked(self) -> Iterator[str]:
        if self.translates:
            yield f"train.objective: masked reads text of one language; given data.name: {self.data.name}, sentence pairs"
            return
        yield from self.model.problems_of_masked()
        yield from self._faults_of_running_text("train.objective is masked")
        for name in PROTOCOL_KEYS[1:]:
            if given := getattr(self.eval, name):
                yield f"eval.{name}: of next tokens, and train.objective is masked; given {given}, leave it out"
        yield from self._faults_of_splits("of next tokens, and train.objective is masked")

    def _faults_of_running_text(self, why: str) -> Iterator[str]:
        """Lines about keys of training that only causal models of a running text have."""
        for name in RUNNING_TEXT_KEYS:
            if given := getattr(self.train, name):
                yield f"train.{name}: for models that predict the next token of a running text, and {why}; given {given}"

    def _faults_of_splits(self, why: str) -> Iterator[str]:
        for split in ("valid", "test"):
            if getattr(self.eval, split) is not None:
                yield f"eval.{split}: {why}; leave it out"

    def _faults_of_text(self) -> Iterator[str]:
        name = f"data.name: {self.data.name} is text of one language"
        for section in ("encoder", "decoder"):
            if getattr(self.model, section) is not None:
                yield (
                    f"model.{section}: a section of translation models, and {name}; leave it out, or choose sentence pairs "
                    f"(data.name: {', '.join(PAIR_CORPORA)})"
                )
        if self.train.batch_tokens is not None:
            given = f"given {self.train.batch_tokens}, leave it out and use train.batch_size and train.segment_length"
            yield f"train.batch_tokens: of sentence pairs, and {name}; {given}"
        if self.eval.metric == "bleu":
            yield f"eval.metric: bleu judges translations, and {name}; use loss"
        if self.model.memory_length and self.train.order != "contiguous":
            yield (
                f"train.order: a model with memory (model.memory_length {self.model.memory_length}) reads its text in order; "
                f"given '{self.train.order}', allowed: contiguous"
            )
        if self.model.memory_length and self.train.context:
            yield (
                f"train.context: for models without memory, given model.memory_length {self.model.memory_length}; "
                "leave one of the two out"
            )
        for split in self._splits():
            yield from self._faults_of_reading(split)

    def _splits(self) -> list[str | None]:
        """The splits with a protocol of their own, after that of `eval` (None)."""
        return [None, *(split for split in ("valid", "test") if getattr(self.eval, split) is not None)]

    def _faults_of_reading(self, split: str | None) -> Iterator[str]:
        """Lines about how the text of a split is read."""
        value, name = {}, {}
        for part in PROTOCOL_KEYS:
            value[part], name[part] = self.eval.protocol_setting(part, split)
        remembers = self.model.memory_length if value["memory_length"] is None else value["memory_length"]
        if remembers and (value["context"] is not None or value["stride"] is not None):
            yield (
                f"{name['context']}: a sliding window is for models without memory; leave {name['context']} and "
                f"{name['stride']} out, or set {name['memory_length']} to 0"
            )
        segment = value["segment_length"] or self.train.segment_length
        for part, other, most in (("context", "stride", segment - 1), ("stride", "context", segment)):
            if value[part] is not None and value[other] is None and value[part] > most:
                yield (
                    f"{name[part]}: at most {most}, for a window has {name['segment_length']} (else train.segment_length) "
                    f"tokens, here {segment}; given {value[part]}; lower it, or give {name[other]} too"
                )
        if value["same_length"] and not remembers:
            yield f"{name['same_length']}: goes with a memory; set {name['memory_length']}"
        if value["clamp_length"] is not None and self.model.position != "relative":
            yield f"{name['clamp_length']}: goes with model.position: relative, given model.position: {self.model.position}"

    def _faults_of_translation(self) -> Iterator[str]:
        name = f"data.name: {self.data.name} is sentence pairs"
        yield from self._faults_of_running_text(name)
        yield from self.model.problems_of_translation()
        if self.train.batch_tokens is None and self.train.budget is None:
            yield (
                f"train.batch_tokens: {name}, which are read in batches of so many tokens; set it (4096 is usual). "
                "train.batch_size and train.segment_length are for text of one language"
            )
        for phase in self.train.phases:
            if phase.skip != "none":
                yield f"train.phases.{phase.name}.skip: needs a memory, and {name}; given '{phase.skip}', allowed is none"
        for part in PROTOCOL_KEYS:
            if (value := getattr(self.eval, part)) is not None:
                yield f"eval.{part}: of the segments of a running text, and {name}; given {value}, leave it out"
        yield from self._faults_of_splits(f"how a running text is read, and {name}")
        shared = self.model.encoder is not None and self.model.encoder.share_embedding
        if shared and self.data.vocabulary == "separate":
            yield (
                "model.encoder.share_embedding: one table for both languages needs one vocabulary; set data.vocabulary: joint "
                "(given separate), or model.encoder.share_embedding: false"
            )

    def _faults_of_protocol(self) -> Iterator[str]:
        """Lines about settings of `eval` that the model cannot have, which are checked before training."""
        for split in self._splits():
            asked, keys = {}, list[str]()
            for part in ("memory_length", "same_length", "clamp_length"):
                asked[part], name = self.eval.protocol_setting(part, split)
                keys += [f"{name}: {asked[part]}"] if asked[part] is not None else []
            try:
                with_memory(self.model, **asked)
            except ConfigError as error:
                for problem in error.problems:
                    yield f"{', '.join(keys)} does not fit the model: {problem}"
