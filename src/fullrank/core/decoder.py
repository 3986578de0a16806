"""The decoder-only language model: embedding -> blocks -> norm -> output layer."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from . import engine, registry, released
from .cache import Cache, CacheState, Source, TranslationCache
from .config import ModelConfig, with_memory
from .draws import make_dropout
from .embedding import Input
from .initialize import initialize
from .layout import State, read_mask
from .memory import Memory, MemoryState
from .model import Layers, LossParts, ModelOutput, Pass, TokenNll, check_state, check_targets, check_tokens
from .output import Output
from .registry import with_parts
from .trace import Trace


class LanguageModel(Layers):
    """A causal Transformer language model: p(x_{n+1} | x_1 .. x_n) for every n at once.

    Nothing computed for token n depends on a later one, unless `config.sees_future`.
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
        """Compute the logits (B, N, V) of the next token at every position.

        Every token sees the tokens of its segment up to itself and the `memory_length` tokens before the segment; with
        `same_length` it sees `memory_length` tokens in all. With a cache the text is one segment, however short
        `memory_length` is. Positions count tokens only. What does not fit the model, or is too long, raises InputError.

        Args:
            input_ids: int64 (B, N); with a cache the new tokens only.
            memory: `out.memory` of the segment before, None at the start of a text.
            cache: from `new_cache()` or the call before.
            attention_mask: (B, N), 1 for tokens and 0 for padding on either side; with a cache it may cover all tokens so far.
            trace: collects attention weights.
            skip: layers, counted from 0, that are skipped in this call.
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
        """Compute the input of the output layer, and memory and cache for the next call.

        Args:
            input_ids: as of `forward`.
            memory: as of `forward`.
            cache: as of `forward`.
            attention_mask: as of `forward`.
            trace: as of `forward`.
            skip: as of `forward`.
            source: of a translation, or the cache of one.
        """
        check_tokens(input_ids)
        check_state(self, memory, cache, skip)
        if input_ids.shape[1] == 0:  # nothing is read: memory and cache stay
            unchanged = (memory or self.new_memory()) if self.memory_length and cache is None else None
            return Pass(self.final_norm(self.embedding(input_ids)), unchanged, cache)
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
        """Return a model with another memory that shares all modules and parameters; this model is not changed.

        Args:
            memory_length: tokens that a layer remembers; None as here.
            same_length: True for a window of `memory_length` keys; None as here.
            clamp_length: keys that are farther count as that far; None as here.

        Raises:
            ConfigError: the model cannot have these values. It is an InputError.
        """
        position = with_parts(self.position)
        if clamp_length is not None:
            position.clamp_length = clamp_length
        model = with_parts(self, position=position)
        model.config = with_memory(self.config, memory_length, same_length=same_length, clamp_length=clamp_length)
        return model

    def new_cache(self) -> Cache:
        """Return an empty cache of keys and values, for decoding token by token."""
        return Cache(tuple(block.attention.attend.past() for block in self.blocks))

    def new_memory(self) -> Memory:
        """Return the memory of a model that has read nothing; it means the same as None."""
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
        """Continue texts, read with a cache, and return them with what was written, (B, N + T).

        Tokens are drawn from p^(1/temperature), cut to `top_k`, then to `top_p`, then to `min_p`. Where a text grows longer
        than `window` W, the model reads its last W / 2 tokens anew, as a text of their own; a memory slides by itself.
        Raises InputError for values out of range, and for `beams` with options of drawing.

        Args:
            input_ids: int64 (B, N), padded on the left.
            max_new_tokens: a row ends after so many new tokens.
            min_new_tokens: the fewest new tokens before `eos_id`.
            temperature: see above; 0 takes the likeliest token.
            top_k: how many of the likeliest tokens are left; None for all.
            top_p: the probability of the smallest set of likeliest tokens that is left; None for all.
            min_p: the least probability of a token that is left, as a share of that of the likeliest; None for all.
            repetition_penalty: above 1 it makes tokens of the text so far less likely.
            greedy: takes the likeliest token.
            beams: width of a beam search, by log p / length^length_penalty; None draws tokens instead.
            length_penalty: an exponent, see `beams`.
            no_repeat_ngram_size: n, where new tokens may repeat no n-gram; None or 0: they may repeat any.
            eos_id: ends a row, and fills the rest of it.
            seed: the same seed gives the same text; None draws another one each time.
            attention_mask: (B, N), 1 for tokens and 0 for padding.
            window: most tokens read at once; None for a segment of the loaded run, else `max_position_embeddings`.
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
        """Compute -log p(targets | input_ids up to there) in nats, (B, N), exact under any cotangent; never builds (B, N, V).

        Args:
            input_ids: int64 (B, N).
            targets: the id that follows each input, int64 (B, N).
            memory: as of `forward`.
            attention_mask: as of `forward`.
        """
        check_targets(input_ids, targets)
        hidden, next_memory, _ = self.hidden(input_ids, memory, attention_mask=attention_mask)
        return TokenNll(self.output.nll(hidden, targets), next_memory)

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
        """Compute `loss`, the nll without label smoothing, and the memory of the next call.

        Args:
            input_ids: int64 (B, N).
            targets: ids (B, T) that follow the last T of the N inputs; the inputs before these are context that is only read.
            weights: weight of each target in the mean (B, T); None for 1.
            memory: as of `forward`.
            attention_mask: as of `forward`.
            label_smoothing: e; the target is (1 - e) [v = x] + e / V.
            trace: collects what penalties need.
            skip: as of `forward`.
        """
        check_targets(input_ids, targets, fewer=True)
        hidden, next_memory, _ = self.hidden(input_ids, memory, attention_mask=attention_mask, trace=trace, skip=skip)
        hidden = hidden[:, input_ids.shape[1] - targets.shape[1] :]
        if trace is not None:
            trace.hidden = hidden
        return LossParts(*self.output.loss(hidden, targets, weights, label_smoothing), next_memory)
