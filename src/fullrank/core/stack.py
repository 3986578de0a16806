"""The loop over the blocks: alone, after a cache of keys and values, or after a memory of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.across import Projected, Source
from fullrank.core.attention import KeyValues
from fullrank.core.cache import Cache
from fullrank.core.layout import Layout
from fullrank.core.memory import LayerMemory, Memory, Segment
from fullrank.core.trace import Trace

# adds to a layout what positions make for all layers, unless the keys and values (or None) beside it have it already
Encode = Callable[[Layout, KeyValues | None], Layout]


def read(
    blocks: Iterable[Any],
    x: Tensor,
    layout: Layout,
    trace: Trace | None,
    skip: Collection[int],
    source: Source | None = None,
) -> Tensor:
    """x (B, N, E) through all blocks but those in `skip`, which may read a source too, -> (B, N, E)."""
    across = None if source is None else source.of_layer(0, x.shape[1])  # the same for all
    for i, block in enumerate(blocks):
        if i not in skip:
            inner = None if trace is None else trace.enter(x)
            x = block(x, layout, inner) if across is None else block(x, layout, inner, across=across)
    return x


def read_after_cache(
    blocks: Iterable[Any],
    x: Tensor,
    cache: Cache,
    layout: Layout,
    mask: Tensor | None,
    trace: Trace | None,
    source: Source | Projected | None = None,
    mixed: bool = True,
) -> tuple[Tensor, Cache]:
    """New tokens x (B, N, E) after those of a cache; mask (B, M + N) is that of old and new keys.

    Without `mixed`, self-attention leaves heads as they are.
    """
    layers = []
    for i, (block, past) in enumerate(zip(blocks, cache.layers, strict=True)):
        across = None if source is None else source.of_layer(i, x.shape[1])
        inner = None if trace is None else trace.enter(x)
        x, present = block.continued(x, past, layout, inner, across=across, mixed=mixed)
        layers.append(present)
    return x, replace(cache, layers=tuple(layers), key_mask=mask)


@dataclass(frozen=True)
class Remembering:
    """How a segment is read after a memory.

    limit: tokens that a layer remembers; window: keys that a query sees, None for all; skip: layers that rest; drifting:
    see `Segment.layout`; keeps_heads: let the memory hold keys and values too (nothing is differentiated); clamp: distances
    beyond it count as it.
    """

    limit: int
    window: int | None
    skip: Collection[int] = ()
    drifting: bool = False
    keeps_heads: bool = False
    clamp: int | None = None


def read_after_memory(
    blocks: Iterable[Any],
    x: Tensor,
    memory: Memory,
    segment: Segment,
    how: Remembering,
    encode: Encode,
    trace: Trace | None,
) -> tuple[Tensor, Memory]:
    """The segment x (B, N, E) after what each layer remembers. A layer that rests passes x on and keeps its memory."""
    layouts: dict[Any, Layout] = {}  # layers that remember the same tokens share one
    after: list[LayerMemory] = []
    for i, block in enumerate(blocks):
        known = memory.layers[i].last(how.limit)
        if i in how.skip:
            after.append(replace(known, rested=known.rested + segment.tokens))
            continue
        made = _made(block, x, how.clamp)
        if known.heads is not None and (not how.keeps_heads or known.made != made):
            known = replace(known, heads=None)  # their table of distances, too, has no gradient and no dropout
        if known.hidden is not None and (known.hidden.dtype != x.dtype or _closed(known.hidden)):
            known = replace(known, hidden=known.hidden.to(x.dtype, copy=True))
        place = (known.runs, known.rested if how.drifting else 0, i if known.runs is None else None)
        if place not in layouts:
            layouts[place] = encode(segment.layout(known, how.window, how.drifting), known.heads)
        layout, before, heads = layouts[place], x, None
        inner = None if trace is None else trace.enter(x)
        if how.keeps_heads:
            hidden = known.hidden if known.heads is None else None
            x, heads = block.continued(x, known.heads, layout, inner, hidden)
        else:
            x = block(x, layout, inner, known.hidden)
        after.append(replace(segment.remember(known, before, heads, how.limit), made=made))
    return x, Memory(tuple(after), memory.length + segment.tokens, segment.lengths)


def _made(block: nn.Module, x: Tensor, clamp: int | None) -> tuple[Any, ...]:
    """What cached keys and values depend on beside the hidden states; a parameter counts how often it was changed."""
    weights = tuple((id(p), 0 if p.is_inference() else p._version) for p in block.parameters())
    device = x.device.type
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return weights, clamp, x.dtype, torch.get_autocast_dtype(device) if cast else None


def _closed(hidden: Tensor) -> bool:
    """Made in inference mode: what is computed from it cannot be differentiated, what is computed from a copy can."""
    return torch.is_grad_enabled() and hidden.is_inference()
