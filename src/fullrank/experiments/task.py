"""The contract of a task. `run.train` is the one way from a configuration to a result; what differs is here.

    prepare the data -> claim the run folder -> model, objective, batches -> fit -> figures of the best and last -> result.json

Language models, masked models, translation and fine-tuning are the four tasks (`run.task_of`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fullrank.analysis.size import parameters_by_part
from fullrank.config.finetune import FinetuneConfig
from fullrank.config.run import EvalConfig, RunConfig
from fullrank.config.training import TrainConfig, TrainingConfig
from fullrank.core import draws
from fullrank.core.decoder import LanguageModel
from fullrank.core.embedding import Input
from fullrank.core.encoder import MaskedLanguageModel
from fullrank.core.errors import FullRankError
from fullrank.core.trace import Trace, orthogonality, overlap
from fullrank.core.translator import Translator
from fullrank.data import prepared
from fullrank.data.batches import Part, Share
from fullrank.evaluation.perplexity import EvaluationProtocol, MaskedProtocol
from fullrank.experiments.measure import check_block
from fullrank.experiments.translate import Search
from fullrank.training import distributed
from fullrank.training.device import device_of
from fullrank.training.optimizer import Groups, parameter_groups
from fullrank.training.values import Batches, Counters, Evaluate, EvaluationOptions, Objective

Say = Callable[[str], None]
Config = TypeVar("Config", bound=RunConfig | FinetuneConfig)
Corpus = TypeVar("Corpus")
Model = TypeVar("Model", LanguageModel, MaskedLanguageModel, Translator)
Reading = TypeVar("Reading", EvaluationProtocol, MaskedProtocol, Search)  # how a model is measured


@dataclass(frozen=True)
class Prepared(Generic[Config, Corpus]):
    """The data of a run, and `config` with the sizes that it takes from them.

    label: its name for people. identity: entries of run.json that say which data these are: `text` holds a checksum of each
    split, `vocabulary` a fingerprint. save: writes the tokenizers into the run folder.
    """

    config: Config
    corpus: Corpus
    label: str
    identity: Mapping[str, Any]
    save: Callable[[Path], None] = lambda folder: None


@dataclass(frozen=True)
class Parts:
    """The parts that a task gives to the training loop.

    evaluate: the evaluation while training. groups: parameter groups of the optimizer.
    result: the task's own entries of result.json, measured after training; it may leave files in the run folder.
    versions: versions of other packages that the result depends on. remark: what is said before training.
    """

    model: nn.Module
    objective: Objective[Any]
    batches: Batches[Any]
    evaluate: Evaluate
    options: TrainConfig
    eval_options: EvalConfig | EvaluationOptions
    groups: Callable[[], Groups]
    result: Callable[[Counters], dict[str, Any]]
    versions: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""


class Task(Protocol[Config, Corpus]):
    """One kind of run. It has no state: everything is in the configuration and the data."""

    def check(self, config: Config) -> None:
        """Raises ConfigError or InputError for faults that are known before any work; by default there are none."""
        return

    def prepare(
        self, config: Config, identity: Mapping[str, Any], allow_slice: bool, say: Say
    ) -> Prepared[Config, Corpus]:
        """Read or build the data. `identity`: the run.json of a run that is resumed, whose data are used if they are there."""
        ...

    def parts(self, data: Prepared[Config, Corpus], folder: Path, device: torch.device) -> Parts:
        """Build model, objective, batches and measures of a run."""
        ...


class TextTask(Task[RunConfig, Corpus], Protocol[Corpus, Model, Reading]):
    """A task that trains a model of ours: one method measures it, at the end of training and for `fullrank eval`."""

    model: type[Model]
    name: str | None = None  # in result.json; causal models have none

    def check(self, config: RunConfig) -> None:
        for split in ("valid", "test"):
            protocol = self.protocol(config, split=split)
            if not isinstance(protocol, Search) and protocol.kind != "memory":
                check_block(config.model.most_tokens, protocol.segment_length)

    def protocol(self, config: RunConfig, changes: Any = None, split: str = "test") -> Reading:
        """The protocol of a split's final figures. changes: `Flags` of language models, of translations those of `Search`."""
        ...

    def figures(
        self, data: Prepared[RunConfig, Corpus], model: Model, split: str, protocol: Reading, keep: Path | None = None
    ) -> dict[str, Any]:
        """The figures of a split, in fp32. keep: the run folder, for what is written on the way."""
        ...

    def sample(self, model: Model, corpus: Corpus) -> dict[str, Any] | None:
        """A text that the model writes, for people; None where it writes none."""
        return None


# -- shared by the tasks with a model of ours ---------------------------------------------------------------------------


def reuse_prepared(identity: Mapping[str, Any]) -> prepared.Corpus | None:
    """The prepared data that a run was started on, if they are still there and whole: the text may be gone by now."""
    try:
        corpus = prepared.load_corpus(Path(identity["prepared"]))
    except (KeyError, TypeError, FullRankError):
        return None
    return corpus if corpus.text_checksums == identity.get("text") else None


def describe_prepared(corpus: prepared.Corpus) -> dict[str, Any]:
    """The entries `corpus` of result.json that every corpus has."""
    values = {key: getattr(corpus, key) for key in ("name", "label", "is_slice")}
    return {**values, "sha256": corpus.text_checksums, "details": dict(corpus.details)}


