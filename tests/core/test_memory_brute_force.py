"""Memory and resting layers: values, ages and gradients against the loops of `memory_loops`, which share no code with them."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from memory_loops import LAYERS, LENGTHS, ROWS, STARTS, TOKENS, VOCABULARY, Loops, Setting, ages

import fullrank as fr
from closeness import close
from fullrank.core.released import DriftingMemory
from pairs import covering, product

PATTERNS = {
    "none": (set(), set(), set(), set(), set()),
    "some": ({1}, set(), {1, 2}, {2}, set()),
    "often": ({0, 2}, {1}, {0, 1, 2}, {2}, {0}),
}


def check(setting, pattern, drifting=False):
    """Values of every segment and memories with their ages, by every kernel, cached or projected anew."""
    model = setting.build()
    text = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    numbers = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = [Loops(setting, numbers).read(row, pattern, drifting) for row in text.tolist()]
    for kernel in ("reference", "auto"):
        for cached in (False, True):
            memory = None
            with fr.kernel(kernel), torch.no_grad() if cached else nullcontext():
                for number, (first, size, resting) in enumerate(zip(STARTS, LENGTHS, pattern, strict=True)):
                    where = f"segment {number}, {kernel}, cached={cached}"
                    ids, targets = text[:, first : first + size], text[:, first + 1 : first + size + 1]
                    memory = memory or model.new_memory()
                    memory = DriftingMemory(**vars(memory)) if drifting else memory
                    hidden, memory, _ = model.hidden(ids, memory, skip=frozenset(resting))
                    nll = model.output.nll(hidden, targets).detach().numpy()
                    close(nll, np.array([row.nll[number] for row in expected]), where)
                    for i in range(LAYERS):
                        same_memory(memory, i, first + size, [row.memories[number][i] for row in expected], where)


def same_memory(memory, layer, length, expected, where):
    distances = ages(memory, layer)
    hidden = memory.layers[layer].hidden
    assert memory.length == length, where
    assert distances == [length - place for place, _ in expected[0]], f"ages of layer {layer}, {where}"
    if not distances:
        assert hidden is None or hidden.shape[1] == 0
        return
    assert not hidden.requires_grad
    right = np.array([x for row in expected for _, x in row]).reshape(hidden.shape)
    close(hidden.numpy(), right, f"memory of layer {layer}, {where}")


def pairwise(**slots):
    """Every pair of choices each day, the full product at night."""
    rows = product(**slots, pattern=PATTERNS)
    everyday = covering(rows)
    cases = [pytest.param(*row.values(), marks=() if row in everyday else pytest.mark.full) for row in rows]
    return pytest.mark.parametrize((*slots, "pattern"), cases)


@pairwise(position=["relative", "rotary", "sinusoidal", "learned"], norm=["post", "pre"])
def test_every_position(position, norm, pattern):
    """Memory of three tokens: as long as the first segment, shorter than the second, longer than the third."""
    check(Setting(position, norm), PATTERNS[pattern])


@pairwise(position=["relative", "rotary"], memory_length=[1, 7, 40])
def test_every_length_of_memory(position, memory_length, pattern):
    """Shorter than most segments, longer than all, and longer than the text."""
    check(Setting(position, "pre", memory_length), PATTERNS[pattern])


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize(
    "setting",
    [
        Setting("relative", "post", 4, clamp_length=3),
        Setting("relative", "pre", 4, clamp_length=3, same_length=True),
        Setting("rotary", "post", 1, same_length=True),
        Setting("sinusoidal", "pre", 6, same_length=True),
        Setting("relative", "post", 4, mixed=True),
        Setting("rotary", "pre", 4, mixed=True),
        Setting("relative", "post", 4, zeros=True),
        Setting("relative", "pre", 4, zeros=True),
    ],
    ids=["clamped", "clamped-window", "window-of-one", "window", "mixed", "rotary-mixed", "zeros", "zeros-pre"],
)
def test_other_settings(setting, pattern):
    check(setting, pattern)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_drifting_gap(norm):
    """As in the released code, every token at which a layer rests moves its memory one position farther away, for good."""
    check(Setting("relative", norm, 4), PATTERNS["some"], drifting=True)
    check(Setting("relative", norm, 4), PATTERNS["often"], drifting=True)
