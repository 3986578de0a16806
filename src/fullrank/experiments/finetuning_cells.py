"""Several runs of fine-tuning in one command: rows and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.recipe import Resolved, load, resolve_finetune
from fullrank.core.errors import InputError
from fullrank.experiments.reproduce import chosen_rows
from fullrank.experiments.run_folder import default_folder


@dataclass(frozen=True)
class FineCell:
    """One run: a row with a seed, and its folder."""

    resolved: Resolved[FinetuneConfig]
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def label(self) -> str:
        row = self.resolved.row or self.resolved.config.data.name
        return f"{row}, seed {self.resolved.config.train.seed}"


def cells_of(
    name: str,
    rows: Sequence[str] | None,
    scale: str | None,
    seeds: int | None,
    overrides: Sequence[str],
    out: Path | None,
) -> list[FineCell]:
    """Every run that is asked for: all rows of a seed, then the next seed, so that what is there can be compared early.

    rows: None is the first one; `all` is each. seeds: 1 .. `seeds`; None: only that of the configuration.
    Raises InputError for an unknown recipe, row or scale, and for a seed given twice.
    """
    known = list(load(name).rows)
    if rows is not None and not known:
        raise InputError(f"{name} is a single configuration; it has no rows")
    wanted: Sequence[str | None] = (
        [None] if rows is None else chosen_rows(name, known, known if list(rows) == ["all"] else rows)
    )
    if seeds is not None and any(text.partition("=")[0].strip() == "train.seed" for text in overrides):
        raise InputError("train.seed: --seeds N trains seeds 1 to N; give one of the two")
    several = len(wanted) > 1 or (seeds or 1) > 1
    found = []
    for seed in [None] if seeds is None else range(1, seeds + 1):
        chosen = [] if seed is None else [f"train.seed={seed}"]
        for row in wanted:
            resolved = resolve_finetune(name, row, scale, [*overrides, *chosen])
            folder = default_folder(resolved)
            if out is not None:
                folder = out / folder.name if several else out
            found.append(FineCell(resolved, folder))
    return found
