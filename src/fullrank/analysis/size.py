"""Size and cost of a model from its configuration alone: parameters, bytes and FLOPs. Nothing is allocated.

FLOPs are per token and count a multiply-add as two: 2 x the matrix parameters that a token meets, attention over the keys
that its query sees, mixing, and the vocabulary (tokens in the tails of an adaptive softmax by Zipf's law). A training step
costs three forwards. Multi-linear attention is counted as it is multiplied out, and what its backward pass computes again
with it; only there the number of sequences of a batch matters.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fullrank.config.run import RunConfig
from fullrank.core.attention import Attention, HeadGate, WeightedValues
from fullrank.core.config import ModelConfig, MultiLinearConfig, stage_name
from fullrank.core.decoder import LanguageModel
from fullrank.core.embedding import Input
from fullrank.core.errors import InputError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.core.model import Layers
from fullrank.core.multilinear import MultiLinear
from fullrank.core.output import Output
from fullrank.core.project import Projection
from fullrank.core.score import DenseSynthesizer
from fullrank.core.translator import Translator
from fullrank.kernels.multilinear import Size, multiply_adds

PLACES = ("encoder", "decoder", "cross")
SENTENCE = 25  # tokens: about the mean of IWSLT 2014, where the length of translations is not given
Model = TypeVar("Model")

_PARTS = (  # first match wins
    ("mixing", (".attend.mix.",)),
    ("attention", (".attention.", ".cross_attention.", "position.biases.")),  # u and v, which all layers share
    ("feed_forward", (".feed_forward.",)),
    ("norm", ("norm.",)),
    ("position", ("position.",)),
    ("embedding", ("embedding.",)),
    ("output", ("output.",)),
)


# -- the three kinds of models ---------------------------------------------------------------------------------------


def size_of_run(run: RunConfig, length: int | None = None) -> dict[str, Any]:
    """Parameters, bytes and FLOPs of the model of a run; `length`: the training segment's, of translations 25."""
    if run.translates:
        return translation_size(run.model, length or SENTENCE, max(1, (run.train.batch_tokens or 1) // SENTENCE))
    length = length or run.train.segment_length
    if run.masks:
        return masked_size(run.model, length, run.train.batch_size, run.train.mlm_probability)
    return size(run.model, length, run.train.batch_size)


def size(config: ModelConfig, length: int, batch: int = 1) -> dict[str, Any]:
    """Size of a language model on `batch` sequences of `length` tokens, as plain numbers.

    A query sees (length + 1) / 2 keys of its segment on average, and the memory. A training step projects the memory again,
    which evaluation does not. Decoding keeps `cache_per_token_fp32`, and `state_per_text_fp32` whatever the length.
    Raises InputError for a length that the output map of multi-linear attention is too small for.
    """
    model = on_meta(LanguageModel, config)
    parts = parameters_by_part(model)
    keys = config.memory_length if config.same_length else config.memory_length + (length + 1) / 2
    stack = _Stack(config, [block.attention for block in model.blocks], keys)
    others = 2 * _matrices(model) + _vocabulary_flops(model.embedding, model.output)
    forward, training = stack.flops(length, batch)
    training += 3 * (others + _memory_flops(model, length))
    memory = 4 * config.num_hidden_layers * config.memory_length * config.hidden_size
    return _document(parts, stack, _bytes(parts, stack.layers, memory), length, forward + others, training)


def masked_size(config: ModelConfig, length: int, batch: int, share: float) -> dict[str, Any]:
    """Size of a masked language model on `batch` texts of `length` tokens, as plain numbers.

    FLOPs are per token that is read: every token sees all `length` tokens, and the output layer works on the `share` of them
    that is masked. Nothing is decoded, so there is no cache.
    Raises ConfigError for a configuration of no masked language model, InputError for a length that it cannot take.
    """
    model = on_meta(MaskedLanguageModel, config)
    encoder, parts = model.encoder, parameters_by_part(model)
    assert encoder.embedding is not None
    stack = _Stack(encoder.config, [block.attention for block in encoder.blocks], length, causal=False)
    others = 2 * _matrices(encoder) + _vocabulary_flops(encoder.embedding)
    others += share * (2 * _matrices(model.output) + _vocabulary_flops(model.output))
    forward, training = stack.flops(length, batch)
    return _document(parts, stack, _bytes(parts), length, forward + others, training + 3 * others)


def _document(
    parts: dict[str, int], stack: _Stack, in_bytes: dict[str, int], length: int, forward: float, training: float
) -> dict[str, Any]:
    """The size of a model with a single stack."""
    return {
        "parameters": parts,
        "attention_block": attention_block(stack.layers[0], stack.config, parts["attention"], parts["total"]),
        "bytes": in_bytes,
        "flops_per_token": {"length": length, "forward": round(forward), "training": round(training)},
    }


def translation_size(config: ModelConfig, length: int, batch: int = 1) -> dict[str, Any]:
    """Size of a translation model for `batch` pairs with `length` tokens on each side, as plain numbers.

    `source` is the work of a token of the source: encoder, in which it sees all `length` tokens, and its keys and values for
    cross-attention. `target` is that of a token of the target: decoder, in which it sees (length + 1) / 2 tokens on average,
    and all `length` tokens of the source, and vocabulary. `forward` and `training` are the sums of both. Decoding keeps
    `cache_per_token_fp32` of each target token, `cache_per_source_token_fp32`, and `state_per_text_fp32` whatever the length.
    Raises ConfigError for a configuration of no translation model, InputError for a length that it cannot take.
    """
    model = on_meta(Translator, config)
    encoder, decoder = model.encoder, cast(Any, model.decoder)
    # every parameter has one place: a table that both languages share is the decoder's
    parts, places = parameters_by_part(model), {place: parameters_by_part(model, place) for place in PLACES}
    seen = (length + 1) / 2
    stacks = {
        "encoder": _Stack(config.of_encoder(), [block.attention for block in encoder.blocks], length, causal=False),
        "decoder": _Stack(config.of_decoder(), [block.attention for block in decoder.blocks], seen),
        "cross": _Stack(config.of_cross(), [block.cross_attention for block in decoder.blocks], length, causal=False),
    }
    keys_and_values = sum(_keys_and_values(layer.project) for layer in stacks["cross"].layers)  # of source tokens
    source_embedding = encoder.embedding if encoder.embedding is not None else decoder.embedding
    linear = {
        "source": 2 * (_matrices(encoder) + keys_and_values) + _vocabulary_flops(source_embedding),
        "target": 2 * (_matrices(decoder) - keys_and_values) + _vocabulary_flops(decoder.embedding, decoder.output),
    }
    flops = {}
    for side, used in (("source", ("encoder",)), ("target", ("decoder", "cross"))):
        work = [stacks[place].flops(length, batch) for place in used]
        flops[side] = {
            "forward": round(linear[side] + sum(forward for forward, _ in work)),
            "training": round(3 * linear[side] + sum(training for _, training in work)),
        }
    blocks = {
        place: attention_block(stack.layers[0], stack.config, places[place]["attention"], parts["total"])
        for place, stack in stacks.items()
    }
    return {
        "parameters": parts,
        "by_place": places,
        "attention_block": {place: block for place, block in blocks.items() if block is not None} or None,
        "bytes": _bytes(parts, stacks["decoder"].layers, 0, source=stacks["cross"].layers),
        "flops_per_token": {
            "length": length,
            **{total: flops["source"][total] + flops["target"][total] for total in ("forward", "training")},
            **flops,
        },
    }


def on_meta(cls: Callable[[ModelConfig], Model], config: ModelConfig) -> Model:
    """A model that allocates nothing."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return cls(config)


# -- parameters and bytes --------------------------------------------------------------------------------------------


def parameters_by_part(model: nn.Module, place: str | None = None) -> dict[str, int]:
    """Trainable parameters of each part of a model, and `total`; tied ones count once, where they are stored.

    Those that training adds (`TrainingOnly`) are no part of the model.
    place: only those of one of `PLACES` of a translation model; cross-attention and its norm are a place of their own.
    """
    counts: Counter[str] = Counter({part: 0 for part, _ in _PARTS})
    saved = model.state_dict()
    for name, parameter in model.named_parameters():
        if name not in saved:
            continue
        own = "encoder" if name.startswith("encoder.") else "cross" if ".cross_attention" in name else "decoder"
        if place in (None, own):
            part = next((part for part, marks in _PARTS if any(mark in name for mark in marks)), "other")
            counts[part] += parameter.numel()
    return {"total": sum(counts.values()), **counts}


def _bytes(
    parts: dict[str, int], layers: Sequence[Attention] = (), memory: int = 0, *, source: Sequence[Attention] = ()
) -> dict[str, int]:
    """Bytes of the weights, of training, and of decoding with `layers` (those of `source`: cross-attention)."""
    result = {"weights_fp32": 4 * parts["total"], "training_adam_fp32": 16 * parts["total"]}
    if layers:
        of_token, of_text = _cached(layers)
        result["cache_per_token_fp32"] = 4 * of_token
        result |= {"cache_per_source_token_fp32": 4 * _cached(source)[0]} if source else {}
        result |= {"state_per_text_fp32": 4 * of_text, "memory_per_text_fp32": memory}
    return result


def _cached(layers: Iterable[Attention]) -> tuple[int, int]:
    """Numbers that decoding keeps: of each token, and of a text whatever its length."""
    of_token = of_text = 0
    for layer in layers:
        numbers = layer.project.num_heads * layer.project.head_dim
        attend = layer.attend
        if isinstance(attend, MultiLinear) and attend.decayed is not None:
            of_text += 2 * attend.decayed.weight.shape[0] * numbers
        elif not attend.sees_future:
            of_token += (1 + layer.project.reads_keys) * numbers
    return of_token, of_text


# -- FLOPs -----------------------------------------------------------------------------------------------------------

_KEY_PRODUCTS = {"relative": 2, "random_synthesizer": 0}  # multiply-adds of a score for a key, in H D; else 1


@dataclass(frozen=True)
class _Stack:
    """All attention layers of `config`, and how many keys a query sees on average; not `causal`: all of them."""

    config: ModelConfig
    layers: list[Attention]
    keys: float
    causal: bool = True

    def flops(self, length: int, batch: int) -> tuple[float, float]:
        """Per token, forward and training: scores, mixing and weighted values, or multi-linear attention up to its output.

        The keys of distances, made once for all texts of a batch, are left out.
        """
        assert self.config.head_dim is not None
        forward = training = 0.0
        for layer, attention in zip(self.layers, self.config.attentions, strict=True):
            if isinstance(attention, MultiLinearConfig):
                once, trained = self._multilinear_work(attention, length, batch)
                forward, training = forward + 2 * once, training + 2 * trained
                continue
            products = _KEY_PRODUCTS.get(stage_name(attention.score), 1) + 1
            scores = 2 * products * layer.project.num_heads * self.config.head_dim * self.keys
            once = scores + _mixing_flops(layer, self.keys)
            forward, training = forward + once, training + 3 * once
        return forward, training

    def _multilinear_work(self, attention: MultiLinearConfig, length: int, batch: int) -> tuple[float, float]:
        """Multiply-adds per token of one layer's tensor and output map: forward, and a training step.

        `pairs`: those of the order that is chosen for `batch` texts in fp32, products that the mask hides included, after
        as much memory as there are positions for. The position term makes the rank 2 R. `decayed`: two sums of S R numbers,
        and U, S R E. Products of single numbers are left out of both. Without `causal`, tokens see the whole text; `decayed`
        then has sums over all of it for every token.
        Raises InputError where a text of `length` tokens is longer than the output map.
        """
        width = self.config.hidden_size
        if attention.decays is not None:
            sums = 1 if self.causal else length
            forward = attention.decays * attention.rank * (2 * sums + width)
            return forward, 3 * forward
        longest, memory = self.config.max_position_embeddings, self.config.memory_length
        if length > longest:
            raise InputError(
                f"{length} tokens, but the output map of multi-linear attention has a row for each pair of {longest} "
                "positions; lower the length (--length, or train.segment_length), raise model.max_position_embeddings, or set "
                "model.attention.output_map: decayed"
            )
        rank = attention.rank * (2 if stage_name(attention.score) == "relative" else 1)
        windowed = self.config.same_length and memory > 0
        masked = self.causal and not attention.sees_future and not windowed
        work = multiply_adds(Size(batch, length, length + min(memory, longest - length), rank, width, masked, windowed))
        return work.forward / (batch * length), work.training / (batch * length)


def _matrices(model: nn.Module) -> int:
    """Numbers of the matrices that each token is multiplied with, the vocabulary's apart."""
    count = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    for module in model.modules():
        if isinstance(module, DenseSynthesizer):
            count -= module.to_positions.weight.numel()  # counted key by key, with the scores
        elif isinstance(module, Projection) and module.key is not None and not module.reads_keys:
            count -= module.key.weight.numel()
        elif isinstance(module, HeadGate):
            count += module.weight.numel()
        elif isinstance(module, Layers) and module.config.value_residual:  # values of the first layer, made once more
            count += module.blocks[0].attention.project.value.weight.numel()
    return count


def _keys_and_values(project: Projection) -> int:
    """Numbers of the matrices that make keys and values, where keys are read at all."""
    count = project.value.weight.numel()
    return count + project.key.weight.numel() if project.key is not None and project.reads_keys else count


def _memory_flops(model: LanguageModel, length: int) -> float:
    """Per token of a training step: keys and values of the memory, which are projected again for every segment."""
    projections = [m for m in model.modules() if isinstance(m, Projection)]
    numbers = sum(map(_keys_and_values, projections))
    for config in model.config.attentions:
        if isinstance(config, MultiLinearConfig) and config.decays is not None:
            numbers += 2 * config.decays * config.rank  # and made into sums: S R multiply-adds for keys and for values
    if model.config.value_residual:
        numbers += projections[0].value.weight.numel()
    return 2 * numbers * model.memory_length / length


def _mixing_flops(layer: Attention, keys: float) -> float:
    """Per token: H^2 multiply-adds a key and, position-wise, D H^2 for the matrix."""
    if not isinstance(layer.attend, WeightedValues):
        return 0.0
    heads, mix = layer.project.num_heads, layer.attend.mix
    flops = 2 * heads * heads * keys if mix.matrix(None) is not None else 0.0
    return flops + sum(2 * p.numel() * heads for name, p in mix.named_parameters() if name == "from_query")


def _vocabulary_flops(*layers: Input | Output) -> float:
    """Per token, forward."""
    return sum(layer.flops_per_token() for layer in layers)


# -- multi-linear attention beside multi-head attention --------------------------------------------------------------

_PIECES = {  # names within the layer begin so; biases of projections and output apart
    "projections": ("project.",),
    "output_map": ("attend.weight", "attend.decayed."),
    "cores": ("attend.cores.",),
    "position_term": ("attend.score.",),  # with u and v where each layer has its own
}


def attention_block(layer: nn.Module, config: ModelConfig, in_all: int, in_model: int) -> dict[str, Any] | None:
    """Parameters of one multi-linear attention layer by piece, beside those of multi-head attention of the same width.

        multi-head: 4 E^2 (+ 4 E with biases), whatever the number of heads

    None for attention of another kind, and where layers differ. `layer` is one of the stack that `config` describes, whose
    attention has `in_all` parameters, the u and v that layers share included, in a model of `in_model`. A `ratio` is
    multi-head / multi-linear, above one where multi-linear attention is smaller. `all_layers` is all attention of the stack;
    `whole_model` is the model as it is and as it would be with multi-head attention there. `positions`: P of an output map
    with a row for each of P^2 pairs, None for one that does not grow with length.
    `paper_formula` is (3 h d) / (3 d + h) (Ma et al. 2019, §3.3), h heads and factors of width d: h heads each as wide as a
    factor against three shared projections and h cores. It has W_O on neither side.
    """
    if not isinstance(config.attention, MultiLinearConfig) or any(a != config.attention for a in config.attentions):
        return None
    counts: Counter[str] = Counter(dict.fromkeys([*_PIECES, "bias"], 0))
    for name, parameter in layer.named_parameters():
        own = next((piece for piece, begins in _PIECES.items() if name.startswith(begins)), "other")
        counts["bias" if name.endswith(".bias") else own] += parameter.numel()
    block = {"total": sum(counts.values()), **counts}
    width, bias = config.hidden_size, 4 * config.hidden_size * config.attention.bias
    heads, layers, rank = config.num_attention_heads, config.num_hidden_layers, config.attention.rank
    pieces = {"projections": 3 * width**2, "output_map": width**2, "bias": bias}
    plain = {"total": sum(pieces.values()), **pieces, "heads": heads}

    def beside(multilinear: int, multi_head: int) -> dict[str, Any]:
        return {"multilinear": multilinear, "multi_head": multi_head, "ratio": multi_head / multilinear}

    return {
        "parameters": block,
        "multi_head": plain,
        "ratio": plain["total"] / block["total"],
        "positions": config.max_position_embeddings if config.attention.tied_to_length else None,
        "all_layers": beside(in_all, layers * plain["total"]),
        "whole_model": beside(in_model, in_model - in_all + layers * plain["total"]),
        "paper_formula": {
            "ratio": 3 * heads * rank / (3 * rank + heads),
            "heads": heads,
            "factor_width": rank,
            "counts": "projections and cores only; the output map W_O is left out",
        },
    }
