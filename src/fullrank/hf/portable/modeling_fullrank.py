"""Language models, translators and masked language models trained with the package `fullrank`, readable without it.

Parameters are named as in the package, under `model.`: `from_pretrained` of an exported folder gives the trained model, and
its logits equal those of the package up to rounding. Everything is written for reading rather than for speed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, MaskedLMOutput, Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from .cache_fullrank import NOTHING, Known, TextLayer
from .configuration_fullrank import (
    FullRankConfig,
    Settings,
    cross_settings,
    decoder_settings,
    encoder_settings,
    settings_of,
)
from .layers_fullrank import Block, Mixing
from .multilinear_fullrank import Cores, DecayedMap
from .positions_fullrank import Position, View
from .vocabulary_fullrank import INPUTS, Dropout, output_layer


class Read(NamedTuple):
    """last (B, N, E); the inputs of all blocks, then `last`; attention weights of each layer; those over the source."""

    last: Tensor
    hidden: tuple[Tensor, ...]
    weights: tuple[Tensor | None, ...]
    cross: tuple[Tensor | None, ...]


class Stack(nn.Module):
    """embedding -> blocks -> norm: input_ids (B, N) -> `Read`; `predicts`: with a vocabulary layer above.

    cross: what a decoder reads its source with. embedding: of somebody else, instead of an own one.
    """

    def __init__(
        self, config: Settings, causal: bool, predicts: bool, cross: Settings | None = None, embedding: Any = None
    ) -> None:
        super().__init__()
        self.causal, self.same_length = causal, config.same_length
        self.starts_with_zeros = config.memory_start == "zeros"
        self.sees_future = config.attention.causal == "as_published"
        self._lent: tuple[Any, ...] = () if embedding is None else (embedding,)  # in a tuple: not registered twice
        self.embedding: Any = INPUTS[config.input.kind](config) if embedding is None else None
        self.position = Position(config)
        self.embedding_dropout = Dropout(config.dropout.embedding, config.dropout.locked)
        self.blocks = nn.ModuleList(Block(config, cross) for _ in range(config.num_hidden_layers))
        eps = config.layer_norm_eps
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=eps) if config.final_norm else nn.Identity()
        self.predicts = predicts
        if predicts:
            self.output_dropout = Dropout(config.dropout.output, config.dropout.locked)
            self.output = output_layer(config, self.embedding)

    def embed(self, input_ids: Tensor | None) -> Tensor:
        return (self._lent[0] if self.embedding is None else self.embedding)(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        layers: list[TextLayer] | None = None,
        memory_length: int = 0,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        source_layers: list[TextLayer] | None = None,
        mixed: bool = True,
        wants_weights: bool = False,
        inputs_embeds: Tensor | None = None,
    ) -> Read:
        """attention_mask (B, N), or of all tokens read so far and these; layers: what earlier calls left, it is updated."""
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        rows, tokens = x.shape[:2]
        if layers and memory_length and self.starts_with_zeros and layers[0].seen == 0:
            self._begin_with_zeros(layers, memory_length, x)
        view = self._view(rows, tokens, attention_mask, layers, memory_length, x.device)
        view = replace(view, mixed=mixed, biases=self.position.biases)
        x = self.position(x, view.queries)
        reusable = not (self.training or torch.is_grad_enabled())
        known = [NOTHING] * len(self.blocks) if layers is None else [layer.known(reusable) for layer in layers]
        view = replace(view, encodings=self._encodings(view, x, known[0], layers is not None and reusable))
        x = self.embedding_dropout(x)
        across = None if source is None else _across(source, source_mask, tokens)
        hidden: tuple[Tensor, ...] = ()
        weights: tuple[Tensor | None, ...] = ()
        cross: tuple[Tensor | None, ...] = ()
        for i, block in enumerate(self.blocks):
            source_known = NOTHING if source_layers is None else source_layers[i].known(True)
            before = x
            x, made, of_source, seen = block(x, view, known[i], source, across, source_known, wants_weights)
            if layers is not None:
                layers[i].begin(view.keys, view.mask, tokens)
                layers[i].keep(before, made, reusable)
            if source_layers is not None and across is not None and source is not None and not source_layers[i].seen:
                source_layers[i].begin(across.keys, across.mask, source.shape[1])
                source_layers[i].keep(source, of_source, True)
            hidden, weights, cross = (*hidden, before), (*weights, seen[0]), (*cross, seen[1])
        last = self.final_norm(x)
        if self.predicts:
            last = self.output_dropout(last)
        return Read(last, (*hidden, last), weights, cross)

    def _view(self, rows: int, tokens: int, mask: Tensor | None, layers: Any, memory_length: int, device: Any) -> View:
        """Who stands where: what is kept, then the new tokens. Positions count tokens, not padding."""
        first = layers[0] if layers else TextLayer(None)
        start, known = first.next_positions, first.places
        new = None if mask is None else mask[:, -tokens:].bool()
        if mask is not None and mask.shape[1] == first.seen + tokens:
            read = mask[:, : first.seen].sum(dim=1, keepdim=True)
            if first.seen and not bool((read == start).all()):
                raise ValueError("attention_mask hides other earlier tokens than when they were read; read them again")
        elif mask is not None and mask.shape[1] != tokens:
            raise ValueError(
                f"attention_mask is {tuple(mask.shape)}, for {first.seen} tokens read before and {tokens} new ones"
            )
        if new is not None and bool(new.all()) and first.mask is None:
            new = None
        if new is None and first.mask is None:
            positions = start + torch.arange(tokens, device=device)[None]
            keys = positions if known is None else torch.cat((known, positions), dim=1)
            return View.of(positions, keys, None, self.causal, self._window(memory_length))
        new = torch.ones(rows, tokens, dtype=torch.bool, device=device) if new is None else new
        positions = start + (new.cumsum(dim=1) - 1).clamp_min(0)
        if known is None:
            return View.of(positions, positions, new, self.causal, self._window(memory_length))
        before = torch.ones_like(known, dtype=torch.bool) if first.mask is None else first.mask
        keys = torch.cat((known.expand(rows, -1), positions), dim=1)
        return View.of(
            positions, keys, torch.cat((before.expand(rows, -1), new), dim=1), self.causal, self._window(memory_length)
        )

    def _window(self, memory_length: int) -> int | None:
        return memory_length if self.same_length and memory_length else None

    def _encodings(self, view: View, x: Tensor, known: Known, decoding: bool) -> Tensor | None:
        """Sinusoids of distances, for all layers; while decoding for more distances than needed, so that their keys last."""
        count = view.distances
        if decoding and self.causal and self.position.places is None:
            if known.relative is not None and known.relative.shape[1] >= count:
                return None
            count = max(64, 1 << (count - 1).bit_length())
        found = self.position.encodings(view.nearest, count, x)
        return None if found is None else self.embedding_dropout(found[None])[0]

    def _begin_with_zeros(self, layers: list[TextLayer], memory_length: int, x: Tensor) -> None:
        """A memory of zeros that stand before the text and are attended."""
        places = torch.arange(-memory_length, 0, device=x.device)[None]
        for layer in layers:
            layer.hidden, layer.places = x.new_zeros(len(x), memory_length, x.shape[2]), places


def _across(source: Tensor, mask: Tensor | None, tokens: int) -> View:
    """Every token sees the source (B, M, E), and no padding of it."""
    mask = None if mask is None or bool(mask.all()) else mask.bool()
    if mask is None:
        places = torch.arange(source.shape[1], device=source.device)[None]
    else:
        places = (mask.cumsum(dim=1) - 1).clamp_min(0)
    return View.of(places.new_zeros(1, tokens), places, mask, causal=False)


def _layers(cache: Cache | None, count: int, limit: int | None) -> list[TextLayer] | None:
    """The layers of a cache, exchanged for ours while it is empty."""
    if cache is None:
        return None
    if not all(isinstance(layer, TextLayer) for layer in cache.layers) or len(cache.layers) != count:
        if not isinstance(cache, DynamicCache) or cache.get_seq_length():
            raise ValueError(
                "past_key_values: the cache that an earlier call of this model returned, or an empty DynamicCache"
            )
        cache.layers[:] = [TextLayer(limit) for _ in range(count)]
    return cache.layers


IGNORED = -100  # the label of what has no loss


def _loss(output: Any, logits: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Mean nll in nats of the labels (B, N) that are not -100."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels are {tuple(labels.shape)}, logits are of {tuple(logits.shape[:-1])} tokens")
    counted = labels != IGNORED
    log_prob = output.log_prob(logits).gather(-1, labels.masked_fill(~counted, 0)[..., None])[..., 0]
    total = -log_prob.masked_fill(~counted, 0.0).sum()
    return total / (counted.sum() if num_items_in_batch is None else num_items_in_batch)


class FullRankPreTrainedModel(PreTrainedModel):
    """What all fullrank models have in common."""

    config_class = FullRankConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _no_split_modules = ("Block",)

    def _init_weights(self, module: nn.Module) -> None:
        """A simple start, N(0, 0.02^2), at plain attention. The package has the papers' own ways to start."""
        if isinstance(module, Mixing):
            if module.kind == "position_wise":
                init.zeros_(module.from_query)
            if module.kind == "random":
                init.normal_(module.mixing, std=len(module.mixing) ** -0.5)
            elif hasattr(module, "mixing"):
                init.eye_(module.mixing)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, Cores):
            init.constant_(module.weight, 1 / module.weight.shape[1] if module.free else 0.0)
        else:
            for parameter in module.parameters(recurse=False):
                init.zeros_(parameter) if parameter.ndim == 1 else init.normal_(parameter, std=0.02)
            if isinstance(module, DecayedMap):  # decays of 2 to 64 tokens
                spread = torch.linspace(0.0, 4.1, len(module.key_decay))
                init.copy_(module.key_decay, spread)
                init.copy_(module.value_decay, spread.flip(0))

    def _wants_weights(self, output_attentions: bool | None) -> tuple[bool, bool]:
        """Whether weights are asked for, and whether attention is computed step by step."""
        asked = self.config.output_attentions if output_attentions is None else output_attentions
        return bool(asked), bool(asked) or self.config._attn_implementation == "eager"


