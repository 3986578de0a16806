"""What a run with multi-linear attention cannot ask for: told when it is configured, not at a step or after all."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fullrank.config.load import build
from fullrank.core.config import with_memory
from fullrank.core.errors import ConfigError

MASKED = {"attention": {"kind": "multilinear"}}
PUBLISHED = {"attention": {"kind": "multilinear", "causal": "as_published", "not_next_token_perplexity": True}}
DECAYED = {"attention": {"kind": "multilinear", "output_map": "decayed"}}
RELATIVE = {"position": "relative", "attention": {"kind": "multilinear", "score": "relative"}}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            {"model": MASKED, "train": {"orthogonality": 0.1}},
            ["train.orthogonality:", "given 0.1", "model.attention.kind"],
        ),
        ({"model": MASKED, "train": {"overlap": 2.0}}, ["train.overlap:", "given 2.0", "model.attention.kind"]),
        ({"model": RELATIVE, "eval": {"clamp_length": 9}}, ["eval.clamp_length: 9", "multi-linear", "none to clamp"]),
        (
            {"model": PUBLISHED, "eval": {"memory_length": 8}},
            ["eval.memory_length: 8", "as_published", "drops the memory"],
        ),
        (
            {"model": {**DECAYED, "memory_length": 8}, "eval": {"same_length": True}},
            ["eval.same_length: True", "output_map: decayed"],
        ),
    ],
)
def test_refused(raw: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(raw)
    (problem,) = caught.value.problems
    for words in said:
        assert words in problem


def test_both_penalties_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        build({"model": MASKED, "train": {"orthogonality": 0.1, "overlap": 0.2}})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["train.orthogonality", "train.overlap"]


def test_allowed() -> None:
    weighted = {"position": "relative", "attention": {"score": "relative"}}
    build({"model": weighted, "train": {"orthogonality": 0.1, "overlap": 0.1}, "eval": {"clamp_length": 9}})
    build({"model": PUBLISHED, "eval": {"memory_length": 0}})
    build({"model": RELATIVE, "eval": {"memory_length": 8, "same_length": True}})
    build({"model": {**DECAYED, "memory_length": 8}, "eval": {"memory_length": 4}})
    zeros = {**weighted, "memory_length": 8, "same_length": True, "memory_start": "zeros"}
    build({"model": zeros, "eval": {"memory_length": 0}})  # without memory there is no window and no start of it


def test_no_distances_to_clamp() -> None:
    model = build({"model": RELATIVE}).model
    with pytest.raises(ConfigError, match=re.escape("given 5 with model.attention.kind: multilinear")):
        with_memory(model, clamp_length=5)
