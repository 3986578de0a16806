"""Dropout, ordinary or locked, and how its masks are drawn."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import draws


def dropout(x: Tensor, p: float, shared: bool = False) -> Tensor:
    """Zero each entry of x with probability p and scale the rest by 1/(1 - p); any shape, the rows of the batch first.

    shared: x has no rows, and several processes that train together draw alike.
    """
    if p == 0:
        return x
    kept = keep_mask(x.shape, p, x, shared=shared)
    return F.dropout(x, p) if kept is None else x * kept.mul_(1 / (1 - p))


def keep_mask(
    shape: torch.Size, p: float, like: Tensor, generator: torch.Generator | None = None, shared: bool = False
) -> Tensor | None:
    """Dropout mask, 1 for kept and 0 for dropped entries, in the dtype of `like`; None where torch's own draw is better.

    On a CPU `Tensor.bernoulli_` takes most of dropout's time (7.5 of 7.8 ns per entry); here one 64-bit draw makes four
    entries (1.3 ns). 16 bits are compared with 65,536 p, rounded up or down at random so that every entry is dropped
    with probability p exactly; the rounding is drawn once a mask. All numbers come from `generator`, or from the draws of the
    training pass (`draws.current`), or torch's default generator.
    """
    if like.device.type != "cpu" or p > 1 - 2**-16 or torch.compiler.is_compiling():
        return None
    if generator is None and draws.current is not None:
        rounding, bits = draws.current.uniform_and_bits(shape, shared)
    else:
        rounding = torch.rand((), generator=generator, device="cpu").item()
        words = torch.empty(-(-math.prod(shape) // 4), dtype=torch.int64, device="cpu")
        words.random_(-(2**63), None, generator=generator)
        bits = words.view(torch.int16)[: math.prod(shape)].view(shape)
    least = math.floor(65_536 * p + rounding) - 32_768  # of a kept entry, as a signed number
    return bits.ge_(least).to(like.dtype)  # in place: comparing to booleans takes ten times as long


class Dropout(nn.Module):
    """Zero entries with probability p and scale the rest by 1/(1 - p), in training only.

    x (B, N, E) -> (B, N, E), or one sequence (N, E).  `locked` (variational dropout, Gal & Ghahramani 2016): one mask for all
    N positions.
    """

    def __init__(self, p: float, locked: bool = False) -> None:
        super().__init__()
        self.p, self.locked = p, locked

    def forward(self, x: Tensor, shared: bool = False) -> Tensor:
        """shared: as of `dropout`."""
        if not self.training or self.p == 0:
            return x
        if not self.locked:
            return dropout(x, self.p, shared)
        return x * dropout(torch.ones_like(x[..., :1, :]), self.p, shared or draws.selecting())

    def of_words(self, input_ids: Tensor, vocab_size: int) -> Tensor | None:
        """Factor of each token, (B, N, 1): 0 for a dropped word wherever it stands, else 1/(1 - p); None: no word is dropped.

        Dropout of rows of the embedding (Gal & Ghahramani 2016; Merity et al. 2018, §4.3). Every process draws alike.
        """
        if not self.training or self.p == 0:
            return None
        like = torch.ones(vocab_size, 1, device=input_ids.device)
        return F.embedding(input_ids, dropout(like, self.p, shared=True))

    def extra_repr(self) -> str:
        return f"p={self.p}" + (", locked" if self.locked else "")
