"""The reach of memory under Skip-Retain against a memory that is played out token by token, and against the equations."""

import math
from collections import Counter

import numpy as np
import pytest

import fullrank as fr
from fullrank.analysis.context import context

SIZES = [(8, 8), (6, 8), (1, 8), (20, 8), (17, 8), (16, 8), (24, 8), (5, 1), (3, 7)]  # memory, segment


def play_memory(memory_length, segment_length, rests):
    """Distances of the oldest remembered token to the first query, at every step with a full memory."""
    memory = []
    seen = []
    for step, rest in enumerate(rests):
        segment = list(range(step * segment_length, (step + 1) * segment_length))
        if rest:
            continue
        if len(memory) == memory_length:
            seen.append(segment[0] - memory[0])
        memory = (memory + segment)[-memory_length:]
    return np.array(seen)


@pytest.mark.parametrize(("memory_length", "segment_length"), SIZES)
@pytest.mark.parametrize("p", [0.15, 0.5])
def test_reach_is_that_of_a_memory_played_out(memory_length, segment_length, p):
    """Within 5 standard deviations; steps share up to j segments: variances are at most 2 j + 1 times those of free draws."""
    rng = np.random.default_rng([memory_length, segment_length, int(100 * p)])
    oldest = play_memory(memory_length, segment_length, list(rng.random(30_000) < p))
    (layer,) = context([p], memory_length=memory_length, segment_length=segment_length)
    skips, rests = np.divmod(oldest - memory_length, segment_length)
    assert not rests.any()
    counts = Counter(skips.tolist())
    spread = 2 * math.ceil(memory_length / segment_length) + 1
    for skipped in range(int(layer.skips.isf(1e-9)) + 1):
        expected = len(oldest) * layer.skips.pmf(skipped)
        assert abs(counts.pop(skipped, 0) - expected) <= 5 * math.sqrt(spread * (expected + 1)), skipped
    assert not counts
    assert abs(oldest.mean() - layer.mean) <= 5 * layer.deviation * math.sqrt(spread / len(oldest))


@pytest.mark.parametrize(("memory_length", "segment_length"), SIZES)
@pytest.mark.parametrize("p", [0.0, 0.02, 0.4333, 0.9, 0.99])
def test_moments(memory_length, segment_length, p):
    """Mean and deviation are those of the closed form."""
    (layer,) = context([p], memory_length=memory_length, segment_length=segment_length)
    segments = math.ceil(memory_length / segment_length)
    assert layer.mean == pytest.approx(memory_length + segment_length * segments * p / (1 - p))
    assert layer.deviation == pytest.approx(segment_length * math.sqrt(segments * p) / (1 - p))


def test_the_papers_model():
    """15 layers with M = N = 512: the farthest layer has p = 13 / 30.

    p = i / 30, mean M / (1 - p), deviation M sqrt(p) / (1 - p), P(K = k) = p^k (1 - p).
    """
    layers = context(fr.SkipRetain("linear", num_layers=15).probabilities, memory_length=512, segment_length=512)
    for number, layer in enumerate(layers):
        p = number / 30 if number < 14 else 0.0
        assert layer.mean == pytest.approx(512 / (1 - p))
        assert layer.deviation == pytest.approx(512 * math.sqrt(p) / (1 - p))
        assert layer.skips.pmf(range(9)) == pytest.approx([p**k * (1 - p) for k in range(9)])
    quantiles = layers[13].skips.ppf([0.5, 0.9, 0.99])
    assert quantiles.tolist() == [0, 2, 5]  # 1 - (13/30)^(k+1): .567 .812 .919 .965 .985 .993
    farthest = max(layers, key=lambda layer: layer.mean)
    assert farthest.layer == 13
    assert farthest.mean == pytest.approx(512 / (1 - 13 / 30))  # M = N: M / (1 - p)
