"""The decoder-only language model: embedding -> blocks -> norm -> output layer."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from . import engine, registry, released
from .cache import Cache, CacheState, Source, TranslationCache
from .config import ModelConfig, with_memory
from .draws import make_dropout
from .embedding import Input
from .errors import InputError
from .initialize import initialize
from .layout import State, read_mask
from .memory import Memory, MemoryState
from .model import Layers, LossParts, ModelOutput, Pass, TokenNll, check_targets, check_tokens
from .output import Output
from .registry import with_parts
from .trace import Trace


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
        self.output_dropout: nn.Module = make_dropout(config.dropout.output, config.dropout.locked)
        self.output: Output = registry.lookup("output", config.output.kind)(config, self.embedding)
        initialize(self, config.initializer)

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
        all tokens so far), and the whole text is one segment, however short `memory_length` is.
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
        source: Source | TranslationCache | None = None,
    ) -> Pass:
        check_tokens(input_ids)
        self._check(memory, cache, skip)
        if input_ids.shape[1] == 0:  # nothing is read, nothing is remembered
            before = (memory or self.new_memory()) if self.memory_length and cache is None else None
            return Pass(self.final_norm(self.embedding(input_ids)), before, cache)
        x = self.embed(self.embedding, input_ids)
        state: State
        if self.memory_length and cache is None:
            state = self._make_memory_state(memory or self.new_memory(), input_ids, attention_mask, x)
        elif cache is None:
            state, _ = self.make_state(input_ids, attention_mask, causal=True, window=self.window)
        else:
            cache.check(len(self.blocks), len(input_ids))
            mask = cache.mask_after(attention_mask, input_ids)
            layout = self.make_layout(input_ids, mask, cache.length, True, self.window, cache.documents)
            state = CacheState(cache, mask, layout, self.position.place)
        last = self.run(x, state, source=source, trace=trace, skip=skip)
        if trace is not None:
            trace.last = last
        return Pass(self.output_dropout(last), *state.next())

    def _make_memory_state(
        self, memory: Memory, input_ids: Tensor, attention_mask: Tensor | None, x: Tensor
    ) -> MemoryState:
        if self.config.memory_start == "zeros":
            memory = released.start_memory(self.config, memory, x)
        memory.check(len(self.blocks), len(x), self.config.hidden_size)
        state = MemoryState(memory, read_mask(attention_mask, input_ids), self, x)
        if self.position.max_length is not None:
            longest = state.first + state.tokens if state.mask is None else int(state.positions.max()) + 1
            self.position.check(longest)
        return state

    def _check(self, memory: Memory | None, cache: Cache | None, skip: Collection[int]) -> None:
        if wrong := [layer for layer in skip if isinstance(layer, bool) or not 0 <= layer < len(self.blocks)]:
            raise InputError(f"skip: layers 0 to {len(self.blocks) - 1}, given {wrong}")
        if memory is not None and self.memory_length == 0:
            raise InputError(
                "memory was given, but model.memory_length is 0: this model has none (model.with_memory gives it one)"
            )
        if not isinstance(memory, Memory | None) or not isinstance(cache, Cache | None):
            types = f"{type(memory).__name__} and {type(cache).__name__}"
            raise InputError(f"memory, cache: those of the output of the call before, given {types}")
        if cache is not None and (memory is not None or skip):
            raise InputError("a cache holds all earlier tokens of every layer: give no memory and no skip with it")
        if cache is not None and self.config.sees_future:
            raise InputError(
                "model.attention.causal: as_published lets tokens see later ones, so a text cannot be continued; read it "
                "whole, or train with 'masked'"
            )

    @property
    def memory_length(self) -> int:
        return self.config.memory_length

    @property
    def window(self) -> int | None:
        """The keys that a query sees, itself included; None: all."""
        return self.memory_length if self.config.same_length and self.memory_length else None

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
        return Cache(tuple(block.attention.attend.past() for block in self.blocks))

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
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        greedy: bool = False,
        beams: int | None = None,
        length_penalty: float = 1.0,
        no_repeat_ngram_size: int | None = None,
        eos_id: int | None = None,
        seed: int | None = None,
        attention_mask: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """input_ids (B, N), padded on the left, and what the model writes after them -> (B, N + T), read with a cache.

        Tokens are drawn from p^(1/temperature) cut to `top_k`, `top_p` and to `min_p` of the likeliest; `repetition_penalty`
        makes tokens that were there less likely; `greedy` takes the likeliest, `beams` searches so
        many texts at a time (score: log p / length^length_penalty). The same `seed` gives the same text. A row ends with
        `eos_id` or after `max_new_tokens`, and is filled with `eos_id`.
        window: the most tokens W that are read at once. Where a text grows longer, the model reads its last W / 2 tokens
        anew, as a text of their own. By default the segments of the run that the model was loaded from, else
        `max_position_embeddings`; a memory slides by itself.
        """
        return engine.generate(
            self, input_ids, beams=beams, length_penalty=length_penalty, window=window, attention_mask=attention_mask,
            max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, no_repeat_ngram_size=no_repeat_ngram_size,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            greedy=greedy, seed=seed, eos_id=eos_id,
        )  # fmt: skip

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
    ) -> LossParts:
        """`loss`, the nll without label smoothing, and the memory of the next call.

        targets, weights (B, T): of the last T of the N inputs; the inputs before them are context that is read only.
        trace: collects what penalties need. skip: layers that are skipped.
        """
        check_targets(input_ids, targets, fewer=True)
        hidden, after, _ = self.hidden(input_ids, memory, attention_mask=attention_mask, trace=trace, skip=skip)
        hidden = hidden[:, input_ids.shape[1] - targets.shape[1] :]
        if trace is not None:
            trace.hidden = hidden
        return LossParts(*self.output.loss(hidden, targets, weights, label_smoothing), after)
