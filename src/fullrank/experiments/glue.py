"""The tasks of GLUE as a benchmark to fine-tune on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.finetune import GLUE, FinetuneConfig
from fullrank.core.errors import InputError
from fullrank.data.examples import Encoded, ExampleBatch
from fullrank.data.invented import make_examples
from fullrank.data.tasks import Examples, load_glue, locate
from fullrank.evaluation.tasks import glue_scores
from fullrank.experiments.benchmark import EncodedSplit, inputs_of
from fullrank.experiments.pretrained import PretrainedEncoder, check_length, padding_of
from fullrank.experiments.task import Say
from fullrank.training.distributed import rank


class GlueBenchmark:
    """A task of GLUE: sentences, or pairs of them, with a label or a number."""

    kind: Literal["classification", "answers"] = "classification"

    def __init__(self, config: FinetuneConfig) -> None:
        self.config, self.task = config, GLUE[config.data.task]
        self.title, self.labels, self.metrics = self.task.title, self.task.labels, self.task.metrics
        self.outputs = self.task.outputs
        self.protocol = f"development split, fp32, at most {config.data.max_length} tokens"

    def list_splits(self, say: Say) -> list[str]:
        data, splits = self.config.data, []
        for split in self.task.sizes:
            if split == "dev_mismatched" and data.dir is not None and locate(self.task, split, Path(data.dir)) is None:
                say(f"{data.name}: measured without {split}, for {data.dir} has no file of it")
            else:
                splits.append(split)
        return splits

    def read(self, split: str, say: Say) -> Examples:
        data = self.config.data
        if data.invented:
            return make_examples(self.task, split)
        return load_glue(self.task, split, data.dir, data.cache, say)

    def encode(self, pretrained: PretrainedEncoder, source: Examples) -> EncodedSplit:
        encoded = encode(pretrained, source, self.config.data.max_length)
        return EncodedSplit(source, encoded, torch.from_numpy(source.labels))

    def compute_logits(self, model: nn.Module, batch: ExampleBatch) -> Tensor:
        logits: Tensor = model(**inputs_of(model, batch)).logits
        return logits.float()

    def compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the labels; of a task of numbers (STS-B), the mean squared error."""
        if self.labels is None:
            return F.mse_loss(logits[:, 0], targets)
        return F.cross_entropy(logits, targets)

    def score(self, split: EncodedSplit, logits: list[Tensor], folder: Path | None) -> dict[str, float]:
        table = torch.stack(logits)
        predictions = predict_labels(table)
        if folder is not None and rank() == 0:
            _write_predictions(folder / f"predictions-{split.source.split}.tsv", predictions, split.source)
        targets = split.targets.double() if self.labels is None else split.targets
        loss = float(self.compute_loss(table.double(), targets))
        scores = glue_scores(self.task, predictions, split.source.labels)
        return {**scores, "loss": loss, "examples": len(split.source)}


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
    names = [name for name in encoded if name in ("input_ids", "token_type_ids", "attention_mask")]
    return Encoded({name: encoded[name] for name in names}, padding_of(tokenizer))


def predict_labels(logits: Tensor) -> np.ndarray:
    """The likeliest label of each row; where there is one output, the number itself."""
    return (logits[:, 0] if logits.shape[1] == 1 else logits.argmax(-1)).numpy()


def _write_predictions(path: Path, predictions: np.ndarray, examples: Examples) -> None:
    """Write a line of index, label and prediction for every example."""
    rows = enumerate(zip(examples.labels, predictions, strict=True))
    lines = [f"{number}\t{label:g}\t{prediction:.6g}\n" for number, (label, prediction) in rows]
    path.write_text("".join(["index\tlabel\tprediction\n", *lines]), encoding="utf-8")
