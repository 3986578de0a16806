"""A memory as a value: other lengths, checkpoints, rows, precisions, and cached keys that serve only what made them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_models import POSITIONS, V, in_segments, model, one_pass, text

import fullrank as fr
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory


def test_cached_keys_are_not_used_after_the_weights_have_changed() -> None:
    made, ids = model("relative"), text()
    with torch.no_grad():
        memory = made(ids[:, :6]).memory
        before = made(ids[:, 6:9], memory).logits
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    made.loss(ids[:, :6], ids[:, 1:7]).backward()
    optimizer.step()
    with torch.no_grad():
        found = made(ids[:, 6:9], memory).logits
        forgetful = Memory.from_tensors(memory.to_tensors())  # hidden states alone
        assert torch.equal(found, made(ids[:, 6:9], forgetful).logits)
    assert (found - before).abs().max() > 1e-3


def test_a_memory_is_a_value() -> None:
    made, ids = model("rotary"), text()
    first = made(ids[:, :6]).memory
    again = [made(ids[:, 6:9], first).logits for _ in range(2)]
    assert torch.equal(*again)
    assert first.length == 6


def test_other_lengths_at_evaluation() -> None:
    made, ids = model("relative", memory_length=3), text()
    sizes = [4, 5, 6]
    before = in_segments(made, ids, sizes)[0]
    changed = made.with_memory(8)
    assert (in_segments(changed, ids, sizes)[0] - one_pass(changed, ids[:, :15], sizes, 8)).abs().max() < 1e-10
    changed = made.with_memory(6, same_length=True)
    expected = one_pass(changed, ids[:, :15], sizes, 6, same_length=True)
    assert (in_segments(changed, ids, sizes)[0] - expected).abs().max() < 1e-10
    changed = made.with_memory(0)
    assert changed(ids[:, :4]).memory is None
    changed = made.with_memory(8, clamp_length=4)
    other = fr.LanguageModel(
        replace(
            made.config,
            memory_length=8,
            attention=replace(made.config.attention, score={"name": "relative", "clamp_length": 4}),
        )
    )
    other.double().eval().load_state_dict(changed.state_dict())
    clamped = in_segments(changed, ids, sizes)[0]
    assert torch.equal(clamped, in_segments(other, ids, sizes)[0])
    assert (clamped - before).abs().max() > 1e-3
    assert torch.equal(in_segments(made, ids, sizes)[0], before)
    longer = in_segments(made, ids, sizes)[1]
    changed = made.with_memory(2)  # of a longer memory, the last tokens are used
    after = [
        replace(layer, hidden=layer.hidden[:, -2:], runs=((start + size - 2, 2),), heads=None)
        for layer in longer.layers
        for start, size in [layer.runs[-1]]
    ]
    expected = changed(ids[:, 15:], replace(longer, layers=tuple(after))).logits
    assert (changed(ids[:, 15:], longer).logits - expected).abs().max() < 1e-12
    assert in_segments(changed, ids, sizes)[1].layers[0].tokens == 2
    assert changed(ids[:, 15:], longer).memory.layers[0].tokens == 2


def test_a_saved_model_keeps_its_other_lengths(tmp_path: Any) -> None:
    made, ids = model("relative", memory_length=3), text()
    changed = made.with_memory(6, same_length=True, clamp_length=5)
    changed.save(tmp_path)
    loaded = fr.LanguageModel.load(tmp_path)
    assert (loaded.memory_length, loaded.config.same_length) == (6, True)
    assert torch.equal(in_segments(loaded, ids, [5, 6])[0], in_segments(changed, ids, [5, 6])[0])
    without = changed.with_memory(0)
    assert (without.memory_length, without.config.same_length) == (0, False)
    with pytest.raises(InputError, match="memory_length"):
        made.with_memory(-1)
    with pytest.raises(InputError, match=r"clamp_length: goes with model\.position: relative"):
        model("rotary").with_memory(clamp_length=5)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("masked", [True, False])
def test_a_segment_of_no_tokens_changes_nothing(position: str, masked: bool) -> None:
    made, ids = model(position), text()
    nothing = {"attention_mask": torch.ones(2, 0, dtype=torch.bool)} if masked else {}
    with torch.no_grad():
        begun = made(ids[:, :0], **nothing)
        first = made(ids[:, :8], begun.memory)
        between = made(ids[:, 8:8], first.memory, **nothing)
        assert begun.logits.shape == between.logits.shape == (2, 0, V)
        assert torch.equal(made(ids[:, 8:12], between.memory).logits, made(ids[:, 8:12], first.memory).logits)
        assert torch.equal(first.logits, made(ids[:, :8]).logits)
        cache = made(ids[:, :0], cache=made.new_cache()).cache
        cache = made(ids[:, 8:8], cache=made(ids[:, :8], cache=cache).cache).cache
        assert torch.equal(
            made(ids[:, 8:12], cache=cache).logits,
            made(ids[:, 8:12], cache=made(ids[:, :8], cache=made.new_cache()).cache).logits,
        )
