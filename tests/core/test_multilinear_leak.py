"""On fresh random tokens no honest perplexity is below the size of the vocabulary; the published form gets far below it.

Uniform tokens, V = 32, segments of 16, two layers; every step and the measurement see tokens that were never seen before.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fullrank as fr

VOCABULARY, LENGTH, STEPS, ROWS, SEGMENTS = 32, 16, 150, 64, 2000


def trained(**attention: Any) -> Tensor:
    """nll (S, N) of fresh segments after training on others."""
    torch.manual_seed(1)
    config = fr.ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        position="learned",
        norm="post",
        initializer="pytorch",
        attention=fr.AttentionConfig(kind="multilinear", rank=32, core_weights="free", bias=False, **attention),
    )
    model = fr.LanguageModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1, (step + 1) / 50)
        text = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        optimizer.zero_grad()
        model.loss(text[:, :-1], text[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    text = torch.randint(VOCABULARY, (SEGMENTS, LENGTH + 1), generator=generator)
    with torch.no_grad():
        return model.eval().nll(text[:, :-1], text[:, 1:]).per_token


def perplexity(nll: Tensor) -> float:
    return math.exp(float(nll.mean()))


@pytest.mark.parametrize("output_map", ["pairs", "decayed"])
def test_the_masked_form_learns_nothing_about_random_tokens(output_map: str) -> None:
    nll = trained(output_map=output_map)
    assert 31.9 <= perplexity(nll) < 34
    assert perplexity(nll[:, -1]) >= 31.9


def test_the_published_form_reads_its_targets() -> None:
    """At every position but the last, whose target is not among its tokens; there it is worse than chance."""
    nll = trained(causal="as_published", not_next_token_perplexity=True)
    assert perplexity(nll) < 20
    assert perplexity(nll[:, :-1]) < perplexity(nll)
    assert perplexity(nll[:, -1]) > VOCABULARY
