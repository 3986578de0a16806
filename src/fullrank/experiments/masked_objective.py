"""What training minimises where tokens are masked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fullrank.config.run import TrainConfig
from fullrank.core.attention import Trace
from fullrank.core.masked import MaskedLanguageModel
from fullrank.data import MaskedBatch
from fullrank.experiments.objective import penalized
from fullrank.training.values import Loss, TrainingPosition


class MaskedObjective:
    """Mean nll of the tokens that are asked for, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20."""

    def __init__(self, model: MaskedLanguageModel, options: TrainConfig) -> None:
        self.model, self.options = model, options
        self.device = next(model.parameters()).device

    def __call__(self, batch: MaskedBatch, carry: Mapping[str, Tensor], place: TrainingPosition) -> Loss:
        options = self.options
        if batch.tokens == 0:  # nothing was drawn: the text was read for nothing
            return Loss(torch.zeros((), device=self.device), 0.0, 0, read=batch.read)
        trace = Trace() if options.orthogonality or options.overlap else None
        batch = batch.to(self.device)
        value, nll, _ = self.model.loss_parts(
            batch.inputs,
            batch.targets,
            attention_mask=batch.attention_mask,
            at=batch.at,
            label_smoothing=options.label_smoothing,
            trace=trace,
            padded_right=True,
        )
        return Loss(penalized(value, trace, options), nll * batch.tokens, batch.tokens, read=batch.read)
