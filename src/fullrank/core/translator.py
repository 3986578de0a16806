"""The translation model: an encoder, and a language model with cross-attention to the encoded source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from . import released
from .cache import KeyValues, Source, TranslationCache
from .config import ModelConfig
from .decoder import LanguageModel
from .encoder import Encoder
from .errors import ConfigError, InputError
from .layout import Layout
from .model import LossParts, Model, ModelOutput, TokenNll, check_targets, longest
from .trace import Trace


class Translator(Model):
    """A Transformer that translates a sentence x to y: p(y_{n+1} | y_1 .. y_n, x) for every n at once (Vaswani et al. 2017).

    Built from a `ModelConfig` whose `encoder` and `decoder` sections say what differs there; `vocab_size` is the target's,
    `encoder.vocab_size` the source's. `decoder` is a language model with cross-attention in every block.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if problems := config.problems_of_translation():
            raise ConfigError(*problems)
        shared = config.encoder is not None and config.encoder.share_embedding
        self.decoder = LanguageModel(config.get_decoder_config(), cross=config.get_cross_config())
        self.encoder = Encoder(config, self.decoder.embedding if shared else None)

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        trace: Trace | None = None,
    ) -> ModelOutput:
        """Compute the logits (B, N, V) of the next token of the target at every position.

        Args:
            input_ids: the source, int64 (B, M).
            decoder_input_ids: the target, int64 (B, N).
            attention_mask: of the source (B, M), 1 for tokens and 0 for padding on either side.
            decoder_attention_mask: of the target (B, N). Targets that are padded on the right need none, where no token sees
                what comes later: in all models but those with `config.sees_future`.
            trace: collects the weights of the encoder's layers, then of each decoder layer those of self-attention and of
                cross-attention; layers without weights are left out.
        """
        hidden = self.hidden(input_ids, decoder_input_ids, attention_mask, decoder_attention_mask, trace=trace)
        return ModelOutput(self.decoder.output(hidden))

    def hidden(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        trace: Trace | None = None,
    ) -> Tensor:
        """Compute the input of the output layer (B, N, E).

        Args:
            input_ids: as of `forward`.
            decoder_input_ids: as of `forward`.
            attention_mask: as of `forward`.
            decoder_attention_mask: as of `forward`.
            trace: as of `forward`.

        Raises:
            InputError: source or target have another shape, or are too long.
        """
        fits = decoder_input_ids.dim() == 2 and decoder_input_ids.shape[0] == len(input_ids)
        if input_ids.dim() == 2 and not fits:  # else the encoder says it
            raise InputError(
                f"decoder_input_ids must be (B, N) with the B of input_ids {tuple(input_ids.shape)}, given "
                f"{tuple(decoder_input_ids.shape)}"
            )
        source = self.encoder.encode(input_ids, attention_mask, trace=trace)
        mask = decoder_attention_mask
        return self.decoder.hidden(decoder_input_ids, attention_mask=mask, trace=trace, source=source).hidden

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Source:
        """Encode the source (B, M) for decoding; attention_mask as in `forward`."""
        return self.encoder.encode(input_ids, attention_mask)

    def of_source(self, source: Source) -> Translating:
        """Return the model that `sample` and `beam_search` call to write translations of `source` token by token."""
        return Translating(self, source)

    @property
    def max_length(self) -> int | None:
        return self.decoder.max_length

    @property
    def max_source_length(self) -> int | None:
        """The longest source the model can take, None if there is no limit."""
        return longest(self.encoder.max_length, self.decoder.blocks[0].cross_attention.attend.max_length)

    def nll(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        targets: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> TokenNll:
        """Compute -log p(targets | decoder_input_ids up to there, input_ids) in nats, (B, N), exact under any cotangent.

        Args:
            input_ids: as of `forward`.
            decoder_input_ids: as of `forward`.
            targets: the id that follows each token of the target, int64 (B, N).
            attention_mask: as of `forward`.
            decoder_attention_mask: as of `forward`.
        """
        check_targets(decoder_input_ids, targets, "decoder_input_ids")
        hidden = self.hidden(input_ids, decoder_input_ids, attention_mask, decoder_attention_mask)
        return TokenNll(self.decoder.output.nll(hidden, targets))

    def loss_parts(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        trace: Trace | None = None,
    ) -> LossParts:
        """Compute `loss`, and the nll without label smoothing.

        Args:
            input_ids: as of `forward`.
            decoder_input_ids: as of `forward`.
            targets: the id that follows each token of the target, int64 (B, N).
            weights: weight of each target in the mean (B, N); None for 1.
            attention_mask: as of `forward`.
            decoder_attention_mask: as of `forward`.
            label_smoothing: e; the target is (1 - e) [v = y] + e / V.
            trace: collects what penalties need.
        """
        check_targets(decoder_input_ids, targets, "decoder_input_ids")
        masks = (attention_mask, decoder_attention_mask)
        hidden = self.hidden(input_ids, decoder_input_ids, *masks, trace=trace)
        return LossParts(*self.decoder.output.loss(hidden, targets, weights, label_smoothing))


class Translating:
    """A translator of one batch of sources; built by `Translator.of_source`.

    Called with new tokens (R, N) and the cache before them it gives logits (R, N, V) and the next cache. R is the number of
    sources, or of target rows after `reorder`.
    """

    def __init__(self, model: Translator, source: Source) -> None:
        self.model = model
        self.source = source
        self.decoder = model.decoder
        section = model.config.decoder
        if section is not None and section.released_decoding:
            self.decoder = released.remove_mixing(model.decoder)

    @property
    def max_length(self) -> int | None:
        return self.model.max_length

    def modules(self) -> Iterator[nn.Module]:
        """Iterate over all modules of the model: decoding puts them into evaluation mode."""
        return iter(dict.fromkeys((*self.model.modules(), *self.decoder.modules())))

    def new_cache(self) -> TranslationCache:
        """Make the cache before the first target token; the source is projected here, once for every layer."""
        source = self.source
        layout = Layout.of(1, source.hidden.shape[1], causal=False, device=source.hidden.device)
        projections = [block.cross_attention.project for block in self.decoder.blocks]
        layers = tuple(KeyValues(*project.keys_and_values(source.hidden, layout)) for project in projections)
        rows = torch.arange(source.batch, device=source.hidden.device)
        return TranslationCache(self.decoder.new_cache(), layers, source.mask, rows)

    def __call__(
        self,
        input_ids: Tensor,
        *,
        cache: TranslationCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> ModelOutput:
        """Compute the logits of new tokens, and the next cache.

        Without a cache input_ids are read whole, one row a source, and no cache comes out.
        """
        if not isinstance(cache, TranslationCache | None):
            raise InputError(f"cache: that of `new_cache` or of the output before, given a {type(cache).__name__}")
        rows = self.source.batch if cache is None else cache.batch
        if len(input_ids) != rows:
            raise InputError(
                f"input_ids have {len(input_ids)} rows, the source {'of the cache ' if cache else ''}is read by {rows}; "
                "see cache.reorder"
            )
        decoder = self.decoder if cache else self.model.decoder
        written = cache.written if cache else None
        source = cache or self.source
        read = decoder.hidden(input_ids, cache=written, attention_mask=attention_mask, source=source)
        after = replace(cache, written=read.cache) if cache and read.cache else None
        return ModelOutput(decoder.output(read.hidden), cache=after)
