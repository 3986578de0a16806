"""Our masked language model as Hugging Face's: `AutoModelForMaskedLM`, `fill-mask`, `Trainer`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

from fullrank.core.masked import MaskedLanguageModel
from fullrank.hf.base import IGNORED, FullRankPreTrainedModel, chunked_loss, mean_loss, states_of, weights_of
from fullrank.hf.configuration import FullRankConfig


class FullRankForMaskedLM(FullRankPreTrainedModel):
    """p(x_n | the text around n): a `MaskedLanguageModel` under `model`. `<mask>` is the last entry (`mask_token_id`).

    `logits` are log-probabilities where the output layer is adaptive or a mixture.
    """

    objectives = ("masked",)

    def __init__(self, config: FullRankConfig) -> None:
        super().__init__(config)
        self.post_init()

    @staticmethod
    def _built(config: FullRankConfig) -> nn.Module:
        return MaskedLanguageModel(config.model_config())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """input_ids (B, N) -> `MaskedLMOutput` with logits (B, N, V) at every place.

        attention_mask (B, N), 1 for tokens and 0 for padding on either side. labels (B, N): the token that stands there, -100
        where nothing is asked for; the output layer then works on the others alone if `config.chunked_loss`.
        """
        trace = self._trace(output_attentions, output_hidden_states)
        model = self.model
        states = model.encoder.encode(input_ids, attention_mask, trace=trace).hidden
        hidden = model.output_dropout(states)
        loss, logits = None, None
        if labels is not None and self.config.chunked_loss and self.training:
            asked = labels != IGNORED
            loss = chunked_loss(model.output, hidden[asked][None], labels[asked][None], num_items_in_batch)
        else:
            logits = model.output(hidden)
            loss = None if labels is None else mean_loss(logits, labels, num_items_in_batch)
        output = MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=states_of(trace, states), attentions=weights_of(trace)
        )
        return self._returned(output, return_dict)
