"""The objective of a causal language model, and what training adds to it: a teacher, and parts that only training has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.run import RunConfig
from fullrank.config.training import PhaseConfig, TrainConfig
from fullrank.core.attention import Trace
from fullrank.core.decoder import LanguageModel
from fullrank.core.dropout import dropout
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.memory import Memory
from fullrank.core.output import Output, SoftmaxOutput, Teacher
from fullrank.core.skip_retain import SkipRetain
from fullrank.data import Batch
from fullrank.experiments.run_folder import teacher_of
from fullrank.experiments.task import penalized, place_draws, shared, trace_for
from fullrank.training.values import Carry, Loss, TrainingPosition

_TAUGHT = "teacher."  # prefix of the teacher's memory in the carry


class Distillation:
    """The frozen teacher of `train.distill`, which reads every batch before the model does.

    Raises InputError unless it is the best checkpoint of a finished run on the same text and vocabulary, with the weights
    that it had when this run began (`identity` is this run's run.json), and can read the batches.
    """

    def __init__(self, config: RunConfig, identity: Mapping[str, Any], device: torch.device) -> None:
        assert config.train.distill is not None
        self.options, train = config.train.distill, config.train
        self.model = LanguageModel.load(self.options.run).to(device).requires_grad_(False)
        entries, given, longest = config.model.vocab_size, self.model.config.vocab_size, self.model.max_length
        streams = train.order == "contiguous" and not train.context
        for wrong, words in (
            (identity.get("teacher") != teacher_of(self.options.run, identity), "was changed after this training began"),
            (given != entries, f"its model.vocab_size is {given}, this one's {entries}"),
            (longest is not None and train.context + train.segment_length > longest,
             f"has {longest} positions, train.context and train.segment_length ask for more"),
            (self.model.memory_length and not streams,
             "has a memory, so train.order has to be contiguous, without train.context"),
        ):  # fmt: skip
            if wrong:
                raise InputError(f"train.distill.run: {self.options.run} {words}; give another teacher")

    @torch.no_grad()
    def __call__(self, batch: Batch, carry: Carry) -> tuple[Teacher, Carry]:
        """The teacher's distribution over a batch, and its memory for the next one."""
        known = {name.removeprefix(_TAUGHT): tensor for name, tensor in carry.items() if name.startswith(_TAUGHT)}
        hidden, memory, _ = self.model.hidden(batch.inputs, Memory.from_tensors(known) if known else None)
        after = {} if memory is None else {f"{_TAUGHT}{name}": tensor for name, tensor in memory.to_tensors().items()}
        hidden = hidden[:, batch.inputs.shape[1] - batch.targets.shape[1] :]
        return Teacher(self.model.output, hidden, self.options.weight, self.options.temperature), after


class TrainingOnly(nn.Module):
    """A part that training adds to a model: its parameters are saved with the state of training, not with the model."""

    def _save_to_state_dict(self, *arguments: Any) -> None:
        return

    def _load_from_state_dict(self, *arguments: Any) -> None:
        return


class PastDecode(TrainingOnly):
    """Past-decode regularization: the predicted distribution of the next token has to tell the token before it
    (Brahma 2018, arXiv 1808.05908).

        q_t = softmax(W tanh(R W' p_t + r) + b),    p_t = p(x_{t+1} | x_1 .. x_t)        mean over t of -log q_t(x_t)

    W (V, E) is the tied embedding. R (E, E), r (E,) and b (V,) belong to training alone.
    Chosen here, for only summaries of the paper were at hand: tanh of one layer as its nonlinear layer, which starts as
    `nn.Linear` does, with r = b = 0.
    """

    def __init__(self, output: Output) -> None:
        super().__init__()
        assert isinstance(output, SoftmaxOutput)
        entries, width = output.matrix.shape
        self.weight = nn.Parameter(output.matrix.new_empty(width, width).uniform_(-(width**-0.5), width**-0.5))
        self.shift = nn.Parameter(output.matrix.new_zeros(width))
        self.bias = nn.Parameter(output.matrix.new_zeros(entries))

    def forward(self, output: SoftmaxOutput, hidden: Tensor, read: Tensor, weights: Tensor | None) -> Tensor:
        """Mean in nats per token, weighted as the loss is; hidden (B, T, E), read (B, T): tokens whose successors it tells."""
        expected = output.log_prob(hidden).exp() @ output.matrix  # (B, T, E)
        state = torch.tanh(F.linear(expected, self.weight, self.shift))
        scores = F.linear(state, output.matrix, self.bias)  # (B, T, V)
        nll = F.cross_entropy(scores.flatten(0, 1), read.flatten(), reduction="none")
        weights = torch.ones_like(nll) if weights is None else weights.flatten()
        return (nll * weights).sum() / weights.sum().clamp_min(1)


class InputMask(TrainingOnly):
    """Random masking of input tokens (Gao et al. 2025, arXiv 2510.04071); targets stay.

        x_t = m with probability p, else the vector of token t

    m (E,) stands for the entry <mask> that a vocabulary may lack. It is learned, belongs to training alone, and starts normal
    with the standard deviation of the vectors of tokens.
    It is not zero: a norm multiplies the gradient of a zero vector by 1 / sqrt(eps), and a first token, which sees only itself,
    could stay zero through all layers.
    """

    def __init__(self, model: LanguageModel, p: float, device: torch.device) -> None:
        super().__init__()
        assert model.config.vocab_size is not None
        with torch.no_grad():
            vectors = model.embedding(torch.arange(min(model.config.vocab_size, 1000), device=device))
        self.vector, self.p = nn.Parameter(torch.randn_like(vectors[0]) * vectors.std()), p
        model.embedding.register_forward_hook(self.replace)

    def replace(self, embedding: nn.Module, _: Any, vectors: Tensor) -> Tensor:
        """Hook of the embedding: vectors (B, N, E) with the masked ones replaced, in training mode."""
        if not embedding.training:
            return vectors
        masked = dropout(torch.ones_like(vectors[..., :1]), self.p) == 0
        return torch.where(masked, self.vector.to(vectors.dtype), vectors)


class CausalObjective:
    """Mean nll of the next token, with label smoothing, plus the penalties of Mixhead Eq. 16 and Eq. 20 if asked for.

    `train.past_decode` and `train.input_mask` add parts to the model that only training has. teacher: its distribution is
    learned, too. The carry holds the memory of a model that has one, and of such a teacher. In a phase with Skip-Retain, the
    skipped layers are drawn for every pass, a function of `train.seed` and the number of the pass.
    Raises ConfigError if the probabilities of a phase do not fit the model.
    """

    def __init__(self, model: LanguageModel, options: TrainConfig, teacher: Distillation | None = None) -> None:
        self.model, self.options, self.teacher = model, options, teacher
        self.device = next(model.parameters()).device
        self.schedules = {phase.name: skip_schedule(phase, model.config.num_hidden_layers) for phase in options.phases}
        self.past_decode = PastDecode(model.output) if options.past_decode else None
        if self.past_decode is not None:
            model.past_decode = self.past_decode
        if options.input_mask:
            model.input_mask = InputMask(model, options.input_mask, self.device)

    def __call__(self, batch: Batch, carry: Carry, position: TrainingPosition) -> Loss:
        options, phase = self.options, position.phase
        trace = trace_for(options) or (None if self.past_decode is None else Trace(weights=False))
        own, part = batch.tokens, batch.part  # counted here, before it goes to a GPU
        place_draws(part, len(batch.inputs))
        batch = batch.to(self.device)
        teacher, taught = (None, {}) if self.teacher is None else self.teacher(batch, carry)
        carry = {name: tensor for name, tensor in carry.items() if not name.startswith(_TAUGHT)}
        memory = Memory.from_tensors(carry) if carry else None
        if memory is not None and phase is not None and phase.gaps == "drifting":
            memory = dataclasses.replace(memory, drifting=True)
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
            teacher=teacher,
        )
        if self.past_decode is not None and trace is not None and trace.hidden is not None:
            read = batch.inputs[:, -batch.targets.shape[1] :]
            past = self.past_decode(self.model.output, trace.hidden, read, batch.weights)
            value = value + options.past_decode * past
        value = penalized(shared(value, own, part), trace, options, part, batch.targets.shape[1])
        tokens = own if part is None else part.tokens
        return Loss(value, nll * own, tokens, {**taught, **({} if memory is None else memory.to_tensors())})


def skip_schedule(phase: PhaseConfig, num_layers: int) -> SkipRetain:
    """Skip-Retain in a phase; ConfigError if its probabilities do not fit the model."""
    try:
        return SkipRetain(phase.skip, phase.p, num_layers=num_layers)
    except ValueError as error:
        raise ConfigError(f"train.phases.{phase.name}.p: {error}") from error
