"""The contract of a task, and what tasks share. `run.train` is the one way from a configuration to a result.

    prepare the data -> claim the run folder -> model, objective, batches -> fit -> figures of the best and last -> result.json

Language models, masked models, translation and fine-tuning are the four tasks (`run.task_of`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fullrank.analysis.size import parameters_by_part
from fullrank.config.run import TrainConfig
from fullrank.core import draws
from fullrank.core.embedding import Input
from fullrank.core.errors import FullRankError
from fullrank.core.stages import Mixing
from fullrank.core.trace import Trace, orthogonality, overlap
from fullrank.data import Corpus, Tokenizer, load_corpus, prepare
from fullrank.data.batches import Part, Shared
from fullrank.experiments.measure import warn_of_length
from fullrank.files import Entries
from fullrank.training.device import device_of
from fullrank.training.values import Carry, Counters, Loss

Rates = dict[nn.Parameter, dict[str, float]]  # of parameters with a learning rate of their own, see `parameter_groups`


@dataclass(eq=False)
class Task:
    """One kind of run: a configuration, with its data once they are prepared, and with all that is trained once it is built.

    config: with the sizes that it takes from the data, when they are prepared. corpus: a `Corpus`; of fine-tuning splits by
    name. identity: entries of run.json: `text` holds a checksum of each split, `vocabulary` a fingerprint.
    model, objective, batches, options, eval_options: what the training loop takes. packages: names of packages
    whose versions result.json records. bits: unit of progress where tokens spell text, such as bits/char; None elsewhere.

    Every kind has these methods:

        prepare(recorded=None, *, allow_slice=True)     read or build the data, and fill in sizes of `config`; return the task
            recorded: the run.json of a run that is resumed, whose data are used if they are there
        build(folder, device)       build what the training loop takes
        objective(batch, carry, position)       compute the loss of a pass (`training.values.Objective`)
        choose_rates(model)         choose the learning rates of parameters that have their own
        evaluate(model)             evaluate the model while it is trained
        measure(counters, folder)   make the task's own entries of result.json, after training; it may write into the folder
    """

    config: Any
    corpus: Any = None
    identity: Entries = field(default_factory=dict)
    packages: ClassVar[Sequence[str]] = ()
    bits: ClassVar[str | None] = None

    def check(self) -> None:
        """Raise ConfigError or InputError for faults that are known before any work; by default there are none."""

    def save(self, folder: Path) -> None:
        """Write what a trained model needs of its data, the tokenizers, into the run folder; by default nothing."""


class TextTask(Task):
    """A task that trains a model on a prepared corpus: it is measured alike after training and by `fullrank eval`.

    Every such task has these methods:

        protocol(split="test")      choose how the final figures of a split are read, a dataclass with `in_words`
        figures(model, split, protocol, keep=None)      measure the figures of a split, in fp32
            keep: the run folder, for what is written on the way
        connect()                   build objective and batches; InputError where the model cannot read the data
        describe_evaluation()       describe `evaluate`, its protocol among other things: entries of result.json
    """

    model_class: Any
    name: str | None = None  # in result.json; causal models have none
    protocol: Any
    figures: Any
    connect: Any
    objective: Any
    batches: Any
    describe_evaluation: Any

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

    def make_model(self) -> Any:
        """Make the model that is trained, as it is before training."""
        model = self.model_class(self.config.model)
        model.trained_length = self.config.train.segment_length
        return model

    def choose_rates(self, model: nn.Module) -> Rates:
        options = self.config.train
        rates: Rates = {}
        for module in model.modules():
            if isinstance(module, Input) and options.embedding_rate != 1:
                rates |= {p: {"peak": options.embedding_rate} for p in module.parameters()}
            elif isinstance(module, Mixing) and options.mixing_rate != 1:
                rates |= {p: {"scale": options.mixing_rate} for p in module.parameters()}
        return rates

    def count_parameters(self) -> dict[str, int]:
        """Count parameters by part, `total` and `mixing` among them."""
        return parameters_by_part(self.model)

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

    def build(self, folder: Path, device: torch.device) -> None:
        self.model = self.make_model().to(device)
        self.options = self.config.train
        self.eval_options = self.config.eval
        warn_of_length(self.config, self.protocol())
        self.connect()

    def measure(self, counters: Counters, folder: Path) -> Entries:
        protocols = {split: self.protocol(split) for split in self.corpus.splits if split != "train"}
        words = {split: protocol.in_words() for split, protocol in protocols.items()}
        settings = {split: dataclasses.asdict(protocol) for split, protocol in protocols.items()}
        device = device_of(self.model)
        best = self.model_class.load(folder, "best").to(device)
        final = {split: self.figures(best, split, protocol, folder) for split, protocol in protocols.items()}
        last = final
        if counters.best_step != counters.step:
            model = self.model_class.load(folder, "last").to(device)
            last = {split: self.figures(model, split, protocol) for split, protocol in protocols.items()}
        counts = self.count_parameters()
        described = "; ".join(f"{split}: {text}" for split, text in words.items())
        return {
            "parameters": counts,
            "mixing_parameters": counts["mixing"],
            "final": final,
            "last": last,
            "best": {
                "step": counters.best_step,
                "nll": counters.best_nll,
                self.eval_options.metric: counters.best_metric,
                **self.describe_evaluation(),
            },
            **({"task": self.name} if self.name else {}),
            "protocol": words["test"] if len({*words.values()}) == 1 else described,
            "protocol_settings": settings["test"],
            "protocols": {split: {"words": words[split], "settings": settings[split]} for split in words},
            **self.finish(best, folder),
        }


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


def begin_pass(options: TrainConfig, batch: Shared) -> Trace | None:
    """Set which rows of the whole batch a pass has, for what is drawn by row.

    Returns a trace for the penalties, where there are any.
    """
    if draws.current is not None:
        draws.current.first = batch.part.first if batch.part and batch.part.rows else 0
        draws.current.rows = batch.rows
    weights = bool(options.orthogonality or options.overlap)
    hidden = options.activation_regularization or options.temporal_regularization
    return Trace(weights=weights) if weights or hidden else None


def finish_loss(
    value: Tensor,
    nll: Tensor | float,
    batch: Shared,
    trace: Trace | None,
    options: TrainConfig,
    *,
    targets: int = 0,
    carry: Carry | None = None,
) -> Loss:
    """Add the penalties to the loss of a pass.

        penalties of Mixhead Eq. 16 and 20, over the layers in `trace` (none where all are skipped)
        AR and TAR (Merity et al. 2018, §4.7), over the last hidden states h of the last `targets` tokens of each row:
            alpha mean(h_n^2) + beta mean((h_n - h_{n-1})^2)      alpha = `activation_regularization`, beta = `temporal_..`

    The published Penn Treebank code of Transformer-XL takes both before dropout, as here; AWD-LSTM takes AR after it.
    Processes that share a batch may have different numbers of tokens and rows. `value` is weighted by tokens and the penalties
    by rows, so that the mean over processes is the mean over the batch.

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
    part = batch.part or Part(0, batch.rows, batch.rows, tokens, batch.read, 1)
    weight = part.rows * part.processes / part.batch_rows
    mean = value
    if tokens * part.processes != part.tokens:
        mean = value * (tokens * part.processes / max(part.tokens, 1))
    if (
        trace is not None
        and trace.last is not None
        and options.activation_regularization + options.temporal_regularization
    ):
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
    return Loss(mean, nll * tokens, part.tokens, carry or {}, part.read)
