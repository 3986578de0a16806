"""Costs of a masked language model, counted by hand."""

from __future__ import annotations

import pytest

import fullrank as fr
from fullrank.analysis.size import measure_masked_size

SIZES = {
    "vocab_size": 101,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}


@pytest.mark.parametrize("asked", [0.15, 1.0])
def test_work_of_a_token(asked: float) -> None:
    """Every token sees all 10, and the output layer works on a share of them."""
    config = fr.ModelConfig(**SIZES, attention=fr.AttentionConfig(mix="position_independent"))
    found = measure_masked_size(config, 10, 2, asked)
    matrices = 3 * (4 * 16 * 16 + 2 * 16 * 40)
    attention = 3 * 2 * 16 * 10  # scores and weighted values
    mixing = 3 * 4 * 4 * 10
    forward = 2 * (matrices + attention + mixing + asked * 16 * 101)
    assert found["flops_per_token"] == {"length": 10, "forward": round(forward), "training": round(3 * forward)}
    model = fr.MaskedLanguageModel(config)
    assert found["parameters"]["total"] == model.num_parameters()
    assert found["parameters"]["mixing"] == 3 * 16
    assert found["parameters"]["output"] == 101 * 17
    assert sum(found["parameters"].values()) == 2 * model.num_parameters(), "every parameter has its part"
    assert found["bytes"] == {
        "weights_fp32": 4 * model.num_parameters(),
        "training_adam_fp32": 16 * model.num_parameters(),
    }
