"""What GLUE and SQuAD share in fine-tuning: encoded splits, the objective and logits by example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.config.finetune import FinetuneTrainConfig
from fullrank.data.examples import Encoded, ExampleBatch, iterate_by_length
from fullrank.decoding.sample import evaluating
from fullrank.experiments.task import add_penalties, place_draws, shared, trace_for
from fullrank.training.device import device_of
from fullrank.training.distributed import all_gather, rank, world_size
from fullrank.training.values import Carry, Loss, TrainingPosition


@dataclass(frozen=True)
class EncodedSplit:
    """A split as a model reads it.

    source: `Examples` or `SquadSplit`. targets: a row for each encoded example. windows: of SQuAD.
    """

    source: Any
    encoded: Encoded
    targets: Tensor
    windows: Sequence[Any] = ()


Logits = Callable[[nn.Module, ExampleBatch], Tensor]


@dataclass(frozen=True)
class ExampleObjective:
    """The mean loss of labelled examples, plus the penalties of Mixhead Eq. 16 and Eq. 20.

    `targets`: one row for each example; `logits` (B, ...), `loss`: those of the benchmark.
    """

    model: nn.Module
    targets: Tensor
    logits: Logits
    loss: Callable[[Tensor, Tensor], Tensor]
    options: FinetuneTrainConfig

    def __call__(self, batch: ExampleBatch, carry: Carry, position: TrainingPosition) -> Loss:
        from fullrank.hf.interface import traced  # a configuration is checked without transformers

        trace, rows, part = trace_for(self.options), len(batch.indices), batch.part
        count_here = rows if part is None else part.rows
        place_draws(part, rows)
        with traced(trace):
            logits = self.logits(self.model, batch)
        value = self.loss(logits, self.targets[torch.from_numpy(batch.indices)].to(logits.device))
        total, read = (rows, batch.tokens) if part is None else (part.tokens, part.read)
        loss = add_penalties(shared(value, count_here, part), trace, self.options, part)
        return Loss(loss, value.detach() * count_here, total, read=read)


def logits_by_example(model: nn.Module, examples: Encoded, batch_size: int, logits: Logits) -> list[Tensor]:
    """The logits of each example, in order, on the CPU; in evaluation mode."""
    logits_here = dict[int, Tensor]()
    with evaluating(model):
        for number, batch in enumerate(iterate_by_length(examples, batch_size)):
            if number % world_size() == rank():
                logits_here.update(zip(batch.indices.tolist(), logits(model, batch).cpu(), strict=True))
    rows = {index: row for part in all_gather(logits_here) for index, row in part.items()}
    return [rows[index] for index in range(len(examples))]


def inputs_of(model: nn.Module, batch: ExampleBatch) -> dict[str, Tensor]:
    """The inputs of a batch on the device of the model."""
    return {name: tensor.to(device_of(model)) for name, tensor in batch.inputs.items()}
