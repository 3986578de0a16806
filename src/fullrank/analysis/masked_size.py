"""How large a masked language model is and what it costs, from its configuration alone: nothing is allocated."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from fullrank.analysis.attention_block import attention_block
from fullrank.analysis.size import attention_flops, matrices, mixing_flops, parameters_by_part, vocabulary_flops
from fullrank.core.config import ModelConfig
from fullrank.core.masked import MaskedLanguageModel


def masked_size(config: ModelConfig, length: int, batch: int, asked: float) -> dict[str, Any]:
    """Parameters by part, bytes and FLOPs of a masked language model on `batch` texts of `length` tokens, as plain numbers.

    FLOPs are per token that is read, and count a multiply-add as two: every token sees all `length` tokens, and the output
    layer works on the share `asked` of them. A training step costs three forwards, for multi-linear attention what it is (see
    `size.size`). Nothing is decoded, so there is no cache.
    Raises ConfigError for a configuration of no masked language model, InputError for a length that it cannot take.
    """
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = MaskedLanguageModel(config)
    encoder = model.encoder
    parts, layers = parameters_by_part(model), [block.attention for block in encoder.blocks]
    others = 2 * matrices(encoder) + vocabulary_flops(encoder.embedding) + mixing_flops(layers, length)
    others += asked * (2 * matrices(model.output) + vocabulary_flops(model.output))
    forward, training = attention_flops(encoder.config, length, length, batch, causal=False)
    return {
        "parameters": parts,
        "attention_block": attention_block(layers[0], encoder.config, parts["attention"], parts["total"]),
        "bytes": {"weights_fp32": 4 * parts["total"], "training_adam_fp32": 16 * parts["total"]},
        "flops_per_token": {
            "length": length,
            "forward": round(forward + others),
            "training": round(training + 3 * others),
        },
    }
