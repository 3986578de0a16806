"""The bases of all models, and the values that their calls return."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
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


torch.export.register_dataclass(ModelOutput)  # torch.export and torch.func.vmap return one


class Pass(NamedTuple):
    """Result of a pass through all layers: the input of the output layer (B, N, E), memory and cache of the next call."""

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
        """Count the trainable parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def loss_parts(self, *arguments: Any, **options: Any) -> LossParts:
        """Compute `loss`, the nll without label smoothing, and what the next call reads."""
        raise NotImplementedError(f"{type(self).__name__} predicts no tokens")

    def loss(self, *arguments: Any, **options: Any) -> Tensor:
        """Compute the weighted mean nll, sum(w nll) / sum(w), a scalar in nats per token that is predicted.

        This is the fast training path: gradients are formed in the forward pass. With `label_smoothing` e the target is
        (1 - e) [v = x] + e / V. Arguments are those of `loss_parts`.
        """
        return self.loss_parts(*arguments, **options).loss

    def save(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.yaml` into `folder`."""
        engine.load_storage().save(self, self.config, Path(folder))

    @classmethod
    def load(cls, path: str | Path, checkpoint: str = "best") -> Self:
        """Load the model saved in `path`: a folder written by `save`, or a run folder (its `best` or `last` checkpoint).

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
                score = block.attention.attend.score
                del score.biases
                vars(score)["biases"] = self.position.biases  # no submodule, so that they are saved once
        self.final_norm = make_norm(config) if config.final_norm else nn.Identity()
        self.parts = nn.ModuleDict(
            {name: registry.lookup("model_part", name)(self, **options) for name, options in config.parts.items()}
        )

    def embed(self, embedding: Input, input_ids: Tensor) -> Tensor:
        """Look up the vectors (B, N, E) of the tokens, without positions; in training words are dropped out."""
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
        """Run all layers on new tokens.

        A skipped layer passes x on.

        Args:
            x: vectors of the new tokens (B, N, E).
            state: what layers know from earlier calls; it takes over what the next call needs.
            source: of a translation.
            trace: collects attention weights and inputs of blocks.
            skip: layers, counted from 0, that are skipped.

        Returns:
            Hidden states after the final norm (B, N, E).
        """
        x = self.embedding_dropout(self.position(x, state.positions))
        for i, block in enumerate(self.blocks):
            if i in skip:
                state.skip(i)
                continue
            layout, past, memory = state.enter(i, x)
            cross = None if source is None else source.get_layer_input(i, x.shape[1])
            layer_trace = None if trace is None else trace.enter(x)
            pasts: list[Past] | None = [] if state.keeps else None
            # not by `__call__`, which is compiled, where lengths differ from call to call
            run = block.forward if state.keeps else block
            out = run(x, layout, past=past, memory=memory, cross=cross, pasts=pasts, trace=layer_trace)
            state.leave(i, x, pasts or [])
            x = out
        return self.final_norm(x)

    def make_state(
        self, input_ids: Tensor, attention_mask: Tensor | None, causal: bool, window: int | None = None
    ) -> tuple[State, Tensor | None]:
        """Make the state of a text that is read whole.

        Args:
            input_ids: int64 (B, N).
            attention_mask: (B, N), 1 for tokens and 0 for padding; None without padding.
            causal: no token sees a later one.
            window: the number of keys that a query sees, itself included; None for all.

        Returns:
            The state, and the mask (B, N) as booleans, None where none was given.

        Raises:
            InputError: the mask has another shape, or the text is too long.
        """
        mask = read_mask(attention_mask, input_ids)
        layout = self.make_layout(input_ids, mask, 0, causal, window)
        return State(layout, self.position.place), mask

    def make_layout(
        self, input_ids: Tensor, mask: Tensor | None, past: int, causal: bool, window: int | None,
        before: Tensor | None = None,
    ) -> Layout:  # fmt: skip
        """Make the layout of new tokens after `past` earlier ones.

        Args:
            input_ids: the new tokens, int64 (B, N).
            mask: True for tokens, of earlier and new ones (B, past + N); None without padding.
            past: the number of earlier tokens.
            causal: no token sees a later one.
            window: the number of keys that a query sees, itself included; None for all.
            before: documents of the earlier tokens (B, past); None without.

        Raises:
            InputError: the text is too long.
        """
        new = input_ids.shape[1]
        device = input_ids.device
        token = self.config.document_token_id
        if mask is None and token is None:
            self.position.check(past + new)
            return Layout.of(new, past + new, causal=causal, device=device, window=window)
        documents = None if token is None else number_documents(input_ids, token, mask, before)
        runs = None
        tokens = mask
        if tokens is None:
            runs = ((0, past + new),)
            tokens = torch.ones(len(input_ids), past + new, dtype=torch.bool, device=device)
        positions = find_positions(tokens, documents)
        if self.position.max_length is not None:
            self.position.check(int(positions.max()) + 1)
        return Layout(positions[:, past:], positions, causal, mask, runs, window=window, documents=documents)

    @property
    def max_length(self) -> int | None:
        limits = (block.attention.attend.max_length for block in self.blocks)
        return longest(self.position.max_length, *limits)


def check_tokens(input_ids: Tensor) -> None:
    """Raise InputError unless input_ids are a matrix; the embedding looks at their values."""
    if input_ids.dim() != 2:
        raise InputError(f"input_ids must be (B, N), given shape {tuple(input_ids.shape)}")


def check_targets(input_ids: Tensor, targets: Tensor, name: str = "input_ids", fewer: bool = False) -> None:
    """Check that there is a target for each of `input_ids`; the output layer looks at their values.

    Args:
        input_ids: the inputs (B, N).
        targets: the tokens to predict (B, N).
        name: what an error calls input_ids.
        fewer: allows targets (B, T) of the last T inputs of each row.

    Raises:
        InputError: targets are empty or have another shape.
    """
    if targets.numel() == 0:
        raise InputError(f"a loss of no tokens: targets are {tuple(targets.shape)}")
    if fewer and targets.dim() == 2:
        input_ids = input_ids[..., -targets.shape[1] :]
    if targets.shape != input_ids.shape:
        raise InputError(f"targets {tuple(targets.shape)} must have the shape of {name} {tuple(input_ids.shape)}")


def check_state(model: Layers, memory: Memory | None, cache: Cache | None, skip: Collection[int]) -> None:
    """Check what a call reads beside its tokens.

    Args:
        model: the model that is called.
        memory: of the segment before, None without.
        cache: of earlier tokens, None without.
        skip: layers, counted from 0, that are skipped.

    Raises:
        InputError: the model has no such layers or no memory, sees later tokens and so cannot read on from a cache, or a cache
            comes with a memory or with skipped layers.
    """
    last = len(model.blocks) - 1
    if wrong := [layer for layer in skip if isinstance(layer, bool) or not 0 <= layer <= last]:
        raise InputError(f"skip: layers 0 to {last}, given {wrong}")
    if memory is not None and model.config.memory_length == 0:
        raise InputError(
            "memory was given, but model.memory_length is 0: this model has none (model.with_memory gives it one)"
        )
    if not isinstance(memory, Memory | None) or not isinstance(cache, Cache | None):
        types = f"{type(memory).__name__} and {type(cache).__name__}"
        raise InputError(f"memory, cache: those of the output of the call before, given {types}")
    if cache is not None and (memory is not None or skip):
        raise InputError("a cache holds all earlier tokens of every layer: give no memory and no skip with it")
    if cache is not None and model.config.sees_future:
        raise InputError(
            "model.attention.causal: as_published lets tokens see later ones, so a text cannot be continued; read it "
            "whole, or train with 'masked'"
        )


def longest(*limits: int | None) -> int | None:
    """Return the longest length that all limits allow, the smallest of them; None stands for no limit."""
    return min(filter(None, limits), default=None)
