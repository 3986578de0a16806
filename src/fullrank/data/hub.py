"""Data sets of the Hugging Face hub, through `datasets`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fullrank.core.errors import InputError, RunError, one_line, pip_install
from fullrank.data.files import Report
from fullrank.files import mended


def load_hub_rows(
    name: str,
    split: str,
    *,
    configuration: str | None = None,
    revision: str,
    cache: str | Path | None,
    licence: str,
    files: str,
    report: Report,
) -> Iterable[dict[str, Any]]:
    """The rows of a split. files: what a local folder would hold instead.

    Raises InputError where `datasets` is not installed, RunError where the hub cannot be reached; both name the local way.
    """
    local = f"give a local folder that holds {files}: --from DIR (data.dir=DIR)"
    if importlib.util.find_spec("datasets") is None:
        raise InputError(f"{local}; or install what the Hugging Face hub ({name}) needs: {pip_install('hf')}")
    import datasets

    report(f"{name}: {split} from the Hugging Face hub ({licence})")
    folder = None if cache is None else str(Path(cache) / "hub")
    try:
        rows = datasets.load_dataset(name, configuration, split=split, revision=revision, cache_dir=folder)
    except Exception as error:  # of many libraries: no network, no such revision, a full disk
        raise RunError(
            f"{name} could not be had from the Hugging Face hub ({type(error).__name__}: {one_line(error, 300)}). Either "
            f"connect to the network, or {local}"
        ) from error
    return map(mended, rows)
