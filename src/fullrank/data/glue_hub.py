"""GLUE from the Hugging Face hub, through `datasets`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fullrank.config.glue import HUB, HUB_REVISION, GlueTask
from fullrank.core.errors import InputError, RunError
from fullrank.data.glue_files import Row, row_of

_SPLITS = {"dev": "validation", "dev_mismatched": "validation_mismatched", "ax": "test"}


def hub_rows(task: GlueTask, split: str, cache: Path | None, report: Callable[[str], None]) -> tuple[list[Row], str]:
    """The rows of a split, and the sha256 of their text.

    Raises InputError where `datasets` is not installed, RunError where the hub cannot be had; both name the local way, too.
    """
    local = f"give a local folder that holds {task.folder}/train.tsv and so on: --from DIR (data.dir=DIR)"
    if importlib.util.find_spec("datasets") is None:
        raise InputError(
            f"GLUE {task.folder}: {local}; or install what the Hugging Face hub ({HUB}) needs: pip install 'fullrank[hf]'"
        )
    report(f"GLUE {task.folder}: {split} from the Hugging Face hub, {HUB} ({task.licence})")
    try:
        rows = _load(task, split, cache)
    except Exception as error:  # of many libraries: no network, no such revision, a full disk
        words = " ".join(str(error).split())[:300]
        raise RunError(
            f"GLUE {task.folder} could not be had from the Hugging Face hub, {HUB} ({type(error).__name__}: {words}). Either "
            f"connect to the network, or {local}"
        ) from error
    found = [row_of(task, split, content, f"row {i}", i, HUB) for i, content in enumerate(rows)]
    if not found:
        raise RunError(f"GLUE {task.folder}: {HUB} holds no rows of the split {split}")
    digest = hashlib.sha256()
    for row in found:
        digest.update(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return found, digest.hexdigest()


def _load(task: GlueTask, split: str, cache: Path | None) -> Iterable[dict[str, Any]]:
    """The hub's rows, as mappings."""
    import datasets

    name = "ax" if split == "ax" else task.name
    there = _SPLITS.get(split, split)
    if task.name == "mnli" and split in ("dev", "test"):
        there += "_matched"
    return datasets.load_dataset(
        HUB, name, split=there, revision=HUB_REVISION, cache_dir=None if cache is None else str(cache / "hub")
    )
