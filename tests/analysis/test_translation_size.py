"""Size of translation models: parameters by place, work and caches by formulas written here; nothing is allocated."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fullrank as fr
from fullrank.analysis.size import PLACES, translation_size
from fullrank.cli import main
from fullrank.config.recipe import resolve
from fullrank.core.config import EncoderConfig

E, F, V, LENGTH = 512, 1024, 6632, 25


def table4(row: str) -> fr.ModelConfig:
    return resolve("mixhead/table4", row, "paper").config.model


def test_parameters_by_place() -> None:
    found = translation_size(table4("h4-plain"), LENGTH)
    attention, feed_forward, norm = 4 * E * E + 4 * E, 2 * E * F + F + E, 2 * E
    assert found["by_place"]["encoder"]["total"] == 8848 * E + 6 * (attention + feed_forward + 2 * norm)
    assert found["by_place"]["decoder"]["total"] == V * E + 6 * (attention + feed_forward + 2 * norm)
    assert found["by_place"]["cross"]["total"] == 6 * (attention + norm)
    assert found["parameters"]["total"] == 39_469_056


@pytest.mark.parametrize("row", ["h4-a", "h32-b", "h64-b-cross", "h64-a-released"])
def test_mixing_stands_where_it_is(row: str) -> None:
    found = translation_size(table4(row), LENGTH)
    heads, mix, *how = row.split("-")
    h = int(heads[1:])
    of_six = 6 * (h * h + (E if mix == "b" else 0))
    expected = {"encoder": of_six, "decoder": of_six, "cross": of_six if how == ["cross"] else 0}
    assert {place: found["by_place"][place]["mixing"] for place in PLACES} == expected
    assert found["parameters"]["mixing"] == sum(expected.values())
    for part, count in found["parameters"].items():
        assert count == sum(found["by_place"][place].get(part, 0) for place in PLACES)


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
