"""Who stands where and who may be seen: the geometry of one attention call, apart from what attention computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """N queries over M keys; the queries of self-attention are the last N of the keys.

    query_positions (N,) or (B, N), key_positions (M,) or (B, M): places in the text, in tokens.
    causal: a query sees no key that comes after it.
    key_mask (B, M), True where a key is a token and False where it is padding; None when there is no padding.
    contiguous: key positions are 0, 1, .., M - 1 and the queries end where the keys end.
    farthest: the greatest distance from a query to a key before it, in tokens; None when no tokens are left out between
    the keys, so that it is M - 1.
    encodings (T, E): the sinusoids of the distances in `reach`, the smallest first, where a model makes them once for all
    its layers.
    """

    query_positions: Tensor
    key_positions: Tensor
    causal: bool = True
    key_mask: Tensor | None = None
    contiguous: bool = False
    farthest: int | None = None
    encodings: Tensor | None = None

    @classmethod
    def of(cls, queries: int, keys: int | None = None, *, causal: bool = True, device: torch.device | None = None,
           key_mask: Tensor | None = None) -> Layout:  # fmt: skip
        """The layout of `queries` tokens that continue a text so that `keys` tokens are there in all.

        Without `causal` there may be more queries than keys (cross-attention); both end at the same position.
        Raises ValueError for a causal layout with more queries than keys.
        """
        keys = queries if keys is None else keys
        if causal and queries > keys:
            raise ValueError(f"{queries} queries over {keys} keys: causal queries are the last ones of the keys")
        positions = torch.arange(min(keys - queries, 0), keys, device=device)
        last = positions.shape[0]
        return cls(positions[last - queries :], positions[last - keys :], causal, key_mask, contiguous=True)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return self.query_positions.shape[-1], self.key_positions.shape[-1]

    @property
    def unrestricted(self) -> bool:
        """Every query sees every key."""
        return self.key_mask is None and (not self.causal or self.shape[0] == 1)

    @property
    def plain_causal(self) -> bool:
        """Causal, without padding and without earlier keys: what a fused kernel calls `is_causal`."""
        queries, keys = self.shape
        return self.causal and self.key_mask is None and queries == keys

    @property
    def reach(self) -> tuple[int, int]:
        """The smallest and the greatest distance, query minus key position in tokens, at which a query sees a key."""
        queries, keys = self.shape
        return 0 if self.causal else 1 - queries, keys - 1 if self.farthest is None else self.farthest

    @property
    def distances(self) -> int:
        """T, how many distances lie within `reach`."""
        nearest, farthest = self.reach
        return farthest - nearest + 1

    def visible(self) -> Tensor:
        """(1 or B, 1, N, M), True where a query sees a key.

        A query that would see nothing (it is padding itself) sees itself, or every key if it has no place among them:
        its output is never used, and no weight becomes NaN.
        """
        queries, keys = self.shape
        device = self.key_positions.device
        own = torch.arange(keys - queries, keys, device=device)[:, None]
        index = torch.arange(keys, device=device)
        seen = (index <= own if self.causal else torch.ones(queries, keys, dtype=torch.bool, device=device))[None, None]
        if self.key_mask is None:
            return seen
        seen = seen & self.key_mask[:, None, None, :]
        return seen | (index == own) if self.causal else seen | ~seen.any(-1, keepdim=True)
