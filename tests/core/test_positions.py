"""Angles and absolute positions against their equations, near the start of a text and far into it."""

import math

import pytest
import torch

import fullrank as fr
from fullrank.core.embedding import Sinusoidal, angles


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoids(width):
    places = torch.tensor([0, 1, 17, 5000])
    added = Sinusoidal(fr.ModelConfig(hidden_size=width, num_attention_heads=1))(
        torch.zeros(1, 4, width, dtype=torch.float64), places
    )
    for n, p in enumerate(places.tolist()):
        for i in range(width):
            angle = p / 10000 ** (2 * (i // 2) / width)
            assert abs(float(added[0, n, i]) - (math.cos(angle) if i % 2 else math.sin(angle))) < 1e-10


@pytest.mark.parametrize("size", [7, 8])
def test_angles_are_exact_anywhere(size):
    positions = torch.tensor([0, 1, 511, 187_000, 5_000_001])
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.float64, 1e-8)):
        radians = angles(positions, size, 10000.0, torch.empty(0, dtype=dtype))
        assert radians.shape == (5, (size + 1) // 2)
        for row, position in enumerate(positions.tolist()):
            for i in range((size + 1) // 2):
                angle = position * 10000.0 ** (-2 * i / size)
                assert abs(math.sin(angle) - math.sin(float(radians[row, i]))) < tolerance
                assert abs(math.cos(angle) - math.cos(float(radians[row, i]))) < tolerance


@pytest.mark.parametrize("position", ["rotary", "relative"])
def test_what_depends_on_distance_does_so_far_into_a_text(position):
    """Two segments read at the start and after 3 million tokens agree in fp32."""
    torch.manual_seed(0)
    score = "relative" if position == "relative" else "dot_product"
    config = fr.ModelConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, position=position, memory_length=6,
        attention=fr.AttentionConfig(score=score),
    )  # fmt: skip
    model = fr.LanguageModel(config).eval()
    ids = torch.randint(9, (1, 12))
    from fullrank.core.memory import Memory

    early = None
    late = Memory(Memory.empty(2).layers, 3_000_000)
    differences = []
    for part in ids.split(6, dim=1):
        early_out, late_out = model(part, early), model(part, late)
        early, late = early_out.memory, late_out.memory
        differences.append(float((early_out.logits - late_out.logits).detach().abs().max()))
    assert max(differences) < 2e-6
