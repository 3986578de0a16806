"""Parts that training alone adds to a causal language model: policies of no paper here, for the recipes `best/*`.

`@register("training_part", KEY)` makes a class the part of `train.KEY`; the objective builds those whose key is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.config.training import TrainConfig
from fullrank.core import draws
from fullrank.core.decoder import LanguageModel
from fullrank.core.draws import dropout
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory
from fullrank.core.output import IGNORED, SoftmaxOutput, log_probabilities, scale_tokens
from fullrank.core.registry import register
from fullrank.data.batches import Batch
from fullrank.experiments.run_folder import teacher_of
from fullrank.training.values import Carry


class TrainingPart:
    """Contract of a part, built from `(model, options: TrainConfig, identity)`; identity: the run's run.json."""

    def read(self, batch: Batch, carry: Carry) -> Carry:
        """Look at a batch before the model does; what the part carries to the next one."""
        return {}

    def add(self, loss: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        """The loss of a batch with what the part adds to it; hidden (B, T, E): input of the output layer at the targets."""
        return loss


@register("training_part", "distill")
class Distillation(TrainingPart):
    """Self-distillation: the distribution q of a frozen teacher is learned beside the targets (`train.distill`).

        loss = (1 - w) CE(targets, p) + w T^2 CE(q_T, p_T)        q_T(v) proportional to q(v)^(1/T)

    w = `weight`, T = `temperature` (Hinton et al. 2015; Furlanello et al. 2018).
    Raises InputError unless the teacher is the best checkpoint of a finished run on the same text and vocabulary, with the
    weights that it had when this run began, and can read the batches.
    """

    CHUNK = 256  # tokens: more than (CHUNK, V) of either distribution is never kept

    def __init__(self, model: LanguageModel, options: TrainConfig, identity: Mapping[str, Any]) -> None:
        assert options.distill is not None
        self.options, self.student = options.distill, model
        device, run = next(model.parameters()).device, self.options.run
        self.model = LanguageModel.load(run).to(device).requires_grad_(False)
        entries, given, longest = model.config.vocab_size, self.model.config.vocab_size, self.model.max_length
        streams = options.order == "contiguous" and not options.context
        for wrong, words in (
            (identity.get("teacher") != teacher_of(run, identity), "was changed after this training began"),
            (given != entries, f"its model.vocab_size is {given}, this one's {entries}"),
            (longest is not None and options.context + options.segment_length > longest,
             f"has {longest} positions, train.context and train.segment_length ask for more"),
            (self.model.memory_length and not streams,
             "has a memory, so train.order has to be contiguous, without train.context"),
        ):  # fmt: skip
            if wrong:
                raise InputError(f"train.distill.run: {run} {words}; give another teacher")

    @torch.no_grad()
    def read(self, batch: Batch, carry: Carry) -> Carry:
        hidden, memory, _ = self.model.hidden(batch.inputs, Memory.from_tensors(carry) if carry else None)
        self.hidden = hidden[:, batch.inputs.shape[1] - batch.targets.shape[1] :]
        return {} if memory is None else memory.to_tensors()

    def add(self, loss: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        scale = scale_tokens(hidden, batch.targets != IGNORED, batch.weights)
        states, taught, tokens = hidden.flatten(0, 1), self.hidden.flatten(0, 1), len(scale)
        places, call, total = torch.arange(tokens), draws.calls(), scale.new_zeros(())
        for start in range(0, tokens, self.CHUNK):
            part = slice(start, start + self.CHUNK)
            with draws.selected(places[part], tokens, call):
                total = total + draws.recomputed(self._cross_entropy, states[part], taught[part], scale[part])
        return (1 - self.options.weight) * loss + self.options.weight * total

    def _cross_entropy(self, states: Tensor, taught: Tensor, scale: Tensor) -> Tensor:
        with torch.no_grad():
            q = self._soften(self.model.output.log_prob(taught)).exp()
        entropies = -(q * self._soften(log_probabilities(self.student.output.components(states)))).sum(1)
        return self.options.temperature**2 * (entropies * scale).sum()

    def _soften(self, log_prob: Tensor) -> Tensor:
        return torch.log_softmax(log_prob / self.options.temperature, dim=1)


class TrainingModule(TrainingPart, nn.Module):
    """A part with parameters, which are saved with the state of training, not with the model."""

    def _save_to_state_dict(self, *arguments: Any) -> None:
        return

    def _load_from_state_dict(self, *arguments: Any) -> None:
        return


@register("training_part", "past_decode")
class PastDecode(TrainingModule):
    """Past-decode regularization: the predicted distribution of the next token has to tell the token before it
    (Brahma 2018, arXiv 1808.05908).

        q_t = softmax(W tanh(R W' p_t + r) + b),    p_t = p(x_{t+1} | x_1 .. x_t)        mean over t of -log q_t(x_t)

    W (V, E) is the tied embedding. R (E, E), r (E,) and b (V,) belong to training alone.
    Chosen here, for only summaries of the paper were at hand: tanh of one layer as its nonlinear layer, which starts as
    `nn.Linear` does, with r = b = 0.
    """

    def __init__(self, model: LanguageModel, options: TrainConfig, identity: Mapping[str, Any]) -> None:
        super().__init__()
        assert isinstance(model.output, SoftmaxOutput)
        self.outputs, self.coefficient = (model.output,), options.past_decode  # in a tuple: no module of this one
        matrix = model.output.matrix
        entries, width = matrix.shape
        self.weight = nn.Parameter(matrix.new_empty(width, width).uniform_(-(width**-0.5), width**-0.5))
        self.shift = nn.Parameter(matrix.new_zeros(width))
        self.bias = nn.Parameter(matrix.new_zeros(entries))

    def add(self, loss: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        (output,), read = self.outputs, batch.inputs[:, -batch.targets.shape[1] :]
        expected = output.log_prob(hidden).exp() @ output.matrix  # (B, T, E)
        state = torch.tanh(F.linear(expected, self.weight, self.shift))
        scores = F.linear(state, output.matrix, self.bias)  # (B, T, V)
        nll = F.cross_entropy(scores.flatten(0, 1), read.flatten(), reduction="none")
        weights = torch.ones_like(nll) if batch.weights is None else batch.weights.flatten()
        return loss + self.coefficient * (nll * weights).sum() / weights.sum().clamp_min(1)


@register("training_part", "input_mask")
class InputMask(TrainingModule):
    """Random masking of input tokens (Gao et al. 2025, arXiv 2510.04071); targets stay.

        x_t = m with probability p, else the vector of token t

    m (E,) stands for the entry <mask> that a vocabulary may lack. It is learned, belongs to training alone, and starts normal
    with the standard deviation of the vectors of tokens.
    It is not zero: a norm multiplies the gradient of a zero vector by 1 / sqrt(eps), and a first token, which sees only itself,
    could stay zero through all layers.
    """

    def __init__(self, model: LanguageModel, options: TrainConfig, identity: Mapping[str, Any]) -> None:
        super().__init__()
        assert model.config.vocab_size is not None
        device = next(model.parameters()).device
        with torch.no_grad():
            vectors = model.embedding(torch.arange(min(model.config.vocab_size, 1000), device=device))
        self.vector, self.p = nn.Parameter(torch.randn_like(vectors[0]) * vectors.std()), options.input_mask
        model.embedding.register_forward_hook(self.replace)

    def replace(self, embedding: nn.Module, _: Any, vectors: Tensor) -> Tensor:
        """Hook of the embedding: vectors (B, N, E) with the masked ones replaced, in training mode."""
        if not embedding.training:
            return vectors
        masked = dropout(torch.ones_like(vectors[..., :1]), self.p) == 0
        return torch.where(masked, self.vector.to(vectors.dtype), vectors)
