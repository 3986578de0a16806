"""Vocabulary layers: hidden states to logits, per-token nll and the training loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.core.adaptive import AdaptiveSoftmax as AdaptiveSoftmax  # registers itself
from fullrank.core.config import ModelConfig
from fullrank.core.embedding import TokenEmbedding
from fullrank.core.errors import ConfigError
from fullrank.core.mixture import MixtureOfSoftmaxes as MixtureOfSoftmaxes  # registers itself
from fullrank.core.registry import register
from fullrank.core.vocabulary_layer import own_or_tied
from fullrank.kernels.cross_entropy import PLAIN, Form, counted, flat, token_nll, weighted_loss
from fullrank.kernels.cross_entropy_reference import logits


@register("output", "softmax")
class SoftmaxOutput(nn.Module):
    """One softmax over the vocabulary: log p(v | h) = log_softmax(W h + b)_v.

    With `normalize: sigsoftmax` the logits are z = s + log sigmoid(s), s = W h + b (Kanai et al. 2018).
    weight (V, E) is the layer's own, or with `tied: true` the embedding's (then this layer holds no weight of its own).
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, embedding: nn.Module) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size: must be a number to build a model (a run takes it from its data)")
        if config.output.tied and not isinstance(embedding, TokenEmbedding):
            raise ConfigError("model.output.tied: a softmax can be tied to `model.input.kind: token` only")
        self.form = Form(config.output.normalize)
        # in a tuple, so that the embedding is not registered as a child and its weight is saved once
        self._tied = (embedding,) if config.output.tied else ()
        self.register_parameter(
            "weight", None if config.output.tied else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        )
        self.register_parameter("bias", nn.Parameter(torch.zeros(config.vocab_size)) if config.output.bias else None)

    @property
    def matrix(self) -> Tensor:
        """W (V, E), the own one or the embedding's."""
        return own_or_tied(self.weight, self._tied)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (B, N, V): what the probabilities are the softmax of."""
        if self.form == PLAIN:
            return F.linear(hidden, self.matrix, self.bias)
        return logits(hidden, self.matrix, self.bias, self.form.normalize)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (B, N, V), in fp32 at least."""
        return torch.log_softmax(logits(hidden, self.matrix, self.bias, self.form.normalize), dim=-1)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(B, N) nats."""
        ids, rows = flat(hidden, targets), hidden.flatten(0, -2)
        return token_nll(rows, self.matrix, self.bias, ids, form=self.form).view(targets.shape)

    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Weighted means, nats per token, two scalars: the smoothed loss and, without gradient, sum(w nll) / sum(w)."""
        ids, scale = counted(hidden, targets, weights, label_smoothing)
        return weighted_loss(hidden.flatten(0, -2), self.matrix, self.bias, ids, scale, label_smoothing, form=self.form)

    def flops_per_token(self) -> float:
        """Multiply-adds, counted as two, of the logits of one token."""
        return 2.0 * self.matrix.numel()