class FullRankForCausalLM(FullRankPreTrainedModel, GenerationMixin):
    """p(x_{n+1} | x_1 .. x_n). input_ids are one segment: every token sees those before it.

    past_key_values: of a model with memory, what its layers remember, `config.memory_length` tokens before the segment; a text
    longer than that is not the same when it is read in one piece. Without memory: keys and values of all earlier tokens.
    Logits are log-probabilities where the output is adaptive or a mixture.
    """

    def __init__(self, config: FullRankConfig) -> None:
        super().__init__(config)
        self.model = Stack(settings_of(config), causal=True, predicts=True)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.embedding

    def get_output_embeddings(self) -> None:
        return None

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Any = None,
    ) -> CausalLMOutputWithPast:
        """labels (B, N): the input_ids, -100 where nothing is asked; they are shifted here."""
        model, config = self.model, self.config
        asked, explicit = self._wants_weights(output_attentions)
        if past_key_values is None and self._carries(use_cache, labels is not None):
            past_key_values = DynamicCache()
        layers = _layers(past_key_values, len(model.blocks), config.memory_length or None)
        if layers and model.sees_future:
            raise ValueError(
                "causal: as_published lets tokens see later ones: a text cannot be continued, read it whole"
            )
        if layers is None and config.memory_length:
            layers = [TextLayer(config.memory_length) for _ in model.blocks]  # it may begin with zeros
        read = model(
            input_ids, attention_mask, layers, config.memory_length, wants_weights=explicit, inputs_embeds=inputs_embeds
        )
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = model.output(read.last[:, kept]), None
        if labels is not None:
            shifted = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), dim=1)
            loss = _loss(model.output, logits, shifted[:, kept], num_items_in_batch)
        wants_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return CausalLMOutputWithPast(
            loss, logits, past_key_values, read.hidden if wants_hidden else None, read.weights if asked else None
        )

    def _carries(self, use_cache: bool | None, has_labels: bool) -> bool:
        """Whether a call without a cache begins one; memory is no shortcut but part of the model."""
        if use_cache is not None:
            return use_cache and not self.model.sees_future
        if self.training or self.model.sees_future:
            return False
        return bool(self.config.memory_length) or (self.config.use_cache and not has_labels)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `generate` hands to `forward`: to a model with memory the new tokens alone, also without a cache."""
        if self.model.sees_future:
            raise ValueError(
                "causal: as_published lets tokens see later ones: this model cannot write a text token by token"
            )
        if self.config.memory_length and kwargs.get("past_key_values") is not None and not is_first_iteration:
            next_sequence_length = 1
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, is_first_iteration=is_first_iteration, **kwargs
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        without = not generation_config.use_cache and model_kwargs.get("past_key_values") is None
        if without and self.config.memory_length:
            model_kwargs["past_key_values"] = DynamicCache()
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


class MaskedModel(nn.Module):
    """An encoder under a vocabulary layer."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.encoder = Stack(encoder_settings(config), causal=False, predicts=False)
        self.output_dropout = Dropout(config.dropout.output, config.dropout.locked)
        self.output = output_layer(config, self.encoder.embedding)


