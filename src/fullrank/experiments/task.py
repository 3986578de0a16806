"""The contract of a task, and what tasks share. `run.train` is the one way from a configuration to a result.

    prepare the data -> claim the run folder -> model, objective, batches -> fit -> figures of the best and last -> result.json

Language models, masked models, translation and fine-tuning are the four tasks (`run.task_of`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fullrank.config.run import EvalConfig, TrainConfig, TrainingConfig
from fullrank.core import draws
from fullrank.core.embedding import Input
from fullrank.core.errors import FullRankError
from fullrank.core.stages import Mixing
from fullrank.core.trace import Trace, orthogonality, overlap
from fullrank.data import Corpus, Tokenizer, load_corpus, prepare
from fullrank.data.batches import Shared
from fullrank.files import Entries
from fullrank.training.optimizer import Groups, parameter_groups
from fullrank.training.values import (
    Batches,
    Carry,
    Counters,
    Evaluate,
    EvaluationOptions,
    Loss,
    Objective,
)


@dataclass(frozen=True)
class Parts:
    """The parts that a task gives to the training loop.

    evaluate: the evaluation while training. groups: parameter groups of the optimizer.
    result: the task's own entries of result.json, measured after training; it may leave files in the run folder.
    versions: versions of other packages that the result depends on.
    """

    model: nn.Module
    objective: Objective
    batches: Batches
    evaluate: Evaluate
    options: TrainConfig
    eval_options: EvalConfig | EvaluationOptions
    groups: Callable[[], Groups]
    result: Callable[[Counters], Entries]
    versions: Mapping[str, str] = field(default_factory=dict)


class Connections(NamedTuple):
    """The parts of a training. evaluation: entries of result.json about `evaluate`, its protocol among them."""

    objective: Objective
    batches: Batches
    evaluate: Evaluate
    evaluation: Mapping[str, Any]


@dataclass(eq=False)
class Task:
    """One kind of run: a configuration and, once they are prepared, its data.

    config: with the sizes that it takes from the data, when they are prepared. corpus: a `Corpus`; of fine-tuning splits by
    name. identity: entries of run.json: `text` holds a checksum of each split, `vocabulary` a fingerprint.
    """

    config: Any
    corpus: Any = None
    identity: Entries = field(default_factory=dict)

    def check(self) -> None:
        """Raise ConfigError or InputError for faults that are known before any work; by default there are none."""

    def prepare(self, recorded: Mapping[str, Any] | None = None, *, allow_slice: bool = True) -> Self:
        """Read or build the data, note them in `corpus` and `identity`, fill in sizes of `config`, and return the task.

        recorded: the run.json of a run that is resumed, whose data are used if they are there.
        """
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write what a trained model needs of its data, the tokenizers, into the run folder; by default nothing."""

    def parts(self, folder: Path, device: torch.device) -> Parts:
        """Build model, objective, batches and measures of a run."""
        raise NotImplementedError


class TextTask(Task):
    """A task that trains a model on a prepared corpus: it is measured alike after training and by `fullrank eval`."""

    model: Any  # the class of the model
    name: str | None = None  # in result.json; causal models have none

    # -- what each task says by itself

    def protocol(self, split: str = "test") -> Any:
        """Choose the protocol of a split's final figures, a dataclass with `in_words`."""
        raise NotImplementedError

    def figures(self, model: Any, split: str, protocol: Any, keep: Path | None = None) -> Entries:
        """Measure the figures of a split, in fp32.

        Args:
            model: trained model.
            split: `valid`, `test` or another of the corpus.
            protocol: how it is read.
            keep: the run folder, for what is written on the way; None: nothing is.

        Returns:
            Figures by name.
        """
        raise NotImplementedError

    def connect(self, model: Any) -> Connections:
        """Build objective, batches and evaluation of the model that is trained; InputError where it cannot read the data."""
        raise NotImplementedError

    # -- what some tasks do in another way

    def read_tokenizer(self) -> Tokenizer | None:
        """Read the tokenizer that the text is encoded with; None: one is made of the text."""
        return None

    def with_sizes(self) -> Any:
        """Return the configuration with the sizes that it leaves to its data.

        Raises ConfigError or InputError where they do not fit.
        """
        return self.config

    def describe(self) -> Entries:
        """Describe the corpus: the entry `corpus` of result.json."""
        corpus = self.corpus
        values = {key: getattr(corpus, key) for key in ("name", "label", "is_slice")}
        return {**values, "sha256": corpus.text_checksums, "details": dict(corpus.details)}

    def build(self) -> Any:
        """Build the model that is trained, as it is before training."""
        model = self.model(self.config.model)
        model.trained_length = self.config.train.segment_length
        return model

    def make_groups(self, model: nn.Module) -> Groups:
        """Build parameter groups of the optimizer."""
        options = self.config.train
        rates: dict[nn.Parameter, dict[str, float]] = {}
        for module in model.modules():
            if isinstance(module, Input) and options.embedding_rate != 1:
                rates |= {p: {"peak": options.embedding_rate} for p in module.parameters()}
            elif isinstance(module, Mixing) and options.mixing_rate != 1:
                rates |= {p: {"scale": options.mixing_rate} for p in module.parameters()}
        return parameter_groups(model, options.weight_decay, options.optimizer == "muon", rates)

    def count_parameters(self, model: Any) -> dict[str, int]:
        """Count parameters by part, `total` and `mixing` among them."""
        from fullrank.analysis.size import parameters_by_part

        return parameters_by_part(model)

    def finish(self, model: Any, folder: Path) -> Entries:
        """Return the task's own entries of result.json, of the best model; it may leave files in the run folder."""
        return {"corpus": self.describe()}

    # -- what all do alike

    def prepare(self, recorded: Mapping[str, Any] | None = None, *, allow_slice: bool = True) -> Self:
        corpus = reuse_prepared(recorded or {})
        if corpus is None:
            tokenizer = self.read_tokenizer()
            corpus = prepare(self.config.data, allow_slice=allow_slice, tokenizer=tokenizer)
        folder = str(corpus.folder.resolve())
        self.corpus = corpus
        self.identity = {"vocabulary": corpus.vocabulary, "text": corpus.text_checksums, "prepared": folder}
        self.config = self.with_sizes()
        return self

    def save(self, folder: Path) -> None:
        self.corpus.tokenizer.save(folder)

    def parts(self, folder: Path, device: torch.device) -> Parts:
        config = self.config
        model = self.build().to(device)
        objective, batches, evaluate, evaluation = self.connect(model)
        protocols = {split: self.protocol(split) for split in self.corpus.splits if split != "train"}

        def measure(checkpoint: str, keep: Path | None = None) -> tuple[Any, Entries]:
            trained = self.model.load(folder, checkpoint).to(device)
            return trained, {split: self.figures(trained, split, protocols[split], keep) for split in protocols}

        def result(done: Counters) -> Entries:
            best, final = measure("best", folder)
            counts = self.count_parameters(model)
            described = {}
            for split, protocol in protocols.items():
                described[split] = {"words": protocol.in_words(), "settings": dataclasses.asdict(protocol)}
            sentences = [f"{split}: {about['words']}" for split, about in described.items()]
            words = {about["words"] for about in described.values()}
            return {
                "parameters": counts,
                "mixing_parameters": counts["mixing"],
                "final": final,
                "last": final if done.best_step == done.step else measure("last")[1],
                "best": {
                    "step": done.best_step,
                    "nll": done.best_nll,
                    config.eval.metric: done.best_metric,
                    **evaluation,
                },
                **({"task": self.name} if self.name else {}),
                "protocol": words.pop() if len(words) == 1 else "; ".join(sentences),
                "protocol_settings": described["test"]["settings"],
                "protocols": described,
                **self.finish(best, folder),
            }

        groups = partial(self.make_groups, model)
        return Parts(model, objective, batches, evaluate, config.train, config.eval, groups, result)


