"""Our models in the auto classes of transformers: `AutoModelForCausalLM.from_pretrained(folder)` and the like."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from fullrank.hf.configuration import FullRankConfig as FullRankConfig
from fullrank.hf.modeling import FullRankForCausalLM as FullRankForCausalLM
from fullrank.hf.modeling_classification import FullRankForSequenceClassification as FullRankForSequenceClassification
from fullrank.hf.modeling_encoder import FullRankForMaskedLM as FullRankForMaskedLM
from fullrank.hf.modeling_seq2seq import FullRankForSeq2SeqLM as FullRankForSeq2SeqLM

AutoConfig.register("fullrank", FullRankConfig, exist_ok=True)
AutoModelForCausalLM.register(FullRankConfig, FullRankForCausalLM, exist_ok=True)
AutoModelForSeq2SeqLM.register(FullRankConfig, FullRankForSeq2SeqLM, exist_ok=True)
AutoModelForMaskedLM.register(FullRankConfig, FullRankForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(FullRankConfig, FullRankForSequenceClassification, exist_ok=True)
