"""A mixture of softmaxes over the vocabulary: the log-probabilities are no longer a matrix of low rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.adaptive import AdaptiveSoftmax
from fullrank.core.config import ModelConfig, OutputConfig
from fullrank.core.embedding import TokenEmbedding
from fullrank.core.errors import ConfigError
from fullrank.core.latents import Latents
from fullrank.core.registry import register
from fullrank.core.vocabulary_layer import own_or_tied, sizes_of
from fullrank.kernels.cross_entropy import Form, counted, flat, mixed_log_prob, token_nll, weighted_loss


class MixtureOfSoftmaxes(nn.Module):
    """Mixture of softmaxes (Transformer-MoS §3; Yang et al. 2018): K softmaxes share one matrix, each with a hidden state.

        log p(v | g) = log sum_k pi_k softmax(W h_k + b)_v        h_k = tanh(W_k g + b_k),  pi = softmax(P g)

    `mixture` holds W_k, b_k and P (`Latents`); weight W (V, E) is the layer's own, or with `tied: true` the embedding's.
    Computed with logarithms throughout: an improbable word keeps its gradient. The released codes take log(p + 1e-8) instead;
    `epsilon` does so (probabilities then sum to 1 + V epsilon).
    Built from a `ModelConfig`, or from an `OutputConfig` and the sizes it lacks; tied, it needs the `embedding`.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig | OutputConfig,
        embedding: nn.Module | None = None,
        *,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__()
        config, vocab_size, hidden_size = sizes_of("MixtureOfSoftmaxes", config, vocab_size, hidden_size)
        if vocab_size is None:
            raise ConfigError(
                "MixtureOfSoftmaxes: vocab_size must be a number to build it; give it, or model.vocab_size"
            )
        if config.kind != "mixture_of_softmaxes" or config.adaptive:
            given = f"components '{config.components}'" if config.adaptive else f"'{config.kind}'"
            raise ConfigError(f"model.output.kind: MixtureOfSoftmaxes is for a mixture of softmaxes, given {given}")
        if config.tied and not isinstance(embedding, TokenEmbedding):
            raise ConfigError(
                "model.output.tied: a mixture of softmaxes can be tied to `model.input.kind: token` only; to an adaptive "
                "input with model.output.components: adaptive"
            )
        if isinstance(embedding, TokenEmbedding) and config.tied:
            shape = tuple(embedding.weight.shape)
            if shape != (vocab_size, hidden_size):
                raise ConfigError(
                    f"model.output.tied: the embedding has a table {shape}, the mixture asks for vocab_size {vocab_size} and "
                    f"hidden_size {hidden_size}"
                )
        # in a tuple, so that the embedding is not registered as a child and its weight is saved once
        self._tied: tuple[Any, ...] = (embedding,) if config.tied else ()
        self.form = Form(config.normalize, config.epsilon)
        self.mixture = Latents(config, hidden_size)
        weight = None if config.tied else nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.register_parameter("weight", weight)
        self.register_parameter("bias", nn.Parameter(torch.zeros(vocab_size)) if config.bias else None)
        if weight is not None:
            nn.init.normal_(weight, std=hidden_size**-0.5)

    @property
    def matrix(self) -> Tensor:
        """W (V, E), the own one or the embedding's."""
        return own_or_tied(self.weight, self._tied)

    def forward(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (B, N, V), in fp32 at least."""
        return self.log_prob(hidden)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities (B, N, V), in fp32 at least."""
        states, log_prior = self.mixture(hidden)
        found = mixed_log_prob(states, log_prior, self.matrix, self.bias, self.form)
        return found.view(*hidden.shape[:-1], found.shape[-1])

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(B, N) nats."""
        ids, (states, log_prior) = flat(hidden, targets), self.mixture(hidden)
        found = token_nll(states, self.matrix, self.bias, ids, log_prior=log_prior, form=self.form)
        return found.view(targets.shape)

    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Weighted means, nats per token, two scalars: the smoothed loss and, without gradient, sum(w nll) / sum(w).

        Gradients are formed in the forward pass, chunk by chunk.
        """
        ids, scale = counted(hidden, targets, weights, label_smoothing)
        states, log_prior = self.mixture(hidden)
        return weighted_loss(
            states, self.matrix, self.bias, ids, scale, label_smoothing, log_prior=log_prior, form=self.form
        )

    def flops_per_token(self) -> float:
        """Multiply-adds, counted as two, of the logits of one token; the latents are linear layers, counted as such."""
        return 2.0 * self.mixture.mixtures * self.matrix.numel()

    def extra_repr(self) -> str:
        return f"vocab_size={self.matrix.shape[0]}, tied={bool(self._tied)}, normalize={self.form.normalize}"


@register("output", "mixture_of_softmaxes")
def mixture(config: ModelConfig, embedding: nn.Module) -> nn.Module:
    """The mixture that a configuration asks for: of softmaxes, or of adaptive softmaxes."""
    layer = AdaptiveSoftmax if config.output.adaptive else MixtureOfSoftmaxes
    return layer(config, embedding)
