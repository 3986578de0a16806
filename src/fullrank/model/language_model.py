"""The decoder-only language model: embedding -> blocks -> norm -> output layer, on one screen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullrank.attention.layout import Layout
from fullrank.attention.trace import Trace
from fullrank.config import registry
from fullrank.config.schema import ModelConfig
from fullrank.errors import InputError
from fullrank.model import weights as storage
from fullrank.model.block import Block
from fullrank.model.cache import Cache
from fullrank.model.dropout import Dropout
from fullrank.model.initialize import initialize
from fullrank.model.position import Learned, Relative


@dataclass(frozen=True)
class ModelOutput:
    """logits (B, N, V); memory and cache go into the next call, None where the model has none or none was passed."""

    logits: Tensor
    memory: None = None
    cache: Cache | None = None


class LossParts(NamedTuple):
    """Scalars in nats per token: `loss` is what training minimises, `nll` (no gradient) leaves label smoothing out."""

    loss: Tensor
    nll: Tensor


@dataclass(frozen=True)
class TokenNll:
    """per_token (B, N): negative log-likelihood in nats; memory goes into the next call."""

    per_token: Tensor
    memory: None = None


class LanguageModel(nn.Module):
    """p(x_{n+1} | x_1 .. x_n) for every n at once; what is computed for token n never depends on a later one.

    Built from a `ModelConfig` whose `vocab_size` is known; can be built under `torch.device("meta")`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Module = registry.lookup("input", config.input.kind)(config)
        self.position: nn.Module = registry.lookup("position", config.position)(config)
        self.embedding_dropout = Dropout(config.dropout.embedding, config.dropout.locked)
        self.blocks: Any = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        if isinstance(self.position, Relative):
            self.position.lend(self.blocks)
        self.final_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.final_norm else nn.Identity()
        )
        self.output_dropout = Dropout(config.dropout.output, config.dropout.locked)
        self.output: Any = registry.lookup("output", config.output.kind)(config, self.embedding)
        initialize(self, config.initializer)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        memory: None = None,
        *,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        trace: Trace | None = None,
    ) -> ModelOutput:
        """input_ids (B, N) int64 -> logits (B, N, V).

        attention_mask (B, N), 1 for tokens and 0 for padding on either side; positions count tokens only.
        cache: from `new_cache()` or the call before; then input_ids are the new tokens only (an attention_mask may cover
        them alone or all tokens so far). trace collects attention weights.
        """
        hidden, cache = self.hidden(input_ids, memory, cache=cache, attention_mask=attention_mask, trace=trace)
        return ModelOutput(self.output(hidden), None, cache)

    def hidden(
        self,
        input_ids: Tensor,
        memory: None = None,
        *,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        trace: Trace | None = None,
    ) -> tuple[Tensor, Cache | None]:
        """What the output layer reads, (B, N, E), and the cache of the next call."""
        if memory is not None:
            raise InputError("memory was given, but model.memory_length is 0: this model has none")
        layout, mask = self._layout(input_ids, cache, attention_mask)
        x = self.embedding_dropout(self.position(self.embedding(input_ids), layout.query_positions))  # (B, N, E)
        layout = self._with_encodings(layout, x, cache)
        layers = []
        for i, block in enumerate(self.blocks):
            if cache is None:
                x = block(x, layout, trace)
            else:
                x, present = block.continued(x, cache.layers[i], layout, trace)
                layers.append(present)
        after = None if cache is None else Cache(tuple(layers), mask)
        return self.output_dropout(self.final_norm(x)), after

    def _layout(
        self, input_ids: Tensor, cache: Cache | None, attention_mask: Tensor | None
    ) -> tuple[Layout, Tensor | None]:
        if input_ids.dim() != 2:
            raise InputError(f"input_ids must be (B, N), given shape {tuple(input_ids.shape)}")
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
            return Layout.of(tokens, past + tokens, device=input_ids.device), None
        positions = (mask.cumsum(1) - 1).clamp_min(0)  # (B, M): padding takes no position
        if isinstance(self.position, Learned):
            self.position.check(int(positions.max()) + 1)
        return Layout(positions[:, past:], positions, True, mask), mask

    def _with_encodings(self, layout: Layout, x: Tensor, cache: Cache | None) -> Layout:
        """The layout with what relative positions make once for all layers."""
        if not isinstance(self.position, Relative):
            return layout
        first = None if cache is None else cache.layers[0]
        known = None if first is None else first.relative
        encodings = self.position.encodings(layout, x, known, cache is not None)
        return layout if encodings is None else replace(layout, encodings=self.embedding_dropout(encodings[None])[0])

    def new_cache(self) -> Cache:
        """An empty cache of keys and values, for decoding token by token."""
        return Cache((None,) * len(self.blocks))

    @property
    def max_length(self) -> int | None:
        """The longest sequence the model can take, None if there is no limit."""
        if self.config.position == "learned":
            return self.config.max_position_embeddings
        return getattr(self.blocks[0].attention.attend, "max_length", None)

    # -- losses -------------------------------------------------------------------------------------------------------

    def nll(
        self, input_ids: Tensor, targets: Tensor, memory: None = None, *, attention_mask: Tensor | None = None
    ) -> TokenNll:
        """-log p(targets | input_ids up to there) in nats, (B, N), exact under any cotangent; never builds (B, N, V)."""
        self._check_targets(input_ids, targets)
        hidden, _ = self.hidden(input_ids, memory, attention_mask=attention_mask)
        return TokenNll(self.output.nll(hidden, targets))

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        memory: None = None,
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
        memory: None = None,
        *,
        attention_mask: Tensor | None = None,
        label_smoothing: float = 0.0,
        trace: Trace | None = None,
    ) -> LossParts:
        """`loss` and, beside it, the plain nll that label smoothing hides; a trace collects what penalties need."""
        self._check_targets(input_ids, targets)
        if weights is not None and weights.shape != targets.shape:
            raise InputError(f"weights {tuple(weights.shape)} must have the shape of targets {tuple(targets.shape)}")
        if weights is not None and weights.requires_grad:
            raise InputError(
                "weights of a loss take no gradient; pass weights.detach(), or weigh model.nll(...).per_token"
            )
        if not 0 <= label_smoothing < 1:
            raise InputError(f"label_smoothing: at least 0 and below 1, given {label_smoothing}")
        hidden, _ = self.hidden(input_ids, memory, attention_mask=attention_mask, trace=trace)
        return LossParts(*self.output.loss(hidden, targets, weights, label_smoothing))

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
    def load(cls, path: str | Path, checkpoint: str = "best") -> LanguageModel:
        """The model saved in `path`: a folder written by `save`, or a run folder (its `best` or `last` checkpoint).

        Raises InputError if the folder holds no model, its weights are damaged or do not fit their configuration.
        """
        file, config = storage.find(Path(path), checkpoint)
        tensors = storage.read(file)
        with torch.device("meta"):
            model = cls(config)
        storage.assign(model, tensors, file)
        return model.eval()
