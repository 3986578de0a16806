"""SQuAD v1.1 and v2: where in a context the answer to a question begins and ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.finetune import FinetuneConfig, FinetuneEvalConfig, TaskDataConfig
from fullrank.core.errors import InputError
from fullrank.data.batches import Encoded, ExampleBatch, ExampleBatches, by_length, subset
from fullrank.data.squad import Question, SquadSplit, read_squad
from fullrank.data.squad_windows import Window, squad_windows
from fullrank.evaluation.tasks import squad_scores, squad_v2_scores
from fullrank.experiments.finetuning import FineParts, Say
from fullrank.experiments.pretrained import Pretrained, check_length, load_pretrained, padding_of
from fullrank.experiments.squad_answers import Answer, find_answers, write_answers
from fullrank.training.device import device_of
from fullrank.training.values import EvaluationResult, Loss, TrainingPosition

VERSIONS = {"squad": "1.1", "squad-v2": "2.0"}
METRICS = {"1.1": ("f1", "exact_match"), "2.0": ("f1", "exact")}  # each script has a name of its own for it
_MASKED = -1e30  # padding is no place for an answer


@dataclass(frozen=True)
class SquadData:
    """The two splits that are public."""

    train: SquadSplit
    dev: SquadSplit

    @property
    def sha256(self) -> dict[str, str]:
        return {"train": self.train.sha256, "dev": self.dev.sha256}


@dataclass(frozen=True)
class WindowedSplit:
    """Questions, their windows, and the same windows as inputs of a model."""

    questions: Sequence[Question]
    windows: Sequence[Window]
    encoded: Encoded

    @property
    def targets(self) -> Tensor:
        """(W, 2): the first and the last token of each window's answer."""
        return torch.tensor([(window.start, window.end) for window in self.windows], dtype=torch.int64).reshape(-1, 2)


class SquadTuning:
    """Fine-tuning on SQuAD."""

    def read(self, config: FinetuneConfig, say: Say) -> SquadData:
        if config.eval.test:
            raise InputError(
                "eval.test: the test set of SQuAD is not public; leave it out (predictions.json of the development split is "
                "written in any case)"
            )
        data = config.data

        def load(split: str, most: int | None) -> SquadSplit:
            found = read_squad(data.dir, split, VERSIONS[data.name], cache=data.cache, report=say)
            chosen = subset(len(found.questions), most, data.subset_seed)
            return dataclasses.replace(found, questions=[found.questions[i] for i in chosen])

        return SquadData(load("train", data.max_train), load("dev", data.max_eval))

    def model(self, config: FinetuneConfig, data: SquadData) -> Pretrained:
        return load_pretrained(config.model, "answers")

    def parts(self, config: FinetuneConfig, data: SquadData, pretrained: Pretrained) -> FineParts:
        train, dev = (windowed(split.questions, config.data, pretrained) for split in (data.train, data.dev))
        size, judging = config.eval.batch_size, config.eval
        null, metrics = data.dev.version == "2.0", METRICS[data.dev.version]

        def judge(model: nn.Module) -> EvaluationResult:
            logits = logits_of(model, dev.encoded, size)
            found = scores(dev.questions, answers_of(dev, logits, judging, null=null), null=null)
            loss = float(_loss(*_padded(logits), dev.targets))
            return EvaluationResult(loss * len(dev.windows), len(dev.windows), {name: found[name] for name in metrics})

        def measure(model: nn.Module, folder: Path) -> dict[str, Any]:
            logits = logits_of(model, dev.encoded, size)
            answers = answers_of(dev, logits, judging, null=null)
            write_answers(answers, folder)
            loss = float(_loss(*_padded(logits), dev.targets))
            counts = {"examples": len(dev.questions), "windows": len(dev.windows)}
            return {"dev": {**scores(dev.questions, answers, null=null), "loss": loss, **counts}}

        return FineParts(
            batches=ExampleBatches(
                train.encoded,
                batch_size=config.train.batch_size,
                seed=config.train.seed,
                group_by_length=config.train.group_by_length,
            ),
            objective=SpanObjective(pretrained.model, train.targets, device_of(pretrained.model)),
            judge=judge,
            measure=measure,
            metrics=metrics,
            told={
                "task": config.data.name,
                "title": f"SQuAD v{data.dev.version}",
                "slice": {"train": data.train.is_slice, "dev": data.dev.is_slice},
                "examples": {"train": len(train.questions), "dev": len(dev.questions)},
                "windows": {"train": len(train.windows), "dev": len(dev.windows)},
                "protocol": f"development split, fp32, windows of at most {config.data.max_length} tokens every "
                f"{config.data.doc_stride}, answers of at most {judging.max_answer_length} tokens",
            },
        )


