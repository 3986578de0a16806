"""The translation model: an encoder, and a language model that reads across what the encoder made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fullrank.core import storage
from fullrank.core.across import Projected, Source
from fullrank.core.cache import Cache
from fullrank.core.config import ModelConfig
from fullrank.core.decoder import LanguageModel
from fullrank.core.encoder import Encoder
from fullrank.core.errors import ConfigError, InputError
from fullrank.core.layout import Layout
from fullrank.core.outputs import LossParts, ModelOutput, TokenNll
from fullrank.core.trace import Trace
from fullrank.core.weighted import WeightedValues


@dataclass(frozen=True)
class TranslationCache:
    """What was written and what it is a translation of: a value, like `Cache`."""

    written: Cache
    source: Projected

    @property
    def length(self) -> int:
        """Target tokens so far."""
        return self.written.length

    @property
    def texts(self) -> int:
        """Those that are being written."""
        return len(self.source.rows)

    def first(self, length: int) -> TranslationCache:
        """That of the first `length` target tokens."""
        return TranslationCache(self.written.first(length), self.source)

    def reorder(self, index: Tensor) -> TranslationCache:
        """That of the texts `index` (K,), in that order; they may repeat (beams)."""
        return TranslationCache(self.written.reorder(index), self.source.reorder(index))


class Translator(nn.Module):
    """p(y_{n+1} | y_1 .. y_n, x) for every n at once (Vaswani et al. 2017); x is read by all of it, y by what comes later.

    Built from a `ModelConfig` whose `encoder` and `decoder` sections say what differs there; `vocab_size` is the target's,
    `encoder.vocab_size` the source's. Both halves are made of the same blocks, embeddings and outputs as a language model:
    `decoder` is one, with cross-attention in every block.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if problems := config.problems_of_translation():
            raise ConfigError(*problems)
        self.config = config
        shared = config.encoder is not None and config.encoder.share_embedding
        self.decoder = LanguageModel(config.of_decoder(), cross=config.of_cross())
        self.encoder = Encoder(config, self.decoder.embedding if shared else None)
        self.mixes_while_decoding = not (config.decoder is not None and config.decoder.released_decoding)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        trace: Trace | None = None,
    ) -> ModelOutput:
        """input_ids (B, M) of the source, decoder_input_ids (B, N) of the target, both int64 -> logits (B, N, V).

        attention_mask (B, M), 1 for tokens of the source and 0 for padding on either side; decoder_attention_mask (B, N) that
        of the target. Targets that are padded on the right need none, where no token sees what comes later (all models but
        those with `config.sees_future`). trace collects the weights of the encoder's layers, then of each decoder layer those
        of self-attention and of cross-attention; layers without weights are left out of it, unless no layer has any.
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
        padded_right: bool | None = None,
    ) -> Tensor:
        """What the output layer reads, (B, N, E). `padded_right` as in `Encoder.encode`."""
        fits = decoder_input_ids.dim() == 2 and decoder_input_ids.shape[0] == len(input_ids)
        if input_ids.dim() == 2 and not fits:  # else the encoder says it
            raise InputError(
                f"decoder_input_ids must be (B, N) with the B of input_ids {tuple(input_ids.shape)}, given "
                f"{tuple(decoder_input_ids.shape)}"
            )
        if trace is not None:
            trace.partial |= any(isinstance(module, WeightedValues) for module in self.modules())
        source = self.encoder.encode(input_ids, attention_mask, trace=trace, padded_right=padded_right)
        mask = decoder_attention_mask
        return self.decoder.hidden(decoder_input_ids, attention_mask=mask, trace=trace, source=source).hidden

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Source:
        """The source (B, M) as decoding reads it; attention_mask as in `forward`."""
        return self.encoder.encode(input_ids, attention_mask)

    def of_source(self, source: Source) -> Translating:
        """The model of translations of `source`: what sampling and beam search read, one token at a time."""
        return Translating(self, source)

    @property
    def max_length(self) -> int | None:
        """The longest target the model can take, None if there is no limit."""
        return self.decoder.max_length

    @property
    def max_source_length(self) -> int | None:
        """The longest source the model can take, None if there is no limit."""
        cross = self.decoder.blocks[0].cross_attention.attend.max_length
        limits = [limit for limit in (self.encoder.max_length, cross) if limit is not None]
        return min(limits, default=None)

    # -- losses -------------------------------------------------------------------------------------------------------

    def nll(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        targets: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> TokenNll:
        """-log p(targets | decoder_input_ids up to there, input_ids) in nats, (B, N), exact under any cotangent."""
        _check_targets(decoder_input_ids, targets)
        hidden = self.hidden(input_ids, decoder_input_ids, attention_mask, decoder_attention_mask)
        return TokenNll(self.decoder.output.nll(hidden, targets))

    def loss(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Weighted mean nll, sum(w nll) / sum(w), a scalar in nats per target token: the fast training path.

        With `label_smoothing` e the target is (1 - e) [v = y] + e / V.
        """
        masks = (attention_mask, decoder_attention_mask)
        return self.loss_parts(
            input_ids, decoder_input_ids, targets, weights, *masks, label_smoothing=label_smoothing
        ).loss

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
        padded_right: bool | None = None,
    ) -> LossParts:
        """`loss` and, beside it, the plain nll that label smoothing hides. A trace collects what penalties need."""
        _check_targets(decoder_input_ids, targets)
        masks = (attention_mask, decoder_attention_mask)
        hidden = self.hidden(input_ids, decoder_input_ids, *masks, trace=trace, padded_right=padded_right)
        return LossParts(*self.decoder.output.loss(hidden, targets, weights, label_smoothing))

    # -- sizes, files -------------------------------------------------------------------------------------------------

    def num_parameters(self) -> int:
        """Numbers in parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def compile_targets(self) -> list[nn.Module]:
        """What `torch.compile` should compile one by one: the blocks of both halves."""
        return [*self.encoder.compile_targets(), *self.decoder.compile_targets()]

    def save(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.yaml` into `folder`."""
        storage.save(self, self.config, Path(folder))

    @classmethod
    def load(cls, path: str | Path, checkpoint: str = "best") -> Translator:
        """The model saved in `path`: a folder written by `save`, or a run folder (its `best` or `last` checkpoint).

        Raises InputError if the folder holds no translation model, its weights are damaged or do not fit their configuration.
        """
        file, config = storage.find(Path(path), checkpoint)
        tensors = storage.read(file)
        storage.check_kind(tensors, "Translator", path)
        with torch.device("meta"):
            model = cls(config)
        storage.assign(model, tensors, file)
        return model.eval()


