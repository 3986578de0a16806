"""What `fullrank info` prints: a model's parameters by part, its work and its memory, in lines."""

from __future__ import annotations

from typing import Any

from fullrank.core.config import ModelConfig

_PLACES = {"encoder": "encoder", "decoder": "decoder", "cross": "cross-attention"}


def lines_of(found: dict[str, Any], model: ModelConfig) -> list[str]:
    """The lines about a model, from `size_of_run` and its recipe."""
    lines = [f"{found['recipe']}" + (f", row {found['row']}, scale {found['scale']}" if found["row"] else "")]
    lines += _parameters(found)
    if found["paper"]:
        lines.append("  the paper:     " + ", ".join(f"{key} {value}" for key, value in found["paper"].items()))
    blocks = found["attention_block"] or {}
    if "by_place" not in found:
        blocks = {"": blocks} if blocks else {}
    layers = {"": model.num_hidden_layers}
    if "by_place" in found:
        own, other = model.of_encoder().num_hidden_layers, model.of_decoder().num_hidden_layers
        layers |= {"encoder": own, "decoder": other, "cross": other}
    for place, block in blocks.items():
        lines += [f"{_PLACES[place]}:"] if place else []
        lines.append(_block(block, layers[place]))
    flops, sizes = found["flops_per_token"], found["bytes"]
    lines.append(
        f"FLOPs per token at length {flops['length']}: forward {flops['forward']:,}, training {flops['training']:,}"
    )
    lines += [
        f"  of a token of the {side}: forward {flops[side]['forward']:,}, training {flops[side]['training']:,}"
        for side in ("source", "target")
        if side in flops
    ]
    line = (
        f"memory: weights {sizes['weights_fp32'] / 2**20:,.1f} MiB in fp32, with gradients and Adam "
        f"{sizes['training_adam_fp32'] / 2**20:,.1f} MiB"
    )
    if "cache_per_token_fp32" in sizes:
        line += f", cache {sizes['cache_per_token_fp32'] / 2**10:,.1f} KiB per token"
    if "cache_per_source_token_fp32" in sizes:
        line += f" and {sizes['cache_per_source_token_fp32'] / 2**10:,.1f} KiB per token of the source"
    if sizes.get("state_per_text_fp32"):
        line += f" and {sizes['state_per_text_fp32'] / 2**10:,.1f} KiB per text"
    if model.memory_length:
        line += f", {sizes['memory_per_text_fp32'] / 2**20:,.1f} MiB of memory per text"
    lines.append(line)
    return lines if found["remark"] is None else [*lines, found["remark"]]


def encoder_lines(found: dict[str, Any]) -> list[str]:
    """`found` as `pretrained_size` and the recipe gave it."""
    parameters, shape = found["parameters"], found["attention"]
    lines = [f"{found['recipe']}" + (f", row {found['row']}, scale {found['scale']}" if found["row"] else "")]
    lines.append(f"  {found['task']}: the pretrained encoder {found['encoder']} ({found['model']}), fine-tuned")
    lines.append(f"  {'encoder':<14} {parameters['encoder']:>14,}")
    mixed = f"  in {shape['layers']} layers of {shape['heads']} heads" if parameters["mixing"] else ""
    lines.append(f"  {'mixing':<14} {parameters['mixing']:>14,}{mixed}")
    lines.append(f"  {'task output':<14} {parameters['output']:>14,}")
    lines.append(f"  {'total':<14} {parameters['total']:>14,}")
    if found["paper"]:
        lines.append("  the paper:     " + ", ".join(f"{key} {value}" for key, value in found["paper"].items()))
    return lines


def _parameters(found: dict[str, Any]) -> list[str]:
    """Parts as lines; of a translation model, with a column for each place."""
    parts, places = found["parameters"], found.get("by_place") or {}
    lines = [f"  {'':<14} {'':>14}" + "".join(f" {_PLACES[place]:>15}" for place in places)] if places else []
    for part, count in parts.items():
        if count or part == "total":
            columns = "".join(f" {place.get(part, 0):>15,}" for place in places.values())
            lines.append(f"  {part:<14} {count:>14,}{columns}")
    return lines


_PIECES = {
    "projections": "projections Q K V",
    "output_map": "output map W_O",
    "cores": "cores",
    "position_term": "position term",
    "bias": "biases",
    "total": "all",
}


def _block(block: dict[str, Any], layers: int) -> str:
    """A multi-linear attention block beside multi-head attention, in lines."""
    own, plain, paper = block["parameters"], block["multi_head"], block["paper_formula"]
    lines = [f"{'one attention block':<22} {'multi-linear':>14} {'multi-head':>14}"]
    for piece, name in _PIECES.items():
        if own[piece] or plain.get(piece):
            lines.append(f"  {name:<20} {own[piece]:>14,} {plain.get(piece, 0):>14,}")
    lines.append(
        f"  {_compared(block['ratio'], 'the block')} (of {plain['heads']} heads; their number changes nothing)"
    )
    if own["position_term"]:
        lines.append(f"  with relative positions as in Transformer-XL, multi-head has {plain['output_map']:,} more")
    places = block["positions"]
    pairs = (
        f"has a row for each of {places:,} x {places:,} pairs of positions" if places else "does not grow with length"
    )
    lines.append(f"  the output map {pairs}")
    for key, name in (("all_layers", f"attention of {layers} layers"), ("whole_model", "the whole model")):
        one = block[key]
        lines.append(
            f"  {_compared(one['ratio'], name)}: {one['multilinear']:,}, with multi-head {one['multi_head']:,}"
        )
    lines.append(
        f"  the paper's formula (3 h d) / (3 d + h) is {paper['ratio']:.2f} at h = {paper['heads']} heads and factors of width "
        f"d = {paper['factor_width']}:\n  it counts projections and cores only and leaves W_O out"
    )
    return "\n".join(lines)


def _compared(ratio: float, name: str) -> str:
    """In words: multi-head over multi-linear parameters."""
    if ratio == 1:
        return f"{name} is as large as with multi-head attention"
    times, word = (ratio, "smaller") if ratio > 1 else (1 / ratio, "LARGER")
    return f"{name} is {times:.{1 if times >= 1.95 else 3}f} times {word} than with multi-head attention"
