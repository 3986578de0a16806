"""Size of translation models: parameters by place, work and caches by formulas written here; nothing is allocated."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fullrank as fr
from fullrank.analysis.size import translation_size
from fullrank.cli import main
from fullrank.config.recipe import resolve
from fullrank.core.config import EncoderConfig

E, F, V, LENGTH = 512, 1024, 6632, 25


def table4(row: str) -> fr.ModelConfig:
    return resolve("mixhead/table4", row, "paper").config.model


@pytest.mark.parametrize("row", ["h32-b", "h64-b-cross", "h64-a-released"])
def test_parameters_of_mixing(row: str) -> None:
    heads, mix, *how = row.split("-")
    of_six = 6 * (int(heads[1:]) ** 2 + (E if mix == "b" else 0))
    parts = translation_size(table4(row), LENGTH)["parameters"]
    assert parts["mixing"] == of_six * (3 if how == ["cross"] else 2)
    assert parts["total"] == sum(parts.values()) - parts["total"]


def test_work_of_source_and_target_tokens() -> None:
    """Matrices twice, scores and values of the keys that are seen; keys and values of cross-attention belong to the source."""
    found = translation_size(table4("h4-plain"), LENGTH)["flops_per_token"]
    source = 2 * 6 * (4 * E * E + 2 * E * F) + 6 * 4 * E * LENGTH + 2 * 6 * 2 * E * E
    target = 2 * 6 * (6 * E * E + 2 * E * F) + 6 * 4 * E * ((LENGTH + 1) / 2 + LENGTH) + 2 * V * E
    assert found["source"] == {"forward": source, "training": 3 * source}
    assert found["target"] == {"forward": target, "training": 3 * target}
    assert (found["forward"], found["training"]) == (source + target, 3 * (source + target))
    mixed = translation_size(table4("h64-a"), LENGTH)["flops_per_token"]
    assert mixed["source"]["forward"] == source + 6 * 2 * 64 * 64 * LENGTH
    assert mixed["target"]["forward"] == target + 6 * 2 * 64 * 64 * (LENGTH + 1) / 2


def test_work_is_what_a_model_multiplies() -> None:
    """Counted by torch on a forward pass, where the causal mask saves nothing: scores of N keys instead of (N + 1) / 2."""
    config = fr.ModelConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        encoder=EncoderConfig(vocab_size=20),
    )
    model, n = fr.Translator(config).eval(), 9
    counter = FlopCounterMode(display=False)
    with fr.kernel("reference"), torch.no_grad(), counter:
        model(torch.zeros(1, n, dtype=torch.int64), torch.zeros(1, n, dtype=torch.int64))
    hidden = 2 * 4 * 16 * (n - 1) / 2  # of 2 layers, per token: what the mask hides
    found = translation_size(config, n)["flops_per_token"]["forward"]
    assert counter.get_total_flops() == n * (found + hidden)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    said = capsys.readouterr()
    assert stopped.value.code in (0, None), said.err
    return said.out


def test_nothing_is_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    """A model of 29 terabytes."""
    sizes = ["model.hidden_size=65536", "model.intermediate_size=262144", "model.num_hidden_layers=64"]
    found = json.loads(told(capsys, "info", "mixhead/table4", *sizes, "--json"))
    assert found["bytes"]["weights_fp32"] > 2**44
