"""`fullrank analyze context`: the reach of each layer's memory in a phase of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.analysis import LayerReach, Reach, context
from fullrank.config.recipe import Resolved
from fullrank.config.run import PhaseConfig, RunConfig
from fullrank.core.errors import ConfigError, InputError, suggest
from fullrank.core.skip_retain import SkipRetain

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class FoundContext:
    """phase: whose schedule this is, None where no phase lets a layer rest. remarks: what the figures do not say themselves."""

    resolved: Resolved[RunConfig]
    phase: PhaseConfig | None
    reach: Reach
    remarks: tuple[str, ...]

    @property
    def title(self) -> str:
        """The recipe, its row and scale, and the phase."""
        place = self.resolved
        row = f", row {place.row}, scale {place.scale}" if place.row else ""
        name = Path(place.recipe).name if Path(place.recipe).exists() else place.recipe
        return f"{name}{row}" + (f", phase {self.phase.name} (skip: {self.phase.skip})" if self.phase else "")


def find_context(resolved: Resolved[RunConfig], phase: str | None = None) -> FoundContext:
    """The reach of each layer's memory in `phase`; if none is named, in the first phase that lets layers rest.

    Raises InputError for a model without memory, an unknown phase, and probabilities that give no reach.
    """
    run = resolved.config
    if run.model.sees_future:
        raise InputError(
            "model.attention.causal: as_published sees every token of its segment and can have no memory, so no layer "
            "reaches beyond it; analyse a 'masked' model with model.memory_length"
        )
    if not run.model.memory_length:
        raise InputError(
            "model.memory_length: 0, so no layer has a memory that could reach anywhere; set it to some tokens "
            "(model.memory_length=512)"
        )
    chosen = _phase(run, phase)
    probabilities = _probabilities(run, chosen) if chosen else (0.0,) * run.model.num_hidden_layers
    try:
        reach = context(probabilities, memory_length=run.model.memory_length, segment_length=run.train.segment_length)
        for layer in reach.layers:
            layer.reach  # noqa: B018  # refuses here what has too many values
    except InputError as error:
        raise InputError(f"train.phases.{chosen.name}.p: {error}" if chosen else str(error)) from error
    return FoundContext(resolved, chosen, reach, tuple(_remarks(run, chosen, reach)))


def as_dict(found: FoundContext, drifting: int | None = None) -> dict[str, Any]:
    """What the verb prints with `--json`; `drifting`: also the released code's labels after so many steps."""
    reach, phase, resolved = found.reach, found.phase, found.resolved
    return {
        "recipe": resolved.recipe,
        "row": resolved.row,
        "scale": resolved.scale,
        "phase": phase.name if phase else None,
        "skip": phase.skip if phase else "none",
        "p": phase.p if phase else None,
        "gaps": phase.gaps if phase else "true",
        "memory_length": reach.memory_length,
        "segment_length": reach.segment_length,
        "layers": [_layer(layer, drifting) for layer in reach.layers],
        "farthest": {"layers": [layer.layer for layer in reach.farthest], "mean": reach.farthest[0].mean},
        "resting_layers": reach.resting,
        "published": {
            "equation_6": reach.published,
            "short_form": reach.published_short if phase and phase.skip == "linear" else None,
            "sums_over_layers": True,
        },
        "remarks": list(found.remarks),
    }


def _layer(layer: LayerReach, drifting: int | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "layer": layer.layer,
        "probability": layer.probability,
        "mean": layer.mean,
        "deviation": layer.deviation,
        "quantiles": {f"{share:g}": layer.reach.quantile(share) for share in QUANTILES},
        "nearest_mean": layer.nearest_mean,
        "reach": {"tokens": layer.reach.tokens.tolist(), "probabilities": layer.reach.probabilities.tolist()},
        "nearest": {"tokens": layer.nearest.tokens.tolist(), "probabilities": layer.nearest.probabilities.tolist()},
    }
    if drifting is not None:
        drift = layer.drifting(drifting)
        content["drifting"] = {
            "steps": drift.steps, "blocks": drift.blocks, "deviation": drift.deviation, "tokens": drift.tokens
        }  # fmt: skip
    return content


def _phase(run: RunConfig, name: str | None) -> PhaseConfig | None:
    phases = run.train.phases
    if name is None:
        return next((phase for phase in phases if any(_probabilities(run, phase))), None)
    if not phases:
        raise InputError(f"--phase {name}: the configuration has no phases (train.phases)")
    named = {phase.name: phase for phase in phases}
    if name not in named:
        raise InputError(f"--phase {name}: the configuration has no such phase; {suggest(name, named)}")
    return named[name]


def _probabilities(run: RunConfig, phase: PhaseConfig) -> tuple[float, ...]:
    try:
        return SkipRetain(phase.skip, phase.p, num_layers=run.model.num_hidden_layers).probabilities
    except ValueError as error:
        raise ConfigError(f"train.phases.{phase.name}.p: {error}") from error


def _remarks(run: RunConfig, phase: PhaseConfig | None, reach: Reach) -> list[str]:
    memory, segment = reach.memory_length, reach.segment_length
    if phase is None or not reach.resting:
        who = f"phase '{phase.name}' lets no layer rest" if phase else "no phase (train.phases) lets a layer rest"
        remarks = [
            f"{who[0].upper()}{who[1:]}: every layer remembers the {memory:,} tokens before the segment, always."
        ]
    else:
        far = reach.farthest
        layers = f"layer {far[0].layer}" if len(far) == 1 else f"{len(far)} layers alike"
        short = f" (in short M (L - 3) / 2 = {reach.published_short:,.0f})" if phase.skip == "linear" else ""
        unequal = (
            "" if memory == segment else f", and takes memory and segment to be equal, here {memory:,} and {segment:,}"
        )
        remarks = [
            f"The paper's Eq. 6 gives {reach.published:,.0f} tokens{short}: it adds p 2M over the {len(reach.layers)} "
            f"layers, which is the expected context of no layer{unequal}; the farthest that a layer's memory reaches is "
            f"{far[0].mean:,.0f} tokens on average ({layers}).",
            f"At a step {reach.resting:.2f} of {len(reach.layers)} layers rest on average.",
        ]
    if run.model.same_length:
        remarks.append(
            f"model.same_length hides what is {memory:,} or more tokens before a query: what a layer remembers beyond "
            "that is not seen."
        )
    if phase is not None and phase.gaps == "drifting":
        remarks.append(
            "gaps: drifting - the tokens that are remembered are these, but the model is told that they are farther away, "
            "and farther with every step (--drifting STEPS)."
        )
    return remarks
