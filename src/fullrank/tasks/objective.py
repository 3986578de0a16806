"""What training minimises and evaluation measures, for causal language models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fullrank.attention.penalty import orthogonality, overlap
from fullrank.attention.trace import Trace
from fullrank.config.schema import TrainConfig
from fullrank.data import Batch
from fullrank.evaluation.perplexity import Evaluation, evaluate_blocks
from fullrank.model.language_model import LanguageModel
from fullrank.model.memory import Memory
from fullrank.training.values import Loss


class CausalObjective:
    """Mean nll of the next token, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20 if asked for.

    A model with memory finds in the carry what it read before.
    """

    def __init__(self, model: LanguageModel, options: TrainConfig) -> None:
        self.model, self.options = model, options
        self.device = next(model.parameters()).device

    def __call__(self, batch: Batch, carry: Mapping[str, Tensor]) -> Loss:
        options = self.options
        trace = Trace() if options.orthogonality or options.overlap else None
        inputs, targets = batch.inputs.to(self.device), batch.targets.to(self.device)
        weights = None if batch.weights is None else batch.weights.to(self.device)
        tokens = targets.numel() if batch.weights is None else int(batch.weights.sum())
        value, nll, memory = self.model.loss_parts(
            inputs,
            targets,
            weights,
            Memory.from_tensors(carry) if carry else None,
            label_smoothing=options.label_smoothing,
            trace=trace,
        )
        if trace is not None and options.orthogonality:
            value = value + options.orthogonality * orthogonality(trace)
        if trace is not None and options.overlap:
            value = value + options.overlap * overlap(trace)
        return Loss(value, nll * tokens, tokens, {} if memory is None else memory.to_tensors())


def evaluate_model(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Evaluation:
    """Summed nll of `batches` under the model in evaluation mode; the training mode is restored.

    In the precision around the call: while training that of training, for final figures fp32.
    """
    assert isinstance(model, LanguageModel)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return evaluate_blocks(lambda x, y: model.nll(x, y).per_token, batches, device=device)
    finally:
        model.train(training)
