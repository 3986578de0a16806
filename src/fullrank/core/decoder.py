"""The decoder-only language model: embedding -> blocks -> norm -> output layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import engine, registry
from .attention import Trace
from .cache import Cache
from .config import ModelConfig, with_memory
from .dropout import Dropout
from .embedding import Input
from .errors import InputError
from .initialize import initialize
from .layout import Layout
from .memory import LayerMemory, Memory, Segment
from .model import Layers, LossParts, ModelOutput, Pass, TokenNll, check_targets, check_tokens, loss_of, read_mask
from .output import Output, Teacher
from .source import ProjectedSource, Source
from .stage import with_parts


class LanguageModel(Layers):
    """p(x_{n+1} | x_1 .. x_n) for every n at once; nothing computed for token n depends on a later one, unless
    `config.sees_future`.

    Built from a `ModelConfig` whose `vocab_size` is known; can be built under `torch.device("meta")`. With `cross`, the
    configuration of its cross-attention, it is the decoder of a translation model: p(y_{n+1} | y_1 .. y_n, source).
    """

    def __init__(self, config: ModelConfig, cross: ModelConfig | None = None) -> None:
        super().__init__(config)
        self.embedding: Input = registry.lookup("input", config.input.kind)(config)
        self.add_layers(cross)
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
        trace: collects attention weights. skip: layers, counted from 0, that are skipped in this call.
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
        source: Source | ProjectedSource | None = None,
    ) -> Pass:
        """Input of the output layer (B, N, E), and memory and cache of the next call; source: of a translation."""
        check_tokens(input_ids, attention_mask)
        self._check(memory, cache, skip)
        self.begin(trace)
        if input_ids.shape[1] == 0:  # nothing is read, nothing is remembered
            begun = (memory or self.new_memory()) if self.memory_length and cache is None else None
            return Pass(self._finish(self.embedding(input_ids), trace), begun, cache)
        if cache is not None:
            return self._after_cache(input_ids, cache, attention_mask, trace, source)
        if self.memory_length:
            return self._after_memory(input_ids, memory or self.new_memory(), attention_mask, trace, skip)
        x, layout, _ = self._embed(input_ids, None, attention_mask)
        layout = self.position.place(layout, x, self.embedding_dropout)
        first = self.first_values(x)
        cross = None if source is None else source.of_layer(0, x.shape[1])  # the same for all layers
        for i, block in enumerate(self.blocks):
            if i not in skip:
                inner = None if trace is None else trace.enter(x)
                x = block(x, layout, inner, cross=cross, first=first)
        return Pass(self._finish(x, trace), None, None)

    def _after_cache(
        self,
        input_ids: Tensor,
        cache: Cache,
        attention_mask: Tensor | None,
        trace: Trace | None,
        source: Source | ProjectedSource | None,
    ) -> Pass:
        """New tokens (B, N) after those of a cache."""
        cache = cache.clamped(self.position.clamp_length)
        x, layout, mask = self._embed(input_ids, cache, attention_mask)
        layout = self.position.place(layout, x, self.embedding_dropout, cache.layers[0], cached=True)
        layers, first = [], self.first_values(x)
        for i, (block, past) in enumerate(zip(self.blocks, cache.layers, strict=True)):
            cross = None if source is None else source.of_layer(i, x.shape[1])
            inner = None if trace is None else trace.enter(x)
            x, present = block.continued(x, past, layout, inner, cross=cross, first=first)
            layers.append(present)
        return Pass(self._finish(x, trace), None, replace(cache, layers=tuple(layers), key_mask=mask))

    def _after_memory(
        self,
        input_ids: Tensor,
        memory: Memory,
        attention_mask: Tensor | None,
        trace: Trace | None,
        skip: Collection[int],
    ) -> Pass:
        """The next segment (B, N) after the memory of each layer. A skipped layer passes x on and keeps its memory."""
        rows, tokens = input_ids.shape
        x = self.embed(self.embedding, input_ids)
        if self.config.memory_start == "zeros" and memory.length == 0:
            memory = Memory.zeros(len(self.blocks), rows, self.memory_length, x)
        memory.check(len(self.blocks), rows, self.config.hidden_size)
        segment = Segment.after(memory, rows, tokens, read_mask(attention_mask, input_ids), input_ids.device)
        if self.position.max_length is not None:
            self.position.check(memory.length + tokens if segment.mask is None else int(segment.positions.max()) + 1)
        x = self.embedding_dropout(self.position(x, segment.positions))  # (B, N, E)
        keeps_heads = not self.training and not torch.is_grad_enabled()
        layouts: dict[Any, Layout] = {}  # layers that remember the same tokens share one
        after: list[LayerMemory] = []
        first: Tensor | None = None
        for i, block in enumerate(self.blocks):
            known = memory.layers[i].last(self.memory_length)
            if i in skip:
                after.append(replace(known, skipped=known.skipped + tokens))
                continue
            # value residuals make heads of the first block's parameters, too
            made_by = self.blocks if self.config.value_residual else block
            version = _version(made_by, x, self.position.clamp_length)
            if known.heads is not None and (not keeps_heads or known.version != version):
                known = replace(known, heads=None)  # their table of distances, too, has no gradient and no dropout
            if known.hidden is not None and (known.hidden.dtype != x.dtype or _frozen(known.hidden)):
                known = replace(known, hidden=known.hidden.to(x.dtype, copy=True))
            key = (known.runs, known.skipped if memory.drifting else 0, i if known.runs is None else None)
            if key not in layouts:
                layout = segment.layout(known, self._window, memory.drifting)
                layouts[key] = self.position.place(layout, x, self.embedding_dropout, known.heads, keeps_heads)
            layout, inputs, heads = layouts[key], x, None
            inner = None if trace is None else trace.enter(x)
            hidden = known.hidden if known.heads is None else None
            if i == 0:  # its memory is of the tokens that all blocks remember
                first = self.first_values(x, hidden)
            if keeps_heads:
                x, heads = block.continued(x, known.heads, layout, inner, hidden, first=first)
            else:
                x = block(x, layout, inner, hidden, first=first)
            remembered = segment.remember(known, inputs, heads, self.memory_length)
            after.append(replace(remembered, version=version))
        memory = replace(memory, layers=tuple(after), length=memory.length + tokens, lengths=segment.lengths)
        return Pass(self._finish(x, trace), memory, None)

    def _embed(
        self, input_ids: Tensor, cache: Cache | None, attention_mask: Tensor | None
    ) -> tuple[Tensor, Layout, Tensor | None]:
        """Input of the first layer (B, N, E) for new tokens after those of a cache; their layout and mask."""
        rows, tokens = input_ids.shape
        past = 0
        if cache is not None:
            cache.check(len(self.blocks), rows)
            past = cache.length
        if attention_mask is not None and past and attention_mask.shape == (rows, past + tokens):
            assert cache is not None
            cache.check_mask(attention_mask[:, :past].bool())
            attention_mask = attention_mask[:, past:]
        new = read_mask(attention_mask, input_ids)
        mask = new if cache is None else cache.mask_after(new, rows, tokens, input_ids.device)
        if mask is None:
            self.position.check(past + tokens)
            layout = Layout.of(tokens, past + tokens, device=input_ids.device, window=self._window)
        else:
            positions = self.positions(mask)  # (B, M)
            layout = Layout(positions[:, past:], positions, True, mask, window=self._window)
        x = self.position(self.embed(self.embedding, input_ids), layout.query_positions)
        return self.embedding_dropout(x), layout, mask

    def _finish(self, x: Tensor, trace: Trace | None) -> Tensor:
        last = self.final_norm(x)
        if trace is not None:
            trace.last = last
        hidden: Tensor = self.output_dropout(last)
        return hidden

    def _check(self, memory: Memory | None, cache: Cache | None, skip: Collection[int]) -> None:
        if wrong := [layer for layer in skip if isinstance(layer, bool) or not 0 <= layer < len(self.blocks)]:
            raise InputError(f"skip: layers 0 to {len(self.blocks) - 1}, given {wrong}")
        if skip and self.memory_length and self.config.value_residual:
            raise InputError(
                "skip: a skipped layer's memory has other tokens than the first layer's, whose values all layers read "
                "(model.attention.value_residual: true); skip none"
            )
        if memory is not None and self.memory_length == 0:
            raise InputError(
                "memory was given, but model.memory_length is 0: this model has none (model.with_memory gives it one)"
            )
        for name, value, kind in (("memory", memory, Memory), ("cache", cache, Cache)):
            if value is not None and not isinstance(value, kind):
                raise InputError(f"{name}: the `{name}` of the output of the call before, given {type(value).__name__}")
        if cache is not None and (memory is not None or skip):
            raise InputError("a cache holds all earlier tokens of every layer: give no memory and no skip with it")

    # -- memory and cache ---------------------------------------------------------------------------------------------

    @property
    def memory_length(self) -> int:
        """Number of tokens before a segment that every layer remembers."""
        return self.config.memory_length

    @property
    def same_length(self) -> bool:
        """True if every query sees `memory_length` keys, itself included, instead of all of the memory."""
        return self.config.same_length

    @property
    def _window(self) -> int | None:
        return self.memory_length if self.same_length and self.memory_length else None

    def with_memory(
        self, memory_length: int | None = None, *, same_length: bool | None = None, clamp_length: int | None = None
    ) -> LanguageModel:
        """This model with another length of memory, another window or other distances clamped (None: as they are).

        The result shares all modules and parameters; this model is not changed.
        Raises ConfigError, an InputError, for values that the model cannot have.
        """
        position = with_parts(self.position)
        if clamp_length is not None:
            position.clamp_length = clamp_length
        model = with_parts(self, position=position)
        model.config = with_memory(self.config, memory_length, same_length=same_length, clamp_length=clamp_length)
        return model

    def new_cache(self) -> Cache:
        """An empty cache of keys and values, for decoding token by token."""
        return Cache(tuple(block.attention.past() for block in self.blocks))

    def new_memory(self) -> Memory:
        """The memory of a model that has read nothing; the same as None."""
        return Memory.empty(len(self.blocks))

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 100,
        *,
        min_new_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        greedy: bool = False,
        beams: int | None = None,
        length_penalty: float = 1.0,
        no_repeat_ngram_size: int | None = None,
        eos_id: int | None = None,
        seed: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """input_ids (B, N), padded on the left, and what the model writes after them -> (B, N + T), read with a cache.

        Tokens are drawn from p^(1/temperature) cut to `top_k` and `top_p`; `greedy` takes the likeliest, `beams` searches so
        many texts at a time (score: log p / length^length_penalty). The same `seed` gives the same text. A row ends with
        `eos_id` or after `max_new_tokens`, and is filled with `eos_id`.
        window: the most tokens W that are read at once. Where a text grows longer, the model reads its last W / 2 tokens
        anew, as a text of their own. By default the segments of the run that the model was loaded from, else
        `max_position_embeddings`; a memory slides by itself.
        """
        if engine.generate is None:
            raise RuntimeError("generate needs the package fullrank; an exported model has Hugging Face's own")
        return engine.generate(
            self, input_ids, beams=beams, length_penalty=length_penalty, window=window, attention_mask=attention_mask,
            max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, no_repeat_ngram_size=no_repeat_ngram_size,
            temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy, seed=seed, eos_id=eos_id,
        )  # fmt: skip

    # -- losses -------------------------------------------------------------------------------------------------------

    def nll(
        self, input_ids: Tensor, targets: Tensor, memory: Memory | None = None, *, attention_mask: Tensor | None = None
    ) -> TokenNll:
        """-log p(targets | input_ids up to there) in nats, (B, N), exact under any cotangent; never builds (B, N, V)."""
        check_targets(input_ids, targets)
        hidden, after, _ = self.hidden(input_ids, memory, attention_mask=attention_mask)
        return TokenNll(self.output.nll(hidden, targets), after)

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
        teacher: Teacher | None = None,
    ) -> LossParts:
        """`loss`, the nll without label smoothing, and the memory of the next call.

        targets, weights (B, T): of the last T of the N inputs; the inputs before them are context that is read only.
        trace: collects what penalties need. skip: layers that are skipped. teacher: as of `Output.loss`.
        """
        check_targets(input_ids, targets, fewer=True)
        hidden, after, _ = self.hidden(input_ids, memory, attention_mask=attention_mask, trace=trace, skip=skip)
        hidden = hidden[:, input_ids.shape[1] - targets.shape[1] :]
        if trace is not None:
            trace.hidden = hidden
        taught = {} if teacher is None else {"teacher": teacher}
        loss, nll = self.output.loss(hidden, targets, weights, label_smoothing, **taught)
        return LossParts(loss, nll, after)

    loss = loss_of(loss_parts)

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
        """The model saved in `path`, as in `Model.load`.

        memory_length, same_length, clamp_length: other values than it was saved with, for good (`save` writes them).
        """
        return cls._load(
            path,
            checkpoint,
            lambda config: with_memory(config, memory_length, same_length=same_length, clamp_length=clamp_length),
        )


def _version(block: nn.Module, x: Tensor, clamp: int | None) -> tuple[Any, ...]:
    """State that keys and values depend on beside the hidden states; a parameter counts how often it was changed."""
    parameters = tuple((id(p), 0 if p.is_inference() else p._version) for p in block.parameters())
    device = x.device.type
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return parameters, clamp, x.dtype, torch.get_autocast_dtype(device) if cast else None


def _frozen(hidden: Tensor) -> bool:
    """True for a tensor made in inference mode, where gradients are wanted: only a copy of it can be differentiated."""
    return torch.is_grad_enabled() and hidden.is_inference()
