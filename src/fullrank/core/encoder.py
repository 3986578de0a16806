"""The encoder: embedding -> blocks in which every token sees every other -> norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fullrank.core import registry, stack
from fullrank.core.across import Source
from fullrank.core.block import Block
from fullrank.core.config import ModelConfig
from fullrank.core.dropout import Dropout
from fullrank.core.embedding import Input
from fullrank.core.errors import InputError
from fullrank.core.initialize import initialize
from fullrank.core.layout import Layout
from fullrank.core.positions import Learned, Relative
from fullrank.core.trace import Trace


class Encoder(nn.Module):
    """Sentences to hidden states, of which each depends on all tokens of its sentence and on no padding.

    input_ids (B, M) int64, attention_mask (B, M), 1 for tokens and 0 for padding on either side -> (B, M, E).
    Built from the encoder's part of a `ModelConfig` (`config.of_encoder()`); `embedding`: of somebody else, used instead of an
    own one. Positions count tokens only. Can be built under `torch.device("meta")`.
    """

    def __init__(self, config: ModelConfig, embedding: Input | None = None) -> None:
        super().__init__()
        config = config.of_encoder()
        if config.memory_length:
            raise InputError(
                f"an encoder reads sentences, not a running text: set model.memory_length to 0, given {config.memory_length}"
            )
        self.config = config
        # a lent one in a tuple, so that it is not registered here too and its weight is saved once
        self._lent: tuple[Input, ...] = () if embedding is None else (embedding,)
        self.embedding: Input | None = None
        if embedding is None:
            self.embedding = registry.lookup("input", config.input.kind)(config)
        self.position: nn.Module = registry.lookup("position", config.position)(config)
        self.embedding_dropout = Dropout(config.dropout.embedding, config.dropout.locked)
        self.blocks: Any = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        if isinstance(self.position, Relative):
            self.position.lend(self.blocks)
        self.final_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.final_norm else nn.Identity()
        )
        initialize(self, config.initializer)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, trace: Trace | None = None) -> Tensor:
        return self.encode(input_ids, attention_mask, trace=trace).hidden

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        trace: Trace | None = None,
        padded_right: bool | None = None,
    ) -> Source:
        """The same as the value that a decoder reads. `padded_right`: where padding stands; None: it is looked at."""
        if input_ids.dim() != 2:
            raise InputError(f"input_ids must be (B, M), given shape {tuple(input_ids.shape)}")
        if input_ids.shape[1] == 0:
            raise InputError(
                "input_ids: at least one token a sentence; an empty one is its end-of-sentence token alone"
            )
        mask = None if attention_mask is None else attention_mask.bool()
        if mask is not None and mask.shape != input_ids.shape:
            raise InputError(
                f"attention_mask must be {tuple(input_ids.shape)} like input_ids, given {tuple(mask.shape)}"
            )
        if mask is not None and padded_right is None and bool(mask.all()):
            mask = None
        layout = self._layout(input_ids, mask, padded_right)
        embedding = self._lent[0] if self.embedding is None else self.embedding
        x = self.embedding_dropout(self.position(embedding(input_ids), layout.query_positions))  # (B, M, E)
        if isinstance(self.position, Relative):
            encodings = self.position.encodings(layout, x, None, False)
            if encodings is not None:
                layout = replace(layout, encodings=self.embedding_dropout(encodings[None])[0])
        x = stack.read(self.blocks, x, layout, trace, ())
        return Source(self.final_norm(x), mask, None if layout.from_start else layout.key_positions)

    def _layout(self, input_ids: Tensor, mask: Tensor | None, padded_right: bool | None) -> Layout:
        tokens = input_ids.shape[1]
        if mask is not None and padded_right is None:
            padded_right = not bool((mask[:, 1:] & ~mask[:, :-1]).any())
        longest = tokens
        if mask is None or padded_right:
            layout = Layout.of(tokens, causal=False, device=input_ids.device, key_mask=mask)
        else:
            positions = (mask.cumsum(1) - 1).clamp_min(0)  # (B, M): padding takes no position
            layout = Layout(positions, positions, False, mask)
            longest = int(positions.max()) + 1
        if isinstance(self.position, Learned):
            self.position.check(longest)
        return layout

    @property
    def max_length(self) -> int | None:
        """The longest sentence the encoder can take, None if there is no limit."""
        if self.config.position == "learned":
            return self.config.max_position_embeddings
        return getattr(self.blocks[0].attention.attend, "max_length", None)

    def num_parameters(self) -> int:
        """Numbers in parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def compile_targets(self) -> list[nn.Module]:
        """What `torch.compile` should compile one by one: the blocks."""
        return list(self.blocks)
