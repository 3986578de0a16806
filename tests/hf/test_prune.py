"""Heads taken out of Hugging Face models: their outputs are those without these columns of the output projection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_families import FAMILIES  # noqa: E402

import fullrank as fr  # noqa: E402
from fullrank.core.errors import InputError  # noqa: E402

WIDTH = 8
# the output projection of a layer, and whether its weight is (inputs, outputs)
MERGES: dict[str, tuple[Callable[[Any], list[Any]], bool]] = {
    "gpt2": (lambda model: [block.attn.c_proj for block in model.transformer.h], True),
    "llama": (lambda model: [layer.self_attn.o_proj for layer in model.model.layers], False),
    "bert": (lambda model: [layer.attention.output.dense for layer in model.bert.encoder.layer], False),
}


@pytest.mark.parametrize("family", MERGES)
def test_pruned_is_ablated_and_smaller(family: str, tmp_path: Path) -> None:
    model, inputs = FAMILIES[family]()
    model, inputs = model.double(), {"input_ids": inputs["input_ids"]}
    merges, transposed = MERGES[family]
    gone = {0: [0, 1], 1: [2, 3]}  # of llama whole groups that share keys and values
    smaller = fr.analysis.prune(model, gone)
    smaller.save_pretrained(tmp_path)
    with torch.no_grad():
        for merge, heads in zip(merges(model), gone.values(), strict=True):
            weight = merge.weight.T if transposed else merge.weight
            weight.unflatten(1, (-1, WIDTH))[:, heads] = 0
    torch.testing.assert_close(smaller(**inputs)[0], model(**inputs)[0], rtol=0, atol=1e-10)
    loaded = fr.load_injected(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(loaded(**inputs)[0], smaller(**inputs)[0], rtol=0, atol=1e-12)
    width, groups, bias = 32, 2 if family == "llama" else 1, 0 if family == "llama" else 1
    rows = 2 * WIDTH * (1 + 2 // groups)  # of queries, keys and values
    assert model.num_parameters() - loaded.num_parameters() == 2 * (rows * (width + bias) + 2 * WIDTH * width)
    injected = fr.inject(loaded, mix="position_wise")
    injected.save_pretrained(tmp_path / "injected")
    again = fr.load_injected(tmp_path / "injected", dtype=torch.float64)
    torch.testing.assert_close(again(**inputs)[0], smaller(**inputs)[0], rtol=0, atol=1e-10)
    with pytest.raises(InputError, match=r"take it out \(fullrank.remove\)"):
        fr.analysis.prune(again, {0: [0]})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(smaller).from_pretrained(tmp_path)


def test_heads_that_share_keys_and_values_are_chosen_together() -> None:
    model, inputs = FAMILIES["llama"]()
    found = fr.analysis.heads(model, inputs["input_ids"])
    sums = {(i, j): layer.change[2 * j : 2 * j + 2].sum() for i, layer in enumerate(found.layers) for j in range(2)}
    layer, group = min(sums, key=sums.__getitem__)
    assert found.least(2) == {layer: [2 * group, 2 * group + 1]}
    assert fr.analysis.prune(model, found.least(4)).num_parameters() < model.num_parameters()
    for count in (3, 6):
        with pytest.raises(InputError, match="at most 4, 2 at a time, which share keys and values"):
            found.least(count)


def test_what_cannot_be_pruned_is_named() -> None:
    llama, _ = FAMILIES["llama"]()
    with pytest.raises(InputError, match=r"2 heads share keys and values and go together; given \[1, 2, 3\] to keep"):
        fr.analysis.prune(llama, {0: [0]})
    fused = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
    ))  # fmt: skip
    with pytest.raises(InputError, match="GPTNeoXAttention has other projections than by head"):
        fr.analysis.prune(fused, {0: [0]})
    olmo = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=0,
    ))  # fmt: skip
    with pytest.raises(InputError, match="its layers fix the number of heads"):
        fr.analysis.prune(olmo, {0: [0]})
