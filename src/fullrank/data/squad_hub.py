"""SQuAD from the Hugging Face hub, through `datasets`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fullrank.core.errors import InputError, RunError

HUB = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}
_REVISIONS = {
    "1.1": "7b6d24c440a36b6815f21b70d25016731768db1f",
    "2.0": "3ffb306f725f7d2ce8394bc1873b24868140c412",
}
_SPLITS = {"train": "train", "dev": "validation"}


def hub_rows(version: str, split: str, cache: Path | None, report: Callable[[str], None]) -> Iterable[dict[str, Any]]:
    """The rows of a split: id, title, context, question, and answers, whose text and answer_start are lists.

    Raises InputError where `datasets` is not installed, RunError where the hub cannot be had; both name the local way, too.
    """
    local = f"give a local folder that holds {split}-v{version}.json: --from DIR (data.dir=DIR)"
    if importlib.util.find_spec("datasets") is None:
        raise InputError(
            f"SQuAD {version}: {local}; or install what the Hugging Face hub ({HUB[version]}) needs: "
            "pip install 'fullrank[hf]'"
        )
    report(f"SQuAD {version}: {split} from the Hugging Face hub, {HUB[version]} (CC BY-SA 4.0)")
    try:
        return _load(version, split, cache)
    except Exception as error:  # of many libraries: no network, no such name, a full disk
        words = " ".join(str(error).split())[:300]
        raise RunError(
            f"SQuAD {version} could not be had from the Hugging Face hub, {HUB[version]} ({type(error).__name__}: {words}). "
            f"Either connect to the network, or {local}"
        ) from error


def _load(version: str, split: str, cache: Path | None) -> Iterable[dict[str, Any]]:
    import datasets

    rows: Iterable[dict[str, Any]] = datasets.load_dataset(
        HUB[version],
        split=_SPLITS[split],
        revision=_REVISIONS[version],
        cache_dir=None if cache is None else str(cache / "hub"),
    )
    return rows
