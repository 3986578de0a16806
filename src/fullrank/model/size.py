"""How large a model is and what it costs, from its configuration alone: nothing is allocated."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from fullrank.attention.layer import Attention
from fullrank.attention.project import Projection
from fullrank.attention.score import DenseSynthesizer
from fullrank.config.schema import ModelConfig, stage_name
from fullrank.model.language_model import LanguageModel

_PARTS = (  # first match wins
    ("mixing", (".attend.mix.",)),
    ("attention", (".attention.", "position.biases.")),  # u and v of relative attention, which all layers share
    ("feed_forward", (".feed_forward.",)),
    ("norm", ("norm.",)),
    ("position", ("position.",)),
    ("embedding", ("embedding.",)),
    ("output", ("output.",)),
)


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Trainable parameters of each part of a model, and `total`; tied ones count once, where they are stored."""
    counts: Counter[str] = Counter({part: 0 for part, _ in _PARTS})
    for name, parameter in model.named_parameters():
        part = next((part for part, marks in _PARTS if any(mark in name for mark in marks)), "other")
        counts[part] += parameter.numel()
    return {"total": sum(counts.values()), **counts}


_KEY_PRODUCTS = {"relative": 2, "random_synthesizer": 0}  # multiply-adds of a score for a key, in H D; else 1


def _attention_flops(config: ModelConfig, keys: float) -> float:
    """Per token: scores and weighted values; the keys of distances, made once for all texts of a batch, are left out."""
    assert config.head_dim is not None
    products = _KEY_PRODUCTS.get(stage_name(config.attention.score), 1) + 1
    return config.num_hidden_layers * 2 * products * config.num_attention_heads * config.head_dim * keys


def _matrices(model: LanguageModel) -> int:
    """Numbers of the matrices that each token is multiplied with, the vocabulary's apart."""
    count = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    for module in model.modules():
        if isinstance(module, DenseSynthesizer):
            count -= module.to_positions.weight.numel()  # counted key by key, with the scores
        elif isinstance(module, Projection) and module.key is not None and not module.reads_keys:
            count -= module.key.weight.numel()
    return count


def _memory_flops(model: LanguageModel, length: int) -> float:
    """Per token of a training step: keys and values of the memory, which are projected again for every segment."""
    projections = [m for m in model.modules() if isinstance(m, Projection)]
    numbers = sum(m.value.weight.numel() + (m.key.weight.numel() if m.key and m.reads_keys else 0) for m in projections)
    return 2 * numbers * model.memory_length / length


def _mixing_flops(model: LanguageModel, keys: float) -> float:
    """Per token: H^2 multiply-adds a key and, position-wise, D H^2 for the matrix."""
    flops = 0.0
    for module in model.modules():
        if isinstance(module, Attention):
            heads, mix = module.project.num_heads, getattr(module.attend, "mix", None)
            if mix is None:
                continue
            if mix.matrix(None) is not None:
                flops += 2 * heads * heads * keys
            flops += sum(2 * p.numel() * heads for name, p in mix.named_parameters() if name == "from_query")
    return flops


def size(config: ModelConfig, length: int) -> dict[str, Any]:
    """Parameters by part, bytes and FLOPs of a model on sequences of `length` tokens, as plain numbers.

    FLOPs per token count a multiply-add as two; forward = 2 x the matrix parameters that a token meets + attention over
    the (length + 1) / 2 keys of its segment that a query sees on average, and over the memory; a training step costs three
    forwards, and projects the memory again, which evaluation does not. How many tokens meet the tails of an adaptive softmax
    is reckoned by Zipf's law.
    """
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = LanguageModel(config)
    parts = parameters_by_part(model)
    assert config.vocab_size is not None
    assert config.head_dim is not None
    keys = config.memory_length if config.same_length else config.memory_length + (length + 1) / 2
    ends: tuple[Any, ...] = (model.embedding, model.output)
    vocabulary = sum(end.flops_per_token() for end in ends if hasattr(end, "flops_per_token"))
    forward = 2 * _matrices(model) + _attention_flops(config, keys) + _mixing_flops(model, keys) + vocabulary
    again = _memory_flops(model, length)
    cached = sum(1 + m.reads_keys for m in model.modules() if isinstance(m, Projection))
    cache = cached * config.num_attention_heads * config.head_dim
    return {
        "parameters": parts,
        "bytes": {
            "weights_fp32": 4 * parts["total"],
            "training_adam_fp32": 16 * parts["total"],
            "cache_per_token_fp32": 4 * cache,
            "memory_per_text_fp32": 4 * config.num_hidden_layers * config.memory_length * config.hidden_size,
        },
        "flops_per_token": {"length": length, "forward": round(forward), "training": round(3 * (forward + again))},
    }
