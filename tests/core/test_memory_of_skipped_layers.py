"""Layers that rest: they do nothing, and what they remember keeps its true age."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_models import E, ages, model, text
from torch import Tensor

import fullrank as fr
from fullrank.core.memory import Memory
from fullrank.core.released import DriftingMemory


def test_ages_count_tokens_to_the_next_one() -> None:
    made, ids = model(memory_length=5), text()
    memory = made(ids[:, :7]).memory
    assert ages(memory, 0).tolist() == [5, 4, 3, 2, 1]
    rested = made(ids[:, 7:10], memory, skip={1}).memory
    assert ages(rested, 0).tolist() == [5, 4, 3, 2, 1]
    assert ages(rested, 1).tolist() == [8, 7, 6, 5, 4]
    ran = made(ids[:, 10:12], rested).memory
    assert ages(ran, 1).tolist() == [8, 7, 6, 2, 1]  # three old ones behind a gap of three tokens


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("position", ["relative", "rotary", "sinusoidal"])
@pytest.mark.parametrize("memory_length", [3, 4, 9])
def test_positions_follow_the_true_ages(position: str, kernel: str, memory_length: int, cached: bool) -> None:
    """Scripted rests: the layer alone, fed with the inputs it had and the positions of the tokens it remembers."""
    made, ids = model(position, memory_length=memory_length, layers=2, norm="post"), text(2, 24)
    script = [set(), {1}, set(), {1}, {1}, set()]
    memory, remembered = None, [(torch.empty(2, 0, E), []), (torch.empty(2, 0, E), [])]
    for step, skip in enumerate(script):
        places = list(range(4 * step, 4 * step + 4))
        part = ids[:, places[0] : places[-1] + 1]
        with fr.kernel(kernel), torch.no_grad() if cached else torch.enable_grad():
            out = made(part, memory, skip=skip)
        memory = out.memory
        x = made.position(made.embedding(part), torch.tensor(places))
        for i, block in enumerate(made.blocks):
            if i in skip:
                continue
            hidden, old = remembered[i]
            keys = torch.tensor(old + places)
            layout = fr.Layout(torch.tensor(places), keys, farthest=int(keys.max() - keys.min()))
            layout = made.position.place(layout, x)
            joined = torch.cat((hidden.double(), x), dim=1)
            with fr.kernel("reference"):
                before, x = x, block.feed_forward_norm(_ff(block, _att(block, x, joined, layout)))
            remembered[i] = (
                torch.cat((hidden.double(), before), dim=1)[:, -memory_length:],
                (old + places)[-memory_length:],
            )
        assert (out.logits - made.output(made.final_norm(x))).abs().max() < 1e-10, step
        for i, (_, places_known) in enumerate(remembered):
            assert ages(memory, i).tolist() == [4 * step + 4 - place for place in places_known]


def _att(block: Any, x: Tensor, joined: Tensor, layout: fr.Layout) -> Tensor:
    return block.attention_norm(x + block.attention(x, joined, layout))


def _ff(block: Any, x: Tensor) -> Tensor:
    return x + block.feed_forward(x)


def test_rests_with_texts_of_different_lengths() -> None:
    made = model("relative", memory_length=4, layers=2)
    script = [(), (1,), (), (1,), ()]
    rows, sizes = [text(1, 15, 5)[0], text(1, 15, 6)[0]], [[3, 2, 3, 1, 3], [2, 3, 1, 3, 3]]
    alone = []
    for row, each in zip(rows, sizes, strict=True):
        memory, parts, at = None, [], 0
        for size, skip in zip(each, script, strict=True):
            out = made(row[None, at : at + size], memory, skip=skip)
            memory, at = out.memory, at + size
            parts.append(out.logits[0])
        alone.append(torch.cat(parts))
    memory, at, found = None, [0, 0], [[], []]
    for step, skip in enumerate(script):
        ids, mask = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool)
        for r in range(2):
            size = sizes[r][step]
            ids[r, :size], mask[r, :size] = rows[r][at[r] : at[r] + size], True
            at[r] += size
        out = made(ids, memory, skip=skip, attention_mask=mask)
        memory = out.memory
        for r in range(2):
            found[r].append(out.logits[r][mask[r]])
    for r in range(2):
        assert (torch.cat(found[r]) - alone[r]).abs().max() < 1e-10


def test_drifting_labels_are_the_released_ones() -> None:
    """The gap of a layer is as many segments as it ever rested, also after it ran again (facts about the released code)."""
    made, ids = model("relative", memory_length=4, layers=2, norm="post"), text(1, 24)
    memory = None
    for step, skip in enumerate([(), (1,), (), (1,), ()]):
        part = ids[:, 4 * step : 4 * step + 4]
        before = memory
        out = made.hidden(part, DriftingMemory.from_memory(memory or made.new_memory()), skip=skip)
        memory = out.memory
    # the last step, layer 1: it rested twice, so its memory is labelled 8 tokens farther than it is
    x = made.embedding(part)
    for block, known, start in zip(made.blocks, before.layers, (12, 16 - 8 - 4), strict=True):
        layout = made.position.place(fr.Layout.from_runs(4, ((start, 4), (16, 4))), x)
        x = block(x, layout, memory=known.hidden)
    expected = x
    assert (out.hidden - expected).abs().max() < 1e-12
    true = made.hidden(part, Memory(**vars(before)))
    assert (true.hidden - expected).abs().max() > 1e-3
