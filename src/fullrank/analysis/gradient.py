"""The share of the gradient that the output layer lets through (Godey and Artzi 2026, arXiv 2603.10145).

    G = d nll / d s   (T, V)      s = h W',  W (V, d)        G's rows live in V dimensions, those that W passes on in d
    let through:  ||G U|| / ||G||,   U (V, d) an orthonormal basis of the columns of W

Training moves the logits s by moving h, and so along columns of W only: what of G lies across them is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.core.errors import InputError
from fullrank.core.output import IGNORED, combined, projected
from fullrank.decoding.sample import evaluating
from fullrank.models import LoadedModel, OwnModel, open_model

_CHUNK = 1 << 23  # numbers of G that are held at a time


@dataclass(frozen=True)
class GradientShare:
    """squares: ||G||^2 over `tokens` tokens, let_through_squares: ||G U||^2, both summed over all matrices of the layer.

    width d and vocab_size V: of the matrix of the layer, or of its head.
    """

    squares: float
    let_through_squares: float
    tokens: int
    width: int
    vocab_size: int

    @property
    def let_through(self) -> float:
        """||G U|| / ||G||."""
        return (self.let_through_squares / self.squares) ** 0.5

    @property
    def suppressed(self) -> float:
        """1 - ||G U|| / ||G||, the share of the gradient's norm that is lost."""
        return 1 - self.let_through


# gradients of a batch (rows, V_i), a few rows at a time, each with the number of its matrix
Gradients = Iterator[tuple[int, Tensor]]


def gradient_share(model: nn.Module | LoadedModel, batches: Iterable[tuple[Tensor, Tensor]]) -> GradientShare:
    """The share of the gradient of the nll that the output layer of `model` lets through, by its norm.

    A mixture has a G for each softmax, an adaptive softmax one for the head and for each tail; norms are over all of them.
    model: a `LanguageModel`, a `MaskedLanguageModel`, or a model of Hugging Face with logits; read in evaluation mode.
    batches: input_ids and targets (B, N) int64; targets -100 do not count. Every row is read on its own, without memory.
    Raises InputError for another kind of model, and where no target counts.
    """
    loaded = open_model(model)
    loaded.require({"logits", "hidden"}, "share of the gradient")
    weights, read = (
        _read_own_layer(loaded.adapter) if isinstance(loaded.adapter, OwnModel) else _read_foreign_layer(loaded.adapter)
    )
    bases = [_basis(weight) for weight in weights]
    squares, let_through, tokens = 0.0, 0.0, 0
    for ids, targets in batches:
        tokens += int((targets != IGNORED).sum())
        with evaluating(loaded.module), _freeze_parameters(loaded.module), torch.enable_grad():
            for number, gradient in read(ids.to(loaded.device), targets.to(loaded.device)):
                wide = gradient.double()
                squares += float(wide.square().sum())
                let_through += float((wide @ bases[number]).square().sum())
    if not tokens or not squares:
        raise InputError("targets: none of them counts")
    vocab_size = sum(len(weight) for weight in weights) - len(weights) + 1  # every tail has a class in the head
    return GradientShare(squares, let_through, tokens, weights[0].shape[1], vocab_size)


def _basis(weight: Tensor) -> Tensor:
    """U (V, r): an orthonormal basis of the columns of `weight` (V, d), of rank r."""
    wide = weight.detach().double()
    q, triangle = torch.linalg.qr(wide)
    u, s, _ = torch.linalg.svd(triangle)
    return q @ u[:, : int((s > s[0] * max(wide.shape) * torch.finfo(s.dtype).eps).sum())]


@contextmanager
def _freeze_parameters(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient inside the block."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)


# the matrices of an output layer, and the gradients that reach each of them from a batch of ids and targets
Layer = tuple[list[Tensor], Callable[[Tensor, Tensor], Gradients]]


def _read_foreign_layer(adapter: Any) -> Layer:
    def gradients(ids: Tensor, targets: Tensor) -> Gradients:
        scores: list[Tensor] = []

        def leaf(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
            scores.append(out.detach().requires_grad_())
            return scores[-1]

        handle = adapter.head.register_forward_hook(leaf)
        try:
            logits = adapter.logits(ids)
        finally:
            handle.remove()
        if not scores or not logits.requires_grad:
            raise InputError(f"{type(adapter.module).__name__} makes its logits without its output embedding")
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        (gradient,) = torch.autograd.grad(nll, scores[-1])
        yield 0, gradient.flatten(0, 1)

    return [adapter.head.weight], gradients


def _read_own_layer(adapter: OwnModel) -> Layer:
    layer = adapter.own.output
    with torch.no_grad():
        width = adapter.own.config.hidden_size
        probe = layer.components(next(adapter.own.parameters()).new_zeros(1, 1, width))
    weights = [cluster.weight for cluster in probe.clusters]
    rows = max(1, _CHUNK // (sum(len(weight) for weight in weights) * probe.states.shape[1]))

    def gradients(ids: Tensor, targets: Tensor) -> Gradients:
        with torch.no_grad():
            hidden = adapter.hidden(ids)
        counts = targets != IGNORED
        for states, wanted in zip(hidden[counts].split(rows), targets[counts].split(rows), strict=True):
            with torch.no_grad():
                components = layer.components(states[None])
                scores = [F.linear(projected(c, components.states), c.weight, c.bias) for c in components.clusters]
            for s in scores:
                s.requires_grad_()
            logits = [s + F.logsigmoid(s) if components.normalize == "sigsoftmax" else s for s in scores]
            nll = -combined(logits, components).gather(1, wanted[:, None]).sum()
            yield from enumerate(g.flatten(0, 1) for g in torch.autograd.grad(nll, scores))

    return weights, gradients
