"""Multi-linear attention in `size`: parameters beside multi-head attention, multiply-adds, and what decoding keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fullrank as fr
from fullrank.analysis.size import size
from fullrank.kernels import multilinear as engine
from fullrank.kernels.multilinear import Size, multiply_adds


def config(score: str = "dot_product", memory: int = 0, same: bool = False, **attention: Any) -> fr.ModelConfig:
    """E = 12, R = 5, two layers, 10 positions."""
    return fr.ModelConfig(
        vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
        max_position_embeddings=10, position="relative" if score == "relative" else "none", memory_length=memory,
        same_length=same, attention=fr.AttentionConfig(kind="multilinear", rank=5, score=score, **attention),
    )  # fmt: skip


# -- multiply-adds ----------------------------------------------------------------------------------------------------


def others(count: int = 1) -> int:
    """Multiply-adds of a token beside attention: projections, feed-forward, vocabulary."""
    return 2 * (3 * 12 * 5 + 2 * 12 * 20) + 30 * 12 * count


def test_flops_of_a_long_text() -> None:
    """The order is chosen for the batch."""
    model = fr.ModelConfig(**{**vars(config("relative")), "max_position_embeddings": 200})
    for batch in (1, 4):
        found = size(model, 160, batch)["flops_per_token"]
        tensor = multiply_adds(Size(batch, 160, 160, 10, 12, True))
        assert found["forward"] == round(2 * (others() + 2 * tensor.forward / (batch * 160)))
        assert found["training"] == round(6 * others() + 2 * 2 * tensor.training / (batch * 160))
        assert tensor.forward < batch * 160**3 * (10 + 12) / 2  # cheaper than T
    published = config("relative", causal="as_published", not_next_token_perplexity=True)
    found = size(fr.ModelConfig(**{**vars(published), "max_position_embeddings": 200}), 160)["flops_per_token"]
    tensor = multiply_adds(Size(1, 160, 160, 10, 12, False))
    assert found["forward"] == round(2 * (others() + 2 * tensor.forward / 160))


@pytest.mark.parametrize("score", ["dot_product", "relative"])
@pytest.mark.parametrize("same", [False, True])
def test_flops_are_what_a_model_multiplies(score: str, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own count of two segments, the second one over the first; keys of places are the one thing more."""
    monkeypatch.setattr(engine, "_operator", engine._forward)  # the count does not look into operators
    settings = vars(config(score, memory=40, same=same)) | {"max_position_embeddings": 90}
    model, batch, n = fr.LanguageModel(fr.ModelConfig(**settings)).eval(), 2, 40
    text = torch.zeros(batch, n, dtype=torch.int64)
    places = 2 * 12 * 5 * 2 * (score == "relative")  # a layer and place
    memory = None
    for keys in (n, 2 * n):
        with torch.no_grad(), FlopCounterMode(display=False) as count:
            found = model(text, memory=memory)
        memory = found.memory
        expected = size(
            fr.ModelConfig(**settings | {"memory_length": keys - n, "same_length": same and keys > n}), n, batch
        )
        more = count.get_total_flops() - batch * n * expected["flops_per_token"]["forward"]
        assert abs(more - places * keys) <= batch * n / 2  # rounded, a token


# -- what decoding keeps ----------------------------------------------------------------------------------------------


def kept(model: fr.LanguageModel, tokens: int) -> int:
    """Bytes of all tensors in the cache of two texts, a text."""
    with torch.no_grad():
        cache = model(torch.zeros(2, tokens, dtype=torch.int64), cache=model.new_cache()).cache
    values = [
        value for layer in cache.layers for value in (layer if isinstance(layer, tuple) else vars(layer).values())
    ]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor)) // 2


@pytest.mark.parametrize("made", [
    config(), config("relative"), config(output_map="decayed", decays=4),
    fr.ModelConfig(vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, head_dim=5, position="none"),
], ids=["pairs", "with positions", "decayed", "multi-head"])  # fmt: skip
def test_the_bytes_of_a_cache(made: fr.ModelConfig) -> None:
    model, found = fr.LanguageModel(made), size(made, 8)["bytes"]
    for tokens in (1, 2, 7):
        assert kept(model, tokens) == tokens * found["cache_per_token_fp32"] + found["state_per_text_fp32"]
    decayed = getattr(made.attention, "decays", None) is not None
    assert (found["state_per_text_fp32"] > 0) == decayed == (found["cache_per_token_fp32"] == 0)
