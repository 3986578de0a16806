"""Fine-tuning a pretrained encoder with our attention injected: what GLUE and SQuAD share, and the tasks of GLUE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.finetune import FinetuneConfig, FinetuneTrainConfig
from fullrank.config.glue import GLUE, GlueTask
from fullrank.core.errors import InputError
from fullrank.data.examples import Encoded, ExampleBatch, ExampleBatches, by_length, subset
from fullrank.data.glue import Examples, load_glue, locate
from fullrank.data.invented import invented_examples
from fullrank.decoding.sample import evaluating
from fullrank.evaluation.tasks import glue_scores
from fullrank.experiments.pretrained import PretrainedEncoder, check_length, load_pretrained, padding_of
from fullrank.experiments.run_folder import open_any, with_own_cache
from fullrank.experiments.task import Parts, Prepared, Say, Task, own_rows, penalized, place_draws, shared, trace_for
from fullrank.training.checkpoint import load_weights
from fullrank.training.device import device_of
from fullrank.training.distributed import count, gathered, rank
from fullrank.training.optimizer import Groups, parameter_groups
from fullrank.training.values import Carry, EvaluationResult, FitResult, Loss, Objective, TrainingPosition

# -- shared by GLUE and SQuAD ----------------------------------------------------------------------------------------


class _EvaluationOptions(NamedTuple):
    every_steps: int | None
    every_epochs: float | None
    metric: str


def tuning_parts(
    data: Prepared[FinetuneConfig, Any],
    pretrained: PretrainedEncoder,
    folder: Path,
    *,
    train: Encoded,
    objective: Objective[ExampleBatch],
    evaluate: Callable[[nn.Module], EvaluationResult],
    measure: Callable[[nn.Module], dict[str, Any]],
    metrics: tuple[str, ...],
    entries: Mapping[str, Any],
) -> Parts:
    """The parts of a run of fine-tuning.

    measure: final figures of every labelled split; it writes the files of predictions. metrics: the task's scores; by the
    first one a checkpoint is the best. entries: the task's own entries of result.json.
    """
    config, model = data.config, pretrained.model
    batches = ExampleBatches(
        train,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        group_by_length=config.train.group_by_length,
        share=own_rows(),
    )
    options = config.train.options(batches.batches_per_epoch)
    # null: once, at the end, which comes by itself
    every_epochs = config.eval.every_epochs or (None if config.eval.every_steps else float(2**31))

    def result(done: FitResult) -> dict[str, Any]:
        if config.eval.checkpoint == "best" and done.best_step != done.steps:
            load_weights(model, folder / "checkpoints" / "best")
        model.eval()
        final, parameters = measure(model), dict(model.named_parameters())
        if config.train.keep_model and rank() == 0:
            model.save_pretrained(folder / "model")
            pretrained.tokenizer.save_pretrained(folder / "model")
        return {
            "kind": "finetuning",
            "parameters": {
                "total": sum(p.numel() for p in parameters.values()),
                "mixing": sum(parameters[name].numel() for name in mixing_names(model)),
                "fresh": sum(parameters[name].numel() for name in pretrained.fresh if name in parameters),
            },
            "final": final,
            "metrics": list(metrics),
            "checkpoint": config.eval.checkpoint,
            "best": {"step": done.best_step, metrics[0]: done.best_metric},
            "task": config.data.label,
            **entries,
            "sha256": data.identity["text"],
            "ms_per_step": done.ms_per_step,
        }

    import transformers

    return Parts(
        model,
        objective,
        batches,
        evaluate,
        options,
        _EvaluationOptions(config.eval.every_steps, every_epochs, metrics[0]),
        lambda: groups_of(model, options.weight_decay, config.train.mixing_scale, options.optimizer == "muon"),
        result,
        {"transformers": transformers.__version__},
        pretrained.remark,
    )


Logits = Callable[[nn.Module, ExampleBatch], Tensor]


@dataclass(frozen=True)
class ExampleObjective:
    """The mean loss of labelled examples, plus the penalties of Mixhead Eq. 16 and Eq. 20.

    `targets`: one row for each example; `logits` (B, ...), `loss`: those of the task.
    """

    model: nn.Module
    targets: Tensor
    logits: Logits
    loss: Callable[[Tensor, Tensor], Tensor]
    options: FinetuneTrainConfig

    def __call__(self, batch: ExampleBatch, carry: Carry, position: TrainingPosition) -> Loss:
        from fullrank.hf.interface import traced  # a configuration is checked without transformers

        trace, count, part = trace_for(self.options), len(batch.indices), batch.part
        own = count if part is None else part.rows
        place_draws(part, count)
        with traced(trace):
            logits = self.logits(self.model, batch)
        value = self.loss(logits, self.targets[torch.from_numpy(batch.indices)].to(logits.device))
        whole, read = (count, batch.tokens) if part is None else (part.tokens, part.read)
        loss = penalized(shared(value, own, part), trace, self.options, part)
        return Loss(loss, value.detach() * own, whole, read=read)


def logits_by_example(model: nn.Module, examples: Encoded, batch_size: int, logits: Logits) -> list[Tensor]:
    """The logits of each example, in order, on the CPU; in evaluation mode."""
    own = dict[int, Tensor]()
    with evaluating(model):
        for number, batch in enumerate(by_length(examples, batch_size)):
            if number % count() == rank():
                own.update(zip(batch.indices.tolist(), logits(model, batch).cpu(), strict=True))
    rows = {index: row for part in gathered(own) for index, row in part.items()}
    return [rows[index] for index in range(len(examples))]


def inputs_of(model: nn.Module, batch: ExampleBatch) -> dict[str, Tensor]:
    """The inputs of a batch on the device of the model."""
    return {name: tensor.to(device_of(model)) for name, tensor in batch.inputs.items()}


def mixing_names(model: nn.Module) -> set[str]:
    """The names of the injected parameters."""
    return {name for name, _ in model.named_parameters() if ".fullrank." in f".{name}"}


def groups_of(model: nn.Module, weight_decay: float, mixing_scale: float, muon: bool = False) -> Groups:
    """The usual parameter groups, and one of mixing parameters: another learning rate, and no decay."""
    names = mixing_names(model)
    injected = {id(p) for name, p in model.named_parameters() if name in names}
    groups = parameter_groups(model, weight_decay, muon)
    mixing = [p for group in groups for p in group["params"] if id(p) in injected]
    groups = [{**group, "params": [p for p in group["params"] if id(p) not in injected]} for group in groups]
    groups.append({"params": mixing, "weight_decay": 0.0, "scale": mixing_scale})
    return [group for group in groups if group["params"]]


# -- GLUE ------------------------------------------------------------------------------------------------------------


class GlueTuning(Task[FinetuneConfig, dict[str, Examples]]):
    """Fine-tuning on a task of GLUE: sentences, or pairs of them, with a label or a number. Its data are splits by name."""

    def prepare(
        self, config: FinetuneConfig, identity: Mapping[str, Any], allow_slice: bool, say: Say
    ) -> Prepared[FinetuneConfig, dict[str, Examples]]:
        data, task = config.data, GLUE[config.data.task]

        def load(split: str, most: int | None) -> Examples:
            examples = (
                invented_examples(task, split) if data.invented else load_glue(task, split, data.dir, data.cache, say)
            )
            chosen = subset(len(examples), most, data.subset_seed)
            return examples if len(chosen) == len(examples) else examples.take(chosen)

        splits = {"train": load("train", data.max_train)}
        for split in task.dev_splits:
            if split != "dev" and data.dir is not None and locate(task, split, Path(data.dir)) is None:
                say(f"{config.data.name}: measured without {split}, for {data.dir} has no file of it")
            else:
                splits[split] = load(split, data.max_eval)
        identity = {"text": {name: splits[name].sha256 for name in [*list(splits)[1:], "train"]}}
        # read before training, so that a file that is missing or not whole is not found after it
        for split in task.test_splits if config.eval.test else ():
            splits[split] = load(split, None)
        return Prepared(config, splits, data.label, identity)

    def parts(self, data: Prepared[FinetuneConfig, dict[str, Examples]], folder: Path, device: torch.device) -> Parts:
        config, corpus, task = data.config, data.corpus, GLUE[data.config.data.task]
        size, longest = config.eval.batch_size, config.data.max_length
        pretrained = load_pretrained(config.model, "classification", num_labels=task.outputs, labels=task.labels)
        pretrained.model.to(device)
        encoded = {name: encode(pretrained, split, longest) for name, split in corpus.items()}
        labelled = [name for name in corpus if name not in task.test_splits]

        def evaluate(model: nn.Module) -> EvaluationResult:
            return score(task, logits_of(model, encoded["dev"], size), corpus["dev"])

        def measure(model: nn.Module) -> dict[str, Any]:
            figures: dict[str, Any] = {}
            for name, examples in corpus.items():
                if name == "train":
                    continue
                logits = logits_of(model, encoded[name], size)
                if rank() == 0:
                    _write_predictions(folder / f"predictions-{name}.tsv", predicted(logits), examples)
                if name in labelled:
                    result = score(task, logits, examples)
                    figures[name] = {**result.scores, "loss": result.nll / result.tokens, "examples": result.tokens}
            return figures

        return tuning_parts(
            data,
            pretrained,
            folder,
            train=encoded["train"],
            objective=ExampleObjective(
                pretrained.model, _targets(corpus["train"], task.labels is None), _logits, _loss, config.train
            ),
            evaluate=evaluate,
            measure=measure,
            metrics=task.metrics,
            entries={
                "title": task.title,
                "slice": {name: corpus[name].is_slice for name in labelled},
                "examples": {name: len(corpus[name]) for name in labelled},
                "protocol": f"development split, fp32, at most {longest} tokens",
            },
        )


def encode(pretrained: PretrainedEncoder, examples: Examples, max_length: int | None) -> Encoded:
    """Token ids with the special tokens of the encoder; of a pair that is too long, the longer side loses tokens first.

    InputError where the encoder reads fewer tokens than `data.max_length` says, and where that leaves no room for a text.
    """
    check_length(pretrained, max_length)
    tokenizer, least = pretrained.tokenizer, 1 if examples.second is None else 2
    special = tokenizer.num_special_tokens_to_add(pair=examples.second is not None)
    if max_length is not None and max_length < special + least:
        raise InputError(
            f"data.max_length: at least {special + least}, of which {special} are special tokens of this encoder, given "
            f"{max_length}"
        )
    encoded = tokenizer(
        examples.first, examples.second, truncation="longest_first", max_length=max_length, return_attention_mask=True
    )
    return Encoded(
        {name: encoded[name] for name in encoded if name in ("input_ids", "token_type_ids", "attention_mask")},
        padding_of(tokenizer),
    )


def logits_of(model: nn.Module, examples: Encoded, batch_size: int) -> Tensor:
    """(T, labels) in the order of the examples, on the CPU; in evaluation mode."""
    return torch.stack(logits_by_example(model, examples, batch_size, _logits))


def predicted(logits: Tensor) -> np.ndarray:
    """The likeliest label of each row; where there is one output, the number itself."""
    return (logits[:, 0] if logits.shape[1] == 1 else logits.argmax(-1)).numpy()


def score(task: GlueTask, logits: Tensor, examples: Examples) -> EvaluationResult:
    """Summed loss, and the official scores of the task."""
    targets = _targets(examples, task.labels is None)
    loss = float(_loss(logits.double(), targets if targets.dtype == torch.int64 else targets.double()))
    return EvaluationResult(
        loss * len(targets), len(targets), glue_scores(task, predicted(logits), examples.known_labels())
    )


def _logits(model: nn.Module, batch: ExampleBatch) -> Tensor:
    logits: Tensor = model(**inputs_of(model, batch)).logits
    return logits.float()


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the labels; of a task of numbers (STS-B), the mean squared error."""
    if targets.is_floating_point():
        return F.mse_loss(logits[:, 0], targets)
    return F.cross_entropy(logits, targets)


