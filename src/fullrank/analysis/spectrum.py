"""The spectrum of attention weights: the share of each matrix that its largest singular values hold (Mixhead §4.4.1).

Where few singular values hold nearly all, a head attends in few ways only: the low-rank bottleneck of Fig. 1 and 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.analysis.rank import effective_rank
from fullrank.models import LoadedModel, open_model
from fullrank.records import Column, Label, Lines, Record, Table, measurement
from fullrank.text import Text, rows_of

_RANKS = ("effective rank", "stable rank")


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values s_1 >= ... >= s_R of attention weights, as means over texts, for each head; R is the smaller side.

    curves (H, R): (s_1 + ... + s_k) / (s_1 + ... + s_R) for k = 1 ... R, the paper's normalised cumulative singular values.
    effective_rank (H,): exp of the entropy of s_k / sum(s). stable_rank (H,): sum_k s_k^2 / s_1^2.
    """

    curves: np.ndarray
    effective_rank: np.ndarray
    stable_rank: np.ndarray


class LayerSpectrum(NamedTuple):
    """One attention layer: its weights P_j = normalize(A_j) before mixing, and sum_j m_ji P_j after it.

    Without mixing, both are the same object.
    """

    before: Spectrum
    after: Spectrum


@dataclass(frozen=True)
class AttentionSpectrum:
    """The spectra of the layers of a model, in the order in which they run, read over `texts` texts of `length` tokens.

    weights: how attention was computed.
    """

    layers: tuple[LayerSpectrum, ...]
    texts: int
    length: int
    weights: str

    def to_records(self) -> Iterator[Record]:
        for number, layer in enumerate(self.layers):
            for weights, values in (("before", layer.before), ("after", layer.after)):
                labels: dict[str, Label] = {"layer": number, "weights": weights}
                for measure, ranks in zip(_RANKS, (values.effective_rank, values.stable_rank), strict=True):
                    yield Record(labels, measure, ranks.mean(), protocol=self.weights)
                    for head, rank in enumerate(ranks):
                        yield Record({**labels, "head": head}, measure, rank, protocol=self.weights)
                curve = values.curves.mean(0)
                for k, share in enumerate(curve, start=1):
                    share_labels = {**labels, "share": k / len(curve)}
                    yield Record(share_labels, "cumulative share", share, protocol=self.weights)


def summarize_values(s: np.ndarray) -> Spectrum:
    """Summarize singular values (B, H, R), largest first, as a spectrum averaged over B."""
    sums = s.cumsum(-1)
    curves = sums / sums[..., -1:]
    squares = np.square(s)
    stable_rank = squares.sum(-1) / squares[..., 0]
    return Spectrum(curves.mean(0), effective_rank(s).mean(0), stable_rank.mean(0))


def spectrum(model: nn.Module | LoadedModel, input_ids: Tensor | Iterable[Tensor]) -> AttentionSpectrum:
    """Measure the singular values of the attention weights of a model over texts, before and after the mixing of heads.

    model: a `LanguageModel`, a `MaskedLanguageModel`, an `Encoder`, or a model of Hugging Face with one sequence. A
    model of Hugging Face that nothing was injected into is copied. Its own weights are formed explicitly, whatever
    kernel it runs with. input_ids (B, N) int64, or several of them with one N: each row is a text of its own, without
    padding. A model with memory reads them one after the other, and its weights are over memory and text.
    Raises InputError for texts of unequal lengths, for no text, for encoder-decoders, and for attention without
    weights.
    """
    loaded = open_model(model)
    rows = rows_of(input_ids)
    attention = loaded.attention_layers
    values: dict[tuple[int, str], list[np.ndarray]] = {}  # singular values (B, H, R), in double precision
    for traces in loaded.attentions(rows):
        for number, layer in enumerate(traces):
            weights = {"before": layer.weights}
            if number not in attention.plain and layer.mixing is not None:
                weights["after"] = layer.mixed
            for when, matrices in weights.items():
                singular_values = torch.linalg.svdvals(matrices.double()).cpu().numpy()
                values.setdefault((number, when), []).append(singular_values)
    spectra = {key: summarize_values(np.concatenate(batches)) for key, batches in values.items()}
    layers = []
    for number in dict.fromkeys(number for number, _ in spectra):
        before = spectra[number, "before"]
        layers.append(LayerSpectrum(before, spectra.get((number, "after"), before)))
    length = rows[0].shape[1]
    return AttentionSpectrum(tuple(layers), len(rows), length, attention.weights)


@measurement(
    "spectrum",
    needs={"attention"},
    texts=16,
    table=Table(
        rows="layer",
        columns=tuple(
            Column(measure, f"{measure}, {weights} mixing", {"weights": weights}, format)
            for measure, format in zip(_RANKS, (".1f", ".2f"), strict=True)
            for weights in ("before", "after")
        ),
    ),
    plot=Lines(
        x="share",
        y="cumulative share",
        where={"weights": "after"},
        series=("model",),
        band="layer",
        title="Sum of the largest singular values of attention weights",
        subtitle="Mean over layers, in a band of one deviation; weights that attend in all ways evenly are the diagonal",
        x_title="share of the singular values, largest first",
        y_title="share of their sum",
        from_zero=True,
    ),
)
def measure_spectrum(model: LoadedModel, text: Text) -> Iterator[Record]:
    """Measure the low-rank bottleneck: singular values of the attention weights, before and after mixing (Mixhead Fig. 1, 3).

    Effective rank: exp(entropy) of the singular values as shares of their sum. Stable rank: sum of their squares over the
    largest square. Means over texts, and in the table over heads; --json has each head, too.
    """
    return spectrum(model, text).to_records()
