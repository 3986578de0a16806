"""Mixing matrices: how far training moved them from plain attention, and how they vary over positions (Mixhead §3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fullrank.core.errors import InputError
from fullrank.models import LoadedModel, open_model
from fullrank.records import Column, HeatMap, Lines, Record, Table, measurement
from fullrank.seal import read_record
from fullrank.text import Text, rows_of
from fullrank.training.checkpoint import list_kept_checkpoints


@dataclass(frozen=True, eq=False)
class LayerMixing:
    """The mixing M of one layer, column i of which makes head i; layer: its number.

    matrix (H, H): M. distance: ||M - I||_F. orthogonality: ||M^T M - I||_F^2 (Eq. 16). A mixing that depends on the
    query has one M at each position. The three are then means over the positions of a text, and deviation (H, H) is the
    standard deviation of m_ji(n) over them. Without a text they are of the part B that all positions share, and
    deviation is None, as it is for any other mixing.
    """

    layer: int
    matrix: np.ndarray
    distance: float
    orthogonality: float
    deviation: np.ndarray | None

    @property
    def variation(self) -> float | None:
        """Root of the mean over entries of their variance over positions."""
        return None if self.deviation is None else np.sqrt(np.square(self.deviation).mean())


def mixing(
    model: nn.Module | LoadedModel, input_ids: Tensor | Iterable[Tensor] | None = None
) -> tuple[LayerMixing, ...]:
    """Measure the mixing of every layer that mixes heads, of our models and of injected ones.

    input_ids are as for `spectrum`; only a mixing that depends on the query reads them. None: of such a mixing the part
    that all positions share is measured.
    Raises InputError for a model in which no layer mixes heads.
    """
    loaded = open_model(model)
    attention = loaded.attention_layers
    mixings: dict[int, list[Tensor]] = {}  # by layer
    for number, stage in enumerate(attention.stages):
        with torch.no_grad():
            shared = None if number in attention.plain else stage.mix.matrix(None)
        if shared is not None:
            reads_text = input_ids is not None and "query" in stage.mix.needs
            mixings[number] = [] if reads_text else [shared]
    if not mixings:
        raise InputError(
            f"{loaded.name}: no layer of it mixes heads; set model.attention.mix, or call fullrank.inject(model, "
            "mix=...) on a Hugging Face model"
        )
    if input_ids is not None and not all(mixings.values()):
        for layers in loaded.attentions(rows_of(input_ids)):
            for number, matrices in mixings.items():
                traced = layers[number].mixing
                if traced is not None:
                    matrices.append(traced.flatten(0, 1) if traced.dim() == 4 else traced)
    return tuple(_measure_layer(number, matrices) for number, matrices in mixings.items())


def _measure_layer(number: int, matrices: list[Tensor]) -> LayerMixing:
    over_positions = matrices[0].dim() == 3
    together = torch.cat(matrices) if over_positions else matrices[0][None]
    m = together.detach().double().cpu()  # (positions, H, H)
    identity = torch.eye(m.shape[-1], dtype=m.dtype)
    distances = torch.linalg.matrix_norm(m - identity)
    products = m.mT @ m
    orthogonalities = (products - identity).square().sum((1, 2))
    deviation = m.std(0, correction=0).numpy() if over_positions else None
    mean = m.mean(0).numpy()
    distance = float(distances.mean())
    orthogonality = float(orthogonalities.mean())
    return LayerMixing(number, mean, distance, orthogonality, deviation)


@measurement(
    "mixing",
    needs={"attention"},
    texts=16,
    table=Table(
        rows="layer",
        columns=tuple(Column(measure, format=".3f") for measure in ("distance", "orthogonality", "variation")),
    ),
    plot=(
        HeatMap("to head", "from head", "mixing", ("model", "layer"), {"last": True}, title="Mixing matrices"),
        Lines("step", "distance", series=("model",), band="layer", title="Distance from plain attention over training"),
    ),
)
def measure_mixing(model: LoadedModel, text: Text) -> Iterator[Record]:
    """Measure mixing matrices M: how far they are from plain attention, by layer and over training (Mixhead §3).

    Distance: ||M - I||. Orthogonality: ||M'M - I||^2 (Eq. 16). Variation: standard deviation over positions of the text, of a
    mixing that depends on the query; distance and orthogonality are then means over positions.
    A run is read at every checkpoint that it has kept (train.keep_checkpoints), the best and the last one.
    """
    rows = text.rows()
    if model.source != "run" or model.folder is None:
        yield from _layer_records(mixing(model, rows), {}, last=True)
        return
    steps = find_checkpoints(model.folder)
    for step, checkpoint in steps.items():
        saved = open_model(str(model.folder), checkpoint=checkpoint, device=str(model.device))
        yield from _layer_records(mixing(saved, rows), {"step": step}, last=step == max(steps))


def _layer_records(layers: Iterable[LayerMixing], labels: dict[str, int], last: bool) -> Iterator[Record]:
    for layer in layers:
        of_layer = {**labels, "layer": layer.layer}
        yield Record(of_layer, "distance", layer.distance)
        yield Record(of_layer, "orthogonality", layer.orthogonality)
        if layer.variation is not None:
            yield Record(of_layer, "variation", layer.variation)
        for (source, target), value in np.ndenumerate(layer.matrix):
            of_pair = {
                **of_layer,
                "from head": source,
                "to head": target,
                "last": last,
            }
            yield Record(of_pair, "mixing", value)


def find_checkpoints(folder: Path) -> dict[int, str]:
    """Find the checkpoints of a run by their steps, the earliest first, under the names that `open_model` takes."""
    checkpoints = folder / "checkpoints"
    names = {step: f"kept/{path.name}" for step, path in list_kept_checkpoints(checkpoints).items()}
    for name in ("best", "last"):
        if (checkpoints / name).is_dir():
            names[read_record(checkpoints / name).state["step"]] = name
    return dict(sorted(names.items()))