def _targets(examples: Examples, regression: bool) -> Tensor:
    return torch.from_numpy(examples.known_labels().astype(np.float32 if regression else np.int64))


def _write_predictions(path: Path, predictions: np.ndarray, examples: Examples) -> None:
    """Write a line of index, label and prediction for every example; the label of a test split is `nan`."""
    labels = np.full(len(examples), np.nan) if examples.labels is None else examples.labels
    rows = zip(examples.ids, labels, predictions, strict=True)
    lines = [f"{name}\t{label:g}\t{prediction:.6g}\n" for name, label, prediction in rows]
    path.write_text("".join(["index\tlabel\tprediction\n", *lines]), encoding="utf-8")


# -- a finished run, read again --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reopened:
    """The model of a finished run of GLUE, its development split and its token ids."""

    model: Any
    task: GlueTask
    examples: Examples
    encoded: Encoded
    batch_size: int

    def predictions(self, model: nn.Module) -> np.ndarray:
        """Predictions of `model` for the examples, (T,)."""
        return predicted(logits_of(model, self.encoded, self.batch_size))


def reopen(folder: Path, say: Say) -> Reopened:
    """The run in `folder` as it was measured at its end; InputError for SQuAD, and where no model was kept."""
    config, identity = open_any(folder)
    if not isinstance(config, FinetuneConfig) or config.data.answers:
        raise InputError(f"{folder}: no run of GLUE")
    if not (folder / "model").is_dir():
        raise InputError(f"{folder}: holds no model/; fine-tune it with train.keep_model: true")
    task, options = GLUE[config.data.task], replace(config.model, pretrained=str(folder / "model"), revision=None)
    pretrained = load_pretrained(options, "classification", num_labels=task.outputs, labels=task.labels)
    dev = GlueTuning().prepare(with_own_cache(config), identity, True, say).corpus["dev"]
    encoded = encode(pretrained, dev, config.data.max_length)
    return Reopened(pretrained.model, task, dev, encoded, config.eval.batch_size)
