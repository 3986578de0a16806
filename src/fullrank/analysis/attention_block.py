"""Multi-linear attention beside ordinary multi-head attention: where its parameters go, and what its tensor costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from fullrank.core.config import ModelConfig, stage_name
from fullrank.core.errors import InputError
from fullrank.kernels.multilinear_plan import Shape, Work, multiply_adds

_PIECES = {  # names within the layer begin so; biases of projections and output apart
    "projections": ("project.",),
    "output_map": ("attend.weight", "attend.decayed."),
    "cores": ("attend.cores.",),
    "position_term": ("attend.score.",),  # with u and v where each layer has its own
}


def attention_block(layer: nn.Module, config: ModelConfig, in_all: int, in_model: int) -> dict[str, Any] | None:
    """Parameters of one multi-linear attention layer by piece, beside those of multi-head attention of the same width.

        multi-head: 4 E^2 (+ 4 E with biases), whatever the number of heads

    None for attention of another kind. `layer` is one of the stack that `config` describes, whose attention has `in_all`
    parameters, the u and v that layers share included, in a model of `in_model`. A `ratio` is multi-head / multi-linear, above
    one where multi-linear attention is smaller. `all_layers` is all attention of the stack; `whole_model` is the model as it is
    and as it would be with multi-head attention there. `positions`: P of an output map with a row for each of P^2 pairs, None
    for one that does not grow with length.
    `paper_formula` is (3 h d) / (3 d + h) (Ma et al. 2019, §3.3), h heads and factors of width d: h heads each as wide as a
    factor against three shared projections and h cores. It has W_O on neither side.
    """
    if config.attention.kind != "multilinear":
        return None
    counts: Counter[str] = Counter(dict.fromkeys([*_PIECES, "bias"], 0))
    for name, parameter in layer.named_parameters():
        found = "bias" if name.endswith(".bias") else None
        piece = found or next((piece for piece, begins in _PIECES.items() if name.startswith(begins)), "other")
        counts[piece] += parameter.numel()
    block = {"total": sum(counts.values()), **counts}
    width, bias = config.hidden_size, 4 * config.hidden_size * config.attention.bias
    plain = {
        "total": 4 * width**2 + bias, "projections": 3 * width**2, "output_map": width**2, "bias": bias,
        "heads": config.num_attention_heads,
    }  # fmt: skip
    layers, rank = config.num_hidden_layers, config.attention.rank
    assert rank is not None
    heads = config.num_attention_heads
    return {
        "parameters": block,
        "multi_head": plain,
        "ratio": plain["total"] / block["total"],
        "positions": config.max_position_embeddings if config.attention.tied_to_length else None,
        "all_layers": _beside(in_all, layers * plain["total"]),
        "whole_model": _beside(in_model, in_model - in_all + layers * plain["total"]),
        "paper_formula": {
            "ratio": 3 * heads * rank / (3 * rank + heads),
            "heads": heads,
            "factor_width": rank,
            "counts": "projections and cores only; the output map W_O is left out",
        },
    }


def _beside(multilinear: int, multi_head: int) -> dict[str, Any]:
    return {"multilinear": multilinear, "multi_head": multi_head, "ratio": multi_head / multilinear}


def multilinear_work(config: ModelConfig, length: int, batch: int, *, causal: bool = True) -> tuple[float, float]:
    """Multiply-adds per token of all layers' tensors and output maps: forward, and a training step.

    `pairs`: those of the order that is chosen for `batch` texts in fp32 on a CPU, products that the mask hides included, after
    as much memory as there are positions for. The position term makes the rank 2 R; its keys, made once for all texts, are
    left out. `decayed`: two sums of S R numbers, and U, S R E. Products of single numbers are left out of both. Without
    `causal`, tokens see the whole text; `decayed` then has sums over all of it for every token.
    Raises InputError where a text of `length` tokens is longer than the output map.
    """
    attention, layers, width = config.attention, config.num_hidden_layers, config.hidden_size
    assert attention.rank is not None
    if attention.decays is not None:
        sums = 1 if causal else length
        forward = layers * attention.decays * attention.rank * (2 * sums + width)
        return forward, 3 * forward
    longest = config.max_position_embeddings
    if length > longest:
        raise InputError(
            f"{length} tokens, but the output map of multi-linear attention has a row for each pair of {longest} positions; "
            "lower the length (--length, or train.segment_length), raise model.max_position_embeddings, or set "
            "model.attention.output_map: decayed"
        )
    keys = length + min(config.memory_length, longest - length)
    rank = attention.rank * (2 if stage_name(attention.score) == "relative" else 1)
    windowed = config.same_length and config.memory_length > 0
    sees_all = attention.sees_future or not causal
    shape = Shape(batch, length, keys, rank, width, not sees_all and not windowed, windowed)
    found: Work = multiply_adds(shape)
    return layers * found.forward / (batch * length), layers * found.training / (batch * length)
