"""Relative attention for a compiler: the definition without the gather, which would keep a compiler from fusing the scores."""

from __future__ import annotations

from torch import Tensor

from fullrank.core.dropout import dropout
from fullrank.core.engine import Distances, Problem
from fullrank.core.mix import mix_heads
from fullrank.core.shift import shifted
from fullrank.kernels.problem import normalized


def declines(problem: Problem) -> str | None:
    if problem.distances is None or problem.layout.runs is None or not problem.layout.causal:
        return "the definition is as fast for a compiler, except for relative scores of causal keys in runs"
    return None


def attend(problem: Problem) -> Tensor:
    """(B, H, N, D)."""
    assert problem.distances is not None
    scores, layout = shifted_scores(problem, problem.distances), problem.layout
    if not layout.unrestricted:
        scores = scores.masked_fill(~layout.visible(), float("-inf"))
    mixed = mix_heads(normalized(scores, problem.normalize), problem.mixing)
    return dropout(mixed, problem.dropout).to(problem.values.dtype) @ problem.values


def shifted_scores(problem: Problem, distances: Distances) -> Tensor:
    """Relative scores before the mask, (B, H, N, M), of a causal layout with runs; hidden keys get any finite number.

    With the farthest distance first the wanted numbers of row n of (Q + v) R^T, laid out without gaps behind row n - 1, are
    those of row n - 1 one step shorter than a row further on, so the shift is a view (`core/shift.py`).
    """
    query = problem.query
    content, position = (
        ((query + bias[:, None]) * problem.scale).to(query.dtype) for bias in (distances.u, distances.v)
    )
    return content @ problem.keys.transpose(-1, -2) + shifted(position, distances.keys, problem.layout)
