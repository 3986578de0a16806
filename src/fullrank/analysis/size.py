"""Size and cost of a model from its configuration alone: parameters, bytes and FLOPs. Nothing is allocated.

FLOPs are per token and count a multiply-add as two: 2 x the matrix parameters that a token meets, attention over the keys
that its query sees, mixing, and the vocabulary (tokens in the tails of an adaptive softmax by Zipf's law). A training step
costs three forwards. Multi-linear attention is counted as it is multiplied out, and what its backward pass computes again
with it; only there the number of sequences of a batch matters.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fullrank.config.run import RunConfig, TrainConfig
from fullrank.core.attention import Attention, WeightedValues
from fullrank.core.config import ModelConfig, MultiLinearConfig, stage_name
from fullrank.core.decoder import LanguageModel
from fullrank.core.encoder import MaskedLanguageModel
from fullrank.core.errors import InputError
from fullrank.core.multilinear import MultiLinear
from fullrank.core.score import DenseSynthesizer
from fullrank.core.stages import Gate, ProjectedMixing, Projection
from fullrank.core.translator import Translator
from fullrank.kernels.multilinear import Size, multiply_adds

SENTENCE = 25  # tokens: about the mean of IWSLT 2014, where the length of translations is not given
Model = TypeVar("Model")

_PARTS = (  # first match wins
    ("mixing", (".attend.mix.", ".attend.mix_scores.", ".project.mix_qkv.")),
    # u and v, which all layers share
    ("attention", (".attention.", ".cross_attention.", "position.biases.")),
    ("feed_forward", (".feed_forward.",)),
    ("norm", ("norm.",)),
    ("position", ("position.",)),
    ("embedding", ("embedding.",)),
    ("output", ("output.",)),
)


def size_of_run(run: RunConfig, length: int | None = None) -> dict[str, Any]:
    """Measure parameters, bytes and FLOPs of the model of a run (as `size` does), and the `memory` of its training.

    length: tokens of a sequence; None for the training segment's, of translations 25.
    """
    length = length or (SENTENCE if run.translates else run.train.segment_length)
    rows = run.train.batch_size
    if run.translates:
        rows = max(1, (run.train.batch_tokens or 1) // SENTENCE)
        document = translation_size(run.model, length, rows)
    elif run.masks:
        document = measure_masked_size(run.model, length, rows, run.train.mlm_probability)
    else:
        document = size(run.model, length, rows)
    return {**document, "memory": training_memory(run, document["parameters"], rows * length)}


def training_memory(run: RunConfig, parameters: Mapping[str, int], tokens: int) -> dict[str, int]:
    """Estimate the bytes that training holds on one device.

        parameters 4 P      gradients 4 P      optimizer 4 S      activations w T L (8 E + 2 F)

    P parameters, S numbers that the optimizer holds, T tokens of a batch, L layers of width E and inner width
    F, w = 2 bytes with bf16, else 4. A layer keeps what its two norms and its products read: 8 E, and F before and
    after the activation. Keys and values of G < H heads keep 2 (H - G) D fewer, a gated activation F more. A layer of a
    decoder with cross-attention keeps 6 E more. With `train.activation_checkpointing` activations are w T (L E + 8 E +
    2 F): inputs of layers, and one layer. Dropout, mixing, memories, attention that no kernel computes and the chunk of
    logits are left out.

    Args:
        run: configuration of the run, with the sizes of the model and the optimizer.
        parameters: P by part, and their `total`.
        tokens: T.

    Returns:
        Bytes by kind, and their `total`.
    """
    if run.translates:
        stacks = [run.model.get_encoder_config(), run.model.get_decoder_config()]
    else:
        stacks = [run.model]
    width = run.model.hidden_size
    layers = sum(stack.num_hidden_layers for stack in stacks)
    elements = 0
    for stack in stacks:
        inner_width = cast(int, stack.intermediate_size)
        shared = stack.num_attention_heads - (stack.num_key_value_heads or stack.num_attention_heads)
        gated = stack.hidden_act == "swiglu"
        of_layer = 8 * width - 2 * shared * cast(int, stack.head_dim) + (2 + gated) * inner_width
        elements += stack.num_hidden_layers * of_layer
    if run.translates:
        elements += stacks[-1].num_hidden_layers * 6 * width
    if run.train.activation_checkpointing:
        elements = layers * width + elements // layers
    element_bytes = 2 if run.train.precision == "bf16" else 4
    total = parameters["total"]
    memory = {
        "parameters": 4 * total,
        "gradients": 4 * total,
        "optimizer": 4 * count_optimizer_states(run.train, parameters),
        "activations": element_bytes * tokens * elements,
    }
    return {**memory, "total": sum(memory.values())}


def count_optimizer_states(options: TrainConfig, parameters: Mapping[str, int]) -> int:
    """Count the numbers that the optimizer holds: two for a parameter, as Adam has, also for an optimizer of one's own.

    SGD has one with momentum, else none. Muon has one for the matrices inside blocks; biases there are few, and count so, too.
    """
    total = parameters["total"]
    if options.optimizer in ("sgd", "nag"):
        return total if options.momentum else 0
    inside_blocks = parameters["attention"] + parameters["feed_forward"] if options.optimizer == "muon" else 0
    return 2 * total - inside_blocks


def size(config: ModelConfig, length: int, batch: int = 1) -> dict[str, Any]:
    """Measure the size of a language model, as plain numbers.

    A query sees (length + 1) / 2 keys of its segment on average, and the memory; with `same_length` as many keys as the
    memory has. A training step projects the memory again, which evaluation does not. Decoding keeps
    `cache_per_token_fp32`, and `state_per_text_fp32` whatever the length.

    Args:
        config: sizes and stages of the model.
        length: tokens of a sequence.
        batch: sequences of a batch.

    Returns:
        `parameters` by part, `bytes` of weights, training and caches, and `flops_per_token`: `forward` and `training`.

    Raises:
        InputError: the output map of multi-linear attention is too small for the length.
    """
    model = _build_on_meta(LanguageModel, config)
    keys: float = config.memory_length
    if not config.same_length:
        keys += (length + 1) / 2
    stack = _Stack(config, model.blocks, keys)
    of_memory = _count_memory(model, length)
    flops = _count_flops([stack], length, batch, _count_linear(model), of_memory)
    cache = _count_cache(stack.layers)
    cache["memory_per_text_fp32"] = 4 * config.num_hidden_layers * config.memory_length * config.hidden_size
    return _describe(model, length, flops, cache)


def measure_masked_size(config: ModelConfig, length: int, batch: int, share: float) -> dict[str, Any]:
    """Measure the size of a masked language model, as plain numbers.

    FLOPs are per token that is read. Every token sees all tokens of its text. Nothing is decoded, so there is no cache.

    Args:
        config: sizes and stages of the model.
        length: tokens of a text.
        batch: texts of a batch.
        share: share of the tokens that is masked, on which the output layer works.

    Returns:
        `parameters` by part, `bytes` of weights and training, and `flops_per_token`: `forward` and `training`.

    Raises:
        ConfigError: no masked language model can be built of the configuration.
        InputError: the output map of multi-linear attention is too small for the length.
    """
    model = _build_on_meta(MaskedLanguageModel, config)
    encoder = cast(Any, model.encoder)
    stack = _Stack(encoder.config, encoder.blocks, length, causal=False)
    of_output = 2 * _count_matrices(model.output) + model.output.flops_per_token()
    linear = _count_linear(encoder) + share * of_output
    flops = _count_flops([stack], length, batch, linear)
    return _describe(model, length, flops)


def translation_size(config: ModelConfig, length: int, batch: int = 1) -> dict[str, Any]:
    """Measure the size of a translation model, as plain numbers.

    `source` is the work of a token of the source: encoder, in which it sees all `length` tokens, and its keys and
    values for cross-attention. `target` is that of a token of the target: decoder, in which it sees (length + 1) / 2
    tokens on average, and all `length` tokens of the source, and vocabulary. `forward` and `training` are the sums of
    both. Decoding keeps `cache_per_token_fp32` of each target token, `cache_per_source_token_fp32`, and
    `state_per_text_fp32` whatever the length.

    Args:
        config: sizes and stages of the model.
        length: tokens on each side.
        batch: pairs of a batch.

    Returns:
        `parameters` by part, `bytes` of weights, training and caches, and `flops_per_token`: `forward` and `training`, also of
        each side.

    Raises:
        ConfigError: no translation model can be built of the configuration.
        InputError: the output map of multi-linear attention is too small for the length.
    """
    model = _build_on_meta(Translator, config)
    encoder = model.encoder
    decoder = cast(Any, model.decoder)
    encoding = _Stack(config.get_encoder_config(), encoder.blocks, length, causal=False)
    decoding = _Stack(config.get_decoder_config(), decoder.blocks, (length + 1) / 2)
    crossing = _Stack(config.get_cross_config(), decoder.blocks, length, causal=False, part="cross_attention")
    keys_and_values = sum(_count_keys_and_values(layer.project) for layer in crossing.layers)  # of source tokens
    source_linear = _count_linear(encoder) + 2 * keys_and_values
    target_linear = _count_linear(decoder) - 2 * keys_and_values
    source = _count_flops([encoding], length, batch, source_linear)
    target = _count_flops([decoding, crossing], length, batch, target_linear)
    flops = {name: source[name] + target[name] for name in source}
    of_source = {"cache_per_source_token_fp32": _count_cache(crossing.layers)["cache_per_token_fp32"]}
    cache = {**_count_cache(decoding.layers), **of_source, "memory_per_text_fp32": 0}
    by_side = {**flops, "source": source, "target": target}
    return _describe(model, length, by_side, cache)


def _describe(
    model: nn.Module, length: int, flops: Mapping[str, Any], cache: Mapping[str, int] | None = None
) -> dict[str, Any]:
    parts = parameters_by_part(model)
    total = parts["total"]
    return {
        "parameters": parts,
        "bytes": {"weights_fp32": 4 * total, "training_adam_fp32": 16 * total, **(cache or {})},
        "flops_per_token": {"length": length, **flops},
    }


def _build_on_meta(cls: Callable[[ModelConfig], Model], config: ModelConfig) -> Model:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return cls(config)


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Count the trainable parameters of each part of a model, and their `total`.

    Tied ones count once, where they are stored. Those that training adds (`train.parts`) are no part of the model.
    """
    counts = Counter({part: 0 for part, _ in _PARTS})
    saved = model.state_dict()
    for name, parameter in model.named_parameters():
        if name in saved:
            counts[_find_part(name)] += parameter.numel()
    return {"total": sum(counts.values()), **counts}


