"""The eval section of a configuration, and the whole of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fullrank.config.attention import NOT_NEXT_TOKEN
from fullrank.config.checks import COUNTS, SIZES, Strict, check_numbers, raise_problems
from fullrank.config.data import PAIR_CORPORA, DataConfig
from fullrank.config.masking import MASKED_TOKEN, masked_problems
from fullrank.config.model import ModelConfig, with_memory
from fullrank.config.training import TrainConfig
from fullrank.errors import ConfigError


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
