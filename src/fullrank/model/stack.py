"""The loop over the blocks: alone, after a cache of keys and values, or after a memory of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fullrank.attention.layer import KeyValues
from fullrank.attention.layout import Layout
from fullrank.attention.trace import Trace
from fullrank.model.cache import Cache
from fullrank.model.memory import LayerMemory, Memory, Segment

# adds to a layout what positions make for all layers, unless the keys and values (or None) beside it have it already
Encode = Callable[[Layout, KeyValues | None], Layout]


def read(blocks: Iterable[Any], x: Tensor, layout: Layout, trace: Trace | None, skip: Collection[int]) -> Tensor:
    """x (B, N, E) through all blocks but those in `skip`, -> (B, N, E)."""
    for i, block in enumerate(blocks):
        if i not in skip:
            x = block(x, layout, trace)
    return x


def read_after_cache(
    blocks: Iterable[Any], x: Tensor, cache: Cache, layout: Layout, mask: Tensor | None, trace: Trace | None
) -> tuple[Tensor, Cache]:
    """New tokens x (B, N, E) after those of a cache; mask (B, M + N) is that of old and new keys."""
    layers = []
    for block, past in zip(blocks, cache.layers, strict=True):
        x, present = block.continued(x, past, layout, trace)
        layers.append(present)
    return x, Cache(tuple(layers), mask)


@dataclass(frozen=True)
class Remembering:
    """How a segment is read after a memory.

    limit: tokens that a layer remembers; window: keys that a query sees, None for all; skip: layers that rest; drifting:
    see `Segment.layout`; keeps_heads: let the memory hold keys and values too (nothing is differentiated).
    """

    limit: int
    window: int | None
    skip: Collection[int] = ()
    drifting: bool = False
    keeps_heads: bool = False


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
        version = _version(block)
        if known.heads is not None and known.version != version:
            known = replace(known, heads=None)  # made with weights that have changed since
        place = (known.runs, known.rested if how.drifting else 0, i if known.runs is None else None)
        if place not in layouts:
            layouts[place] = encode(segment.layout(known, how.window, how.drifting), known.heads)
        layout, before, heads = layouts[place], x, None
        if how.keeps_heads:
            hidden = known.hidden if known.heads is None else None
            x, heads = block.continued(x, known.heads, layout, trace, hidden)
        else:
            x = block(x, layout, trace, known.hidden)
        after.append(replace(segment.remember(known, before, heads, how.limit), version=version))
    return x, Memory(tuple(after), memory.length + segment.tokens, segment.lengths)


def _version(block: nn.Module) -> int:
    """Grows whenever an optimizer, or anybody, changes a parameter of the block in place."""
    return sum(p._version for p in block.parameters() if not p.is_inference())
