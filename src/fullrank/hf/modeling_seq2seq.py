"""Our translation model as Hugging Face's: `AutoModelForSeq2SeqLM`, `generate`, `Trainer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from fullrank.core.attention import Trace
from fullrank.core.errors import InputError
from fullrank.core.source import Source
from fullrank.core.translator import TranslationCache, Translator
from fullrank.hf.base import (
    IGNORED,
    FullRankPreTrainedModel,
    chunked_loss,
    mean_loss,
    refuse_generation,
    states_of,
    weights_of,
)
from fullrank.hf.cache import FullRankCache, StateLayer, layer_of
from fullrank.hf.configuration import FullRankConfig
from fullrank.hf.padding import mask_of_new


class FullRankForSeq2SeqLM(FullRankPreTrainedModel, GenerationMixin):
    """p(y_{n+1} | y_1 .. y_n, x): a `Translator` under `model`. A translation begins with `decoder_start_token_id`.

    `logits` are log-probabilities where the output layer is adaptive or a mixture. Where `decoder.released_decoding` is set,
    heads are mixed in training and in `generate(use_cache=False)`, and not with a cache, as in Mixhead's released code.
    """

    objectives = ("translation",)

    def __init__(self, config: FullRankConfig) -> None:
        super().__init__(config)
        self.post_init()

    @staticmethod
    def _built(config: FullRankConfig) -> nn.Module:
        return Translator(config.model_config())

    def get_encoder(self, modality: str | None = None) -> EncoderOf:
        """What `generate` reads the source with."""
        return EncoderOf(self)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """input_ids (B, M) of the source -> `Seq2SeqLMOutput` with logits (B, N, V) of the target.

        encoder_outputs: of `get_encoder()`, instead of input_ids. attention_mask (B, M): that of the source, padding on either
        side. decoder_input_ids (B, N): the target so far, or without them labels (B, N) shifted to the right. labels: -100
        where there is no loss. decoder_attention_mask (B, N) is for targets that are padded on the left.
        past_key_values: as of a language model; one is returned where one is given, or with `use_cache`.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise InputError("decoder_input_ids or labels: what was written so far, or what is to be written")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        wanted = (output_attentions, output_hidden_states)
        if encoder_outputs is None:
            if input_ids is None:
                raise InputError("input_ids or encoder_outputs: a translation needs its source")
            encoder_outputs = self.get_encoder()(input_ids, attention_mask, *wanted)
        layer = None if past_key_values is None else layer_of(past_key_values)
        if layer is None and use_cache:
            past_key_values = FullRankCache()
            layer = layer_of(past_key_values)
        trace = self._trace(*wanted)
        source = Source.of(encoder_outputs[0], attention_mask)
        hidden = self._read(decoder_input_ids, decoder_attention_mask, source, layer, trace)
        output_layer = self.model.decoder.output
        loss, logits = None, None
        if labels is not None and self.config.chunked_loss and self.training:
            loss = chunked_loss(output_layer, hidden, labels, num_items_in_batch)
        else:
            places = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = output_layer(hidden[:, places])
            loss = None if labels is None else mean_loss(logits, labels[:, places], num_items_in_batch)
        both = weights_of(trace)
        output = Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            decoder_hidden_states=states_of(trace, hidden),
            decoder_attentions=None if both is None else both[::2],
            cross_attentions=None if both is None else both[1::2],
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_attentions=getattr(encoder_outputs, "attentions", None),
        )
        return self._returned(output, return_dict)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Labels (B, N) shifted to the right behind `decoder_start_token_id`; collators call it."""
        start = self.config.decoder_start_token_id
        if start is None:
            raise InputError(
                "decoder_start_token_id: the configuration has none; set it to what a translation begins with"
            )
        first = labels.new_full((len(labels), 1), start)
        return torch.cat((first, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, start)), dim=1)

    def _read(
        self,
        decoder_input_ids: Tensor,
        decoder_attention_mask: Tensor | None,
        source: Source,
        layer: StateLayer | None,
        trace: Trace | None,
    ) -> Tensor:
        """What the output layer reads, (B, N, E); `layer` then holds what was read and written."""
        model: Any = self.model
        decoder, hidden = model.decoder, None
        if layer is None:
            alone = not model.config.sees_future
            mask = mask_of_new(decoder_attention_mask, decoder_input_ids, None, alone=alone)
            hidden = decoder.hidden(decoder_input_ids, attention_mask=mask, trace=trace, source=source).hidden
        else:
            state = self._begun(source) if layer.state is None else layer.state
            if not isinstance(state, TranslationCache):
                raise InputError(
                    f"past_key_values: holds a {type(state).__name__} of another model; begin with FullRankCache()"
                )
            mask = mask_of_new(decoder_attention_mask, decoder_input_ids, state.written, alone=False)
            found = model.decoder_while_decoding().hidden(
                decoder_input_ids, cache=state.written, attention_mask=mask, trace=trace, source=state.source
            )
            hidden, layer.state = found.hidden, TranslationCache(found.cache, state.source)
        read: Tensor = hidden
        return read

    def _begun(self, source: Source) -> TranslationCache:
        """Nothing written yet. Beams of one sentence, which `generate` copies, read one source together again."""
        hidden, mask = source.hidden, source.mask
        same = (hidden[1:] == hidden[:-1]).flatten(1).all(1)
        if mask is not None:
            same &= (mask[1:] == mask[:-1]).all(1)
        groups = torch.cat((same.new_zeros(1), ~same)).cumsum(0)
        counts = groups.bincount()
        if bool((counts != counts[0]).any()) or int(counts[0]) == 1:
            cache: TranslationCache = self.model.of_source(source).new_cache()
            return cache
        first = torch.arange(0, len(hidden), int(counts[0]), device=hidden.device)
        cache = self.model.of_source(source.rows(first)).new_cache()
        return cache.reorder(groups)

    # -- generation ---------------------------------------------------------------------------------------------------

    @property
    def _is_stateful(self) -> bool:
        """Whether speculation is out of question: a sum cannot forget again what was read in vain."""
        return not self.model.decoder.new_cache().croppable

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """What `generate` hands to `forward`."""
        refuse_generation(self.model.config)
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs


class EncoderOf:
    """The encoder of a model as `generate` calls it. No module: the encoder's tensors have a name already."""

    main_input_name = "input_ids"

    def __init__(self, whole: FullRankForSeq2SeqLM) -> None:
        self._whole = whole

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """input_ids (B, M) -> `BaseModelOutput` with last_hidden_state (B, M, E)."""
        whole = self._whole
        trace = whole._trace(output_attentions, output_hidden_states)
        hidden = whole.model.encoder.encode(input_ids, attention_mask, trace=trace).hidden
        output = BaseModelOutput(
            last_hidden_state=hidden, hidden_states=states_of(trace, hidden), attentions=weights_of(trace)
        )
        return whole._returned(output, return_dict)

    __call__ = forward