def _check_targets(decoder_input_ids: Tensor, targets: Tensor) -> None:
    if targets.numel() == 0:
        raise InputError(f"a loss of no tokens: targets are {tuple(targets.shape)}")
    if targets.shape != decoder_input_ids.shape:
        raise InputError(
            f"targets {tuple(targets.shape)} must have the shape of decoder_input_ids {tuple(decoder_input_ids.shape)}"
        )


class Translating:
    """The model of what translates one batch of sources; built by `Translator.of_source`.

    Called with new tokens (R, N) and the cache before them it gives logits (R, N, V) and the next cache. R is the number of
    sources, or what `reorder` made of it.
    """

    def __init__(self, model: Translator, source: Source) -> None:
        self.model, self.source = model, source

    @property
    def max_length(self) -> int | None:
        """The longest target, in tokens."""
        return self.model.max_length

    def modules(self) -> Iterator[nn.Module]:
        """Those of the model: decoding puts them into evaluation mode."""
        return self.model.modules()

    def new_cache(self) -> TranslationCache:
        """Nothing written yet; the source is projected here, once for every layer."""
        decoder, source = self.model.decoder, self.source
        layout = Layout.of(1, source.hidden.shape[1], causal=False, device=source.hidden.device)
        layers = tuple(block.cross_attention.keys_of(source.hidden, layout) for block in decoder.blocks)
        rows = torch.arange(source.texts, device=source.hidden.device)
        return TranslationCache(decoder.new_cache(), Projected(layers, source.mask, rows, source.positions))

    def __call__(
        self,
        input_ids: Tensor,
        *,
        cache: TranslationCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> TranslatingOutput:
        """Without a cache input_ids are read whole, one row a source."""
        decoder = self.model.decoder
        texts = self.source.texts if cache is None else len(cache.source.rows)
        if len(input_ids) != texts:
            raise InputError(
                f"input_ids are {len(input_ids)} texts, the source {'of the cache ' if cache else ''}is read by {texts}; "
                "see cache.reorder"
            )
        if cache is None:
            found = decoder.hidden(input_ids, attention_mask=attention_mask, source=self.source)
            return TranslatingOutput(decoder.output(found.hidden), None)
        found = decoder.hidden(
            input_ids,
            cache=cache.written,
            attention_mask=attention_mask,
            source=cache.source,
            mixed=self.model.mixes_while_decoding,
        )
        assert found.cache is not None
        return TranslatingOutput(decoder.output(found.hidden), TranslationCache(found.cache, cache.source))


@dataclass(frozen=True)
class TranslatingOutput:
    """logits (R, N, V), and the cache of the next call."""

    logits: Tensor
    cache: TranslationCache | None
