"""The share of the gradient that the output layer lets through (Godey and Artzi 2026, arXiv 2603.10145).

    G = d nll / d s = p - 1[y]   (T, V)      s = h W' + b,  W (V, d)
    let through:  ||G U|| / ||G||,   U (V, d) an orthonormal basis of the columns of W

Training moves the logits s by moving h, and so along columns of W only: what of G lies across them is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullrank.analysis.rank import describe_output
from fullrank.core.errors import InputError
from fullrank.core.output import IGNORED
from fullrank.models import LoadedModel, open_model

_CHUNK = 1 << 23  # numbers of G that are held at a time


@dataclass(frozen=True)
class GradientShare:
    """squares: ||G||^2 over `tokens` tokens. let_through_squares: ||G U||^2."""

    squares: float
    let_through_squares: float
    tokens: int

    @property
    def let_through(self) -> float:
        """||G U|| / ||G||."""
        return (self.let_through_squares / self.squares) ** 0.5


def gradient_share(model: nn.Module | LoadedModel, batches: Iterable[tuple[Tensor, Tensor]]) -> GradientShare:
    """The share of the gradient of the nll that the output layer of `model` lets through, by its norm.

    model: of ours or of Hugging Face, with one softmax over a single output matrix.
    batches: input_ids and targets (B, N) int64; targets -100 do not count. Every row is read on its own, without memory.
    Raises InputError for another output layer, and where no target counts.
    """
    loaded = open_model(model)
    loaded.require({"logits", "output_matrix"}, "share of the gradient")
    output = describe_output(loaded)
    exempt = output.exempt
    if exempt is not None:
        raise InputError(f"share of the gradient: {loaded.name} has no logits of one softmax: {exempt}")
    matrix = loaded.output_matrix()
    basis = find_basis(matrix)
    squares = 0.0
    let_through = 0.0
    tokens = 0
    for ids, targets in batches:
        counts = targets != IGNORED
        tokens += int(counts.sum())
        logits = loaded.logits(ids)[counts.to(loaded.device)]
        wanted = targets[counts].to(loaded.device)
        vocab_size = logits.shape[1]
        rows = max(1, _CHUNK // vocab_size)
        for scores, words in zip(logits.split(rows), wanted.split(rows), strict=True):
            gradient = scores.double().softmax(-1)
            numbers = torch.arange(len(words))
            gradient[numbers, words] -= 1
            inside = gradient @ basis[:vocab_size]
            squares += float(gradient.square().sum())
            let_through += float(inside.square().sum())
    if not tokens:
        raise InputError("targets: none of them counts")
    return GradientShare(squares, let_through, tokens)


def find_basis(weight: Tensor) -> Tensor:
    """U (V, r): an orthonormal basis of the columns of `weight` (V, d), of rank r."""
    wide = weight.double()
    q, triangle = torch.linalg.qr(wide)
    u, s, _ = torch.linalg.svd(triangle)
    precision = torch.finfo(s.dtype).eps
    least = s[0] * max(wide.shape) * precision
    rank = int((s > least).sum())
    return q @ u[:, :rank]
