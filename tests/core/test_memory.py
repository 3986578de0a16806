"""A memory as a value: rows of different lengths, a changed length, files, and cached keys, valid for the same weights only.

Segments after a memory are compared with their equations in test_memory_brute_force.py.
"""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

import fullrank as fr
from fullrank.core.memory import Memory
from moving import narrow
from pairs import covering, product

VOCABULARY = 11
POSITIONS = ["sinusoidal", "learned", "relative", "rotary", "none"]


def model(position="relative", memory_length=5, **settings):
    score = "relative" if position == "relative" else "dot_product"
    settings |= {"position": position, "memory_length": memory_length, "max_position_embeddings": 64}
    return narrow(attention={"score": score}, **settings)


def text(rows=2, tokens=19, seed=1):
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


TEXT = text()


def in_segments(made, ids, sizes, skips=None):
    memory = None
    parts = []
    for (first, end), skip in zip(pairwise([0, *accumulate(sizes)]), skips or [()] * len(sizes), strict=True):
        if first < end:
            out = made(ids[:, first:end], memory, skip=skip)
            parts.append(out.logits)
            memory = out.memory
    return torch.cat(parts, dim=1), memory


RAGGED = covering(
    product(
        position=POSITIONS,
        norm=["pre", "post"],
        memory=[(2, False), (5, False), (5, True), (30, False)],
        cached=[False, True],
        skips=[[()] * 4, [(), (1,), (), (1,)]],
    )
)


@pytest.mark.parametrize("row", RAGGED, ids=lambda row: "-".join(map(str, row.values())))
def test_texts_of_different_lengths_are_read_as_if_alone(row):
    """Every text has its own ragged segments, padded on either side; its memory holds its own last tokens. Layers rest."""
    memory_length, same_length = row["memory"]
    made = model(row["position"], memory_length, same_length=same_length, norm=row["norm"])
    sizes = [[4, 1, 5, 3], [2, 5, 0, 4], [4, 4, 4, 4]]  # per text
    texts = [text(1, 16, seed)[0] for seed in range(3)]
    bounds = [[0, *accumulate(each)] for each in sizes]
    with torch.set_grad_enabled(not row["cached"]):
        alone = [in_segments(made, ids[None], each, row["skips"])[0][0] for ids, each in zip(texts, sizes, strict=True)]
        memory = None
        logits = [[] for _ in texts]
        for step, skip in enumerate(row["skips"]):
            ids, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.bool)
            for number, each in enumerate(sizes):
                at = slice(5 - each[step], 5) if number == 1 else slice(0, each[step])
                ids[number, at] = texts[number][bounds[number][step] : bounds[number][step + 1]]
                mask[number, at] = True
            out = made(ids, memory, attention_mask=mask, skip=skip)
            memory = out.memory
            for number in range(3):
                logits[number].append(out.logits[number][mask[number]])
    for number in range(3):
        assert (torch.cat(logits[number]) - alone[number]).abs().max() < 1e-10, number
    assert memory.lengths.tolist() == [sum(each) for each in sizes]


def test_cached_keys_are_not_used_after_the_weights_have_changed():
    made = model()
    with torch.no_grad():
        memory = made(TEXT[:, :6]).memory
        before = made(TEXT[:, 6:9], memory).logits
    assert all(layer.heads is not None for layer in memory.layers)
    assert all(layer.heads is None for layer in made(TEXT[:, :6]).memory.layers)  # there gradients would be lost
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    made.loss(TEXT[:, :6], TEXT[:, 1:7]).backward()
    optimizer.step()
    with torch.no_grad():
        after = made(TEXT[:, 6:9], memory).logits
        forgetful = Memory.from_tensors(memory.to_tensors())  # hidden states alone
        assert torch.equal(after, made(TEXT[:, 6:9], forgetful).logits)
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize(("length", "same", "clamp"), [(8, False, None), (6, True, None), (8, False, 4)])
def test_another_length_is_that_of_a_model_built_with_it(length, same, clamp, tmp_path):
    """The model itself is left alone, and files keep the change."""
    made = model(memory_length=3)
    sizes = [4, 5, 6]
    before = in_segments(made, TEXT, sizes)[0]
    changed = made.with_memory(length, same_length=same, clamp_length=clamp)
    score = {"name": "relative", "clamp_length": clamp}
    attention = replace(made.config.attention, score=score)
    config = replace(made.config, memory_length=length, same_length=same, attention=attention)
    built = fr.LanguageModel(config).double().eval()
    built.load_state_dict(made.state_dict())
    changed.save(tmp_path)
    expected = in_segments(built, TEXT, sizes)[0]
    for other in (changed, fr.LanguageModel.load(tmp_path)):
        assert torch.equal(in_segments(other, TEXT, sizes)[0], expected)
    assert (expected - before).abs().max() > 1e-3
    assert torch.equal(in_segments(made, TEXT, sizes)[0], before)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("masked", [True, False])
def test_a_segment_of_no_tokens_changes_nothing(position, masked):
    made = model(position)
    nothing = {"attention_mask": torch.ones(2, 0, dtype=torch.bool)} if masked else {}
    with torch.no_grad():
        empty = made(TEXT[:, :0], **nothing)
        first = made(TEXT[:, :8], empty.memory)
        between = made(TEXT[:, 8:8], first.memory, **nothing)
        assert empty.logits.shape == between.logits.shape == (2, 0, VOCABULARY)
        assert torch.equal(made(TEXT[:, 8:12], between.memory).logits, made(TEXT[:, 8:12], first.memory).logits)
        assert torch.equal(first.logits, made(TEXT[:, :8]).logits)
        cache = made(TEXT[:, :8], cache=made(TEXT[:, :0], cache=made.new_cache()).cache).cache
        after = made(TEXT[:, 8:12], cache=made(TEXT[:, 8:8], cache=cache).cache)
        assert torch.equal(after.logits, made(TEXT[:, 8:12], cache=cache).logits)
