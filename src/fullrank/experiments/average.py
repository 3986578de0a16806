"""The mean of the weights that a run has kept, as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullrank.core.errors import InputError
from fullrank.experiments.run_folder import open_run
from fullrank.training.checkpoint import kept_checkpoints, mean_weights, write_mean


def average(folder: Path, *, last: int | None = None, name: str = "average") -> dict[str, Any]:
    """Average the weights of the last `last` kept checkpoints of the run in `folder` (None: all of them), and say which.

    The mean of every tensor, added up in fp64, is written to `checkpoints/<name>`, where `--checkpoint <name>` finds it.
    Raises InputError without a run, or where it keeps fewer checkpoints.
    """
    open_run(folder)
    if last is not None and last < 1:
        raise InputError(f"--last: at least 1 checkpoint, given {last}")
    checkpoints = folder / "checkpoints"
    kept = kept_checkpoints(checkpoints)
    if not kept:
        raise InputError(
            f"{folder} keeps no checkpoints to average; train with train.keep_checkpoints: {last or 5} to keep the last ones"
        )
    if last is not None and len(kept) < last:
        raise InputError(
            f"{folder} keeps {len(kept)} checkpoint{'s' * (len(kept) > 1)} to average (steps {', '.join(map(str, kept))}), "
            f"--last asks for {last}; lower it, or train with train.keep_checkpoints: {last}"
        )
    steps = list(kept)[-last:] if last else list(kept)
    place = write_mean(checkpoints, name, mean_weights([kept[step] for step in steps]), steps)
    return {"run": str(folder), "checkpoint": name, "steps": steps, "folder": str(place)}
