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


def test_caches() -> None:
    sizes = translation_size(table4("h4-plain"), LENGTH)["bytes"]
    assert sizes["cache_per_token_fp32"] == sizes["cache_per_source_token_fp32"] == 4 * 6 * 2 * E
    assert (sizes["state_per_text_fp32"], sizes["weights_fp32"]) == (0, 4 * 39_469_056)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    said = capsys.readouterr()
    assert stopped.value.code in (0, None), said.err
    return said.out


def test_info_of_a_translation_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "info", "mixhead/table4", "--row", "h64-a")
    assert "mixhead/table4, row h64-a, scale paper" in shown
    large = json.loads(told(capsys, "info", "mixhead/table4", "--row", "h64-a", "--json"))
    places = ("encoder", "decoder", "cross")
    assert [large["by_place"][place]["mixing"] for place in places] == [24_576, 24_576, 0]
    assert large["paper"] == {"valid_tokenised_bleu": 31.74, "test_tokenised_bleu": 31.32}
    found = json.loads(told(capsys, "info", "mixhead/table4", "--row", "h4-a", "--length", "10", "--json"))
    assert found["parameters"]["total"] == 39_469_056 + 192
    assert found["flops_per_token"]["length"] == 10
    assert found["by_place"]["encoder"]["mixing"] == found["by_place"]["decoder"]["mixing"] == 96


def test_nothing_is_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    """A model of 29 terabytes."""
    sizes = ["model.hidden_size=65536", "model.intermediate_size=262144", "model.num_hidden_layers=64"]
    found = json.loads(told(capsys, "info", "mixhead/table4", *sizes, "--json"))
    assert found["bytes"]["weights_fp32"] > 2**44


@pytest.mark.parametrize("name", ["mixhead/table4", "mixhead/table4-long", "tensorized/table3"])
def test_verbs_that_show_recipes(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert name in told(capsys, "recipes", "list")
    assert "notes:" in told(capsys, "recipes", "show", name)
    assert "batch_tokens" in told(capsys, "config", "show", name, "--scale", "small")
    assert "valid (" in told(capsys, "config", "validate", name)
    schema = json.loads(told(capsys, "config", "schema"))
    assert {"encoder", "decoder"} <= schema["$defs"]["ModelConfig"]["properties"].keys()
