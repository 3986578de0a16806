"""The encoder: embedding -> blocks in which every token sees every other -> norm."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from . import registry
from .cache import Source, State, read_mask
from .config import ModelConfig
from .embedding import Input
from .errors import InputError
from .initialize import initialize
from .layout import Layout
from .model import Layers, check_tokens
from .trace import Trace


class Encoder(Layers):
    """Sentences to hidden states; each depends on all tokens of its sentence and on no padding.

    input_ids (B, M) int64, attention_mask (B, M), 1 for tokens and 0 for padding on either side -> (B, M, E).
    Built from the encoder's part of a `ModelConfig` (`config.of_encoder()`); embedding: of another model, used instead of an
    own one. Positions count tokens only. Can be built under `torch.device("meta")`.
    """

    def __init__(self, config: ModelConfig, embedding: Input | None = None) -> None:
        config = config.of_encoder()
        super().__init__(config)
        if config.memory_length:
            raise InputError(
                f"an encoder reads sentences, not a running text: set model.memory_length to 0, given {config.memory_length}"
            )
        # a shared one in a tuple, so that it is not registered here too and its weight is saved once
        self._shared: tuple[Input, ...] = () if embedding is None else (embedding,)
        self.embedding: Input | None = None
        if embedding is None:
            self.embedding = registry.lookup("input", config.input.kind)(config)
        self.add_layers()
        initialize(self, config.initializer)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, trace: Trace | None = None) -> Tensor:
        return self.encode(input_ids, attention_mask, trace=trace).hidden

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, trace: Trace | None = None) -> Source:
        """The hidden states as the value that a decoder reads."""
        check_tokens(input_ids, "(B, M)")
        tokens = input_ids.shape[1]
        if tokens == 0:
            raise InputError(
                "input_ids: at least one token a sentence; an empty one is its end-of-sentence token alone"
            )
        mask = read_mask(attention_mask, input_ids)
        if mask is None:
            self.position.check(tokens)
            layout = Layout.of(tokens, causal=False, device=input_ids.device)
        else:
            positions = self.positions(mask)  # (B, M)
            layout = Layout(positions, positions, False, mask)
        embedding = self._shared[0] if self.embedding is None else self.embedding
        state = State(layout, partial(self.position.place, dropout=self.embedding_dropout))
        return Source(self.run(self.embed(embedding, input_ids), state, trace=trace), mask)