def _find_part(name: str) -> str:
    """Find the part that a parameter belongs to by its name."""
    for part, marks in _PARTS:
        if any(mark in name for mark in marks):
            return part
    return "other"


def _count_notes(layer: Attention) -> int:
    """Count the numbers that stages which mix heads remember of each token."""
    x = torch.zeros(1, 1, layer.hidden_size, device=layer.project.value.weight.device)
    scored = torch.zeros(1, layer.project.num_heads, 1, layer.project.head_dim)
    return sum(note.numel() for note in layer.attend.remember(x, scored) if note is not None)


def _count_cache(layers: Iterable[Attention]) -> dict[str, int]:
    """Count the bytes that decoding keeps in fp32: of each token, and of a text whatever its length."""
    token_elements = text_elements = 0
    for layer in layers:
        layer_elements = layer.project.num_heads // layer.project.groups * layer.project.head_dim
        attend = layer.attend
        if isinstance(attend, MultiLinear) and attend.decayed is not None:
            text_elements += 2 * attend.decayed.weight.shape[0] * layer_elements
        elif not attend.sees_future:
            token_elements += (1 + layer.project.reads_keys) * layer_elements * layer.project.mix_qkv.pseudo_heads
            token_elements += _count_notes(layer)
    return {"cache_per_token_fp32": 4 * token_elements, "state_per_text_fp32": 4 * text_elements}


