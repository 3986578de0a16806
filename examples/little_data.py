"""Policies for little data that no paper of this library has: parts of a model and of its training, and a measurement.

    fullrank train my.yaml --import examples.little_data 'train.parts={input_mask: {probability: 0.1}}'
    fullrank reproduce best/ptb-shares --rows plain,input-mask        # imports this module by itself, in a checkout
    fullrank analyze dynamic RUN --text test.txt --rate 0.01 --import examples.little_data

`docs/little_data.md` has what each of them gave by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fullrank as fr
from fullrank.config import register
from fullrank.config.run import TrainConfig
from fullrank.core import draws
from fullrank.core.attention import WeightedValues
from fullrank.core.decoder import LanguageModel
from fullrank.core.draws import dropout
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory
from fullrank.core.model import Layers
from fullrank.core.output import IGNORED, SoftmaxOutput, log_probabilities, scale_tokens
from fullrank.data.batches import Batch
from fullrank.experiments.language_model import TrainingPart
from fullrank.experiments.run_folder import open_causal, read_result
from fullrank.files import sha256_of
from fullrank.seal import read_identity
from fullrank.storage import find
from fullrank.training.values import Carry

# -- parts of a model --------------------------------------------------------------------------------------------------


@register("model_part", "value_residual")
class ValueResiduals(nn.Module):
    """Values of later layers take a share of those of the first layer (Zhou et al. 2025, arXiv 2410.17897).

        V'_l = (1 - a_l) V_l + a_l V_1

    V (B, M, H D), of the tokens that a call projects, before dropout. a_l = `shares[l]`, a number of the layer l that starts at
    1/2. Raises InputError for a layer without values of its own, and where a skipped layer remembers other tokens.
    """

    def __init__(self, model: Layers) -> None:
        super().__init__()
        attentions = [block.attention for block in model.blocks]
        if not all(isinstance(attention.attend, WeightedValues) for attention in attentions):
            raise InputError("model.parts.value_residual: multi-linear attention has no values; use kind: weighted")
        projections = [attention.project.value for attention in attentions]
        self.shares = nn.ParameterDict(
            {str(layer): nn.Parameter(torch.full((1,), 0.5)) for layer in range(1, len(model.blocks))}
        )
        self.first: Tensor | None = None  # V_1 of the current call
        model.position.register_forward_hook(self._forget)  # every pass begins with it
        projections[0].register_forward_hook(self._keep)
        for layer in range(1, len(model.blocks)):
            projections[layer].register_forward_hook(partial(self._mix, layer))

    def _forget(self, *_: Any) -> None:
        self.first = None

    def _keep(self, module: nn.Module, inputs: Any, values: Tensor) -> None:
        self.first = values

    def _mix(self, layer: int, module: nn.Module, inputs: Any, values: Tensor) -> Tensor:
        if self.first is None:  # a layer by itself, or the first one is skipped
            return values
        if self.first.shape != values.shape:
            raise InputError(
                "model.parts.value_residual: a skipped layer remembers other tokens than the first; skip none"
            )
        share = self.shares[str(layer)].to(values.dtype)
        return (1 - share) * values + share * self.first

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"first": None}  # a copy of the model begins without values of a call


# -- parts of training -------------------------------------------------------------------------------------------------


class TrainingModule(TrainingPart, nn.Module):
    """A part with parameters, which are saved with the state of training, not with the model."""

    def _save_to_state_dict(self, *arguments: Any) -> None:
        return

    def _load_from_state_dict(self, *arguments: Any) -> None:
        return


@register("training_part", "distill")
class Distillation(TrainingPart):
    """Self-distillation: the distribution q of a frozen teacher is learned beside the targets.

        loss = (1 - w) CE(targets, p) + w T^2 CE(q_T, p_T)        q_T(v) proportional to q(v)^(1/T)

    w = `weight`, T = `temperature` (Hinton et al. 2015; Furlanello et al. 2018).
    Raises InputError unless the teacher is the best checkpoint of a finished run on the same text and vocabulary, with the
    weights that it had when this run began, and can read the batches.
    """

    CHUNK = 256  # tokens: more than (CHUNK, V) of either distribution is never kept

    @dataclass(frozen=True)
    class Config:
        """run: folder of the finished run that teaches."""

        run: str
        weight: float = 0.5
        temperature: float = 1.0

        def __post_init__(self) -> None:
            if not 0 <= self.weight <= 1 or self.temperature <= 0:
                raise ValueError(
                    f"weight from 0 to 1 and a positive temperature, given {self.weight}, {self.temperature}"
                )

    @staticmethod
    def identify(identity: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """Name, folder and checksum of the teacher; InputError unless it is finished and read this text."""
        folder = Path(settings["run"]).expanduser().resolve()
        open_causal(folder)
        teacher = read_identity(folder)
        prefix = f"train.parts.distill.run: {folder}"
        if read_result(folder) is None:
            raise InputError(f"{prefix} is not finished; train the teacher to its end first")
        if teacher.get("vocabulary") != identity.get("vocabulary"):
            raise InputError(f"{prefix} has another vocabulary; train the teacher on the same data section")
        if (teacher.get("text") or {}).get("train") != (identity.get("text") or {}).get("train"):
            raise InputError(f"{prefix} was trained on another text; train the teacher on this one")
        return {"name": teacher.get("name"), "folder": str(folder), "sha256": sha256_of(find(folder, "best")[0])}

    def __init__(
        self, model: LanguageModel, options: TrainConfig, identity: Mapping[str, Any], **settings: Any
    ) -> None:
        self.settings = self.Config(**settings)
        self.student = model
        teacher = identity["parts"]["distill"]
        run = teacher["folder"]
        self.model = LanguageModel.load(run).to(next(model.parameters()).device).requires_grad_(False)
        vocab_size = model.config.vocab_size
        vocab_size_of_teacher = self.model.config.vocab_size
        longest = self.model.max_length
        is_stream = options.order == "contiguous" and not options.context
        fault = ""
        if teacher["sha256"] != sha256_of(find(Path(run), "best")[0]):
            fault = "was changed after this training began"
        elif vocab_size_of_teacher != vocab_size:
            fault = f"its model.vocab_size is {vocab_size_of_teacher}, this one's {vocab_size}"
        elif longest is not None and options.context + options.segment_length > longest:
            fault = f"has {longest} positions, train.context and train.segment_length ask for more"
        elif self.model.memory_length and not is_stream:
            fault = "has a memory, so train.order has to be contiguous, without train.context"
        elif options.sharding == "fsdp":
            fault = "teaches whole models; set train.sharding to ddp"
        if fault:
            raise InputError(f"train.parts.distill.run: {run} {fault}; give another teacher")

    @torch.no_grad()
    def read(self, batch: Batch, carry: Carry) -> Carry:
        hidden, memory, _ = self.model.hidden(batch.inputs, Memory.from_tensors(carry) if carry else None)
        self.hidden = hidden[:, batch.inputs.shape[1] - batch.targets.shape[1] :]
        return {} if memory is None else memory.to_tensors()

    def add(self, loss: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        scale = scale_tokens(hidden, batch.targets != IGNORED, batch.weights)
        states = hidden.flatten(0, 1)
        teacher_states = self.hidden.flatten(0, 1)
        positions = torch.arange(len(scale))
        call = draws.calls()
        total = scale.new_zeros(())
        for chunk in positions.split(self.CHUNK):
            part = slice(int(chunk[0]), int(chunk[-1]) + 1)
            with draws.select_tokens(chunk, len(scale), call):
                total = total + draws.checkpoint_function(
                    self._cross_entropy, states[part], teacher_states[part], scale[part]
                )
        return (1 - self.settings.weight) * loss + self.settings.weight * total

    def _cross_entropy(self, states: Tensor, teacher_states: Tensor, scale: Tensor) -> Tensor:
        with torch.no_grad():
            q = self._soften(self.model.output.log_prob(teacher_states)).exp()
        entropies = -(q * self._soften(log_probabilities(self.student.output.components(states)))).sum(1)
        return self.settings.temperature**2 * (entropies * scale).sum()

    def _soften(self, log_prob: Tensor) -> Tensor:
        return torch.log_softmax(log_prob / self.settings.temperature, dim=1)


@register("training_part", "past_decode")
class PastDecode(TrainingModule):
    """Past-decode regularization: the predicted distribution of the next token has to tell the token before it
    (Brahma 2018, arXiv 1808.05908).

        q_t = softmax(W tanh(R W' p_t + r) + b),    p_t = p(x_{t+1} | x_1 .. x_t)        mean over t of -log q_t(x_t)

    W (V, E) is the tied embedding. R (E, E), r (E,) and b (V,) belong to training alone. `coefficient`: 0.001 is usual.
    Chosen here, for only summaries of the paper were at hand: tanh of one layer as its nonlinear layer, which starts as
    `nn.Linear` does, with r = b = 0.
    """

    @dataclass(frozen=True)
    class Config:
        coefficient: float = 0.001

    def __init__(
        self, model: LanguageModel, options: TrainConfig, identity: Mapping[str, Any], *, coefficient: float = 0.001
    ) -> None:
        super().__init__()
        output = model.output
        if not isinstance(output, SoftmaxOutput) or not model.config.output.tied:
            raise InputError(
                "train.parts.past_decode: reads a tied vocabulary layer of softmaxes; set model.output.tied: true"
            )
        self.outputs = (output,)  # in a tuple: no module of this one
        self.coefficient = coefficient
        matrix = output.matrix
        entries, width = matrix.shape
        self.weight = nn.Parameter(matrix.new_empty(width, width).uniform_(-(width**-0.5), width**-0.5))
        self.shift = nn.Parameter(matrix.new_zeros(width))
        self.bias = nn.Parameter(matrix.new_zeros(entries))

    def add(self, loss: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        (output,) = self.outputs
        read = batch.inputs[:, -batch.targets.shape[1] :]
        expected = output.log_prob(hidden).exp() @ output.matrix  # (B, T, E)
        state = torch.tanh(F.linear(expected, self.weight, self.shift))
        scores = F.linear(state, output.matrix, self.bias)  # (B, T, V)
        nll = F.cross_entropy(scores.flatten(0, 1), read.flatten(), reduction="none")
        weights = torch.ones_like(nll) if batch.weights is None else batch.weights.flatten()
        return loss + self.coefficient * (nll * weights).sum() / weights.sum().clamp_min(1)


@register("training_part", "input_mask")
class InputMask(TrainingModule):
    """Random masking of input tokens (Gao et al. 2025, arXiv 2510.04071); targets stay.

        x_t = m with `probability`, else the vector of token t

    m (E,) stands for the entry <mask> that a vocabulary may lack. It is learned, belongs to training alone, and starts normal
    with the standard deviation of the vectors of tokens.
    It is not zero: a norm multiplies the gradient of a zero vector by 1 / sqrt(eps), and a first token, which sees only itself,
    could stay zero through all layers.
    """

    @dataclass(frozen=True)
    class Config:
        probability: float = 0.1

        def __post_init__(self) -> None:
            if not 0 <= self.probability < 1:
                raise ValueError(f"probability at least 0 and below 1, given {self.probability}")

    def __init__(
        self, model: LanguageModel, options: TrainConfig, identity: Mapping[str, Any], *, probability: float = 0.1
    ) -> None:
        super().__init__()
        assert model.config.vocab_size is not None
        device = next(model.parameters()).device
        with torch.no_grad():
            vectors = model.embedding(torch.arange(min(model.config.vocab_size, 1000), device=device))
        self.vector = nn.Parameter(torch.randn_like(vectors[0]) * vectors.std())
        self.probability = probability
        model.embedding.register_forward_hook(self.replace)

    def replace(self, embedding: nn.Module, _: Any, vectors: Tensor) -> Tensor:
        """Hook of the embedding: vectors (B, N, E) with the masked ones replaced, in training mode."""
        if not embedding.training:
            return vectors
        masked = dropout(torch.ones_like(vectors[..., :1]), self.probability) == 0
        return torch.where(masked, self.vector.to(vectors.dtype), vectors)


# -- a measurement -----------------------------------------------------------------------------------------------------


@fr.measurement("dynamic", table=fr.Table(rows="evaluation"))
def measure_dynamic(
    model: fr.LoadedModel, text: fr.Text, *, rate: float = 0.01, decay: float = 0.0
) -> Iterator[fr.Record]:
    """Dynamic evaluation: every segment is scored, and then the model takes a gradient step on it.

        theta <- theta + decay (theta_0 - theta) - rate g          (Krause et al. 2018, arXiv 1709.07432, §4: SGD)

    g is the gradient of the mean nll of the segment, theta_0 the trained parameters, which come back bit for bit.
    A memory is carried from segment to segment. Choose rate and decay on validation text.
    """
    if not isinstance(model.fullrank_model, LanguageModel):
        raise InputError(f"dynamic: {model.name} is no language model of ours, with parameters to learn")
    protocol = f"segments of {text.segment_length} tokens, rate {rate:g}, decay {decay:g}"
    for evaluation, step in (("static", 0.0), ("dynamic", rate)):
        nll = score_segments(model.fullrank_model.eval(), text, step, decay if step else 0.0)
        yield fr.Record({"evaluation": evaluation}, "perplexity", float(nll.mean().exp()), protocol=protocol)


def score_segments(model: LanguageModel, text: fr.Text, rate: float, decay: float) -> Tensor:
    """Compute the nll (T,) of each token of a text after those before it; with a rate, the model learns what it has scored."""
    ids = torch.tensor([] if text.start_id is None else [text.start_id])
    ids = torch.cat((ids, torch.tensor(list(text.ids())))).long()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = [parameter.detach().clone() for parameter in parameters]
    scores = []
    memory = None
    try:
        for start in range(0, len(ids) - 1, text.segment_length):
            piece = ids[None, start : start + text.segment_length + 1]
            nll = model.nll(piece[:, :-1], piece[:, 1:], memory)
            scores.append(nll.per_token.detach()[0].double())
            memory = nll.memory
            if rate:
                gradients = torch.autograd.grad(nll.per_token.mean(), parameters, materialize_grads=True)
                with torch.no_grad():
                    for parameter, start_value, gradient in zip(parameters, trained, gradients, strict=True):
                        parameter.add_(decay * (start_value - parameter) - rate * gradient)
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, trained)
    return torch.cat(scores)
