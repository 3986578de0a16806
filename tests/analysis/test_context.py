"""The reach of memory under Skip-Retain against a memory that is played out token by token, and against the equations."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

import fullrank as fr
from fullrank.analysis.context import compute_published_reach, context

SIZES = [(8, 8), (6, 8), (1, 8), (20, 8), (17, 8), (16, 8), (24, 8), (5, 1), (3, 7)]  # memory, segment


def played(memory_length: int, segment_length: int, rests: list[bool]) -> list[tuple[int, int]]:
    """Distances of the oldest and the nearest remembered token to the first query, at every step with a full memory."""
    memory = []
    seen = []
    for step, rest in enumerate(rests):
        segment = list(range(step * segment_length, (step + 1) * segment_length))
        if rest:
            continue
        if len(memory) == memory_length:
            seen.append((segment[0] - memory[0], segment[0] - memory[-1]))
        memory = (memory + segment)[-memory_length:]
    return seen


@pytest.mark.parametrize(("memory_length", "segment_length"), SIZES)
@pytest.mark.parametrize("p", [0.15, 0.5])
def test_reach_is_that_of_a_memory_played_out(memory_length, segment_length, p):
    """Within 5 standard deviations; steps share up to j segments: variances are at most 2 j + 1 times those of free draws."""
    rng = np.random.default_rng([memory_length, segment_length, int(100 * p)])
    seen = played(memory_length, segment_length, list(rng.random(30_000) < p))
    (layer,) = context([p], memory_length=memory_length, segment_length=segment_length)
    oldest, nearest = np.array(seen).T
    counts = Counter(oldest.tolist())
    assert set(counts) <= set(layer.tokens.tolist())
    spread = 2 * layer.segments + 1
    for tokens, probability in zip(layer.tokens.tolist(), layer.probabilities, strict=True):
        expected = len(seen) * probability
        assert abs(counts[tokens] - expected) <= 5 * math.sqrt(spread * (expected + 1)), tokens
    assert abs(oldest.mean() - layer.mean) <= 5 * layer.deviation * math.sqrt(spread / len(seen))
    deviation = segment_length * math.sqrt(p) / (1 - p)
    assert abs(nearest.mean() - layer.nearest_mean) <= 5 * deviation * math.sqrt(3 / len(seen))


@pytest.mark.parametrize(("memory_length", "segment_length"), SIZES)
@pytest.mark.parametrize("p", [0.0, 0.02, 0.4333, 0.9, 0.99])
def test_moments_and_tail(memory_length, segment_length, p):
    """Mean and deviation in closed form are those of the distribution, whose sum is 1 but for the tail."""
    (layer,) = context([p], memory_length=memory_length, segment_length=segment_length)
    assert 0 <= 1 - layer.probabilities.sum() + 1e-12 < 1.1e-9
    assert (layer.tokens * layer.probabilities).sum() == pytest.approx(layer.mean, rel=1e-6)
    variance = ((layer.tokens - layer.mean) ** 2 * layer.probabilities).sum()
    assert math.sqrt(variance) == pytest.approx(layer.deviation, rel=1e-4)
    assert layer.segments == math.ceil(Fraction(memory_length, segment_length))


def test_the_papers_model():
    """15 layers with M = N = 512: Eq. 6 is 2 * 512 * 91 / 30; the farthest layer has p = 13 / 30.

    p = i / 30, mean M / (1 - p), deviation M sqrt(p) / (1 - p), P(K = k) = p^k (1 - p).
    """
    layers = context(fr.SkipRetain("linear", num_layers=15).probabilities, memory_length=512, segment_length=512)
    for number, layer in enumerate(layers):
        p = number / 30 if number < 14 else 0.0
        assert layer.mean == pytest.approx(512 / (1 - p))
        assert layer.deviation == pytest.approx(512 * math.sqrt(p) / (1 - p))
        assert layer.nearest_mean == pytest.approx(1 + 512 * p / (1 - p))
        assert layer.probabilities == pytest.approx([p**k * (1 - p) for k in range(len(layer.probabilities))])
    quantiles = [layers[13].quantile(share) for share in (0.5, 0.9, 0.99)]
    assert quantiles == [512, 3 * 512, 6 * 512]  # 1 - (13/30)^(k+1): .567 .812 .919 .965 .985 .993
    assert compute_published_reach(layers) == pytest.approx(1024 * 91 / 30)
    farthest = max(layers, key=lambda layer: layer.mean)
    assert farthest.layer == 13
    assert farthest.mean == pytest.approx(512 / (1 - 13 / 30))  # M = N: M / (1 - p)
