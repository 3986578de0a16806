"""Texts to classes: a language model or an encoder of ours under a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from fullrank.core.decoder import LanguageModel
from fullrank.core.masked import MaskedLanguageModel
from fullrank.hf.base import FullRankPreTrainedModel, states_of, weights_of
from fullrank.hf.configuration import FullRankConfig
from fullrank.hf.padding import mask_of_new


class FullRankForSequenceClassification(FullRankPreTrainedModel):
    """One vector of a text, and a linear layer, `classifier`, of it.

    Of a language model the vector is that of the last token, which has read all; of an encoder the mean over the tokens.
    The vocabulary layer is left out, so that a checkpoint of either kind loads and only `classifier` is new.
    """

    objectives = ("causal", "masked")
    accepts_loss_kwargs = False  # a mean over the texts of a batch
    _keys_to_ignore_on_load_unexpected = [r"^model\.output\."]  # noqa: RUF012  Hugging Face reads a list

    def __init__(self, config: FullRankConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.model_config().hidden_size, config.num_labels)
        self.post_init()

    @staticmethod
    def _built(config: FullRankConfig) -> nn.Module:
        built = LanguageModel if config.objective == "causal" else MaskedLanguageModel
        model: Any = built(config.model_config())
        model.output = nn.Identity()
        whole: nn.Module = model
        return whole

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """input_ids (B, N) -> `SequenceClassifierOutput` with logits (B, num_labels).

        attention_mask (B, N), 1 for tokens and 0 for padding on either side; without one every id is a token. labels (B,):
        numbers of classes, or values where `num_labels` is 1; (B, num_labels) where a text has several.
        """
        trace = self._trace(output_attentions, output_hidden_states)
        hidden = self._read(input_ids, attention_mask, trace)
        logits = self.classifier(self._pooled(hidden, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=states_of(trace, hidden), attentions=weights_of(trace)
        )
        return self._returned(output, return_dict)

    def _read(self, input_ids: Tensor, attention_mask: Tensor | None, trace: Any) -> Tensor:
        """Of the last layer, (B, N, E)."""
        model = self.model
        hidden: Tensor
        if self.config.objective == "masked":
            hidden = model.hidden(input_ids, attention_mask, trace=trace)
            return hidden
        mask = mask_of_new(attention_mask, input_ids, None, alone=not model.config.sees_future)
        hidden = model.hidden(input_ids, attention_mask=mask, trace=trace).hidden
        return hidden

    def _pooled(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, E)."""
        if attention_mask is None:
            attention_mask = hidden.new_ones(hidden.shape[:2], dtype=torch.int64)
        if self.config.objective == "masked":
            weights = attention_mask.to(hidden.dtype)[..., None]
            return (hidden * weights).sum(1) / weights.sum(1).clamp_min(1)
        places = torch.arange(hidden.shape[1], device=hidden.device)
        last = (attention_mask.bool() * places).argmax(1)
        return hidden[torch.arange(len(hidden), device=hidden.device), last]
