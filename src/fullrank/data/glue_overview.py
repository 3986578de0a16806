"""What a folder, or the hub, holds of a GLUE task: every split read through, counted and compared with what was published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.config.glue import GlueTask, glue_task
from fullrank.data.glue import Examples, Report, glue_label, load_glue
from fullrank.data.glue_files import locate


def glue_overview(
    task: str | GlueTask, folder: str | Path | None, cache: str | Path | None, report: Report
) -> dict[str, Any]:
    """Counts, files and shares of labels of all splits. Only the training split has to be there; `missing` names the others.

    Raises what `load_glue` raises.
    """
    task = glue_task(task)
    missing: list[str] = []
    parts: list[Examples] = []
    for split in task.splits:
        if folder is not None and split != "train" and locate(task, split, Path(folder).expanduser()) is None:
            missing.append(split)
        else:
            parts.append(load_glue(task, split, folder, cache, report))
    return {
        "name": f"glue/{task.name}",
        "label": glue_label(*parts),
        "title": task.title,
        "is_slice": any(part.is_slice for part in parts),
        "labels": None if task.labels is None else list(task.labels),
        "metrics": list(task.metrics),
        "splits": {part.split: _of_split(part) for part in parts},
        "missing": missing,
    }


def _of_split(part: Examples) -> dict[str, Any]:
    return {
        "rows": len(part), "published": part.task.sizes[part.split], "is_slice": part.is_slice,
        "left_out": part.left_out, "file": None if part.path is None else str(part.path), "sha256": part.sha256,
        "labels": _shares(part),
    }  # fmt: skip


def _shares(part: Examples) -> dict[str, float] | None:
    """The share of each class; of scores, their mean and standard deviation; None without labels."""
    if part.labels is None:
        return None
    if part.task.labels is None:
        scores = part.labels.astype(np.float64)
        return {"mean": float(scores.mean()), "deviation": float(scores.std())}
    counts = np.bincount(part.labels, minlength=len(part.task.labels))
    return {name: int(count) / len(part) for name, count in zip(part.task.labels, counts, strict=True)}


def overview_lines(found: Mapping[str, Any]) -> list[str]:
    """`glue_overview` for people: a line for the task, and one for each split."""
    kind = "scores from 0 to 5" if found["labels"] is None else f"{len(found['labels'])} classes"
    lines = [f"{found['label']}, {found['title']}: {kind}, {', '.join(found['metrics'])}"]
    told = []
    for split, content in found["splits"].items():
        shares = content["labels"]
        if shares is None:
            text = "no labels"
        elif found["labels"] is None:
            text = f"mean {shares['mean']:.2f}, standard deviation {shares['deviation']:.2f}"
        else:
            text = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        count = "as published" if not content["is_slice"] else f"published {content['published']:,}"
        told.append((split, f"{content['rows']:,}", f"rows ({count})", text, content["file"] or "the hub"))
    wide = [max(map(len, column)) for column in zip(*told, strict=True)]
    lines += [
        f"  {split:<{wide[0]}}  {rows:>{wide[1]}} {count:<{wide[2]}}  {text:<{wide[3]}}  {file}"
        for split, rows, count, text, file in told
    ]
    if found["missing"]:
        lines.append(f"  not there: {', '.join(found['missing'])}")
    return lines