class SpanObjective:
    """The mean of two cross-entropies over the positions of a window: of the answer's first and of its last token.

    Where the window does not hold the answer, both are [CLS]. Padding is left out of the softmax, so that the loss of a
    window does not depend on the batch it is in; BERT's script, whose windows are all padded to `max_length`, leaves it in.
    """

    def __init__(self, model: nn.Module, targets: Tensor, device: torch.device) -> None:
        self.model, self.targets, self.device = model, targets, device

    def __call__(self, batch: ExampleBatch, carry: Mapping[str, Tensor], place: TrainingPosition) -> Loss:
        count = len(batch.indices)
        start, end = _logits(self.model, batch, self.device)
        value = _loss(start, end, self.targets[torch.from_numpy(batch.indices)].to(self.device))
        return Loss(value, value.detach() * count, count, read=batch.tokens)


def windowed(questions: Sequence[Question], data: TaskDataConfig, pretrained: Pretrained) -> WindowedSplit:
    """The windows of questions; InputError where the encoder reads fewer tokens than `data.max_length` says."""
    assert data.max_length is not None  # the configuration fills them in for SQuAD
    assert data.doc_stride is not None
    assert data.max_query_length is not None
    check_length(pretrained, data.max_length)
    tokenizer = pretrained.tokenizer
    windows = squad_windows(
        questions,
        tokenizer,
        max_length=data.max_length,
        doc_stride=data.doc_stride,
        max_query_length=data.max_query_length,
    )
    inputs: dict[str, Any] = {
        "input_ids": [window.ids for window in windows],
        "attention_mask": [np.ones(len(window.ids), np.int8) for window in windows],
    }
    if "token_type_ids" in tokenizer.model_input_names:
        inputs["token_type_ids"] = [window.types for window in windows]
    return WindowedSplit(questions, windows, Encoded(inputs, padding_of(tokenizer)))


Logits = list[tuple[NDArray[np.float32], NDArray[np.float32]]]


def logits_of(model: nn.Module, windows: Encoded, batch_size: int) -> Logits:
    """The start and end logits of each window, without padding, in order; in evaluation mode."""
    device, training = device_of(model), model.training
    found: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    lengths = windows.lengths
    model.eval()
    with torch.no_grad():
        for batch in by_length(windows, batch_size):
            start, end = (logits.cpu().numpy() for logits in _logits(model, batch, device))
            for row, place in enumerate(batch.indices.tolist()):
                found[place] = start[row, : lengths[place]], end[row, : lengths[place]]
    model.train(training)
    return [found[place] for place in range(len(windows))]


def answers_of(split: WindowedSplit, logits: Logits, config: FinetuneEvalConfig, *, null: bool) -> list[Answer]:
    """The answers by the rules of the eval section."""
    return find_answers(
        split.questions,
        split.windows,
        [start for start, _ in logits],
        [end for _, end in logits],
        null=null,
        n_best=config.n_best,
        max_answer_length=config.max_answer_length,
        null_score_diff_threshold=config.null_score_diff_threshold,
    )


def scores(questions: Sequence[Question], answers: Sequence[Answer], *, null: bool) -> dict[str, float]:
    """What the official script prints of these answers, as fractions, like the scores of every task; `total` is left out.

    In v2 `best_*` are of the best answers that are not empty, whatever `null_score_diff_threshold` made of them.
    """
    references = {question.id: question.answers for question in questions}
    given = {answer.id: answer.text for answer in answers}
    if null:
        odds = {answer.id: answer.null_odds or 0.0 for answer in answers}
        free = squad_v2_scores({answer.id: answer.best for answer in answers}, references, odds)
        best = {name: value for name, value in free.items() if name.startswith("best_")}
        found = squad_v2_scores(given, references) | best
    else:
        found = squad_scores(given, references)
    return {
        name: value if name.endswith(("total", "thresh")) else value / 100
        for name, value in found.items()
        if name != "total"
    }


def _logits(model: nn.Module, batch: ExampleBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Start and end logits (B, N) in fp32, those of padding masked."""
    inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
    found, padded = model(**inputs), inputs["attention_mask"] == 0
    start, end = (logits.float().masked_fill(padded, _MASKED) for logits in (found.start_logits, found.end_logits))
    return start, end


def _loss(start: Tensor, end: Tensor, targets: Tensor) -> Tensor:
    return (F.cross_entropy(start, targets[:, 0]) + F.cross_entropy(end, targets[:, 1])) / 2


def _padded(logits: Logits) -> tuple[Tensor, Tensor]:
    """Start and end logits of all windows (W, N)."""

    def table(side: int) -> Tensor:
        rows = [torch.from_numpy(pair[side]) for pair in logits]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_MASKED).double()

    return table(0), table(1)
