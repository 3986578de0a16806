"""The largest of many numbers."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of scores (R, N) and where they are, both (R, k), largest first, as `topk` gives them.

    `topk` sorts where it need not: with blocks of columns, the k largest numbers lie in the k blocks with the largest
    maxima, and a maximum is found at the speed of reading. Several times faster for a few of a vocabulary.
    """
    rows, columns = scores.shape
    blocks = columns // _BLOCK
    if blocks < 4 * k:
        best = scores.topk(k)
        return best.values, best.indices
    whole = blocks * _BLOCK
    split = scores[:, :whole].unflatten(1, (blocks, _BLOCK))
    chosen = split.amax(dim=2).topk(k).indices  # (R, k)
    inside = torch.arange(_BLOCK, device=scores.device)
    places = (chosen[..., None] * _BLOCK + inside).flatten(1)  # (R, k * block)
    rest = torch.arange(whole, columns, device=scores.device).expand(rows, -1)
    places = torch.cat((places, rest), dim=1)
    best = scores.gather(1, places).topk(k)
    return best.values, places.gather(1, best.indices)