# -- FLOPs -----------------------------------------------------------------------------------------------------------

_KEY_PRODUCTS = {"relative": 2, "random_synthesizer": 0}  # multiply-adds of a score for a key, in H D; else 1


@dataclass(frozen=True)
class _Stack:
    """Blocks of `config`, and how many keys a query sees on average; not `causal`: all of them. part: of a block."""

    config: ModelConfig
    blocks: Any
    keys: float
    causal: bool = True
    part: str = "attention"

    @property
    def layers(self) -> list[Attention]:
        return [getattr(block, self.part) for block in self.blocks]


def _count_flops(
    stacks: Sequence[_Stack], length: int, batch: int, linear: float, only_training: float = 0.0
) -> dict[str, int]:
    """Count the FLOPs per token, forward and training: `linear` (matrices and vocabulary) and attention.

    Attention is scores, mixing and weighted values, or multi-linear attention up to its output. The keys of distances,
    made once for all texts of a batch, are left out. only_training: a part that evaluation does not compute.
    """
    forward = linear
    training = 3 * (linear + only_training)
    for stack in stacks:
        for layer, attention in zip(stack.layers, stack.config.attentions, strict=True):
            if isinstance(attention, MultiLinearConfig):
                forward_work, training_work = _count_multilinear(stack, attention, length, batch)
            else:
                products = 1 + _KEY_PRODUCTS.get(stage_name(attention.score), 1)
                forward_work = _count_weighted(layer, products, stack.keys)
                training_work = 3 * forward_work
            forward += forward_work
            training += training_work
    return {"forward": round(forward), "training": round(training)}


