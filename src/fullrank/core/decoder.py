"""The decoder-only language model: embedding -> blocks -> norm -> output layer, on one screen."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core import registry, stack, storage
from fullrank.core.across import Projected, Source
from fullrank.core.attention import KeyValues, Past
from fullrank.core.block import Block
from fullrank.core.cache import Cache
from fullrank.core.config import ModelConfig, with_memory
from fullrank.core.dropout import Dropout
from fullrank.core.embedding import Input
from fullrank.core.errors import InputError
from fullrank.core.initialize import initialize
from fullrank.core.layout import Layout
from fullrank.core.memory import Memory, Segment
from fullrank.core.output import Output
from fullrank.core.outputs import LossParts, ModelOutput, Pass, TokenNll
from fullrank.core.positions import Learned, Relative
from fullrank.core.trace import Trace


class LanguageModel(nn.Module):
    """p(x_{n+1} | x_1 .. x_n) for every n at once; what is computed for token n never depends on a later one,
    unless `config.sees_future`.

    Built from a `ModelConfig` whose `vocab_size` is known; can be built under `torch.device("meta")`. With `cross`, the
    configuration of its cross-attention, it is the decoder of a translation model: p(y_{n+1} | y_1 .. y_n, source).
    """

    def __init__(self, config: ModelConfig, cross: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding: Input = registry.lookup("input", config.input.kind)(config)
        self.position: nn.Module = registry.lookup("position", config.position)(config)
        self.embedding_dropout = Dropout(config.dropout.embedding, config.dropout.locked)
        self.blocks: Any = nn.ModuleList(Block(config, cross) for _ in range(config.num_hidden_layers))
        if isinstance(self.position, Relative):
            self.position.lend(self.blocks)
        self.final_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.final_norm else nn.Identity()
        )
        self.output_dropout = Dropout(config.dropout.output, config.dropout.locked)
        self.output: Output = registry.lookup("output", config.output.kind)(config, self.embedding)
        initialize(self, config.initializer)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        memory: Memory | None = None,
        *,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        trace: Trace | None = None,
        skip: Collection[int] = (),
    ) -> ModelOutput:
        """input_ids (B, N) int64 -> logits (B, N, V).

        memory: `out.memory` of the segment before, None at the start of a text. Every token sees the tokens of its segment
        up to itself and the `memory_length` tokens before the segment; with `same_length` memory_length tokens in all.
        attention_mask (B, N), 1 for tokens and 0 for padding on either side; positions count tokens only.
        cache: from `new_cache()` or the call before; then input_ids are the new tokens only (an attention_mask may cover
        them alone or all tokens so far). With a cache the whole text is one segment: a token sees all before it, however short
        `memory_length` is (with `same_length` memory_length tokens in all), and no memory of zeros.
        trace collects attention weights. skip: layers, from 0, that rest at this call.
        """
        hidden, memory, cache = self.hidden(
            input_ids, memory, cache=cache, attention_mask=attention_mask, trace=trace, skip=skip
        )
        return ModelOutput(self.output(hidden), memory, cache)

    def hidden(
        self,
        input_ids: Tensor,
        memory: Memory | None = None,
        *,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        trace: Trace | None = None,
        skip: Collection[int] = (),
        drifting: bool = False,
        source: Source | Projected | None = None,
        mixed: bool = True,
    ) -> Pass:
        """What the output layer reads, (B, N, E), and the memory and cache of the next call.

        source: what a decoder reads across. Without `mixed`, tokens after a cache leave heads as they are, as Mixhead's
        released code does.
        drifting: label memories of layers that have rested as Skip Cross-head's released code does (see `Segment.layout`).
        """
        if input_ids.dim() != 2:
            raise InputError(f"input_ids must be (B, N), given shape {tuple(input_ids.shape)}")
        if wrong := [layer for layer in skip if isinstance(layer, bool) or not 0 <= layer < len(self.blocks)]:
            raise InputError(f"skip: layers 0 to {len(self.blocks) - 1}, given {wrong}")
        if memory is not None and self.memory_length == 0:
            raise InputError(
                "memory was given, but model.memory_length is 0: this model has none (model.remembers gives it one)"
            )
        if cache is not None and (memory is not None or skip):
            raise InputError("a cache holds all earlier tokens of every layer: give no memory and no skip with it")
        if input_ids.shape[1] == 0:  # nothing is read, nothing is remembered
            begun = (memory or self.new_memory()) if self.memory_length and cache is None else None
            return Pass(self._finished(self.embedding(input_ids)), begun, cache)
        if cache is not None:
            cache = cache.clamped(self._clamp_length)
            x, layout, mask = self._embedded(input_ids, cache, attention_mask)
            layout = self._with_encodings(layout, x, cache.layers[0], True)
            x, after = stack.read_after_cache(self.blocks, x, cache, layout, mask, trace, source, mixed)
            return Pass(self._finished(x), None, after)
        if self.memory_length:
            return self._after_memory(input_ids, memory, attention_mask, trace, skip, drifting)
        x, layout, _ = self._embedded(input_ids, None, attention_mask)
        assert not isinstance(source, Projected)
        x = stack.read(self.blocks, x, self._with_encodings(layout, x, None, False), trace, skip, source)
        return Pass(self._finished(x), None, None)

    def _after_memory(
        self,
        input_ids: Tensor,
        memory: Memory | None,
        attention_mask: Tensor | None,
        trace: Trace | None,
        skip: Collection[int],
        drifting: bool,
    ) -> Pass:
        rows, tokens = input_ids.shape
        read = self.embedding(input_ids)
        memory = memory or self.new_memory()
        if self.config.memory_start == "zeros" and memory.length == 0:
            memory = Memory.zeros(len(self.blocks), rows, self.memory_length, read)
        memory.check(len(self.blocks), rows, self.config.hidden_size)
        if attention_mask is not None and attention_mask.shape != (rows, tokens):
            raise InputError(
                f"attention_mask must be {(rows, tokens)} like input_ids, given {tuple(attention_mask.shape)}"
            )
        mask = None if attention_mask is None else attention_mask.bool()
        segment = Segment.after(memory, rows, tokens, mask, input_ids.device)
        if isinstance(self.position, Learned):
            self.position.check(memory.length + tokens if segment.mask is None else int(segment.positions.max()) + 1)
        x = self.embedding_dropout(self.position(read, segment.positions))  # (B, N, E)
        keeps_heads = not self.training and not torch.is_grad_enabled()
        how = stack.Remembering(self.memory_length, self._window, skip, drifting, keeps_heads, self._clamp_length)

        def encode(layout: Layout, known: KeyValues | None) -> Layout:
            return self._with_encodings(layout, x, known, keeps_heads)

        x, after = stack.read_after_memory(self.blocks, x, memory, segment, how, encode, trace)
        return Pass(self._finished(x), after, None)

    def _embedded(
        self, input_ids: Tensor, cache: Cache | None, attention_mask: Tensor | None
    ) -> tuple[Tensor, Layout, Tensor | None]:
        """What the first layer reads, (B, N, E), of new tokens after those of a cache; their layout and mask."""
        rows, tokens = input_ids.shape
        past = 0
        if cache is not None:
            cache.check(len(self.blocks), rows)
            past = cache.length
        new = None if attention_mask is None else attention_mask.bool()
        if new is not None and past and new.shape == (rows, past + tokens):
            assert cache is not None
            cache.check_mask(new[:, :past])
            new = new[:, past:]
        if new is not None and new.shape != (rows, tokens):
            raise InputError(f"attention_mask must be {(rows, tokens)} like input_ids, given {tuple(new.shape)}")
        mask = new if cache is None else cache.mask_after(new, rows, tokens, input_ids.device)
        if mask is None:
            if isinstance(self.position, Learned):
                self.position.check(past + tokens)
            layout = Layout.of(tokens, past + tokens, device=input_ids.device, window=self._window)
        else:
            positions = (mask.cumsum(1) - 1).clamp_min(0)  # (B, M): padding takes no position
            if isinstance(self.position, Learned):
                self.position.check(int(positions.max()) + 1)
            layout = Layout(positions[:, past:], positions, True, mask, window=self._window)
        x = self.position(self.embedding(input_ids), layout.query_positions)
        return self.embedding_dropout(x), layout, mask

    @property
    def _window(self) -> int | None:
        return self.memory_length if self.same_length and self.memory_length else None

    def _with_encodings(self, layout: Layout, x: Tensor, known: Past | None, cached: bool) -> Layout:
        """The layout with what relative positions make once for all layers."""
        if not isinstance(self.position, Relative):
            return layout
        encodings = self.position.encodings(layout, x, known.relative if isinstance(known, KeyValues) else None, cached)
        return layout if encodings is None else replace(layout, encodings=self.embedding_dropout(encodings[None])[0])

    def _finished(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.output_dropout(self.final_norm(x))
        return hidden

    @property
    def memory_length(self) -> int:
        """Tokens before a segment that every layer remembers."""
        return self.config.memory_length

    @property
    def same_length(self) -> bool:
        """Whether every query sees `memory_length` keys, itself included, instead of all of the memory."""
        return self.config.same_length

    @contextlib.contextmanager
    def remembers(
        self, memory_length: int | None = None, *, same_length: bool | None = None, clamp_length: int | None = None
    ) -> Iterator[None]:
        """Inside a `with` block: another length of memory, another window, other distances clamped (None: as they are).

        Raises ConfigError, an InputError, for values that the model cannot have.
        """
        before, clamped = self.config, self._clamp_length
        self.config = with_memory(before, memory_length, same_length=same_length, clamp_length=clamp_length)
        self._clamp(clamped if clamp_length is None else clamp_length)
        try:
            yield
        finally:
            self.config = before
            self._clamp(clamped)

    @property
    def _clamp_length(self) -> int | None:
        return self.position.clamp_length if isinstance(self.position, Relative) else None

    def _clamp(self, length: int | None) -> None:
        if isinstance(self.position, Relative):
            self.position.clamp(length, self.blocks)

    def new_cache(self) -> Cache:
        """An empty cache of keys and values, for decoding token by token."""
        return Cache(tuple(block.attention.past() for block in self.blocks))

    def new_memory(self) -> Memory:
        """The memory of a model that has read nothing; the same as None."""
        return Memory.empty(len(self.blocks))

    @property
    def max_length(self) -> int | None:
        """The longest sequence the model can take, None if there is no limit."""
        if self.config.position == "learned":
            return self.config.max_position_embeddings
        return getattr(self.blocks[0].attention.attend, "max_length", None)

    # -- losses -------------------------------------------------------------------------------------------------------

    def nll(
        self, input_ids: Tensor, targets: Tensor, memory: Memory | None = None, *, attention_mask: Tensor | None = None
    ) -> TokenNll:
        """-log p(targets | input_ids up to there) in nats, (B, N), exact under any cotangent; never builds (B, N, V)."""
        self._check_targets(input_ids, targets)
        hidden, after, _ = self.hidden(input_ids, memory, attention_mask=attention_mask)
        return TokenNll(self.output.nll(hidden, targets), after)

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        memory: Memory | None = None,
        *,
        attention_mask: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Weighted mean nll, sum(w nll) / sum(w), a scalar in nats per token: the fast training path.

        Its gradients are formed in the forward pass. With `label_smoothing` e the target is (1 - e) [v = x] + e / V.
        """
        mask, smoothing = attention_mask, label_smoothing
        return self.loss_parts(input_ids, targets, weights, memory, attention_mask=mask, label_smoothing=smoothing).loss

    def loss_parts(
        self,
        input_ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        memory: Memory | None = None,
        *,
        attention_mask: Tensor | None = None,
        label_smoothing: float = 0.0,
        trace: Trace | None = None,
        skip: Collection[int] = (),
        drifting: bool = False,
    ) -> LossParts:
        """`loss` and, beside it, the plain nll that label smoothing hides, and the memory of the next call.

        A trace collects what penalties need; `skip` are the layers that rest, `drifting` is explained at `hidden`.
        """
        self._check_targets(input_ids, targets)
        hidden, after, _ = self.hidden(
            input_ids, memory, attention_mask=attention_mask, trace=trace, skip=skip, drifting=drifting
        )
        loss, nll = self.output.loss(hidden, targets, weights, label_smoothing)
        return LossParts(loss, nll, after)

    def _check_targets(self, input_ids: Tensor, targets: Tensor) -> None:
        if targets.numel() == 0:
            raise InputError(f"a loss of no tokens: targets are {tuple(targets.shape)}")
        if targets.shape != input_ids.shape:
            raise InputError(
                f"targets {tuple(targets.shape)} must have the shape of input_ids {tuple(input_ids.shape)}"
            )

    # -- sizes, files -------------------------------------------------------------------------------------------------

    def num_parameters(self) -> int:
        """Numbers in parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def compile_targets(self) -> list[nn.Module]:
        """What `torch.compile` should compile one by one: the blocks."""
        return list(self.blocks)

    def save(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.yaml` into `folder`."""
        storage.save(self, self.config, Path(folder))

    @classmethod
    def load(
        cls,
        path: str | Path,
        checkpoint: str = "best",
        *,
        memory_length: int | None = None,
        same_length: bool | None = None,
        clamp_length: int | None = None,
    ) -> LanguageModel:
        """The model saved in `path`: a folder written by `save`, or a run folder (its `best` or `last` checkpoint).

        memory_length, same_length, clamp_length: other values than it was saved with, for good (`save` writes them).
        Raises InputError if the folder holds no model, its weights are damaged or do not fit their configuration.
        """
        file, config = storage.find(Path(path), checkpoint)
        config = with_memory(config, memory_length, same_length=same_length, clamp_length=clamp_length)
        tensors = storage.read(file)
        storage.check_kind(tensors, "LanguageModel", path)
        with torch.device("meta"):
            model = cls(config)
        storage.assign(model, tensors, file)
        return model.eval()
