"""Random numbers of a training, a function of configuration, seed and place alone.

A model draws by place (`core.draws`), all else from generators that are seeded anew for each pass: so a resumed run draws
what it would have drawn, and no state of a generator is saved.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fullrank.core import draws
from fullrank.core.draws import dropout, recomputed
from fullrank.training.distributed import HasBlocks, blocks_of, rank

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


def drawing(model: nn.Module) -> AbstractContextManager[object]:
    """Around a forward pass: the dropout of a pretrained model draws by place, as that of ours does (on a CPU)."""
    return nullcontext() if isinstance(model, HasBlocks) else _DropoutByPlace()


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep the inputs of each block alone (`train.activation_checkpointing`): the backward pass computes the rest again."""
    for block in blocks_of(model):
        block.forward = _Recomputed(block.forward, partial(drawing, model))


@dataclass(frozen=True)
class _Recomputed:
    """A forward pass, and the context that it needs both times."""

    forward: Callable[..., Any]
    context: Callable[[], AbstractContextManager[object]]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return recomputed(self._within, *arguments, **options)

    def _within(self, *arguments: Any, **options: Any) -> Any:
        with self.context():
            return self.forward(*arguments, **options)


class _DropoutByPlace(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.dropout:
            return _dropout(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention and args[0].device.type == "cpu":
            return _attention(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # what has no rows of the batch, such as positions, is dropped alike by every process
    shared = draws.current is not None and x.shape[0] % draws.current.rows > 0
    return dropout(x, p, shared) if training else x


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention`, whose weights are there to be dropped."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        keep = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if keep else scores + attn_mask
    return _dropout(scores.softmax(-1), dropout_p) @ value
