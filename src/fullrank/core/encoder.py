"""The encoder: embedding -> blocks in which every token sees every other -> norm. And the masked language model upon it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import draws, registry
from .cache import Source
from .config import ModelConfig
from .draws import make_dropout
from .embedding import Input
from .errors import ConfigError, InputError
from .initialize import initialize
from .model import Layers, LossParts, Model, ModelOutput, TokenNll, check_targets, check_tokens
from .output import Output
from .trace import Trace


class Encoder(Layers):
    """A Transformer encoder: sentences to hidden states, each of which depends on all tokens of its sentence and on no padding.

    input_ids (B, M) int64, attention_mask (B, M), 1 for tokens and 0 for padding on either side -> (B, M, E).
    Positions count tokens only.
    Built from the encoder's part of a `ModelConfig` (`config.get_encoder_config()`). Can be built under `torch.device("meta")`.
    embedding: that of another model, which is then shared; None for one of its own.
    """

    def __init__(self, config: ModelConfig, embedding: Input | None = None) -> None:
        config = config.get_encoder_config()
        super().__init__(config)
        if config.memory_length:
            raise InputError(
                f"an encoder reads sentences, not a running text: set model.memory_length to 0, given {config.memory_length}"
            )
        self.embedding: Input
        if embedding is None:
            self.embedding = registry.lookup("input", config.input.kind)(config)
        else:
            vars(self)["embedding"] = embedding  # no submodule here too, so that its weight is saved once
        self.add_layers()
        initialize(self, config.initializer)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, trace: Trace | None = None) -> Tensor:
        """Compute the hidden states (B, M, E).

        Args:
            input_ids: int64 (B, M), one token a sentence at least.
            attention_mask: (B, M), 1 for tokens and 0 for padding on either side; None without padding.
            trace: collects attention weights.
        """
        return self.encode(input_ids, attention_mask, trace=trace).hidden

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, trace: Trace | None = None) -> Source:
        """Compute the hidden states, with their mask, as the value that a decoder reads.

        Args:
            input_ids: as of `forward`.
            attention_mask: as of `forward`.
            trace: as of `forward`.

        Raises:
            InputError: input_ids or mask have another shape, hold no token, or are too long.
        """
        check_tokens(input_ids)
        tokens = input_ids.shape[1]
        if tokens == 0:
            raise InputError(
                "input_ids: at least one token a sentence; an empty one is its end-of-sentence token alone"
            )
        state, mask = self.make_state(input_ids, attention_mask, causal=False)
        return Source(self.run(self.embed(self.embedding, input_ids), state, trace=trace), mask)


class MaskedLanguageModel(Model):
    """A masked language model: p(x_n | the text around n) for every masked n at once (BERT, Devlin et al. 2019).

    Every token sees every other. The last of `config.vocab_size` ids is `<mask>` (`mask_id`), an entry beside those of the
    text. So `vocab_size` is that of the text plus one.
    Built from a `ModelConfig` without `encoder`, `decoder` and memory; can be built under `torch.device("meta")`.
    Differs from BERT: one vocabulary layer, tied or not, without a dense layer before it; no sentence pairs.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if problems := config.problems_of_masked():
            raise ConfigError(*problems)
        self.encoder = Encoder(config)
        self.output_dropout = make_dropout(config.dropout.output, config.dropout.locked)
        self.output: Output = registry.lookup("output", config.output.kind)(config, self.encoder.embedding)
        initialize(self.output, config.initializer)

    @property
    def mask_id(self) -> int:
        assert self.config.vocab_size is not None
        return self.config.vocab_size - 1

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, trace: Trace | None = None
    ) -> ModelOutput:
        """Compute the logits (B, N, V) of the token at every position.

        Args:
            input_ids: int64 (B, N), `mask_id` at masked tokens.
            attention_mask: (B, N), 1 for tokens and 0 for padding on either side; positions count tokens only.
            trace: collects attention weights.
        """
        return ModelOutput(self.output(self.hidden(input_ids, attention_mask, trace=trace)))

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, trace: Trace | None = None) -> Tensor:
        """Compute the input of the output layer (B, N, E).

        Args:
            input_ids: as of `forward`.
            attention_mask: as of `forward`.
            trace: as of `forward`.
        """
        read = self.encoder.encode(input_ids, attention_mask, trace=trace).hidden
        dropped: Tensor = self.output_dropout(read)
        return dropped

    @property
    def max_length(self) -> int | None:
        return self.encoder.max_length

    def nll(self, input_ids: Tensor, targets: Tensor, attention_mask: Tensor | None = None) -> TokenNll:
        """Compute -log p(targets | input_ids) in nats, (B, N), exact under any cotangent; never builds (B, N, V).

        Args:
            input_ids: as of `forward`.
            targets: the token at each position, int64 (B, N).
            attention_mask: as of `forward`.
        """
        check_targets(input_ids, targets)
        return TokenNll(self.output.nll(self.hidden(input_ids, attention_mask), targets))

    def loss_parts(
        self,
        input_ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        at: Tensor | None = None,
        label_smoothing: float = 0.0,
        trace: Trace | None = None,
    ) -> LossParts:
        """Compute `loss`, and the nll without label smoothing.

        The output layer computes only tokens that are predicted. With `at` the host does not wait for the device to count
        them.

        Args:
            input_ids: as of `forward`.
            targets: the token at each position, int64 (B, N); with `at` only the predicted ones, (T,).
            weights: weight of each target, of the same shape, 0 where a token is not predicted; None for 1.
            attention_mask: as of `forward`.
            at: positions of the predicted tokens in the flattened input_ids (T,); None finds them by their weights.
            label_smoothing: e; the target is (1 - e) [v = x] + e / V.
            trace: collects what penalties need.

        Raises:
            InputError: shapes do not fit, or no token is predicted.
        """
        if at is None:
            check_targets(input_ids, targets)
            weights = torch.ones_like(targets) if weights is None else weights
            if weights.shape != targets.shape:
                raise InputError(
                    f"weights {tuple(weights.shape)} must have the shape of targets {tuple(targets.shape)}"
                )
            at = weights.flatten().nonzero()[:, 0]
            if at.numel() == 0:
                raise InputError("a loss of no tokens: every weight is 0")
            weights = weights.flatten()[at]
            targets = targets.flatten()[at]
        elif at.dim() != 1:
            raise InputError(f"at: positions (T,) in the flattened input_ids, given {tuple(at.shape)}")
        else:
            check_targets(at, targets, "at")
        hidden = self.hidden(input_ids, attention_mask, trace=trace).flatten(0, 1)[at][None]  # (1, T, E)
        weights = None if weights is None else weights[None]
        with draws.select_tokens(at, input_ids.numel()):
            return LossParts(*self.output.loss(hidden, targets[None], weights, label_smoothing))
