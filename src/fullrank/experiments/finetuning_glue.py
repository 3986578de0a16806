"""The tasks of GLUE: sentences, or pairs of them, with a label or a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.finetune import FinetuneConfig
from fullrank.core.errors import InputError
from fullrank.data.batches import Encoded, ExampleBatch, ExampleBatches, by_length, subset
from fullrank.data.glue import GLUE, Examples, GlueTask, load_glue, locate, submission_rows, write_submission
from fullrank.evaluation.tasks import glue_scores
from fullrank.experiments.finetuning import FineParts, Say
from fullrank.experiments.pretrained import Pretrained, check_length, load_pretrained, padding_of
from fullrank.training.device import device_of
from fullrank.training.values import EvaluationResult, Loss, TrainingPosition


@dataclass(frozen=True)
class GlueData:
    """The splits of a task; of MNLI the development split is that of matched genres, `others` has the mismatched ones.

    tests: the splits that the test server judges, where a submission is asked for.
    """

    task: GlueTask
    train: Examples
    dev: Examples
    others: Mapping[str, Examples]
    tests: Mapping[str, Examples]

    @property
    def sha256(self) -> dict[str, str]:
        return {name: examples.sha256 for name, examples in (self.labelled() | {"train": self.train}).items()}

    def labelled(self) -> dict[str, Examples]:
        """What is measured."""
        return {"dev": self.dev, **self.others}


class GlueTuning:
    """Fine-tuning on a task of GLUE."""

    def read(self, config: FinetuneConfig, say: Say) -> GlueData:
        data = config.data
        task = GLUE[data.task]

        def load(split: str, most: int | None) -> Examples:
            found = load_glue(task, split, data.dir, data.cache, say)
            chosen = subset(len(found), most, data.subset_seed)
            return found if len(chosen) == len(found) else found.take(chosen)

        train, dev = load("train", data.max_train), load(task.dev_splits[0], data.max_eval)
        others: dict[str, Examples] = {}
        for split in task.dev_splits[1:]:
            if data.dir is not None and locate(task, split, Path(data.dir)) is None:
                say(f"{config.data.name}: measured without {split}, for {data.dir} has no file of it")
            else:
                others[split] = load(split, data.max_eval)
        # read before training, so that a file that is missing or not whole is not found after it
        tests = {split: load(split, None) for split in task.test_splits} if config.eval.test else {}
        for split, examples in tests.items():
            submission_rows(task, split, examples)
        return GlueData(task, train, dev, others, tests)

    def model(self, config: FinetuneConfig, data: GlueData) -> Pretrained:
        labels = data.task.labels
        return load_pretrained(config.model, "classification", num_labels=1 if labels is None else len(labels))

    def parts(self, config: FinetuneConfig, data: GlueData, pretrained: Pretrained) -> FineParts:
        size, longest = config.eval.batch_size, config.data.max_length
        train = encode(pretrained, data.train, longest)
        splits = {name: (encode(pretrained, found, longest), found) for name, found in data.labelled().items()}
        device = device_of(pretrained.model)
        regression = data.task.labels is None

        def judge(model: nn.Module) -> EvaluationResult:
            encoded, examples = splits["dev"]
            return judged(data.task, logits_of(model, encoded, size), examples)

        def measure(model: nn.Module, folder: Path) -> dict[str, Any]:
            figures: dict[str, Any] = {}
            for name, (encoded, examples) in splits.items():
                logits = logits_of(model, encoded, size)
                found = judged(data.task, logits, examples)
                figures[name] = {**found.scores, "loss": found.nll / found.tokens, "examples": found.tokens}
                _keep_predictions(folder / f"predictions-{name}.tsv", predicted(logits), examples)
            for name, examples in data.tests.items():
                logits = logits_of(model, encode(pretrained, examples, longest), size)
                write_submission(data.task, name, predicted(logits), folder / "submission", examples)
            return figures

        return FineParts(
            batches=ExampleBatches(
                train,
                batch_size=config.train.batch_size,
                seed=config.train.seed,
                group_by_length=config.train.group_by_length,
            ),
            objective=LabelObjective(pretrained.model, _targets(data.train, regression), device),
            judge=judge,
            measure=measure,
            metrics=data.task.metrics,
            told={
                "task": config.data.name,
                "title": data.task.title,
                "slice": {"train": data.train.is_slice} | {name: part.is_slice for name, (_, part) in splits.items()},
                "examples": {"train": len(data.train)} | {name: len(part) for name, (_, part) in splits.items()},
                "protocol": f"development split, fp32, at most {longest} tokens",
            },
        )


class LabelObjective:
    """Mean cross-entropy of the labels; of a task of numbers (STS-B), the mean squared error."""

    def __init__(self, model: nn.Module, targets: Tensor, device: torch.device) -> None:
        self.model, self.targets, self.device = model, targets, device

    def __call__(self, batch: ExampleBatch, carry: Mapping[str, Tensor], place: TrainingPosition) -> Loss:
        count, read = len(batch.indices), batch.tokens
        inputs = {name: tensor.to(self.device) for name, tensor in batch.inputs.items()}
        logits = self.model(**inputs).logits.float()
        targets = self.targets[torch.from_numpy(batch.indices)].to(self.device)
        value = _loss(logits, targets)
        return Loss(value, value.detach() * count, count, read=read)


def encode(pretrained: Pretrained, examples: Examples, max_length: int | None) -> Encoded:
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
    found = tokenizer(
        examples.first, examples.second, truncation="longest_first", max_length=max_length, return_attention_mask=True
    )
    return Encoded(
        {name: found[name] for name in found if name in ("input_ids", "token_type_ids", "attention_mask")},
        padding_of(tokenizer),
    )


def logits_of(model: nn.Module, examples: Encoded, batch_size: int) -> Tensor:
    """(T, labels) in the order of the examples, on the CPU; in evaluation mode."""
    device = device_of(model)
    training, found = model.training, list[Tensor]()
    places = list[np.ndarray]()
    model.eval()
    with torch.no_grad():
        for batch in by_length(examples, batch_size):
            inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
            found.append(model(**inputs).logits.float().cpu())
            places.append(batch.indices)
    model.train(training)
    logits = torch.cat(found)
    ordered = torch.empty_like(logits)
    ordered[torch.from_numpy(np.concatenate(places))] = logits
    return ordered


def predicted(logits: Tensor) -> np.ndarray:
    """The likeliest label of each row; where there is one output, the number itself."""
    return (logits[:, 0] if logits.shape[1] == 1 else logits.argmax(-1)).numpy()


def judged(task: GlueTask, logits: Tensor, examples: Examples) -> EvaluationResult:
    """Summed loss, and the official scores of the task."""
    targets = _targets(examples, task.labels is None)
    loss = float(_loss(logits.double(), targets if targets.dtype == torch.int64 else targets.double()))
    return EvaluationResult(
        loss * len(targets), len(targets), glue_scores(task, predicted(logits), examples.known_labels())
    )


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return F.mse_loss(logits[:, 0], targets)
    return F.cross_entropy(logits, targets)


def _targets(examples: Examples, regression: bool) -> Tensor:
    return torch.from_numpy(examples.known_labels().astype(np.float32 if regression else np.int64))


def _keep_predictions(path: Path, predictions: np.ndarray, examples: Examples) -> None:
    """A line of index, label and prediction for every example: what differences are tested on later."""
    lines = ["index\tlabel\tprediction"]
    lines += [
        f"{name}\t{label:g}\t{prediction:.6g}"
        for name, label, prediction in zip(examples.ids, examples.known_labels(), predictions, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
