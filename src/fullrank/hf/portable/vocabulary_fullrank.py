"""Tokens in, log-probabilities out: token and adaptive input; softmax, adaptive softmax and mixtures of both.

B batch, N tokens, E width of the model, V vocabulary, K softmaxes of a mixture.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_fullrank import Settings


class Dropout(nn.Module):
    """Dropout in training; `locked`: one mask for all positions of a sequence.  x (..., N, E)."""

    def __init__(self, p: float, locked: bool = False) -> None:
        super().__init__()
        self.p, self.locked = p, locked

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if not self.locked:
            return F.dropout(x, self.p)
        return x * torch.empty_like(x[..., :1, :]).bernoulli_(1 - self.p) / (1 - self.p)


def clusters(cutoffs: list[int], vocab_size: int) -> list[tuple[int, int]]:
    """First id and number of ids of each cluster."""
    return [(start, end - start) for start, end in pairwise((0, *cutoffs, vocab_size))]


class TokenEmbedding(nn.Module):
    """One vector per token, times sqrt(E) if `scale_embedding`.  input_ids (B, N) -> (B, N, E)."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.scale = config.hidden_size**0.5 if config.scale_embedding else 1.0

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight) * self.scale


class AdaptiveInput(nn.Module):
    """Adaptive input (Baevski & Auli 2019): rare words have shorter vectors, projected to the width of the model.

    x = P_i W_i[id - start_i]           for an id of cluster i; P_i only where div_val is not 1
    """

    def __init__(self, config: Settings) -> None:
        super().__init__()
        width, div = config.hidden_size, config.input.div_val
        self.clusters = clusters(config.input.cutoffs, config.vocab_size)
        self.weights = nn.ParameterList(torch.empty(n, width // div**i) for i, (_, n) in enumerate(self.clusters))
        projected = range(len(self.clusters)) if div != 1 else ()
        self.projections = nn.ParameterList(torch.empty(width, width // div**i) for i in projected)
        self.scale = width**0.5 if config.scale_embedding else 1.0

    def forward(self, input_ids: Tensor) -> Tensor:
        total = torch.zeros((), dtype=self.weights[0].dtype, device=input_ids.device)
        for i, (start, size) in enumerate(self.clusters):
            inside = (input_ids >= start) & (input_ids < start + size)
            vectors = F.embedding(torch.where(inside, input_ids - start, 0), self.weights[i])
            vectors = vectors.masked_fill(~inside[..., None], 0)
            total = total + (F.linear(vectors, self.projections[i]) if len(self.projections) else vectors)
        return total * self.scale


INPUTS = {"token": TokenEmbedding, "adaptive": AdaptiveInput}


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, normalize: str) -> Tensor:
    """Logits in fp32 at least; sigsoftmax is the softmax of z + log sigmoid(z)."""
    z = F.linear(hidden, weight, bias)
    z = z if z.dtype == torch.float64 else z.float()
    return z + F.logsigmoid(z) if normalize == "sigsoftmax" else z


class Latents(nn.Module):
    """h_k = tanh(W_k g + b_k), pi = softmax(P g): (B, N, E) -> h (B, N, K, E) and log pi (B, N, K)."""

    def __init__(self, own: Settings, width: int) -> None:
        super().__init__()
        self.mixtures = own.mixtures
        self.latent = nn.Linear(width, own.mixtures * width) if own.latent else None
        self.prior = nn.Linear(width, own.mixtures, bias=False) if own.latent else None
        self.dropout = Dropout(own.latent_dropout, own.latent_dropout_locked)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self.latent is None or self.prior is None:  # one softmax of g itself
            return hidden[..., None, :], torch.zeros_like(hidden[..., :1], dtype=wide)
        states = self.dropout(torch.tanh(self.latent(hidden)))
        return states.unflatten(-1, (self.mixtures, -1)), torch.log_softmax(self.prior(hidden).to(wide), dim=-1)


def _mixed(each: Tensor, log_prior: Tensor, epsilon: float) -> Tensor:
    """log sum_k pi_k p_k, each (.., K, V) -> (.., V); the released codes take log(p + epsilon)."""
    found = torch.logsumexp(log_prior[..., None] + each, dim=-2)
    return torch.logaddexp(found, found.new_tensor(math.log(epsilon))) if epsilon else found


class SoftmaxOutput(nn.Module):
    """One softmax, or a mixture of K (Yang et al. 2018); W is the embedding's where they are tied.

        z = W h + b, or log p(v | g) = log sum_k pi_k softmax(W h_k + b)_v

    hidden (B, N, E) -> (B, N, V): logits, or the log-probabilities of a mixture.
    """

    def __init__(self, config: Settings, embedding: nn.Module) -> None:
        super().__init__()
        own = config.output
        self.normalize, self.epsilon = own.normalize, own.epsilon
        self._tied: tuple[Any, ...] = (embedding,) if own.tied else ()  # in a tuple, so that it is not registered twice
        shape = (config.vocab_size, config.hidden_size)
        self.weight: nn.Parameter | None = None if own.tied else nn.Parameter(torch.empty(shape))
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(config.vocab_size)) if own.bias else None
        self.mixture = Latents(own, config.hidden_size) if own.kind == "mixture_of_softmaxes" else None

    def forward(self, hidden: Tensor) -> Tensor:
        weight: Any = self._tied[0].weight if self._tied else self.weight
        if self.mixture is not None:
            states, log_prior = self.mixture(hidden)
            each = torch.log_softmax(_logits(states, weight, self.bias, self.normalize), dim=-1)
            return _mixed(each, log_prior, self.epsilon)
        if self.normalize == "softmax":
            return F.linear(hidden, weight, self.bias)
        return _logits(hidden, weight, self.bias, self.normalize)

    def log_prob(self, logits: Tensor) -> Tensor:
        """Log-probabilities, in fp32 at least, from what `forward` gives."""
        if self.mixture is not None:
            return logits
        return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


class AdaptiveSoftmax(nn.Module):
    """Adaptive softmax (Grave et al. 2017), alone or as the component of a mixture; gives log-probabilities (B, N, V).

    log p(v | h) = head(h)_v                                    for a word of cluster 0
                 = head(h)_{class i} + tail_i(h)_{v - start_i}  for a word of cluster i > 0
    head(h)   = log_softmax([W_0; C] h + [b_0; c])              h replaced by P_0' h in Transformer-XL's form
    tail_i(h) = log_softmax(W_i P_i' h + b_i)
    """

    def __init__(self, config: Settings, embedding: nn.Module) -> None:
        super().__init__()
        own, width = config.output, config.hidden_size
        div = own.div_val or 1
        self.normalize, self.epsilon, self.projected = own.normalize, own.epsilon, div != 1
        self.clusters = clusters(own.cutoffs, config.vocab_size)
        widths = [width // div**i for i in range(len(self.clusters))]
        tails = len(self.clusters) - 1
        self._tied: tuple[Any, ...] = (embedding,) if own.tied else ()
        self._tied_projections = bool(own.tied_projections)
        sizes = [size for _, size in self.clusters]
        self.weights = nn.ParameterList(torch.empty(n, w) for n, w in zip(sizes, widths, strict=True) if not own.tied)
        self.biases = nn.ParameterList(torch.zeros(n) for n in sizes if own.bias)
        kept = [0] if own.form == "transformer_xl" else []
        kept += [] if self._tied_projections else list(range(1, len(sizes)))
        self.projections = nn.ParameterDict(
            {str(i): nn.Parameter(torch.empty(width, widths[i])) for i in kept if self.projected}
        )
        self.class_weight = nn.Parameter(torch.empty(tails, width))
        self.class_bias = nn.Parameter(torch.zeros(tails)) if own.bias else None
        self.tail_dropout = Dropout(own.tail_dropout)
        self.mixture = Latents(own, width) if own.kind == "mixture_of_softmaxes" else None

    def _matrix(self, i: int) -> Tensor:
        return self._tied[0].weights[i] if self._tied else self.weights[i]

    def _read(self, i: int, hidden: Tensor) -> Tensor:
        """What W_i is multiplied with: h, or P_i' h."""
        if str(i) in self.projections:
            projection = self.projections[str(i)]
        elif i > 0 and self._tied_projections and self.projected:
            projection = self._tied[0].projections[i]
        else:
            return hidden
        hidden = F.linear(hidden, projection.t())
        return self.tail_dropout(hidden) if i > 0 else hidden

    def _each(self, hidden: Tensor) -> Tensor:
        """log p(v | h), (..., E) -> (..., V)."""
        words = self.clusters[0][1]
        bias = None if self.class_bias is None else torch.cat((self.biases[0], self.class_bias))
        head = torch.cat((self._matrix(0), self.class_weight))
        found = torch.log_softmax(_logits(self._read(0, hidden), head, bias, self.normalize), dim=-1)
        parts = [found[..., :words]]
        for i in range(1, len(self.clusters)):
            bias = self.biases[i] if len(self.biases) else None
            tail = torch.log_softmax(_logits(self._read(i, hidden), self._matrix(i), bias, self.normalize), dim=-1)
            parts.append(tail + found[..., words + i - 1, None])
        return torch.cat(parts, dim=-1)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.mixture is None:
            return self._each(hidden)
        states, log_prior = self.mixture(hidden)
        return _mixed(self._each(states), log_prior, self.epsilon)

    def log_prob(self, logits: Tensor) -> Tensor:
        return logits


def output_layer(config: Settings, embedding: Any) -> nn.Module:
    """The vocabulary layer that a configuration asks for."""
    own = config.output
    adaptive = own.kind == "adaptive" or (own.kind == "mixture_of_softmaxes" and own.components == "adaptive")
    return (AdaptiveSoftmax if adaptive else SoftmaxOutput)(config, embedding)
