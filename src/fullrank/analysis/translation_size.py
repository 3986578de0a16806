"""How large a translation model is and what it costs, from its configuration alone: nothing is allocated."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fullrank.analysis.attention_block import attention_block
from fullrank.analysis.size import (
    attention_flops,
    cached,
    matrices,
    mixing_flops,
    parameters_by_part,
    parameters_of,
    vocabulary_flops,
)
from fullrank.core.attention import Attention
from fullrank.core.config import ModelConfig
from fullrank.core.project import Projection
from fullrank.core.translator import Translator

PLACES = ("encoder", "decoder", "cross")


def place_of(name: str) -> str:
    """Where a parameter of a translation model belongs: cross-attention and its norm are a place of their own."""
    if name.startswith("encoder."):
        return "encoder"
    return "cross" if ".cross_attention" in name else "decoder"


def parameters_by_place(model: nn.Module) -> dict[str, dict[str, int]]:
    """Trainable parameters of a translation model: of encoder, decoder and cross-attention, each by part and in `total`.

    Every parameter is in one place only: a table that both languages share is the decoder's.
    """
    named = list(model.named_parameters())
    return {place: parameters_of(item for item in named if place_of(item[0]) == place) for place in PLACES}


def translation_size(config: ModelConfig, length: int, batch: int = 1) -> dict[str, Any]:
    """Parameters by part and place, bytes and FLOPs of a translation model for `batch` pairs, as plain numbers.

    Source and target have `length` tokens each. FLOPs per token count a multiply-add as two. `source` is the work of a token
    of the source: encoder, in which it sees all `length` tokens, and its keys and values for cross-attention. `target` is
    that of a token of the target: decoder, in which it sees (length + 1) / 2 tokens on average, and all `length` tokens of the
    source, and vocabulary. `forward` and `training` are the sum of both: a target token, and the source token that comes
    with it. A training step costs three forwards, for multi-linear attention what it is (see `size`). Decoding keeps
    `cache_per_token_fp32` of each target token, `cache_per_source_token_fp32`, and `state_per_text_fp32` whatever the length.
    Raises ConfigError for a configuration of no translation model, InputError for a length that it cannot take.
    """
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = Translator(config)
    decoder: Any = model.decoder
    places = parameters_by_place(model)
    parts = parameters_by_part(model)
    configs = {"encoder": config.of_encoder(), "decoder": config.of_decoder(), "cross": config.of_cross()}
    layers: dict[str, list[Attention]] = {
        "encoder": [block.attention for block in model.encoder.blocks],
        "decoder": [block.attention for block in decoder.blocks],
        "cross": [block.cross_attention for block in decoder.blocks],
    }
    weights = {  # numbers of matrices that a source or target token is multiplied with
        "source": matrices(model.encoder) + _keys_and_values(layers["cross"]),
        "target": matrices(decoder) - _keys_and_values(layers["cross"]),
    }
    ends = {
        "source": (model.encoder.embedding if model.encoder.embedding is not None else decoder.embedding,),
        "target": (decoder.embedding, decoder.output),
    }
    flops: dict[str, dict[str, float]] = {}
    for side, read in {"source": ("encoder",), "target": ("decoder", "cross")}.items():
        forward = 2 * weights[side] + vocabulary_flops(*ends[side])
        training = 3 * forward
        for place in read:
            keys = (length + 1) / 2 if place == "decoder" else length
            mixed = mixing_flops(layers[place], keys)
            once, step = attention_flops(configs[place], keys, length, batch, causal=place == "decoder")
            forward, training = forward + once + mixed, training + step + 3 * mixed
        flops[side] = {"forward": round(forward), "training": round(training)}
    of_token, of_text = cached(layers["decoder"])
    of_source = cached(layers["cross"])[0]
    blocks = {
        place: attention_block(layers[place][0], configs[place], places[place]["attention"], parts["total"])
        for place in PLACES
    }
    return {
        "parameters": parts,
        "by_place": places,
        "attention_block": {place: block for place, block in blocks.items() if block is not None} or None,
        "bytes": {
            "weights_fp32": 4 * parts["total"],
            "training_adam_fp32": 16 * parts["total"],
            "cache_per_token_fp32": 4 * of_token,
            "cache_per_source_token_fp32": 4 * of_source,
            "state_per_text_fp32": 4 * of_text,
            "memory_per_text_fp32": 0,
        },
        "flops_per_token": {
            "length": length,
            "forward": flops["source"]["forward"] + flops["target"]["forward"],
            "training": flops["source"]["training"] + flops["target"]["training"],
            **flops,
        },
    }


def _keys_and_values(layers: Iterable[Attention]) -> int:
    """Numbers of the matrices that make keys and values, where keys are read at all."""
    found = 0
    for layer in layers:
        project: Projection = layer.project
        found += project.value.weight.numel()
        if project.key is not None and project.reads_keys:
            found += project.key.weight.numel()
    return found
