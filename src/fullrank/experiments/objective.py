"""The objective of a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fullrank.config.training import PhaseConfig, TrainConfig
from fullrank.core import registry
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import ConfigError
from fullrank.core.memory import Memory
from fullrank.core.released import DriftingMemory
from fullrank.core.skip_retain import SkipRetain
from fullrank.core.trace import Trace
from fullrank.data.batches import Batch
from fullrank.experiments.task import add_penalties, place_draws, shared, trace_for
from fullrank.training.values import Carry, Loss, TrainingPosition


class TrainingPart:
    """Contract of what training adds to a causal model and the model does not keep (`@register("training_part", NAME)`).

    Built from `(model, options, identity, **settings)`: the train section, the run.json of the run, and what `train.parts.NAME`
    holds. A part that is an `nn.Module` has its parameters trained, and saved with the state of training.
    """

    @staticmethod
    def identify(identity: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """Facts of the part that run.json and result.json record when a run begins."""
        return settings

    def read(self, batch: Batch, carry: Carry) -> Carry:
        """Look at a batch before the model does; what the part carries to the next one."""
        return {}

    def add(self, loss: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        """The loss of a batch with what the part adds to it; hidden (B, T, E): input of the output layer at the targets."""
        return loss


class CausalObjective:
    """Mean nll of the next token, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20 if asked for.

    parts: those of `train.parts` (slot `training_part`) by name. The carry holds the memory of a model that has one, and what
    parts carry. In a phase with Skip-Retain, the skipped layers are drawn for every pass, a
    function of `train.seed` and the number of the pass.
    Raises ConfigError if the probabilities of a phase do not fit the model.
    """

    def __init__(self, model: LanguageModel, options: TrainConfig, identity: Mapping[str, Any] | None = None) -> None:
        self.model, self.options = model, options
        self.device = next(model.parameters()).device
        self.schedules = {phase.name: skip_schedule(phase, model.config.num_hidden_layers) for phase in options.phases}
        self.parts: dict[str, Any] = {
            name: registry.lookup("training_part", name)(model, options, identity or {}, **settings)
            for name, settings in options.parts.items()
        }
        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                model.add_module(name, part)

    def __call__(self, batch: Batch, carry: Carry, position: TrainingPosition) -> Loss:
        options, phase = self.options, position.phase
        trace = trace_for(options) or (Trace(weights=False) if self.parts else None)
        own, part = batch.tokens, batch.part  # counted here, before it goes to a GPU
        place_draws(part, len(batch.inputs))
        batch = batch.to(self.device)
        after: dict[str, Tensor] = {}
        for name, extra in self.parts.items():
            known, carry = _split(carry, f"{name}.")
            after |= {f"{name}.{key}": tensor for key, tensor in extra.read(batch, known).items()}
        memory = Memory.from_tensors(carry) if carry else None
        if memory is not None and phase is not None and phase.gaps == "drifting":
            memory = DriftingMemory.from_memory(memory)
        value, nll, memory = self.model.loss_parts(
            batch.inputs,
            batch.targets,
            batch.weights,
            memory,
            # padding comes last: models that do not see the future do not see it
            attention_mask=batch.weights if self.model.config.sees_future else None,
            label_smoothing=options.label_smoothing,
            trace=trace,
            skip=frozenset() if phase is None else self.schedules[phase.name].skipped(options.seed, position.number),
        )
        for extra in self.parts.values():
            assert trace is not None
            value = extra.add(value, trace.hidden, batch)
        value = add_penalties(shared(value, own, part), trace, options, part, batch.targets.shape[1])
        after |= {} if memory is None else memory.to_tensors()
        return Loss(value, nll * own, own if part is None else part.tokens, after)


def _split(carry: Carry, prefix: str) -> tuple[Carry, Carry]:
    """The tensors whose names begin with `prefix`, without it, and the others."""
    inside = {name.removeprefix(prefix): tensor for name, tensor in carry.items() if name.startswith(prefix)}
    return inside, {name: tensor for name, tensor in carry.items() if not name.startswith(prefix)}


def skip_schedule(phase: PhaseConfig, num_layers: int) -> SkipRetain:
    """Skip-Retain in a phase; ConfigError if its probabilities do not fit the model."""
    try:
        return SkipRetain(phase.skip, phase.p, num_layers=num_layers)
    except ValueError as error:
        raise ConfigError(f"train.phases.{phase.name}.p: {error}") from error
