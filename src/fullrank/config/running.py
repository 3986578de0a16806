"""The data and eval sections of a configuration, and the whole of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fullrank.config.checks import COUNTS, SIZES, Strict, check_numbers, raise_problems
from fullrank.config.model import ModelConfig, with_memory
from fullrank.config.training import TrainConfig
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
    metric: Literal["loss", "bleu"] = "loss"  # what makes a checkpoint the best, and what patience and `plateau` follow

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.metric not in ("loss", "bleu"):
            problems.append(f"eval.metric: 'loss' or 'bleu', given '{self.metric}'")
        check_numbers(problems, self, "eval", ("batch_size", "segment_length", "stride", "clamp_length"), below=SIZES)
        check_numbers(problems, self, "eval", ("context", "memory_length"), zero=True, below=SIZES)
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
        problems: list[str] = []
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
