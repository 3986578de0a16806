"""Weights of query blocks: normalise, mix, drop; and their gradients. All heads of a block at once, (G, n, m) with G = H b.

    P = softmax(A)  or  softmax(A + log sigmoid(A)),      P'_i = sum_j M_ji P_j,      W = P' o Z / (1 - p)
    D_ji = sum_m P_j G_i,     dM = D, summed over b and n if M is (H, H),     dP_j = sum_i M_ji G_i,       G = dP'
    dA_j = P_j o (dP_j - sum_m P_j dP_j),     for sigsoftmax times  2 - sigmoid(A_j) = 1 + sigmoid(-A_j)

A matrix is (H, H), or (b n, H, H) where it depends on the query, in the dtype of the weights; None is I.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fullrank.core.dropout import keep_mask
from fullrank.kernels.block_scores import Scratch


def normalize_(scores: Tensor, how: str, scratch: Scratch) -> Tensor:
    """Weights in the place of the scores (softmax), or in the room `weights`, the scores staying what they are."""
    if how == "softmax":
        return torch.softmax(scores, -1, out=scores)
    weights = scratch.room("weights", (scores.shape[0], scores.shape[1], scores.shape[2]), scores.dtype)
    torch.add(scores, F.logsigmoid(scores), out=weights)
    return torch.softmax(weights, -1, out=weights)


def normalize_backward_(d_weights: Tensor, weights: Tensor, scores: Tensor, how: str) -> Tensor:
    """dA in the place of dP; destroys the scores."""
    torch._softmax_backward_data(d_weights, weights, -1, weights.dtype, grad_input=d_weights)
    if how == "sigsoftmax":
        d_weights.addcmul_(d_weights, scores.neg_().sigmoid_())
    return d_weights


def mix(weights: Tensor, matrix: Tensor | None, scratch: Scratch) -> Tensor:
    """P', a view that may have gaps, in the room `mixed`; P itself without a matrix."""
    if matrix is None:
        return weights
    if matrix.dim() == 2:
        return _shared_product(matrix.t(), weights, scratch)
    product = _product_by_query(matrix.transpose(1, 2), weights, scratch)
    if product.shape[1] == weights.shape[1]:  # one text: its heads stand evenly apart
        return product
    return (
        scratch.room("weights by head", _shape(weights), weights.dtype)
        .view(product.shape)
        .copy_(product)
        .view(weights.shape)
    )


def mix_backward(d_mixed: Tensor, matrix: Tensor | None, scratch: Scratch) -> Tensor:
    """dP in the place of `d_mixed`, or in the room `mixed`."""
    if matrix is None:
        return d_mixed
    if matrix.dim() == 2:
        return _shared_product(matrix, d_mixed, scratch)
    product = _product_by_query(matrix, d_mixed, scratch)
    d_mixed.view(product.shape).copy_(product)
    return d_mixed


def _shape(x: Tensor) -> tuple[int, int, int]:
    return (x.shape[0], x.shape[1], x.shape[2])


def _shared_product(matrix: Tensor, x: Tensor, scratch: Scratch) -> Tensor:
    out = scratch.room("mixed", _shape(x), x.dtype)
    heads = matrix.shape[0]
    torch.mm(matrix, x.view(heads, -1), out=out.view(heads, -1))
    return out


def _product_by_query(matrix: Tensor, x: Tensor, scratch: Scratch) -> Tensor:
    """(H, b n, m), of heads that lie side by side for each query."""
    out = scratch.room("mixed", (matrix.shape[0], matrix.shape[1], x.shape[2]), x.dtype)
    return torch.bmm(matrix, _by_query(x, matrix), out=out).transpose(0, 1)


def _by_query(x: Tensor, matrix: Tensor) -> Tensor:
    """(G, n, m) -> the view (b n, H, m)."""
    return x.view(matrix.shape[1], matrix.shape[0], -1).transpose(0, 1)


def mixing_gradient(weights: Tensor, d_mixed: Tensor, matrix: Tensor) -> Tensor:
    """D in the shape of the matrix."""
    if matrix.dim() == 3:
        return torch.bmm(_by_query(weights, matrix), _by_query(d_mixed, matrix).transpose(1, 2))
    heads = matrix.shape[0]
    return torch.mm(weights.view(heads, -1), d_mixed.view(heads, -1).t())


class Masks:
    """Dropout masks of one block after the other, the same again for the same seed."""

    def __init__(self, p: float, seed: int, device: torch.device) -> None:
        self.p, self.scale = p, 0.0 if p == 1 else 1 / (1 - p)  # at p = 1 nothing is left to be scaled
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self, like: Tensor) -> Tensor:
        """1 where an entry is kept, 0 where it is dropped, in shape and dtype of `like`."""
        kept = keep_mask(like.shape, self.p, like, self._generator)
        if kept is not None:
            return kept
        drawn = torch.rand(like.shape, generator=self._generator, device=like.device)
        return (drawn >= self.p).to(like.dtype)
