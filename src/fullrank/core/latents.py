"""What a vocabulary layer reads: one hidden state a token, or the K latents of a mixture with their prior."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fullrank.core.config import OutputConfig
from fullrank.core.dropout import Dropout


class Components(NamedTuple):
    """Of T tokens: what each softmax reads, hidden (T, K, E), and log_prior (T, K), its share in fp32 at least."""

    hidden: Tensor
    log_prior: Tensor


class Latents(nn.Module):
    """The components of a mixture of softmaxes (Transformer-MoS §3; Yang et al. 2018, §2.3).

        h_k = tanh(W_k g + b_k)         pi = softmax(P g)

    hidden states g (B, N, E) -> `Components` of the B N tokens.  `latent` holds the W_k (E, E) and b_k one under the other,
    `prior` P (K, E), without bias; dropout acts on the h_k alone. Without latent states (K = 1) h is g, and nothing is learned:
    a plain softmax.
    Parameters: K E^2 + 2 K E.
    """

    def __init__(self, config: OutputConfig, hidden_size: int) -> None:
        super().__init__()
        assert config.mixtures is not None
        self.mixtures = config.mixtures
        self.latent = nn.Linear(hidden_size, self.mixtures * hidden_size) if config.latent else None
        self.prior = nn.Linear(hidden_size, self.mixtures, bias=False) if config.latent else None
        self.dropout = Dropout(config.latent_dropout, config.latent_dropout_locked)

    def forward(self, hidden: Tensor) -> Components:
        tokens = hidden.shape[:-1].numel()
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        if self.latent is None or self.prior is None:
            return Components(hidden.reshape(tokens, 1, hidden.shape[-1]), hidden.new_zeros(tokens, 1, dtype=wide))
        latents = self.dropout(torch.tanh(self.latent(hidden)))  # (B, N, K E)
        log_prior = torch.log_softmax(self.prior(hidden).to(wide), dim=-1)
        return Components(
            latents.reshape(tokens, self.mixtures, hidden.shape[-1]), log_prior.reshape(tokens, self.mixtures)
        )

    def extra_repr(self) -> str:
        return f"mixtures={self.mixtures}"
