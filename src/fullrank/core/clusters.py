"""The clusters of adaptive layers: frequent words are wide, rare ones narrow."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from torch import Tensor

from fullrank.core.config import cluster_problems
from fullrank.core.errors import ConfigError


@dataclass(frozen=True)
class Clusters:
    """Cluster i holds the ids from starts[i] up to starts[i] + sizes[i], as vectors of widths[i] = E // div_val^i."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    projected: bool  # div_val is not 1, so that vectors are not of the model's width

    @classmethod
    def of(
        cls, key: str, cutoffs: list[int] | None, div_val: int, vocab_size: int | None, hidden_size: int
    ) -> Clusters:
        """Clusters that end at `cutoffs` and at `vocab_size`; ConfigError names `key` (`model.input`, `model.output`)."""
        if vocab_size is None:
            raise ConfigError("model.vocab_size: must be a number to build a model (a run takes it from its data)")
        if problems := cluster_problems(key, cutoffs, div_val, vocab_size, hidden_size):
            raise ConfigError(*problems)
        starts, ends = (0, *(cutoffs or ())), (*(cutoffs or ()), vocab_size)
        return cls(
            starts,
            tuple(end - start for start, end in zip(starts, ends, strict=True)),
            tuple(hidden_size // div_val**i for i in range(len(starts))),
            div_val != 1,
        )

    def number(self, ids: Tensor) -> Tensor:
        """The cluster of each id, int64, same shape; an id that no cluster holds is counted to the nearest."""
        cluster = (ids >= self.starts[1]).long()
        for start in self.starts[2:]:
            cluster += ids >= start
        return cluster

    def shares(self) -> list[float]:
        """How large a part of a text each cluster is by Zipf's law (the word of rank r is as frequent as 1 / r)."""
        ends = [0.0] + [math.log(2 * (start + size) + 1) for start, size in zip(self.starts, self.sizes, strict=True)]
        return [(b - a) / ends[-1] for a, b in itertools.pairwise(ends)]
