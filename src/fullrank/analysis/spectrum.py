"""The spectrum of attention weights: the share of each matrix that its largest singular values hold (Mixhead §4.4.1).

Where few singular values hold nearly all, a head attends in few ways only: the low-rank bottleneck of Fig. 1 and 3.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.analysis.rank import effective_rank, unwrapped
from fullrank.core.attention import LayerTrace, Trace
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError
from fullrank.core.masked import MaskedLanguageModel
from fullrank.decoding.sample import evaluating
from fullrank.training.device import device_of


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values s_1 >= ... >= s_R of attention weights, as means over texts, for each head; R is the smaller side.

    curves (H, R): (s_1 + ... + s_k) / (s_1 + ... + s_R) for k = 1 ... R, the paper's normalised cumulative singular values.
    effective_rank (H,): exp of the entropy of s_k / sum(s). stable_rank (H,): sum_k s_k^2 / s_1^2.
    """

    curves: np.ndarray
    effective_rank: np.ndarray
    stable_rank: np.ndarray


@dataclass(frozen=True)
class LayerSpectrum:
    """One attention layer: its weights P_j = normalize(A_j) before mixing, and sum_j m_ji P_j after it.

    Without mixing, both are the same object.
    """

    before: Spectrum
    after: Spectrum


@dataclass(frozen=True)
class AttentionSpectrum:
    """Layers in the order in which they run, read over `texts` texts of `length` tokens. `weights`: how they were computed."""

    layers: tuple[LayerSpectrum, ...]
    texts: int
    length: int
    weights: str


def spectrum_of(weights: Tensor) -> Spectrum:
    """The spectrum of weights (B, H, N, M), computed in double precision and averaged over B."""
    s = torch.linalg.svdvals(weights.double()).cpu().numpy()  # (B, H, R)
    sums = s.cumsum(-1)
    figures = (sums / sums[..., -1:], effective_rank(s), np.square(s).sum(-1) / np.square(s[..., 0]))
    return Spectrum(*(figure.mean(0) for figure in figures))


def spectrum(model: nn.Module, input_ids: Tensor | Iterable[Tensor]) -> AttentionSpectrum:
    """The singular values of the attention weights of `model` over texts, before and after the mixing of heads.

    model: a `LanguageModel`, a `MaskedLanguageModel`, or a model of Hugging Face with one sequence. A model of Hugging Face
    that nothing was injected into is copied, and its own weights are formed explicitly, whatever kernel it runs with.
    input_ids (B, N) int64, or several of them with one N: each row is a text of its own, without padding and memory.
    Raises InputError for texts of unequal lengths, for no text, for encoder-decoders, and for attention without weights.
    """
    read, how = _reader(model)
    lengths: set[int] = set()
    texts: list[list[LayerSpectrum]] = []
    for ids in _texts(input_ids):
        lengths.add(ids.shape[1])
        if len(lengths) > 1:
            raise InputError(f"input_ids: texts of one length, given {' and '.join(map(str, sorted(lengths)))} tokens")
        with evaluating(model):
            texts.append([_of_layer(layer) for layer in read(ids)])
    if not texts or not texts[0]:
        raise InputError(
            "input_ids: no text to read" if not texts else f"{type(model).__name__}: no attention has weights"
        )
    return AttentionSpectrum(tuple(map(_mean, zip(*texts, strict=True))), len(texts), lengths.pop(), how)


def _of_layer(layer: LayerTrace) -> LayerSpectrum:
    before = spectrum_of(layer.weights)
    return LayerSpectrum(before, before if layer.mixing is None else spectrum_of(layer.mixed))


def _mean(layers: Sequence[LayerSpectrum]) -> LayerSpectrum:
    """One layer's spectrum over all texts."""

    def mean(spectra: Sequence[Spectrum]) -> Spectrum:
        return Spectrum(*(np.mean(figures, axis=0) for figures in zip(*map(dataclasses.astuple, spectra), strict=True)))

    before = mean([layer.before for layer in layers])
    mixes = layers[0].after is not layers[0].before
    return LayerSpectrum(before, mean([layer.after for layer in layers]) if mixes else before)


def _texts(input_ids: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    """The rows of all batches as texts (1, N)."""
    for ids in [input_ids] if isinstance(input_ids, Tensor) else input_ids:
        if ids.ndim != 2 or ids.is_floating_point() or not ids.shape[1]:
            raise InputError(f"input_ids: (B, N) of whole numbers, given {tuple(ids.shape)} {ids.dtype}")
        yield from ids.split(1)


def _reader(model: Any) -> tuple[Callable[[Tensor], Sequence[LayerTrace]], str]:
    """The attention of a model over one text, layer by layer, and how its weights are computed."""
    own = unwrapped(model)
    if isinstance(own, LanguageModel | MaskedLanguageModel):

        def traced_own(ids: Tensor) -> Sequence[LayerTrace]:
            trace = Trace()
            own.hidden(ids.to(device_of(own)), trace=trace)
            return trace.layers

        return traced_own, "by the definition"
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "is_encoder_decoder"):
        raise InputError(f"spectrum: a model of fullrank or of Hugging Face, given {type(model).__name__}")
    if config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__}: reads two sequences; give its encoder, or a model of one sequence")
    from fullrank.hf.inject import inject, injected_modules
    from fullrank.hf.interface import traced

    plain = not injected_modules(model)
    if plain:  # a mixing that is the identity, to be traced
        model = inject(copy.deepcopy(model), mix="position_independent").eval()

    def traced_foreign(ids: Tensor) -> Sequence[LayerTrace]:
        with traced(trace := Trace()):
            model(input_ids=ids.to(device_of(model)))
        return [dataclasses.replace(layer, mixing=None) for layer in trace.layers] if plain else trace.layers

    return traced_foreign, "explicitly, by the model's own attention" + ", with what was injected" * (not plain)
