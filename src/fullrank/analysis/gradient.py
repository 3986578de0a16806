"""The share of the gradient that the output layer lets through (Godey and Artzi 2026, arXiv 2603.10145).

    G = d nll / d s   (T, V)      s = h W',  W (V, d)        G's rows live in V dimensions, those that W passes on in d
    let through:  ||G U|| / ||G||,   U (V, d) an orthonormal basis of the columns of W

Training moves the logits s by moving h, and so along columns of W only: what of G lies across them is lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.analysis.rank import unwrapped
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.core.output import IGNORED, combined, projected
from fullrank.decoding.sample import evaluating
from fullrank.training.device import device_of

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


def gradient_share(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> GradientShare:
    """The share of the gradient of the nll that the output layer of `model` lets through, by its norm.

    A mixture has a G for each softmax, an adaptive softmax one for the head and for each tail; norms are over all of them.
    model: a `LanguageModel`, a `MaskedLanguageModel`, or a model of Hugging Face with logits; read in evaluation mode.
    batches: input_ids and targets (B, N) int64; targets -100 do not count. Every row is read on its own, without memory.
    Raises InputError for another kind of model, and where no target counts.
    """
    weights, read = _reader(model)
    bases = [_basis(weight) for weight in weights]
    squares, let_through, tokens = 0.0, 0.0, 0
    for ids, targets in batches:
        tokens += int((targets != IGNORED).sum())
        with evaluating(model), _frozen(model), torch.enable_grad():
            for number, gradient in read(ids.to(device_of(model)), targets.to(device_of(model))):
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
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient inside the block."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)


def _reader(model: Any) -> tuple[list[Tensor], Callable[[Tensor, Tensor], Gradients]]:
    """The matrices of the output layer, and the gradients that reach each of them from a batch."""
    own = unwrapped(model)
    if isinstance(own, LanguageModel | MaskedLanguageModel):
        return _of_ours(own)
    head = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None
    if head is None or getattr(head, "weight", None) is None:
        raise InputError(f"{type(model).__name__} has no output embedding; give a language model, causal or masked")
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters

    def gradients(ids: Tensor, targets: Tensor) -> Gradients:
        scores: list[Tensor] = []

        def leaf(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
            scores.append(out.detach().requires_grad_())
            return scores[-1]

        handle = head.register_forward_hook(leaf)
        try:
            logits = model(ids, **({"attention_mask": torch.ones_like(ids)} if takes_mask else {})).logits
        finally:
            handle.remove()
        if not scores or not logits.requires_grad:
            raise InputError(f"{type(model).__name__} makes its logits without its output embedding")
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        (gradient,) = torch.autograd.grad(nll, scores[-1])
        yield 0, gradient.flatten(0, 1)

    return [head.weight], gradients


def _of_ours(model: LanguageModel | MaskedLanguageModel) -> tuple[list[Tensor], Callable[[Tensor, Tensor], Gradients]]:
    layer = model.output
    with torch.no_grad():
        width = model.config.hidden_size
        probe = layer.components(next(model.parameters()).new_zeros(1, 1, width))
    weights = [cluster.weight for cluster in probe.clusters]
    rows = max(1, _CHUNK // (sum(len(weight) for weight in weights) * probe.states.shape[1]))

    def gradients(ids: Tensor, targets: Tensor) -> Gradients:
        with torch.no_grad():
            read = model.hidden(ids)
            hidden = read if isinstance(read, Tensor) else read.hidden
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