class FullRankForMaskedLM(FullRankPreTrainedModel):
    """p(x_n | the text around n) at every n; the last id of the vocabulary is `<mask>`."""

    def __init__(self, config: FullRankConfig) -> None:
        super().__init__(config)
        self.model = MaskedModel(settings_of(config))
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.encoder.embedding

    def get_output_embeddings(self) -> None:
        return None

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Any = None,
    ) -> MaskedLMOutput:
        """labels (B, N): the tokens that were masked, -100 elsewhere."""
        asked, explicit = self._wants_weights(output_attentions)
        read = self.model.encoder(input_ids, attention_mask, wants_weights=explicit, inputs_embeds=inputs_embeds)
        logits = self.model.output(self.model.output_dropout(read.last))
        loss = None if labels is None else _loss(self.model.output, logits, labels, num_items_in_batch)
        wants_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return MaskedLMOutput(loss, logits, read.hidden if wants_hidden else None, read.weights if asked else None)


class TranslationModel(nn.Module):
    """An encoder, and a decoder that reads across what it made."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.decoder = Stack(decoder_settings(config), causal=True, predicts=True, cross=cross_settings(config))
        shared = config.encoder is not None and config.encoder.share_embedding
        embedding = self.decoder.embedding if shared else None
        self.encoder = Stack(encoder_settings(config), causal=False, predicts=False, embedding=embedding)


class _SourceReader:
    """What `generate` calls to read the source."""

    main_input_name = "input_ids"

    def __init__(self, encoder: Stack) -> None:
        self.encoder = encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        read = self.encoder(input_ids, attention_mask, wants_weights=bool(output_attentions))
        return BaseModelOutput(
            read.last, read.hidden if output_hidden_states else None, read.weights if output_attentions else None
        )

    __call__ = forward


class FullRankForSeq2SeqLM(FullRankPreTrainedModel, GenerationMixin):
    """p(y_{n+1} | y_1 .. y_n, x): input_ids (B, M) are the source, decoder_input_ids (B, N) the target so far."""

    def __init__(self, config: FullRankConfig) -> None:
        super().__init__(config)
        settings = settings_of(config)
        # Mixhead's released code leaves heads as they are while it decodes token by token
        self.mixes_while_decoding = not (settings.decoder is not None and settings.decoder.released_decoding)
        self.model = TranslationModel(settings)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        own = self.model.encoder.embedding
        return self.model.decoder.embedding if own is None else own

    def get_output_embeddings(self) -> None:
        return None

    def get_encoder(self, modality: str | None = None) -> _SourceReader:
        return _SourceReader(self.model.encoder)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The target one step later, behind the token that it begins with."""
        begins = self.config.decoder_start_token_id
        if begins is None:
            raise ValueError(
                "decoder_start_token_id: needed to make decoder_input_ids of labels; set it, or give decoder_input_ids"
            )
        shifted = torch.cat((torch.full_like(labels[:, :1], begins), labels[:, :-1]), dim=1)
        return shifted.masked_fill(shifted == IGNORED, begins)

    @can_return_tuple
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
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Any = None,
    ) -> Seq2SeqLMOutput:
        """labels (B, N): the target, -100 where nothing is asked; decoder_input_ids are made of them where none are given."""
        asked, explicit = self._wants_weights(output_attentions)
        wants_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder().forward(input_ids, attention_mask, explicit, wants_hidden)
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        decoder, decoding = self.model.decoder, past_key_values is not None
        if past_key_values is None and not self.training and not decoder.sees_future and labels is None:
            wanted = self.config.use_cache if use_cache is None else use_cache
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache()) if wanted else None
        own, across = None, None
        if past_key_values is not None:
            if decoder.sees_future:
                raise ValueError(
                    "causal: as_published lets tokens see later ones: this model cannot write token by token"
                )
            own = _layers(past_key_values.self_attention_cache, len(decoder.blocks), None)
            across = _layers(past_key_values.cross_attention_cache, len(decoder.blocks), None)
        read = decoder(
            decoder_input_ids,
            decoder_attention_mask,
            own,
            source=encoder_outputs[0],
            source_mask=attention_mask,
            source_layers=across,
            mixed=self.mixes_while_decoding or not decoding,
            wants_weights=explicit,
        )
        logits = decoder.output(read.last)
        return Seq2SeqLMOutput(
            loss=None if labels is None else _loss(decoder.output, logits, labels, num_items_in_batch),
            logits=logits,
            past_key_values=past_key_values,
            decoder_hidden_states=read.hidden if wants_hidden else None,
            decoder_attentions=read.weights if asked else None,
            cross_attentions=read.cross if asked else None,
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_attentions=getattr(encoder_outputs, "attentions", None) if asked else None,
        )
