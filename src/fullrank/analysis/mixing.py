"""Mixing matrices: how far training moved them from plain attention, and how they vary over positions (Mixhead §3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.analysis.attention import AttentionReader, texts_of
from fullrank.core.errors import InputError


@dataclass(frozen=True, eq=False)
class LayerMixing:
    """The mixing M of one layer, column i of which makes head i; layer: its number, name: the module that holds it.

    matrix (H, H): M. distance: ||M - I||_F. orthogonality: ||M^T M - I||_F^2 (Eq. 16). Of a mixing that depends on the query,
    these are means over the positions of a text, and deviation (H, H) is the standard deviation of m_ji(n) over them; without a
    text they are of the part B that all positions share, and deviation is None.
    """

    layer: int
    name: str
    matrix: np.ndarray
    distance: float
    orthogonality: float
    deviation: np.ndarray | None

    @property
    def variation(self) -> float | None:
        """Root of the mean over entries of their variance over positions."""
        return None if self.deviation is None else float(np.sqrt(np.square(self.deviation).mean()))


def mixing(model: nn.Module, input_ids: Tensor | Iterable[Tensor] | None = None) -> tuple[LayerMixing, ...]:
    """The mixing of every layer that mixes heads, of our models and of injected ones; input_ids as for `spectrum`.

    Raises InputError for a model in which no layer does.
    """
    reader = AttentionReader(model)
    found = dict[int, list[Tensor]]()
    for number, stage in enumerate(reader.stages):
        with torch.no_grad():
            shared = None if number in reader.plain else stage.mix.matrix(None)
        if shared is not None:
            found[number] = [] if input_ids is not None and "query" in stage.mix.needs else [shared]
    if not found:
        raise InputError(
            f"{type(model).__name__}: no layer of it mixes heads; set model.attention.mix, or call fullrank.inject(model, "
            "mix=...) on a Hugging Face model"
        )
    if input_ids is not None and not all(found.values()):
        for layers in reader.traces(texts_of(input_ids)):
            for number, matrices in found.items():
                traced = layers[number].mixing
                if traced is not None and traced.dim() == 4:
                    matrices.append(traced.flatten(0, 1))
    return tuple(_of_layer(number, reader.names[number], matrices) for number, matrices in found.items())


def _of_layer(number: int, name: str, matrices: list[Tensor]) -> LayerMixing:
    over_positions = matrices[0].dim() == 3
    m = (torch.cat(matrices) if over_positions else matrices[0][None]).detach().double().cpu()  # (positions, H, H)
    identity = torch.eye(m.shape[-1], dtype=m.dtype)
    return LayerMixing(
        number,
        name,
        m.mean(0).numpy(),
        float((m - identity).square().sum((1, 2)).sqrt().mean()),
        float((m.mT @ m - identity).square().sum((1, 2)).mean()),
        m.std(0, correction=0).numpy() if over_positions else None,
    )
