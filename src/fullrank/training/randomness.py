"""Random numbers of a training, a function of configuration, seed and place alone.

Our models draw by place (`core.draws`), all else from generators that are seeded anew for each pass: so a resumed run draws
what it would have drawn, and no state of a generator is saved.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.core import draws
from fullrank.core.draws import recomputed
from fullrank.training.distributed import blocks_of, rank

_APART = 0x9E3779B97F4A7C15F39CC0605CEDC835  # 2^128 / golden ratio, odd: sequences of calls lie far from each other


def seed_everything(*key: int) -> None:
    """Set every generator to a state that depends on `key` alone: a seed, or the numbers of a pass and a process with it."""
    seed = key[0] if len(key) == 1 else int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def begin_draws(seed: int, number: int) -> None:
    """Begin the draws of pass `number` (from 1) of a training, and seed the generators for it."""
    seed_everything(seed, number, rank())
    generator, at = np.random.PCG64([seed, number]), 0

    def words(call: int, start: int, size: int) -> Tensor:
        nonlocal at
        target = call * _APART + start
        generator.advance((target - at) % 2**128)
        at = target + size
        return torch.from_numpy(generator.random_raw(size).view(np.int64))

    draws.current = draws.Draws(words)


def end_draws() -> None:
    """Leave the draws to torch's generators, as outside of training."""
    draws.current = None


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep the inputs of each block alone (`train.activation_checkpointing`): the backward pass computes the rest again."""
    for block in blocks_of(model):
        block.forward = partial(recomputed, block.forward)
