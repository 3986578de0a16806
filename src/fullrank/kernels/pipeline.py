"""What the kernels of weighted attention are asked to compute: the tensors and the few choices, without modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fullrank.core.layout import Layout
from fullrank.core.mix import (
    AverageHeads,
    KeepHeads,
    PositionIndependentMixing,
    PositionWiseMixing,
    RandomMixing,
)
from fullrank.core.normalize import SigSoftmax, Softmax
from fullrank.core.project import Heads
from fullrank.core.score import DotProduct, XLRelative

if TYPE_CHECKING:
    from fullrank.core.weighted import WeightedValues

Normalizer = Literal["softmax", "sigsoftmax"]

_NORMALIZERS: dict[type, Normalizer] = {Softmax: "softmax", SigSoftmax: "sigsoftmax"}
_SCORES = (DotProduct, XLRelative)
_MIXING = (KeepHeads, PositionIndependentMixing, PositionWiseMixing, RandomMixing, AverageHeads)


@dataclass(frozen=True)
class Distances:
    """The relative term: keys (H, T, D) of the distances in `layout.spans`, the smallest first; u and v (H, D)."""

    keys: Tensor
    u: Tensor
    v: Tensor


@dataclass(frozen=True)
class Pipeline:
    """score -> mask -> normalize -> mix -> dropout -> weighted values, of these tensors.

        A_j(n, m) = s Q_j(n) . K_j(m),   with distances  s ((Q_j(n) + u_j) . K_j(m) + (Q_j(n) + v_j) . R_j(p_n - p_m))
        P_j = normalize(A_j),   P'_i(n, m) = sum_j M_ji(n) P_j(n, m),   O_i = dropout(P'_i) V_i

    query (B, H, N, D), keys and values (B, H, M, D) -> (B, H, N, D), in the dtype of the values.
    mixing: M as (H, H), or (B, N, H, H) where it depends on the query; None is M = I.
    dropout: the probability with which a mixed weight is dropped, the others being divided by 1 - p; 0 outside training.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mixing: Tensor | None
    distances: Distances | None
    layout: Layout
    scale: float
    normalize: Normalizer
    dropout: float

    @property
    def plain(self) -> bool:
        """Scaled dot product, softmax, no mixing: what everybody's fused kernels compute."""
        return self.mixing is None and self.distances is None and self.normalize == "softmax"

    @property
    def fits(self) -> bool:
        """Whether shapes are those that stand above; the reference broadcasts others, or refuses them."""
        (texts, heads, queries, width), keys = self.query.shape, self.keys.shape[2]
        mixing, distances, mask = self.mixing, self.distances, self.layout.key_mask
        return (
            self.keys.shape == self.values.shape == (texts, heads, keys, width)
            and self.layout.shape == (queries, keys)
            and (mixing is None or mixing.shape in ((heads, heads), (texts, queries, heads, heads)))
            and (mask is None or mask.shape in ((1, keys), (texts, keys)))
            and (distances is None or distances.keys.shape == (heads, self.layout.distances, width))
        )

    def differentiable(self) -> list[Tensor]:
        """The tensors that gradients may be asked for."""
        given = (self.query, self.keys, self.values, self.mixing)
        relative = () if self.distances is None else (self.distances.keys, self.distances.u, self.distances.v)
        return [tensor for tensor in (*given, *relative) if tensor is not None]

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.differentiable())


def expressible(attend: WeightedValues) -> bool:
    """Whether stages of exactly these types are a `Pipeline`; a subclass may compute something else."""
    score = type(attend.score)
    if score is XLRelative and attend.score.as_published:
        return False
    return score in _SCORES and type(attend.normalize) in _NORMALIZERS and type(attend.mix) in _MIXING


def pipeline_of(attend: WeightedValues, heads: Heads, layout: Layout) -> Pipeline:
    """What `attend` asks for, of stages that are `expressible`."""
    query, keys, values, distances = heads.scored, heads.keys, heads.values, None
    assert query is not None
    assert keys is not None
    if type(attend.score) is XLRelative:
        assert heads.relative is not None
        distances = Distances(heads.relative[:, : layout.distances], *attend.score.u_and_v())
    return Pipeline(
        query=query,
        keys=keys,
        values=values,
        mixing=_matrix(attend, heads),
        distances=distances,
        layout=layout,
        scale=attend.score.scale,
        normalize=_NORMALIZERS[type(attend.normalize)],
        dropout=attend.dropout if attend.training else 0.0,
    )


def _matrix(attend: WeightedValues, heads: Heads) -> Tensor | None:
    if type(attend.mix) is KeepHeads:
        return None
    if type(attend.mix) is AverageHeads:
        count = attend.size.num_heads
        return heads.values.new_full((count, count), 1 / count)
    matrix: Tensor = attend.mix.matrix(heads.query if "query" in attend.mix.needs else None)
    return matrix
