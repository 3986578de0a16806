"""The bases of all models, and the values that their calls return."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from . import engine, registry
from .attention import Block
from .cache import Cache, Past, Source, TranslationCache
from .config import ModelConfig
from .draws import draw_words, make_dropout
from .embedding import Input, Position
from .errors import InputError
from .layout import Layout, State, find_positions, number_documents, read_mask
from .memory import Memory
from .stages import make_norm
from .trace import Trace


@dataclass(frozen=True)
class ModelOutput:
    """logits (B, N, V); memory and cache go into the next call, None if the model has none or none was passed.

    cache: of the kind that was passed, a `Cache`, a `TranslationCache`, or where a memory is read like one a `Memory`.
    """

    logits: Tensor
    memory: Memory | None = None
    cache: Any = None


class Pass(NamedTuple):
    """Result of a pass through all layers: input of the output layer (B, N, E), and memory and cache of the next call."""

    hidden: Tensor
    memory: Memory | None
    cache: Cache | None


class LossParts(NamedTuple):
    """Scalars in nats per token: training minimises `loss`; `nll`, without gradient, is free of label smoothing.

    memory goes into the next call.
    """

    loss: Tensor
    nll: Tensor
    memory: Memory | None = None


@dataclass(frozen=True)
class TokenNll:
    """per_token (B, N): negative log-likelihood in nats; memory goes into the next call."""

    per_token: Tensor
    memory: Memory | None = None


class Model(nn.Module):
    """Base of LanguageModel, Encoder, MaskedLanguageModel and Translator: exact counts, saving and loading.

    A subclass sets `config` and is built from it alone, also under `torch.device("meta")`.
    """

    config: ModelConfig
    trained_length: int | None = None  # tokens of a segment in the run that it was loaded from

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise InputError(f"{type(self).__name__} is built from a ModelConfig, given {type(config).__name__}")
        self.config = config

    def num_parameters(self) -> int:
        """Number of trainable parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def loss_parts(self, *arguments: Any, **options: Any) -> LossParts:
        """`loss`, the nll without label smoothing, and what the next call reads."""
        raise NotImplementedError(f"{type(self).__name__} predicts no tokens")

    def loss(self, *arguments: Any, **options: Any) -> Tensor:
        """Weighted mean nll, sum(w nll) / sum(w), a scalar in nats per token that is predicted: the fast training path.

        Its gradients are formed in the forward pass. With `label_smoothing` e the target is (1 - e) [v = x] + e / V.
        Arguments are those of `loss_parts`.
        """
        return self.loss_parts(*arguments, **options).loss

    def compile_targets(self) -> list[nn.Module]:
        """The modules that `torch.compile` should compile one by one: all blocks."""
        lists = [module.children() for name, module in self.named_modules() if name.endswith("blocks")]
        return [*chain.from_iterable(lists)]

    def save(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.yaml` into `folder`."""
        engine.load_storage().save(self, self.config, Path(folder))

    @classmethod
    def load(cls, path: str | Path, checkpoint: str = "best") -> Self:
        """The model saved in `path`: a folder written by `save`, or a run folder (its `best` or `last` checkpoint).

        Raises InputError if the folder holds another model or none, its weights are damaged or do not fit their configuration.
        """
        model: Self = engine.load_storage().load(cls, Path(path), checkpoint)
        return model


class Layers(Model):
    """Base of LanguageModel and Encoder: positions, blocks and the norm after the last one."""

    position: Position
    embedding_dropout: nn.Module
    blocks: Any
    final_norm: nn.Module

    def add_layers(self, cross: ModelConfig | None = None) -> None:
        """Build the layers that `config` describes; cross: the configuration of cross-attention in every block."""
        config = self.config
        assert config.position is not None  # resolved
        self.position = registry.lookup("position", config.position)(config)
        self.embedding_dropout = make_dropout(config.dropout.embedding, config.dropout.locked)
        parts = [config.get_layer_config(layer) for layer in range(config.num_hidden_layers)]
        self.blocks = nn.ModuleList(Block(part, cross, layer) for layer, part in enumerate(parts))
        if self.position.biases is not None:
            for block in self.blocks:
                block.attention.attend.share_biases(self.position.biases)
        self.final_norm = make_norm(config) if config.final_norm else nn.Identity()
        self.parts = nn.ModuleDict(
            {name: registry.lookup("model_part", name)(self, **options) for name, options in config.parts.items()}
        )

    def embed(self, embedding: Input, input_ids: Tensor) -> Tensor:
        """Vectors (B, N, E) of the tokens, without positions."""
        vectors: Tensor = embedding(input_ids)
        if not self.training or self.config.dropout.words == 0:
            return vectors
        assert self.config.vocab_size is not None
        mask = draw_words(self.config.dropout.words, input_ids, self.config.vocab_size)
        # not 0: from a first token of zeros, post-norm layers compute zeros, and its gradient grows beyond every number
        return torch.where(mask == 0, 1e-12, vectors * mask).to(vectors.dtype)

    def run(
        self,
        x: Tensor,
        state: State,
        *,
        source: Source | TranslationCache | None = None,
        trace: Trace | None = None,
        skip: Collection[int] = (),
    ) -> Tensor:
        """The vectors x (B, N, E) of new tokens through all layers after `state`, which takes over what a next call needs.

        A skipped layer passes x on. source: of a translation.
        """
        x = self.embedding_dropout(self.position(x, state.positions))
        for i, block in enumerate(self.blocks):
            if i in skip:
                state.skip(i)
                continue
            layout, past, memory = state.enter(i, x)
            cross = None if source is None else source.get_layer_input(i, x.shape[1])
            of_layer = None if trace is None else trace.enter(x)
            pasts: list[Past] | None = [] if state.keeps else None
            # not by `__call__`, which is compiled, where lengths differ from call to call
            run = block.forward if state.keeps else block
            out = run(x, layout, past=past, memory=memory, cross=cross, pasts=pasts, trace=of_layer)
            state.leave(i, x, pasts or [])
            x = out
        return self.final_norm(x)

    def make_state(
        self, input_ids: Tensor, attention_mask: Tensor | None, causal: bool, window: int | None = None
    ) -> tuple[State, Tensor | None]:
        """The state of a text (B, N) that is read whole, and its mask. Raises InputError for too long a text."""
        mask = read_mask(attention_mask, input_ids)
        layout = self.make_layout(input_ids, mask, 0, causal, window)
        return State(layout, self.position.place), mask

    def make_layout(
        self, input_ids: Tensor, mask: Tensor | None, past: int, causal: bool, window: int | None,
        before: Tensor | None = None,
    ) -> Layout:  # fmt: skip
        """The layout of new tokens (B, N) after `past` earlier ones of documents `before` (B, past); mask (B, past + N)."""
        new, device, token = input_ids.shape[1], input_ids.device, self.config.document_token_id
        if mask is None and token is None:
            self.position.check(past + new)
            return Layout.of(new, past + new, causal=causal, device=device, window=window)
        documents = None if token is None else number_documents(input_ids, token, mask, before)
        runs, tokens = None, mask
        if tokens is None:
            runs = ((0, past + new),)
            tokens = torch.ones(len(input_ids), past + new, dtype=torch.bool, device=device)
        positions = find_positions(tokens, documents)
        if self.position.max_length is not None:
            self.position.check(int(positions.max()) + 1)
        return Layout(positions[:, past:], positions, causal, mask, runs, window=window, documents=documents)

    @property
    def max_length(self) -> int | None:
        of_layers = (block.attention.attend.max_length for block in self.blocks)
        return longest(self.position.max_length, *of_layers)


def check_tokens(input_ids: Tensor, shape: str = "(B, N)") -> None:
    """Raises InputError unless input_ids are a matrix; the embedding looks at their values."""
    if input_ids.dim() != 2:
        raise InputError(f"input_ids must be {shape}, given shape {tuple(input_ids.shape)}")


def check_targets(input_ids: Tensor, targets: Tensor, name: str = "input_ids", fewer: bool = False) -> None:
    """Raises InputError unless targets are tokens, as many as `input_ids`; fewer: of the last ones of each row."""
    if targets.numel() == 0:
        raise InputError(f"a loss of no tokens: targets are {tuple(targets.shape)}")
    are_matrices = targets.dim() == 2 and input_ids.dim() == 2
    if fewer and are_matrices and targets.shape[1] <= input_ids.shape[1]:
        input_ids = input_ids[:, -targets.shape[1] :]
    if targets.shape != input_ids.shape:
        raise InputError(f"targets {tuple(targets.shape)} must have the shape of {name} {tuple(input_ids.shape)}")


def longest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
