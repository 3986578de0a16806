"""What training minimises: the nll of the next token, of a text or of a translation, plus penalties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fullrank.config.run import PhaseConfig, TrainConfig
from fullrank.core.attention import Trace
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import ConfigError
from fullrank.core.memory import Memory
from fullrank.core.penalty import orthogonality, overlap
from fullrank.core.skip_retain import SkipRetain
from fullrank.core.translator import Translator
from fullrank.data import Batch, PairBatch
from fullrank.training.values import Loss, TrainingPosition


class CausalObjective:
    """Mean nll of the next token, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20 if asked for.

    A model with memory finds in the carry what it read before. In a phase with Skip-Retain, the layers that rest are drawn
    for every pass; the draw is a function of `train.seed` and the number of the pass.
    Raises ConfigError if the probabilities of a phase do not fit the model.
    """

    def __init__(self, model: LanguageModel, options: TrainConfig) -> None:
        self.model, self.options = model, options
        self.device = next(model.parameters()).device
        self.rests = {phase.name: _rest(phase, model.config.num_hidden_layers) for phase in options.phases}

    def __call__(self, batch: Batch, carry: Mapping[str, Tensor], place: TrainingPosition) -> Loss:
        options, phase = self.options, place.phase
        trace = Trace() if options.orthogonality or options.overlap else None
        tokens = batch.tokens  # counted here, before it goes to a GPU
        batch = batch.to(self.device)
        inputs, targets, weights = batch.inputs, batch.targets, batch.weights
        memory = Memory.from_tensors(carry) if carry else None
        if memory is not None and phase is not None and phase.gaps == "drifting":
            memory = replace(memory, drifting=True)
        value, nll, memory = self.model.loss_parts(
            inputs,
            targets,
            weights,
            memory,
            attention_mask=weights if self.model.config.sees_future else None,  # others see no padding: it comes last
            label_smoothing=options.label_smoothing,
            trace=trace,
            skip=frozenset() if phase is None else self.rests[phase.name].skipped(options.seed, place.number),
        )
        value = penalized(value, trace, options)
        return Loss(value, nll * tokens, tokens, {} if memory is None else memory.to_tensors())


class TranslationObjective:
    """Mean nll of the target tokens given the source, with label smoothing, plus the same penalties over all attention."""

    def __init__(self, model: Translator, options: TrainConfig) -> None:
        self.model, self.options = model, options
        self.device = next(model.parameters()).device

    def __call__(self, batch: PairBatch, carry: Mapping[str, Tensor], place: TrainingPosition) -> Loss:
        options = self.options
        trace = Trace() if options.orthogonality or options.overlap else None
        tokens = batch.tokens  # counted here, before it goes to a GPU
        batch = batch.to(self.device)
        value, nll, _ = self.model.loss_parts(
            batch.source_ids,
            batch.inputs,
            batch.targets,
            batch.weights,
            batch.source_mask,
            batch.weights
            if self.model.config.of_decoder().sees_future
            else None,  # others see no padding: it comes last
            label_smoothing=options.label_smoothing,
            trace=trace,
            padded_right=True,
        )
        return Loss(penalized(value, trace, options), nll * tokens, tokens)


def penalized(value: Tensor, trace: Trace | None, options: TrainConfig) -> Tensor:
    """`value` plus the penalties that `options` ask for, of the layers that `trace` has seen (none where all rest)."""
    if trace is not None and trace.layers:
        if options.orthogonality:
            value = value + options.orthogonality * orthogonality(trace)
        if options.overlap:
            value = value + options.overlap * overlap(trace)
    return value


def _rest(phase: PhaseConfig, layers: int) -> SkipRetain:
    try:
        return SkipRetain(phase.skip, phase.p, num_layers=layers)
    except ValueError as error:
        raise ConfigError(f"train.phases.{phase.name}: {error}; change train.phases.{phase.name}.p") from error
