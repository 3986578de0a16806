"""Our language model as Hugging Face's: `AutoModelForCausalLM`, `generate`, `Trainer`, pipelines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from fullrank.core.cache import Cache
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.memory import Memory
from fullrank.hf.base import (
    IGNORED,
    FullRankPreTrainedModel,
    chunked_loss,
    mean_loss,
    refuse_generation,
    states_of,
    weights_of,
)
from fullrank.hf.cache import FullRankCache, State, StateLayer, layer_of
from fullrank.hf.configuration import FullRankConfig
from fullrank.hf.padding import mask_of_new


class FullRankForCausalLM(FullRankPreTrainedModel, GenerationMixin):
    """p(x_{n+1} | x_1 .. x_n): a `LanguageModel` under `model`.

    `logits` are log-probabilities where the output layer is adaptive or a mixture; their softmax is right either way.
    A model with memory reads a text segment by segment: what it remembers is in `past_key_values`, which goes into the next
    call. It does so whatever `use_cache` says, for memory is no shortcut: without it the model is another one.
    """

    objectives = ("causal",)

    def __init__(self, config: FullRankConfig) -> None:
        super().__init__(config)
        self.post_init()

    @staticmethod
    def _built(config: FullRankConfig) -> nn.Module:
        return LanguageModel(config.model_config())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """input_ids (B, N) -> `CausalLMOutputWithPast` with logits (B, N, V).

        attention_mask (B, N), or (B, M + N) with the tokens before, 1 for tokens and 0 for padding on either side. What stands
        at padding means nothing.
        labels (B, N): input_ids again, -100 where there is no loss; the loss is of each token given those before it.
        past_key_values: `FullRankCache`, or the empty cache that `generate` makes; it is changed in place. Without one a new
        one is returned if `use_cache` (in evaluation, without labels, `config.use_cache`), and by models with memory always
        in evaluation.
        logits_to_keep: of the last so many tokens, or of these places; 0: of all.
        """
        trace = self._trace(output_attentions, output_hidden_states)
        layer = None if past_key_values is None else layer_of(past_key_values)
        if layer is None and self._carries(use_cache, labels is not None):
            past_key_values = FullRankCache()
            layer = layer_of(past_key_values)
        hidden = self._read(input_ids, attention_mask, layer, trace)
        loss, logits = None, None
        if labels is not None and self.config.chunked_loss and self.training:
            loss = chunked_loss(self.model.output, hidden[:, :-1], labels[:, 1:], num_items_in_batch)
        else:
            places = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.output(hidden[:, places])
            if labels is not None:
                shifted = torch.cat((labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)), dim=1)
                loss = mean_loss(logits, shifted[:, places], num_items_in_batch)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=states_of(trace, hidden),
            attentions=weights_of(trace),
        )
        return self._returned(output, return_dict)

    @property
    def _remembers(self) -> bool:
        return bool(self.model.memory_length)

    @property
    def _is_stateful(self) -> bool:
        """Whether speculation is out of question: a memory or a sum cannot forget again what was read in vain."""
        return self._remembers or not self.model.new_cache().croppable

    def _carries(self, use_cache: bool | None, has_labels: bool) -> bool:
        """Whether a call without a cache begins one."""
        if use_cache is not None:
            return use_cache
        if self.training or self.model.config.sees_future:
            return False
        return self._remembers or (self.config.use_cache and not has_labels)

    def _read(self, input_ids: Tensor, attention_mask: Tensor | None, layer: StateLayer | None, trace: Any) -> Tensor:
        """What the output layer reads, (B, N, E); `layer` then holds what was read."""
        state: State | None = None if layer is None else layer.state
        model = self.model
        if state is not None and not isinstance(state, Memory if self._remembers else Cache):
            raise InputError(
                f"past_key_values: holds a {type(state).__name__}, of another model or of this one with another "
                "memory_length; begin with FullRankCache()"
            )
        mask = mask_of_new(attention_mask, input_ids, state, alone=layer is None and not model.config.sees_future)
        if self._remembers:
            found = model.hidden(input_ids, state, attention_mask=mask, trace=trace)
        elif layer is not None:
            found = model.hidden(input_ids, cache=state or model.new_cache(), attention_mask=mask, trace=trace)
        else:
            found = model.hidden(input_ids, attention_mask=mask, trace=trace)
        if layer is not None:
            layer.state = found.memory if self._remembers else found.cache
        hidden: Tensor = found.hidden
        return hidden

    # -- generation ---------------------------------------------------------------------------------------------------

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `generate` hands to `forward`: to a model with memory the new tokens alone, also without a cache."""
        refuse_generation(self.model.config)
        if past_key_values is not None and self._remembers and not is_first_iteration:
            next_sequence_length = 1
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if self._remembers and not generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = FullRankCache()  # the memory that the text begins with
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
