"""Who stands where in a text and who is seen: sinusoids, learned positions, distances.

B batch, N queries, M keys, H heads, D size of a head, E width, T distances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .configuration_fullrank import Settings, stage


@dataclass
class View:
    """N queries over M keys, the same for all layers.

    queries (1 or B, N), keys (1 or B, M): positions in the text; padding takes none. mask (B, M): True for tokens, None without
    padding. visible (1 or B, 1, N, M): who is seen. plain: what a fused kernel needs instead of it, "causal" or "all".
    encodings (T, E): sinusoids of the distances `nearest`, nearest + 1, ..; biases: u and v that all layers share.
    mixed: False where Mixhead's released code leaves heads as they are.
    """

    queries: Tensor
    keys: Tensor
    visible: Tensor
    mask: Tensor | None = None
    causal: bool = True
    window: int | None = None
    plain: str | None = None
    encodings: Tensor | None = None
    biases: RelativeBiases | None = None
    mixed: bool = True

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, mask: Tensor | None, causal: bool, window: int | None = None) -> View:
        """A query that would see nothing (it is padding) sees itself, or everything: no weight becomes NaN."""
        n, m, device = queries.shape[1], keys.shape[1], keys.device
        window = None if window is None or m <= window else window
        own, index = torch.arange(m - n, m, device=device)[:, None], torch.arange(m, device=device)
        seen = (index <= own if causal else torch.ones(n, m, dtype=torch.bool, device=device))[None, None]
        if window is not None:
            seen = seen & (keys[:, None] > queries[..., None] - window)[:, None]
        if mask is not None:
            seen = seen & mask[:, None, None]
            seen = seen | (index == own) if causal else seen | ~seen.any(-1, keepdim=True)
        plain = None
        if mask is None and window is None:
            plain = "all" if not causal or n == 1 else "causal" if n == m else None
        return cls(queries, keys, seen, mask, causal, window, plain)

    @property
    def nearest(self) -> int:
        """The smallest distance that is needed; a causal query has no key after it."""
        return 0 if self.causal else 1 - self.queries.shape[1]

    @property
    def distances(self) -> int:
        """T."""
        return self.keys.shape[1] - self.nearest


def angles(positions: Tensor, size: int, theta: float, like: Tensor) -> Tensor:
    """p theta^(-2i / size) for 2i < size, made in fp64; fp32 without whole turns, or fp64 if `like` is."""
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    exponent = torch.arange(0, size, 2, device=positions.device, dtype=wide) / size
    angle = positions.to(wide)[..., None] * torch.exp(-math.log(theta) * exponent)
    return angle if like.dtype == torch.float64 else angle.remainder(2 * math.pi).to(torch.float32)


def sines_then_cosines(positions: Tensor, width: int, like: Tensor) -> Tensor:
    """Transformer-XL's sinusoids, (T,) -> (T, E)."""
    angle = angles(positions, width, 10000.0, like)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)[:, :width].to(like.dtype)


class RelativeBiases(nn.Module):
    """u and v (H, D)."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.content_bias = nn.Parameter(torch.zeros(heads, width))
        self.position_bias = nn.Parameter(torch.zeros(heads, width))


class Position(nn.Module):
    """What positions add to embeddings (B, N, E): sinusoids, learned vectors, or nothing; holds u and v that layers share."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.kind, self.width = config.position, config.hidden_size
        if self.kind == "learned":
            self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
        options = stage(config.attention.score)[1]
        self.clamp = options.get("clamp_length")
        self.places = config.max_position_embeddings if config.attention.kind == "multilinear" else None
        self.biases: RelativeBiases | None = None
        if self.kind == "relative" and options.get("shared_biases", True):
            heads, width = config.num_attention_heads, config.head_dim
            self.biases = RelativeBiases(*((1, config.attention.rank) if self.places else (heads, width)))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.kind == "sinusoidal":
            angle = angles(positions, self.width, 10000.0, x)
            return x + torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., : self.width].to(x.dtype)
        if self.kind == "learned":
            if int(positions.max()) >= len(self.weight):
                raise ValueError(
                    f"a text of {int(positions.max()) + 1} tokens, but max_position_embeddings is {len(self.weight)}"
                )
            return x + self.weight[positions]
        return x

    def encodings(self, nearest: int, count: int, like: Tensor) -> Tensor | None:
        """Sinusoids of the distances nearest, nearest + 1, ..; of the places P - 1, P - 2, .. in multi-linear attention."""
        if self.kind != "relative":
            return None
        if self.places is not None:
            return sines_then_cosines(torch.arange(self.places - 1, -1, -1, device=like.device), self.width, like)
        distances = torch.arange(nearest, nearest + count, device=like.device)
        if self.clamp is not None:
            distances = distances.clamp(-self.clamp, self.clamp)
        return sines_then_cosines(distances, self.width, like)


def check_length(view: View, longest: int) -> None:
    """ValueError where a text is longer than a table of positions."""
    if (length := int(view.keys.max()) + 1) > longest:
        raise ValueError(f"a text of {length} tokens, but max_position_embeddings is {longest}")


@dataclass
class Heads:
    """query (B, H, N, D) is as projected, for mixing; scored meets keys (B, H, M, D); relative (H, T, D) of distances."""

    query: Tensor | None
    scored: Tensor | None
    keys: Tensor | None
    values: Tensor
    relative: Tensor | None


def shared_or_own(own: RelativeBiases | None, view: View) -> tuple[Tensor, Tensor]:
    """u and v of a layer: its own, or those that all layers share."""
    biases = view.biases if own is None else own
    assert biases is not None
    return biases.content_bias, biases.position_bias
