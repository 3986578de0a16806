"""The reach of memory under the Skip-Retain phase of a configuration: what `fullrank analyze context` measures."""

from __future__ import annotations

from pathlib import Path

from fullrank.analysis.context import REACH_PLOT, REACH_TABLE, compute_published_reach, context, reach_records
from fullrank.config.recipe import Resolved
from fullrank.config.run import RunConfig
from fullrank.config.training import PhaseConfig
from fullrank.core.errors import InputError, suggest
from fullrank.experiments.measurements import Measured
from fullrank.experiments.objective import skip_schedule


def measure_reach(resolved: Resolved[RunConfig], name: str | None = None) -> tuple[Measured, str]:
    """The reach of each layer's memory in the phase `name`, and what the paper's Eq. 6 gives.

    name: None is the first phase that skips layers.
    Raises InputError for a model without memory, an unknown phase, and probabilities that give no reach.
    """
    run = resolved.config
    if not run.model.memory_length:
        raise InputError(
            "model.memory_length: 0, so no layer has a memory that could reach anywhere; set it to some tokens "
            "(model.memory_length=512)"
        )
    layers = run.model.num_hidden_layers
    phase = find_phase(run, name)
    probabilities = skip_schedule(phase, layers).probabilities if phase else (0.0,) * layers
    try:
        reach = context(probabilities, memory_length=run.model.memory_length, segment_length=run.train.segment_length)
        records = list(reach_records(reach))
    except InputError as error:
        raise InputError(f"train.phases.{phase.name}.p: {error}" if phase else str(error)) from error
    recipe = Path(resolved.recipe).name if Path(resolved.recipe).exists() else resolved.recipe
    about = {
        "model": recipe, "source": "configuration", "row": resolved.row, "scale": resolved.scale,
        "phase": phase.name if phase else None, "skip": phase.skip if phase else "none",
    }  # fmt: skip
    measured = Measured("context", records, (REACH_TABLE,), (REACH_PLOT,), [about])
    return measured, (
        f"The paper's Eq. 6 gives {compute_published_reach(reach):,.0f} tokens. It adds p 2M over the layers, which is the "
        f"context of no layer, and takes memory and segment as equal. The farthest layer reaches "
        f"{max(layer.mean for layer in reach):,.0f} tokens on average."
    )


def find_phase(run: RunConfig, name: str | None) -> PhaseConfig | None:
    """The phase `name`; without a name, the first one that skips layers, or None. InputError for an unknown name."""
    phases = {phase.name: phase for phase in run.train.phases}
    if name is None:
        layers = run.model.num_hidden_layers
        return next((phase for phase in phases.values() if any(skip_schedule(phase, layers).probabilities)), None)
    if name not in phases:
        raise InputError(f"--phase {name}: train.phases has no such phase; {suggest(name, phases)}")
    return phases[name]
