"""How large a model is and what it costs, from its configuration alone: nothing is allocated."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fullrank.analysis.attention_block import attention_block, multilinear_work
from fullrank.core.attention import Attention
from fullrank.core.config import ModelConfig, stage_name
from fullrank.core.decoder import LanguageModel
from fullrank.core.multilinear_decayed import Summed
from fullrank.core.project import Projection
from fullrank.core.score import DenseSynthesizer
from fullrank.core.weighted import WeightedValues

_PARTS = (  # first match wins
    ("mixing", (".attend.mix.",)),
    ("attention", (".attention.", ".cross_attention.", "position.biases.")),  # u and v, which all layers share
    ("feed_forward", (".feed_forward.",)),
    ("norm", ("norm.",)),
    ("position", ("position.",)),
    ("embedding", ("embedding.",)),
    ("output", ("output.",)),
)


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Trainable parameters of each part of a model, and `total`; tied ones count once, where they are stored."""
    return parameters_of(model.named_parameters())


def parameters_of(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """The same of parameters with their names in the model."""
    counts: Counter[str] = Counter({part: 0 for part, _ in _PARTS})
    for name, parameter in named:
        part = next((part for part, marks in _PARTS if any(mark in name for mark in marks)), "other")
        counts[part] += parameter.numel()
    return {"total": sum(counts.values()), **counts}


_KEY_PRODUCTS = {"relative": 2, "random_synthesizer": 0}  # multiply-adds of a score for a key, in H D; else 1


def attention_flops(
    config: ModelConfig, keys: float, length: int, batch: int, *, causal: bool = True
) -> tuple[float, float]:
    """Per token, forward and training: scores and weighted values, or multi-linear attention up to its output.

    The keys of distances, made once for all texts of a batch, are left out. Without `causal` a token sees all `length` others.
    """
    if config.attention.kind == "multilinear":
        forward, training = multilinear_work(config, length, batch, causal=causal)
        return 2 * forward, 2 * training
    assert config.head_dim is not None
    products = _KEY_PRODUCTS.get(stage_name(config.attention.score), 1) + 1
    forward = config.num_hidden_layers * 2 * products * config.num_attention_heads * config.head_dim * keys
    return forward, 3 * forward


def matrices(model: nn.Module) -> int:
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
    config = model.config.attention
    if config.decays is not None:  # and made into sums: S R multiply-adds for keys and for values
        assert config.rank is not None
        numbers += len(projections) * 2 * config.decays * config.rank
    return 2 * numbers * model.memory_length / length


def cached(layers: Iterable[Attention]) -> tuple[int, int]:
    """Numbers that decoding keeps: of each token, and of a text however long it is."""
    of_token = of_text = 0
    for layer in layers:
        numbers = layer.project.num_heads * layer.project.head_dim
        if isinstance(layer.past(), Summed):
            of_text += 2 * layer.attend.decayed.weight.shape[0] * numbers
        elif not layer.attend.sees_future:
            of_token += (1 + layer.project.reads_keys) * numbers
    return of_token, of_text


def mixing_flops(layers: Iterable[Attention], keys: float) -> float:
    """Per token: H^2 multiply-adds a key and, position-wise, D H^2 for the matrix."""
    flops = 0.0
    for layer in layers:
        if isinstance(layer.attend, WeightedValues):
            heads, mix = layer.project.num_heads, layer.attend.mix
            if mix.matrix(None) is not None:
                flops += 2 * heads * heads * keys
            flops += sum(2 * p.numel() * heads for name, p in mix.named_parameters() if name == "from_query")
    return flops


def vocabulary_flops(*ends: Any) -> float:
    """Per token, forward: of input and output layers that know what a token costs them."""
    return float(sum(end.flops_per_token() for end in ends if hasattr(end, "flops_per_token")))


def size(config: ModelConfig, length: int, batch: int = 1) -> dict[str, Any]:
    """Parameters by part, bytes and FLOPs of a model on `batch` sequences of `length` tokens, as plain numbers.

    FLOPs per token count a multiply-add as two; forward = 2 x the matrix parameters that a token meets + attention over
    the (length + 1) / 2 keys of its segment that a query sees on average, and over the memory; a training step costs three
    forwards, and projects the memory again, which evaluation does not. Multi-linear attention is counted as it is multiplied
    out, and what its backward pass computes again with it; only there `batch` matters. How many tokens meet the tails of an
    adaptive softmax is reckoned by Zipf's law. Decoding keeps `cache_per_token_fp32`, and `state_per_text_fp32` whatever the
    length. Raises InputError for a length that the output map of multi-linear attention is too small for.
    """
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = LanguageModel(config)
    parts = parameters_by_part(model)
    assert config.vocab_size is not None
    keys = config.memory_length if config.same_length else config.memory_length + (length + 1) / 2
    layers = [block.attention for block in model.blocks]
    others = 2 * matrices(model) + mixing_flops(layers, keys) + vocabulary_flops(model.embedding, model.output)
    forward, training = attention_flops(config, keys, length, batch)
    of_token, of_text = cached(layers)
    return {
        "parameters": parts,
        "attention_block": attention_block(model.blocks[0].attention, config, parts["attention"], parts["total"]),
        "bytes": {
            "weights_fp32": 4 * parts["total"],
            "training_adam_fp32": 16 * parts["total"],
            "cache_per_token_fp32": 4 * of_token,
            "state_per_text_fp32": 4 * of_text,
            "memory_per_text_fp32": 4 * config.num_hidden_layers * config.memory_length * config.hidden_size,
        },
        "flops_per_token": {
            "length": length,
            "forward": round(forward + others),
            "training": round(training + 3 * (others + _memory_flops(model, length))),
        },
    }
