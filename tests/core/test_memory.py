"""Memory: segments one after the other are one long text with the same visibility, whatever else the model is made of."""

from __future__ import annotations

import pytest
import torch
from memory_models import LAYERS, POSITIONS, E, V, in_segments, model, one_pass, text

import fullrank as fr
from pairs import covering, product

LENGTHS = [[4, 4, 4, 4], [7, 1, 3, 6, 2], [19]]


@pytest.mark.parametrize("memory_length", [2, pytest.param(5, marks=pytest.mark.full), 40])
@pytest.mark.parametrize("position", POSITIONS)
def test_segments_equal_one_long_pass(position: str, memory_length: int) -> None:
    made, ids = model(position, memory_length=memory_length), text()
    for sizes in LENGTHS:
        expected = one_pass(made, ids[:, : sum(sizes)], sizes, memory_length)
        for cached in (False, True):
            with torch.no_grad() if cached else torch.enable_grad():
                found, memory = in_segments(made, ids, sizes)
            known = [layer.heads is not None for layer in memory.layers]
            assert known == [cached] * LAYERS
            assert (found - expected).abs().max() < 1e-10, (sizes, cached)
            assert memory.length == sum(sizes)
            assert [layer.tokens for layer in memory.layers] == [min(memory_length, sum(sizes))] * LAYERS


@pytest.mark.parametrize("position", POSITIONS)
def test_same_length_is_a_window(position: str) -> None:
    ids = text()
    for memory_length in (1, 6):
        made = model(position, memory_length=memory_length, same_length=True)
        for sizes in LENGTHS:
            with torch.no_grad():
                expected = one_pass(made, ids[:, : sum(sizes)], sizes, memory_length, same_length=True)
                found, _ = in_segments(made, ids, sizes)
                assert (found - expected).abs().max() < 1e-10, (memory_length, sizes, "cached")
            found, _ = in_segments(made, ids, sizes)
            assert (found - expected).abs().max() < 1e-10, (memory_length, sizes)


RAGGED = covering(
    product(position=POSITIONS, norm=["pre", "post"], memory=[(2, False), (5, False), (5, True), (30, False)],
            cached=[False, True])
)  # fmt: skip


@pytest.mark.parametrize(("position", "norm", "memory", "cached"), [tuple(row.values()) for row in RAGGED], ids=str)
def test_texts_of_different_lengths_are_read_as_if_alone(
    position: str, norm: str, memory: tuple[int, bool], cached: bool
) -> None:
    """Every row has its own ragged segments, padded on either side; its memory holds its own last tokens."""
    memory_length, same_length = memory
    made = model(position, memory_length=memory_length, same_length=same_length, norm=norm)
    sizes = [[4, 1, 5, 3], [2, 5, 0, 4], [4, 4, 4, 4]]  # per row
    with torch.no_grad() if cached else torch.enable_grad():
        rows = [text(1, 16, seed)[0] for seed in range(3)]
        alone = [
            in_segments(made, row[None], [n for n in each if n])[0][0] for row, each in zip(rows, sizes, strict=True)
        ]
        known, found = None, [[] for _ in rows]
        taken = [0, 0, 0]
        for step in range(4):
            ids, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.bool)
            for row, each in enumerate(sizes):
                size = each[step]
                at = slice(5 - size, 5) if row == 1 else slice(0, size)
                ids[row, at] = rows[row][taken[row] : taken[row] + size]
                mask[row, at] = True
                taken[row] += size
            out = made(ids, known, attention_mask=mask)
            known = out.memory
            for row in range(3):
                found[row].append(out.logits[row][mask[row]])
    for row in range(3):
        assert (torch.cat(found[row]) - alone[row]).abs().max() < 1e-10, row
    assert known.lengths.tolist() == [sum(each) for each in sizes]


def test_gradients_stop_at_the_memory() -> None:
    made, ids = model("relative", memory_length=6), text()
    first = made(ids[:, :6])
    assert not any(layer.hidden.requires_grad for layer in first.memory.layers)
    kept = [layer.hidden.clone() for layer in first.memory.layers]
    made.loss(ids[:, 6:12], ids[:, 7:13], memory=first.memory).backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in made.parameters())
    assert all(torch.equal(layer.hidden, k) for layer, k in zip(first.memory.layers, kept, strict=True))


def test_keys_and_values_of_the_memory_receive_gradient() -> None:
    """The value projection reads the memory too: its gradient is that of one long pass whose past is detached."""
    made, ids = model("none", memory_length=4, layers=1, bias=False), text(1, 8)
    cotangent = torch.randn(1, 4, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    memory = made(ids[:, :4]).memory
    (made(ids[:, 4:], memory).logits * cotangent).sum().backward()
    block = made.blocks[0]
    found = block.attention.project.value.weight.grad.clone()
    made.zero_grad()
    x = made.embedding(ids)
    x = torch.cat((x[:, :4].detach(), x[:, 4:]), dim=1)
    (made.output(made.final_norm(block(x, fr.Layout.of(8))))[:, 4:] * cotangent).sum().backward()
    assert (found - block.attention.project.value.weight.grad).abs().max() < 1e-12


def test_a_memory_of_zeros_is_attended() -> None:
    made, ids = model("relative", memory_start="zeros", norm="post", bias=False), text()
    empty = model("relative", norm="post", bias=False)
    found = made(ids[:, :4]).logits
    assert (found - empty(ids[:, :4]).logits).abs().max() > 1e-3
    x = made.embedding(ids[:, :4])
    layout = made.position.place(fr.Layout.from_runs(4, ((-5, 5), (0, 4))), x)
    for block in made.blocks:
        x = block(x, layout, memory=torch.zeros(2, 5, E, dtype=torch.float64))
    assert (found - made.output(x)).abs().max() < 1e-12
