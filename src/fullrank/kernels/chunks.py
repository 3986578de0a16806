"""The vocabulary layer as its matrix products see it: worked off in chunks of tokens, so that not all logits exist at once.

Scratch memory is a chunk of logits: as many bytes as the gradient of W takes, but 16 MiB at least and 128 MiB at most (on a
GPU always 256 MiB, counted in fp32), and never less than 64 rows. Under autocast the operands and results of the matrix
products have its dtype; bias, softmax, nll and the sums over chunks are always fp32 (or fp64).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _pieces(total: int, longest: int) -> Iterator[slice]:
    """0 .. total in the fewest pieces of at most `longest`, all nearly equally long."""
    count = -(-total // longest)
    return (slice(total * i // count, total * (i + 1) // count) for i in range(count))


class Layer:
    """hidden (T K, E), weight (V, E), bias (V,) or None; the K rows of a token stand together and are never parted.

    `dtype` is that of the products, `wide` that of softmax and sums.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, group: int) -> None:
        self.wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(self.wide)
        self.group, self.tokens = group, hidden.shape[0] // group
        self.on_cpu = hidden.device.type == "cpu"

    def rows(self, tokens: slice) -> slice:
        """The rows of some tokens."""
        return slice(tokens.start * self.group, tokens.stop * self.group)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Tokens, and their logits (C K, V) without the bias: so many that a pass over dW for each chunk costs little.

        All chunks share one scratch: done with a chunk, it may be written to.
        """
        vocabulary, width = self.weight.shape
        budget = min(max(4 * width * vocabulary, 16 << 20), 128 << 20) if self.on_cpu else 256 << 20  # bytes
        # the block of a GPU is the chunk, in `wide`
        size = self.weight.element_size() if self.on_cpu else self.wide.itemsize
        longest = max(budget // (vocabulary * size), 64)
        longest = max((longest if self.on_cpu else min(longest, 4096)) // self.group, -(-64 // self.group))
        pieces = list(_pieces(self.tokens, longest))
        most = max((p.stop - p.start for p in pieces), default=0)
        scratch = self.hidden.new_empty(most * self.group, vocabulary)
        for piece in pieces:
            logits = scratch[: (piece.stop - piece.start) * self.group]
            yield piece, torch.mm(self.hidden[self.rows(piece)], self.weight.t(), out=logits)

    def blocks(self, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """A few tokens at a time, in `wide` and with the bias: on a CPU so few that their logits stay in its cache.

        Tokens count from the first of `logits`. A block may be the memory of `logits`.
        """
        rows, vocabulary = logits.shape
        tokens = rows // self.group
        few = max((1 << 19) // (vocabulary * self.group), -(-16 // self.group))
        for piece in _pieces(tokens, few if self.on_cpu else max(tokens, 1)):
            block = logits[self.rows(piece)].to(self.wide)
            yield piece, block if self.bias is None else block.add_(self.bias)


class Gradients:
    """Sums of the gradients with respect to W and b, and the rows of the gradient with respect to h.

        dW = sum_r c_r G_r h_r',    dh_r = c_r W' G_r,    db = sum_r c_r G_r

    over rows r with known scales c; `needs`: whether those of h, W and b are wanted.
    """

    def __init__(self, layer: Layer, needs: tuple[bool, bool, bool]) -> None:
        self.layer, self.wants_weight = layer, needs[1]
        self.hidden = torch.empty_like(layer.hidden, dtype=layer.wide) if needs[0] else None
        self.weight = torch.zeros_like(layer.weight) if needs[1] and layer.tokens == 0 else None
        self.bias = torch.zeros_like(layer.bias) if layer.bias is not None and needs[2] else None

    def block(self, gradient: Tensor, scale: Tensor) -> None:
        """Add what a block contributes to db: G (R, V), scale c (R,)."""
        if self.bias is not None:
            self.bias.addmv_(gradient.t(), scale)

    def chunk(self, tokens: slice, gradient: Tensor, scale: Tensor) -> None:
        """Add what a chunk contributes to dW and dh: G (C K, V) in the dtype of the products, scale c (C K,)."""
        layer, rows = self.layer, self.layer.rows(tokens)
        if self.hidden is not None:
            self.hidden[rows] = (gradient @ layer.weight) * scale[:, None]
        if not self.wants_weight:
            return
        hidden = (layer.hidden[rows] * scale[:, None]).to(gradient.dtype)
        if self.weight is None:
            self.weight = gradient.t() @ hidden  # one chunk needs no sum: autograd widens it
        elif gradient.dtype == layer.wide:
            self.weight.addmm_(gradient.t(), hidden)
        else:
            self.weight = self.weight.to(layer.wide).add_(gradient.t() @ hidden)
