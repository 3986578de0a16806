"""Relative attention over keys in pieces and within a window: the definition and the engines against the equation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fullrank as fr
from fullrank.core.attention import WeightedValues
from fullrank.core.project import Heads
from fullrank.core.stage import HeadSize

H, D, E = 3, 4, 10

# queries, runs of keys (the last one ends with the queries), window
LAYOUTS = {
    "gap below the segment": (13, ((0, 9), (15, 20)), None),
    "gap beyond the segment": (13, ((0, 9), (50, 20)), None),
    "no earlier key beside the segment": (11, ((-40, 17), (0, 11)), None),
    "three runs": (7, ((-90, 5), (-20, 3), (-4, 11)), None),
    "gap of one": (10, ((0, 6), (7, 3), (11, 12)), None),
    "window below the segment": (13, ((0, 30),), 5),
    "window of one": (6, ((0, 9),), 1),
    "window beyond the segment": (13, ((0, 40),), 21),
    "window that hides nothing": (5, ((0, 9),), 9),
    "window that ends in a gap": (6, ((0, 9), (30, 10)), 12),
    "window that ends in an old run": (6, ((0, 9), (14, 10)), 16),
    "window that hides an old run from some": (9, ((0, 4), (6, 5), (14, 12)), 11),
    "window that hides an old run from later rows": (9, ((0, 4), (14, 12)), 18),
    "one query": (1, ((0, 30),), None),
    "one query after a gap": (1, ((0, 9), (15, 4), (40, 1)), None),
    "one query, window": (1, ((0, 9), (15, 14)), 17),
}
WHERE = pytest.mark.parametrize("name", LAYOUTS)


def layout(name: str) -> fr.Layout:
    queries, runs, window = LAYOUTS[name]
    return fr.Layout.of_runs(queries, runs, window=window)


def attend(mix: str = "none", normalize: str = "softmax", p: float = 0.0) -> WeightedValues:
    torch.manual_seed(4)
    made = WeightedValues(fr.AttentionConfig(score="relative", mix=mix, normalize=normalize), HeadSize(H, D, E, 9), p)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made.double()


def operands(where: fr.Layout, batch: int = 3, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    (queries, keys), generator = where.shape, torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {"query": drawn(batch, queries, H, D), "keys": drawn(batch, H, keys, D), "values": drawn(batch, H, keys, D),
            "relative": drawn(where.distances, H, D)}  # fmt: skip


def heads(given: dict[str, Tensor]) -> Heads:
    query = given["query"].transpose(1, 2)
    return Heads(query, query, given["keys"], given["values"], given["relative"].transpose(0, 1))


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@WHERE
def test_the_equation(name: str, kernel: str) -> None:
    """By a loop over queries and keys, distances by subtraction of positions; with gradients and without."""
    queries, runs, window = LAYOUTS[name]
    where, made = layout(name), attend()
    given = operands(where, batch=1)
    places = [start + i for start, size in runs for i in range(size)]
    row = {}  # where the key of a distance stands
    for low, high in where.spans:
        for distance in range(low, high + 1):
            row[distance] = len(row)
    assert list(row) == sorted(row)
    u, v = (bias.detach() for bias in (made.score.biases.content_bias, made.score.biases.position_bias))
    query_of, key_of, far_of = (given[name].detach() for name in ("query", "keys", "relative"))
    expected = torch.zeros(1, H, queries, D, dtype=torch.float64)
    for h in range(H):
        for n in range(queries):
            own, query = places[len(places) - queries + n], query_of[0, n, h]
            scores = {}
            for m, place in enumerate(places):
                if place <= own and (window is None or own - place < window):
                    far = far_of[row[own - place], h]
                    scores[m] = float((query + u[h]) @ key_of[0, h, m] + (query + v[h]) @ far) / math.sqrt(D)
            total = sum(math.exp(score) for score in scores.values())
            for m, score in scores.items():
                expected[0, h, n] += math.exp(score) / total * given["values"][0, h, m].detach()
    with fr.kernel(kernel):
        assert (made(heads(given), where).detach() - expected).abs().max() < 1e-12
        with torch.no_grad():
            assert (made.eval()(heads(given), where) - expected).abs().max() < 1e-12