def _count_multilinear(stack: _Stack, attention: MultiLinearConfig, length: int, batch: int) -> tuple[float, float]:
    """Count the FLOPs per token of one layer's tensor and output map: forward, and a training step.

    `pairs`: those of the order that is chosen for `batch` texts in fp32, products that the mask hides included, after
    as much memory as there are positions for. The position term makes the rank 2 R. `decayed`: two sums of S R numbers,
    and U, S R E. Products of single numbers are left out of both. Where not `causal`, tokens see the whole text.
    `decayed` then has sums over all of it for every token.
    Raises InputError where a text of `length` tokens is longer than the output map.
    """
    config = stack.config
    width = config.hidden_size
    if attention.decays is not None:
        sums = 1 if stack.causal else length
        forward = 2 * attention.decays * attention.rank * (2 * sums + width)
        return forward, 3 * forward
    longest = config.max_position_embeddings
    memory = config.memory_length
    if length > longest:
        raise InputError(
            f"{length} tokens, but the output map of multi-linear attention has a row for each pair of {longest} positions; "
            "lower the length (--length, or train.segment_length), raise model.max_position_embeddings, or set "
            "model.attention.output_map: decayed"
        )
    rank = attention.rank
    if stage_name(attention.score) == "relative":
        rank *= 2
    windowed = config.same_length and memory > 0
    masked = stack.causal and not attention.sees_future and not windowed
    keys = length + min(memory, longest - length)
    work = multiply_adds(Size(batch, length, keys, rank, width, masked, windowed))
    tokens = batch * length
    return 2 * work.forward / tokens, 2 * work.training / tokens


def _count_weighted(layer: Attention, products: int, keys: float) -> float:
    """Count the FLOPs per token of scores, weighted values and mixing.

    For each key, every number of a head takes `products` multiply-adds: one for the weighted value, the others for the score.
    P tokens at a position are P queries, each of which sees P times as many keys.
    """
    attend = cast(WeightedValues, layer.attend)
    tokens = layer.project.mix_qkv.pseudo_heads
    seen = tokens * keys
    work = products * layer.project.num_heads * layer.project.head_dim * seen
    work += attend.mix.multiply_adds(seen)
    work += attend.mix_scores.multiply_adds(seen)
    return 2 * tokens * work


def _count_linear(part: Any) -> float:
    """Count the FLOPs of each token in the matrices of a model or a part of it, and in its input and output layers."""
    work = 2 * _count_matrices(part) + part.embedding.flops_per_token()
    if hasattr(part, "output"):
        work += part.output.flops_per_token()
    return work


def _count_matrices(model: nn.Module) -> int:
    """Count the multiply-adds of each token with the matrices of a model, the vocabulary's apart."""
    count = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            count += module.weight.numel()
        elif isinstance(module, Gate):
            count += module.multiply_adds()
        elif isinstance(module, ProjectedMixing):
            count += sum(module.multiply_adds())
        elif isinstance(module, DenseSynthesizer):
            count -= module.to_positions.weight.numel()  # counted key by key, with the scores
        elif isinstance(module, Projection) and module.key is not None and not module.reads_keys:
            count -= module.key.weight.numel()
    return count


def _count_keys_and_values(project: Projection) -> int:
    """Count the multiply-adds of a token's keys and values, where keys are read at all."""
    count = project.value.weight.numel() + project.mix_qkv.multiply_adds()[1]
    if project.key is not None and project.reads_keys:
        count += project.key.weight.numel()
    return count


def _count_memory(model: LanguageModel, length: int) -> float:
    """Count the FLOPs per token of a training step for keys and values of the memory, projected again for every segment."""
    multiply_adds = 0
    for module in model.modules():
        if isinstance(module, Projection):
            multiply_adds += _count_keys_and_values(module)
    for config in model.config.attentions:
        if isinstance(config, MultiLinearConfig) and config.decays is not None:
            multiply_adds += (
                2 * config.decays * config.rank
            )  # and made into sums: S R multiply-adds for keys and for values
    return 2 * multiply_adds * model.memory_length / length
