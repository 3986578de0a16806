"""Cross-attention of a translation, to be drawn."""

from __future__ import annotations

from typing import Any

import torch

from fullrank.analysis.plots import AttentionMaps, Panel
from fullrank.core.attention import LayerTrace, Trace
from fullrank.core.errors import InputError
from fullrank.core.source import Source
from fullrank.core.translator import Translator
from fullrank.data import Language
from fullrank.experiments.translate import LineTranslator, Translation
from fullrank.training.device import device_of

_SPACE, _WORD = (
    "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}",
    "▁",
)  # how byte-level BPE begins a word, and how it is shown


def cross_attention(
    translator: LineTranslator, line: str, translation: Translation, layer: int | None = None
) -> AttentionMaps:
    """The cross-attention of a translation of `line`: of each layer the mean over its heads, or all heads of `layer`.

    The weights are those that multiply the values, after mixing, in one pass over the whole translation. A row belongs to the
    token that the model wrote there, <eos> last; its query is made of the tokens before it.
    Raises InputError for a layer that the model does not have, an empty line, and multi-linear cross-attention.
    """
    model = translator.model
    check_weights(model, layer)
    ids = translator.encoded(line)
    if not ids:
        raise InputError("an empty line has no attention; give a sentence")
    source, target = [*ids, translator.source.eos_id], [*translation.ids, translator.target.eos_id]
    begun = [translator.target.eos_id, *translation.ids]
    longest = model.max_length
    found = cross_weights(model, source, begun if longest is None else begun[:longest])
    mixed = any(one.mixing is not None for one in found)
    if layer is None:
        panels = [Panel(f"layer {i}", one.mixed[0].mean(0).cpu().numpy()) for i, one in enumerate(found)]
    else:
        heads = found[layer].mixed[0]
        panels = [Panel("mean", heads.mean(0).cpu().numpy())]
        panels += [Panel(f"head {i}", head.cpu().numpy()) for i, head in enumerate(heads)]
    return AttentionMaps(
        source=tuple(shown(translator.source, i) for i in source),
        target=tuple(shown(translator.target, i) for i in target[: panels[0].weights.shape[0]]),
        panels=tuple(panels),
        title="Cross-attention, mean over the heads of each layer"
        if layer is None
        else f"Cross-attention of layer {layer}",
        mixed=mixed,
    )


def check_weights(model: Translator, layer: int | None) -> None:
    """Raises InputError unless cross-attention has weights, and the model has this layer."""
    attends = [block.cross_attention.attend for block in model.decoder.blocks]
    if not all(hasattr(attend, "mix") for attend in attends):
        raise InputError(
            "--attention: the cross-attention of this run is multi-linear, which has no attention weights to draw; it needs "
            "model.decoder.cross.kind: weighted"
        )
    if layer is not None and layer >= len(attends):
        raise InputError(
            f"--attention-layer: from 0 to {len(attends) - 1} (the decoder has {len(attends)} layers), given {layer}"
        )


def cross_weights(model: Translator, source: list[int], target: list[int]) -> list[LayerTrace]:
    """The trace of each decoder layer's cross-attention: weights (1, H, N, M) of target inputs and source, <eos> included.

    The pass itself keeps no trace, so that self-attention may be of any kind.
    """
    device = device_of(model)
    read: list[tuple[Any, ...]] = []
    layers = [block.cross_attention for block in model.decoder.blocks]
    hooks = [layer.register_forward_pre_hook(lambda _, given: read.append(given)) for layer in layers]
    try:
        with torch.no_grad():
            encoded: Source = model.encode(torch.tensor([source], device=device))
            model.decoder.hidden(torch.tensor([target], device=device), source=encoded)
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    with torch.no_grad():
        for layer, given in zip(layers, read, strict=True):
            layer(*given, trace=(trace := Trace()))
            found += trace.layers
    return found


def shown(language: Language, token: int) -> str:
    """A piece in readable form: the beginning of a word is a low line."""
    piece = language.entries[token]
    if token == language.eos_id or language.segmenter.kind != "byte_bpe":
        return piece
    return _WORD * piece.startswith(_SPACE) + language.segmenter.join([piece])
