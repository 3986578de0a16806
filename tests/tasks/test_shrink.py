"""Every row of every recipe can be made small, and keeps its mechanisms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fullrank as fr
from fullrank.config.recipe import load, resolve, shipped
from fullrank.tasks.shrink import shrunk

KEPT = ("position", "norm", "hidden_act", "initializer", "dropout", "scale_embedding", "same_length", "final_norm")


def test_every_recipe() -> None:
    seen = set()
    for name in shipped():
        recipe = load(name)
        for row in recipe.rows:
            first = row == next(iter(recipe.rows))
            for scale in list(recipe.scales)[: None if first else 1]:
                config = resolve(name, row, scale).config.model
                if repr(config) in seen:
                    continue
                seen.add(repr(config))
                small, changed = shrunk(config)
                with torch.device("meta"):
                    count = fr.LanguageModel(small).num_parameters()
                assert count <= 100_000, (name, row, scale)
                assert changed, (name, row, scale)
                assert [getattr(small, key) for key in KEPT] == [getattr(config, key) for key in KEPT]
                for part in ("attention", "input", "output"):
                    before, after = getattr(config, part), getattr(small, part)
                    sizes = {"cutoffs", "mixtures", "rank", "cores", "decays"}
                    same = {key: value for key, value in vars(before).items() if key not in sizes}
                    assert {key: vars(after)[key] for key in same} == same
                    if hasattr(before, "cutoffs"):
                        assert len(after.cutoffs or ()) == len(before.cutoffs or ())
                assert (small.memory_length > 0) == (config.memory_length > 0)
                assert (small.hidden_size == small.num_attention_heads * (small.head_dim or 0)) == (
                    config.hidden_size == config.num_attention_heads * (config.head_dim or 0)
                )
    assert len(seen) > 50


def test_what_is_small_stays() -> None:
    config = fr.ModelConfig(vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=2)
    assert shrunk(config) == (config, ())
    small, changed = shrunk(replace(config, vocab_size=None))
    assert small.vocab_size == 32
    assert changed[0] == "vocab_size that of the data -> 32"


@pytest.mark.parametrize("head_dim", [3, 5, 64])
def test_heads_that_do_not_add_up_stay_so(head_dim: int) -> None:
    config = fr.ModelConfig(vocab_size=50_000, hidden_size=96, num_attention_heads=6, head_dim=head_dim)
    small, _ = shrunk(config)
    assert small.head_dim == min(head_dim, 4)
    assert small.hidden_size != small.num_attention_heads * small.head_dim


@pytest.mark.parametrize("options", [{"cores": 5}, {"output_map": "decayed", "decays": 16}, {"score": "relative"}])
def test_multilinear_attention(options: dict[str, Any]) -> None:
    """Pairs of positions, cores, rank and decays get small; what is not there is not made up."""
    attention = fr.AttentionConfig(kind="multilinear", rank=40, **options)
    position = "relative" if "score" in options else "none"
    small, changed = shrunk(
        fr.ModelConfig(
            vocab_size=10_000, hidden_size=256, max_position_embeddings=512, position=position, attention=attention
        )
    )
    positions = 40 if attention.output_map == "decayed" else 23  # pairs of which have parameters
    assert {"attention.rank 40 -> 6", f"max_position_embeddings 512 -> {positions}"} <= set(changed)
    assert small.attention.cores == min(attention.cores or 0, 3)
    assert small.attention.decays == (3 if attention.decays else None)
    kept = ("kind", "output_map", "causal", "core_weights", "score")
    assert [getattr(small.attention, key) for key in kept] == [getattr(attention, key) for key in kept]
    with torch.device("meta"):
        assert fr.LanguageModel(small).num_parameters() <= 100_000