def reuse_prepared(identity: Mapping[str, Any]) -> Corpus | None:
    """Open the prepared data that a run was started on, if they are still there and whole.

    Its text may be gone by now.
    """
    try:
        corpus = load_corpus(Path(identity["prepared"]))
    except (KeyError, TypeError, FullRankError):
        return None
    return corpus if corpus.text_checksums == identity.get("text") else None


# -- the loss of a pass ------------------------------------------------------------------------------------------------


def begin_pass(options: TrainingConfig, batch: Shared) -> Trace | None:
    """Set which rows of the whole batch a pass has, for what is drawn by row.

    Returns a trace for the penalties, where there are any.
    """
    if draws.current is not None:
        draws.current.first = batch.part.first if batch.part and batch.part.rows else 0
        draws.current.rows = batch.rows
    weights = bool(options.orthogonality or options.overlap)
    return Trace(weights=weights) if weights or _regularizes(options) else None


def finish_loss(
    value: Tensor,
    nll: Tensor | float,
    batch: Shared,
    trace: Trace | None,
    options: TrainingConfig,
    *,
    targets: int = 0,
    carry: Carry | None = None,
) -> Loss:
    """Add the penalties to the loss of a pass.

        penalties of Mixhead Eq. 16 and 20, over the layers in `trace` (none where all are skipped)
        AR and TAR (Merity et al. 2018, §4.7), over the last hidden states h of the last `targets` tokens of each row:
            alpha mean(h_n^2) + beta mean((h_n - h_{n-1})^2)      alpha = `activation_regularization`, beta = `temporal_..`

    The published Penn Treebank code of Transformer-XL takes both before dropout, as here; AWD-LSTM takes AR after it.
    Where processes share a batch, `value` is so weighted that its mean over them is that over all tokens of the batch;
    the penalties are means over rows.

    Args:
        value: loss, a mean over the tokens of its batch.
        nll: mean over the same tokens in nats, without smoothing; the loss of the pass has the sum.
        batch: the batch on the CPU, where it is counted.
        trace: what `begin_pass` returned.
        options: the train section.
        targets: how many of the last tokens of each row AR and TAR count; 0: all.
        carry: tensors that the next pass begins with; None for none.

    Returns:
        The loss of the pass.
    """
    tokens = batch.tokens
    read = batch.read
    part = batch.part
    total = tokens
    weight = 1.0
    mean = value
    if part is not None:
        total = part.tokens
        read = part.read
        weight = part.rows * part.count / part.of
        if tokens * part.count != total:
            mean = value * (tokens * part.count / max(total, 1))
    if trace is not None and trace.last is not None and _regularizes(options):
        assert isinstance(options, TrainConfig)
        hidden = trace.last[:, -targets:]
        penalty = options.activation_regularization * hidden.square().mean()
        if options.temporal_regularization and hidden.shape[1] > 1:
            penalty = penalty + options.temporal_regularization * (hidden[:, 1:] - hidden[:, :-1]).square().mean()
        mean = mean + weight * penalty
    if trace is not None and trace.layers:
        if options.orthogonality:
            mean = mean + weight * options.orthogonality * orthogonality(trace)
        if options.overlap:
            mean = mean + weight * options.overlap * overlap(trace)
    return Loss(mean, nll * tokens, total, {} if carry is None else carry, read)


def _regularizes(options: TrainingConfig) -> bool:
    """Return whether AR or TAR is on."""
    return (
        isinstance(options, TrainConfig) and max(options.activation_regularization, options.temporal_regularization) > 0
    )
