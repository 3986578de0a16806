"""Memory: the inputs of every layer before the current segment, as a value that goes in and comes out (Transformer-XL §3.2).

Each layer remembers its own inputs, at most `memory_length` of them, without gradient. A skipped layer keeps its memory
(Skip Cross-head §2.1); the memory grows older, and the positions of its tokens say how old it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .cache import KeyValues, Past, take_rows
from .errors import InputError
from .layout import Layout, Run, State, find_last_runs, find_positions, join_runs, list_positions


@dataclass(frozen=True)
class LayerMemory:
    """The memory of one layer, M tokens.

    inputs: inputs of the layer as values (B, 1, M, E), detached; None for an empty memory.
    runs: positions of these tokens as runs of consecutive ones, oldest first; None where rows differ in length.
    positions (B, M), mask (B, M): the same for rows that differ; padding, False in the mask, stands on the left.
    heads: keys and values of these tokens in evaluation without gradients, so that nothing is projected twice.
    skipped: tokens of all segments at which the layer was skipped.
    """

    inputs: KeyValues | None = None
    runs: tuple[Run, ...] | None = ()
    positions: Tensor | None = None
    mask: Tensor | None = None
    heads: KeyValues | None = None
    skipped: int = 0

    @property
    def hidden(self) -> Tensor | None:
        """Inputs of the layer (B, M, E)."""
        return None if self.inputs is None else self.inputs.values[:, 0]

    @property
    def tokens(self) -> int:
        return 0 if self.inputs is None else self.inputs.length

    def last(self, limit: int) -> LayerMemory:
        """Take the last `limit` tokens."""
        if self.inputs is None or self.tokens <= limit:
            return self
        return replace(
            self,
            inputs=self.inputs.last(limit),
            runs=None if self.runs is None else find_last_runs(self.runs, limit),
            positions=None if self.positions is None else self.positions[:, -limit:],
            mask=None if self.mask is None else self.mask[:, -limit:],
            heads=None if self.heads is None else self.heads.last(limit),
        )

    def reorder(self, index: Tensor) -> LayerMemory:
        """Take rows `index` (K,), in that order; rows may repeat."""
        return replace(
            self,
            inputs=None if self.inputs is None else self.inputs.rows(index),
            positions=take_rows(self.positions, index),
            mask=take_rows(self.mask, index),
            heads=None if self.heads is None else self.heads.rows(index),
        )


@dataclass(frozen=True)
class Memory:
    """The memory of all layers, a value: the next segment takes it as input and returns another one.

    length: tokens read so far, which is the position of the next token; lengths (B,): the same where rows differ.
    version: the parameters, precision and clamp length that made the heads of the layers, so that no others use them.
    """

    layers: tuple[LayerMemory, ...]
    length: int = 0
    lengths: Tensor | None = None
    version: tuple[Any, ...] = ()

    @classmethod
    def empty(cls, layers: int) -> Memory:
        """Make the memory of a model of `layers` layers that has read nothing."""
        return cls((LayerMemory(),) * layers)

    def place(self, layer: LayerMemory, segment: MemoryState) -> LayerMemory:
        """Place the tokens of a layer's memory where the queries of the segment see them: at their positions in the text."""
        return layer

    @property
    def batch(self) -> int | None:
        return next(iter(self._batches), None)

    @property
    def _batches(self) -> list[int]:
        parts = [self.lengths, *(layer.hidden for layer in self.layers)]
        return [len(part) for part in parts if part is not None]

    def reorder(self, index: Tensor) -> Memory:
        """Take rows `index` (K,), in that order; rows may repeat."""
        layers = tuple(layer.reorder(index) for layer in self.layers)
        return replace(self, layers=layers, lengths=take_rows(self.lengths, index))

    def check(self, layers: int, rows: int, width: int) -> None:
        """Check that this is a memory of the model and the rows that read it.

        Args:
            layers: the number of layers of the model.
            rows: the number of rows B that it reads.
            width: its width E.

        Raises:
            InputError: one of these numbers differs.
        """
        widths = {layer.hidden.shape[2] for layer in self.layers if layer.hidden is not None}
        batches = {*self._batches}
        sizes = (len(self.layers), *(widths or {width}), *(batches or {rows}))
        if sizes != (layers, width, rows):
            raise InputError(
                f"the memory is of (layers, hidden_size, rows) {sizes}, the model and input_ids of {(layers, width, rows)}; "
                "begin with memory=None, or see memory.reorder"
            )

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything but cached keys and values as named tensors, for a checkpoint.

        Those of two dimensions or more have the rows of the batch first; the others are of all rows.
        """
        tensors = {"length": torch.tensor(self.length)}
        if self.lengths is not None:
            tensors["lengths"] = self.lengths[:, None]
        for i, layer in enumerate(self.layers):
            parts = {"hidden": layer.hidden, "positions": layer.positions, "mask": layer.mask}
            if layer.runs is not None:
                parts["runs"] = torch.tensor(layer.runs, dtype=torch.int64).flatten()
            tensors |= {f"{i}.{name}": part for name, part in parts.items() if part is not None}
            tensors[f"{i}.rested"] = torch.tensor(layer.skipped)
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Memory:
        """Make a memory of the tensors that `to_tensors` returned."""
        layers = []
        for i in range(sum(name.endswith(".rested") for name in tensors)):
            hidden = tensors.get(f"{i}.hidden")
            runs = tensors.get(f"{i}.runs")
            layer = LayerMemory(
                None if hidden is None else KeyValues(None, hidden[:, None]),
                None if runs is None else tuple(map(tuple, runs.view(-1, 2).tolist())),
                tensors.get(f"{i}.positions"),
                tensors.get(f"{i}.mask"),
                skipped=int(tensors[f"{i}.rested"]),
            )
            layers.append(layer)
        lengths = tensors.get("lengths")
        return cls(tuple(layers), int(tensors["length"]), None if lengths is None else lengths.flatten())


class MemoryState(State):
    """A segment of N tokens after the memory of each layer; a skipped layer keeps its memory.

    positions (N,) or (B, N): those of the segment in the text. first: the first one, where rows do not differ.
    mask (B, N): True for tokens; None when nothing was ever padded.
    lengths (B,): tokens read up to the end of the segment, where rows differ.
    model: the language model, whose parameters make the keys and values that layers keep in evaluation without gradients.
    """

    def __init__(self, memory: Memory, mask: Tensor | None, model: Any, x: Tensor) -> None:
        self.memory = memory
        self.first = memory.length
        self.tokens = x.shape[1]
        self.limit = model.memory_length
        self.window = model.window
        self.place = model.position.place
        self.mask = mask
        self.lengths = memory.lengths
        if mask is None and memory.lengths is None:
            self.positions = torch.arange(self.first, self.first + self.tokens, device=x.device)
        else:
            self._count_by_row(x)
        self.keeps = not model.blocks.training and not torch.is_grad_enabled()
        self.version = _find_version(model.blocks, x, model.position.clamp_length) if self.keeps else ()
        self.before = [layer.last(self.limit) for layer in memory.layers]
        if not self.keeps or memory.version != self.version:
            # a table of distances, too, has no gradient and no dropout
            self.before = [replace(layer, heads=None) for layer in self.before]
        self.after: dict[int, LayerMemory] = {}
        self.layouts: dict[Any, Layout] = {}  # layers that remember the same tokens share one

    def _count_by_row(self, x: Tensor) -> None:
        """Set mask, positions and lengths of a segment whose rows differ in padding."""
        rows = len(x)
        if self.mask is None:
            self.mask = torch.ones(rows, self.tokens, dtype=torch.bool, device=x.device)
        before = self.lengths
        if before is None:
            before = torch.full((rows,), self.first, device=x.device)
        self.positions = before[:, None] + find_positions(self.mask)
        self.lengths = before + self.mask.sum(1)

    def enter(self, layer: int, x: Tensor) -> tuple[Layout, KeyValues | None, Tensor | None]:
        before = self.before[layer]
        placed = self.memory.place(before, self)
        key = layer if placed.runs is None else placed.runs
        if key not in self.layouts:
            distance_keys = None if before.heads is None else before.heads.relative
            layout = self._make_layout(placed)
            self.layouts[key] = self.place(layout, x, distance_keys=distance_keys, cached=self.keeps)
        hidden = before.hidden
        if before.heads is not None or hidden is None:
            return self.layouts[key], before.heads, None
        # only a copy of a tensor made in inference mode can be differentiated
        frozen = torch.is_grad_enabled() and hidden.is_inference()
        return self.layouts[key], None, hidden.to(x.dtype, copy=frozen)

    def leave(self, layer: int, x: Tensor, pasts: list[Past]) -> None:
        heads = pasts[0] if pasts and isinstance(pasts[0], KeyValues) else None
        self.after[layer] = self._remember(self.before[layer], x, heads)

    def skip(self, layer: int) -> None:
        before = self.before[layer]
        self.after[layer] = replace(before, skipped=before.skipped + self.tokens)

    def next(self) -> tuple[Memory, None]:
        layers = tuple(self.after[layer] for layer in range(len(self.before)))
        length = self.first + self.tokens
        return replace(self.memory, layers=layers, length=length, lengths=self.lengths, version=self.version), None

    def _make_layout(self, memory: LayerMemory) -> Layout:
        if self.mask is None:
            runs = [(start - self.first, length) for start, length in memory.runs or ()]
            runs.append((0, self.tokens))
            device = self.positions.device
            return Layout.from_runs(self.tokens, runs, origin=self.first, device=device, window=self.window)
        positions, mask = _join_positions(memory, self.positions, self.mask)
        farthest = None
        if memory.tokens and memory.skipped:  # only then there may be gaps; the host waits for the device
            distances = (self.positions[:, -1:] - positions).masked_fill(~mask, 0)
            farthest = max(int(distances.max()), positions.shape[1] - 1)
        return Layout(self.positions, positions, True, mask, window=self.window, farthest=farthest)

    def _remember(self, memory: LayerMemory, hidden: Tensor, heads: KeyValues | None) -> LayerMemory:
        """Make the memory of a layer that has run on the segment: the last `limit` of old and new tokens.

        hidden (B, N, E): inputs of the layer. heads: keys and values of old and new tokens; None where they are not kept.
        """
        limit = self.limit
        inputs = KeyValues(None, hidden.detach()[:, None])
        num_old = limit - self.tokens if self.mask is None else limit
        if memory.inputs is not None and num_old > 0:  # forgotten tokens are not copied
            inputs = memory.inputs.last(num_old).append(inputs)
        if self.mask is None:
            all_runs = (*(memory.runs or ()), (self.first, self.tokens))
            runs = find_last_runs(join_runs(all_runs), limit)
            last_heads = None if heads is None else heads.last(limit)
            return LayerMemory(inputs.last(limit), runs, heads=last_heads, skipped=memory.skipped)
        positions, mask = _join_positions(memory, self.positions, self.mask)
        # padding goes to the left of every row, so that the last tokens of a row are its last columns
        padding_first = mask.to(torch.uint8).argsort(dim=1, stable=True)
        order = padding_first[:, -limit:]

        def choose(part: Tensor) -> Tensor:
            index = order[:, None, :, None]
            return part.gather(2, index.expand(-1, part.shape[1], -1, part.shape[3]))

        return LayerMemory(
            inputs.select(choose),
            None,
            positions.gather(1, order),
            mask.gather(1, order),
            None if heads is None else heads.select(choose),
            memory.skipped,
        )


def _join_positions(memory: LayerMemory, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Append positions and mask (B, N) of new tokens to those of a memory."""
    old_positions = memory.positions
    old_mask = memory.mask
    if old_positions is None or old_mask is None:
        listed = list_positions(memory.runs or (), mask.device)
        old_positions = listed.expand(len(mask), -1)
        old_mask = torch.ones_like(old_positions, dtype=torch.bool)
    joined_positions = torch.cat((old_positions, positions), dim=1)
    joined_mask = torch.cat((old_mask, mask), dim=1)
    return joined_positions, joined_mask


def _find_version(blocks: nn.Module, x: Tensor, clamp_length: int | None) -> tuple[Any, ...]:
    """Find the state that keys and values depend on beside the hidden states.

    Each parameter has a number that grows with every change in place.
    """
    versions = ((id(p), 0 if p.is_inference() else p._version) for p in blocks.parameters())
    device = x.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    autocast_dtype = torch.get_autocast_dtype(device) if casts else None
    return tuple(versions), clamp_length, x.dtype, autocast_dtype
