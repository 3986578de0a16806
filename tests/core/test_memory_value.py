"""A memory as a value: other lengths, checkpoints, rows, precisions, and cached keys that serve only what made them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_models import POSITIONS, V, in_segments, model, one_pass, text, without_heads

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


def test_tensors_of_a_memory_are_the_memory() -> None:
    made, ids = model("relative", memory_length=7), text()
    memory = in_segments(made, ids, [4, 3])[1]
    memory = made(ids[:, 7:9], memory, skip={1}).memory
    memory = made(ids[:, 9:11], memory).memory
    back = Memory.from_tensors({name: tensor.clone() for name, tensor in memory.to_tensors().items()})
    assert [layer.runs for layer in back.layers] == [layer.runs for layer in memory.layers]
    assert torch.equal(made(ids[:, 11:15], back).logits, made(ids[:, 11:15], memory).logits)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ragged = made(ids[:, :3], attention_mask=mask).memory
    back = Memory.from_tensors(ragged.to_tensors())
    assert torch.equal(made(ids[:, 3:6], back).logits, made(ids[:, 3:6], ragged).logits)
    assert Memory.from_tensors(Memory.empty(3).to_tensors()) == Memory.empty(3)


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


def test_load_with_other_lengths(tmp_path: Any) -> None:
    made, ids = model("relative", memory_length=3), text()
    made.save(tmp_path)
    loaded = fr.LanguageModel.load(tmp_path, memory_length=6, same_length=True, clamp_length=5)
    changed = made.with_memory(6, same_length=True, clamp_length=5)
    assert torch.equal(in_segments(loaded, ids, [5, 6])[0], in_segments(changed, ids, [5, 6])[0])
    assert fr.LanguageModel.load(tmp_path).memory_length == 3
    loaded.save(tmp_path / "again")
    again = fr.LanguageModel.load(tmp_path / "again")
    assert (again.memory_length, again.same_length) == (6, True)
    assert torch.equal(in_segments(again, ids, [5, 6])[0], in_segments(loaded, ids, [5, 6])[0])
    without = fr.LanguageModel.load(tmp_path / "again", memory_length=0)
    assert (without.memory_length, without.same_length) == (0, False)
    with pytest.raises(InputError, match="memory_length"):
        fr.LanguageModel.load(tmp_path, memory_length=-1)
    rotary = model("rotary")
    rotary.save(tmp_path / "rotary")
    with pytest.raises(InputError, match=r"clamp_length: goes with model\.position: relative"):
        fr.LanguageModel.load(tmp_path / "rotary", clamp_length=5)


def test_learned_positions_end() -> None:
    made, ids = model("learned", memory_length=4), text(1, 66)
    memory = in_segments(made, ids, [32, 32])[1]
    with pytest.raises(InputError, match="max_position_embeddings is 64"):
        made(ids[:, 64:], memory)


def test_misuse() -> None:
    made, ids = model(), text()
    memory = made(ids[:, :4]).memory
    with pytest.raises(InputError, match="of 2 rows, input_ids of 3"):
        made(text(3, 4), memory)
    with pytest.raises(InputError, match="of 3 layers, the model has 2"):
        model(layers=2)(ids, memory)
    with pytest.raises(InputError, match=r"skip: layers 0 to 2, given \[3\]"):
        made(ids, skip={1, 3})
    with pytest.raises(InputError, match="give no memory and no skip"):
        made(ids, memory, cache=made.new_cache())
    with pytest.raises(InputError, match=r"model\.memory_length is 0"):
        model(memory_length=0)(ids, memory)
    with pytest.raises(InputError, match=r"attention_mask must be \(2, 19\)"):
        made(ids, attention_mask=torch.ones(2, 3))
    with pytest.raises(InputError, match=r"same_length: goes with `model\.memory_length`"):
        made.with_memory(0, same_length=True)
    with pytest.raises(InputError, match=r"clamp_length: .* model\.position: sinusoidal"):
        made.with_memory(clamp_length=3)
    for length in (-1, 1.5, True):
        with pytest.raises(InputError, match=r"memory_length: 0 or a positive whole number"):
            made.with_memory(length)
    with pytest.raises(InputError, match=r"clamp_length: .* given 2\.5"):
        model("relative").with_memory(clamp_length=2.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"skip: layers 0 to 2, given \[True, False\]"):
        made(ids, skip=[True, False])  # which layers, not whether they rest
    with pytest.raises(InputError, match="hidden_size 24, this one has 12"):
        made(ids, replace(memory, layers=tuple(_twice_as_wide(layer) for layer in memory.layers)))


def _twice_as_wide(layer: Any) -> Any:
    return replace(layer, hidden=layer.hidden.repeat(1, 1, 2))


def test_cached_keys_of_distances_are_not_used_where_distances_are_clamped_otherwise() -> None:
    made, ids = model("relative"), text()
    with torch.no_grad():
        cached = made(ids[:, :8]).memory
        cache = made(ids[:, :8], cache=made.new_cache()).cache
        changed = made.with_memory(clamp_length=2)
        found = changed(ids[:, 8:12], cached).logits
        want = changed(ids[:, 8:12], without_heads(cached)).logits
        beside = changed(ids[:, 8:12], cache=cache).logits
        whole = changed(
            ids[:, 8:12], cache=replace(cache, layers=tuple(kv._replace(relative=None) for kv in cache.layers))
        )
        there = made(ids[:, 8:12], cached).logits
        back = made(ids[:, 8:12], without_heads(cached)).logits
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(there, back, rtol=0, atol=1e-12)
    torch.testing.assert_close(beside, whole.logits, rtol=0, atol=1e-12)
    assert (want - back).abs().max() > 1e-3


def test_a_memory_of_an_evaluation_does_not_end_the_dropout_of_distances() -> None:
    made, ids = model("relative", dropout=fr.DropoutConfig(embedding=0.5)), text()
    with torch.no_grad():
        cached = made(ids[:, :8]).memory
    made.train()
    found = []
    for memory in (cached, without_heads(cached)):
        torch.manual_seed(3)
        found.append(made(ids[:, 8:12], memory).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("cached", [True, False])
def test_a_memory_of_another_precision(position: str, cached: bool) -> None:
    made, ids = model(position), text()
    with torch.no_grad():
        low = copy.deepcopy(made).float()
        memory = low(ids[:, :8]).memory
        want = made(ids[:, 8:12], made(ids[:, :8]).memory).logits
    with torch.set_grad_enabled(not cached):
        torch.testing.assert_close(made(ids[:, 8:12], memory).logits, want, rtol=0, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            low(ids[:, 8:12], memory)
            memory = low(ids[:, :8]).memory
        low(ids[:, 8:12], memory)


@pytest.mark.parametrize("masked", [True, False])
def test_a_memory_made_in_inference_mode_can_be_trained_after(masked: bool) -> None:
    made, ids = model("relative"), text()
    more = {"attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])} if masked else {}
    with torch.inference_mode():
        memory = made(ids[:, :4], **more).memory
    gradients = []
    for before in (memory, made(ids[:, :4], **more).memory):
        made.zero_grad()
        made.loss(ids[:, 4:8], ids[:, 5:9], memory=before, **more).backward()
        gradients.append([p.grad.clone() for p in made.parameters() if p.grad is not None])
    for found, want in zip(*gradients, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


def test_cached_keys_of_one_model_are_not_used_by_another() -> None:
    made, other, ids = model("rotary"), model("rotary", seed=1), text()
    with torch.no_grad():
        memory = made(ids[:, :8]).memory
        found = other(ids[:, 8:12], memory).logits
        assert torch.equal(found, other(ids[:, 8:12], without_heads(memory)).logits)


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