def identify(corpus: prepared.Corpus) -> dict[str, Any]:
    """The entries of run.json that say which data these are."""
    return {
        "vocabulary": corpus.vocabulary, "text": corpus.text_checksums, "prepared": str(corpus.folder.resolve()),
    }  # fmt: skip


WRITES_FROM = 100  # steps; a model that was trained for fewer writes noise


def training_parts(
    task: TextTask[Corpus, Model, Reading],
    data: Prepared[RunConfig, Corpus],
    model: Model,
    folder: Path,
    *,
    objective: Objective[Any],
    batches: Batches[Any],
    evaluate: Evaluate,
    splits: Sequence[str],
    evaluation: Mapping[str, Any],
    entries: Mapping[str, Any],
) -> Parts:
    """The parts of a run that trains a model of ours.

    splits: those that are measured in the end. evaluation: the protocol while training. entries: the task's own entries of
    result.json.
    """
    config, device = data.config, device_of(model)
    protocols = {split: task.protocol(config, split=split) for split in splits}

    def measure(checkpoint: str, keep: Path | None = None) -> tuple[Model, dict[str, Any]]:
        trained = type(model).load(folder, checkpoint).to(device)
        return trained, {split: task.figures(data, trained, split, protocols[split], keep) for split in splits}

    def result(done: Counters) -> dict[str, Any]:
        best, final = measure("best", folder)
        text = task.sample(best, data.corpus) if done.step >= WRITES_FROM else None
        counts = parameters_by_part(model)
        return {
            "parameters": counts,
            "mixing_parameters": counts["mixing"],
            "final": final,
            "last": final if done.best_step == done.step else measure("last")[1],
            "best": {"step": done.best_step, "nll": done.best_nll, config.eval.metric: done.best_metric, **evaluation},
            **({"task": task.name} if task.name else {}),
            "protocol": in_words(protocols),
            "protocol_settings": dataclasses.asdict(protocols["test"]),
            "protocols": {
                split: {"words": one.in_words(), "settings": dataclasses.asdict(one)}
                for split, one in protocols.items()
            },
            **entries,
            **({"sample": text} if text is not None else {}),
        }

    def groups() -> Groups:
        options = config.train
        tables = (p for module in model.modules() if isinstance(module, Input) for p in module.parameters())
        return parameter_groups(
            model, options.weight_decay, options.optimizer == "muon", faster=tables, peak=options.embedding_rate
        )

    return Parts(model, objective, batches, evaluate, config.train, config.eval, groups, result)


def in_words(protocols: Mapping[str, EvaluationProtocol | MaskedProtocol | Search]) -> str:
    """The protocol of all splits as a sentence, or that of each by its name where they differ."""
    words = {split: protocol.in_words() for split, protocol in protocols.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{split}: {sentence}" for split, sentence in words.items())


def choose_own_rows() -> Share:
    """The rows of each batch that this process reads."""
    return Share(distributed.rank(), distributed.world_size())


def place_draws(part: Part | None, rows: int) -> None:
    """Say which rows of the whole batch the `rows` rows of a pass are, for what is drawn by row."""
    if draws.current is not None:
        draws.current.first, draws.current.rows = 0 if part is None or not part.rows else part.first, rows


def shared(value: Tensor, own: int, part: Part | None) -> Tensor:
    """`value`, a mean over `own` tokens, so weighted that the mean over processes is that over all tokens of the batch."""
    if part is None or own * part.count == part.tokens:
        return value
    return value * (own * part.count / max(part.tokens, 1))


def _activation_penalty(hidden: Tensor, options: TrainConfig) -> Tensor:
    """AR and TAR of the last hidden states (B, N, E), a mean over all entries (Merity et al. 2018, §4.7).

        alpha mean(h_n^2) + beta mean((h_n - h_{n-1})^2)      alpha = `activation_regularization`, beta = `temporal_..`

    The published Penn Treebank code of Transformer-XL takes both before dropout, as here; AWD-LSTM takes AR after it.
    """
    penalty = options.activation_regularization * hidden.square().mean()
    if options.temporal_regularization and hidden.shape[1] > 1:
        penalty = penalty + options.temporal_regularization * (hidden[:, 1:] - hidden[:, :-1]).square().mean()
    return penalty


def add_penalties(
    value: Tensor, trace: Trace | None, options: TrainingConfig, part: Part | None = None, targets: int = 0
) -> Tensor:
    """`value` plus the penalties of Mixhead Eq. 16 and 20, over the layers in `trace` (none where all are skipped), and AR and
    TAR over the last `targets` tokens of each row.

    The penalties are means over the rows of a batch, of which this process has a part.
    """
    weight = 1.0 if part is None else part.rows * part.count / part.of
    if trace is not None and trace.last is not None and isinstance(options, TrainConfig) and _regularizes(options):
        value = value + weight * _activation_penalty(trace.last[:, -targets:], options)
    if trace is not None and trace.layers:
        if options.orthogonality:
            value = value + weight * options.orthogonality * orthogonality(trace)
        if options.overlap:
            value = value + weight * options.overlap * overlap(trace)
    return value


def trace_for(options: TrainingConfig) -> Trace | None:
    """A trace where a penalty needs one."""
    weights = bool(options.orthogonality or options.overlap)
    last = isinstance(options, TrainConfig) and _regularizes(options)
    return Trace(weights=weights) if weights or last else None


def _regularizes(options: TrainConfig) -> bool:
    """AR or TAR is on."""
    return options.activation_regularization > 0 or options.temporal_regularization > 0
