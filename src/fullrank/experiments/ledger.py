"""From a finished run folder to its row of the ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from fullrank.analysis.size import size_of_run
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.experiments.run_folder import finished_result, open_any
from fullrank.experiments.task import LOG_PROBABILITIES
from fullrank.files import read_json
from fullrank.reporting.ledger import differences
from fullrank.reporting.runs import mapping

_MACHINE = ("cpu", "cores", "threads", "device", "precision")


def row_of(folder: Path) -> dict[str, Any]:
    """The row of the run in `folder`; InputError if it has not finished, or was changed since."""
    config, identity = open_any(folder)
    result = finished_result(folder)
    if result is None:
        raise InputError(f"{folder}: not finished (no result.json); finish it with `fullrank train {folder}`")
    training = mapping(result.get("training"))  # of another run, which this one measures again
    environment = dict(mapping(training.get("environment") or result.get("environment")))
    environment.pop("platform", None)
    recipe = str(result["recipe"])
    same = {"words": result.get("protocol"), "settings": result.get("protocol_settings")}  # of every split
    spectrum = _spectrum(folder)
    return {
        "result": _sha256(folder / "result.json"),
        "task": result.get("task") or "language_modeling",
        **{key: result.get(key) for key in ("row", "scale", "seed", "kernel")},
        "recipe": _name(recipe),
        "training": {"recipe": _name(training["recipe"]), "row": training["row"]} if training else None,
        "set": differences(config, recipe, result.get("row"), result.get("scale")),
        "data": _data(result, config.data.name, identity),
        "protocol": (result.get("protocols") or dict.fromkeys(result["final"], same)) | spectrum.get("protocol", {}),
        "last": None if result.get("last") == result["final"] else result.get("last"),
        "best": {
            key: value for key, value in mapping(result.get("best")).items() if key not in ("protocol", "next_token")
        },
        "final": result["final"] | spectrum.get("final", {}),
        **{key: result.get(key) for key in ("parameters", "steps", "epochs")},
        "tokens": result.get("tokens_seen"),
        "stopped_early": result.get("stopped_early"),
        "flops_per_token": size_of_run(config)["flops_per_token"] if isinstance(config, RunConfig) else None,
        "seconds": result.get("wall_seconds"),
        **{key: result.get(key) for key in ("ms_per_step", "tokens_per_second", "peak_memory_mib")},
        "commit": environment.pop("commit", None),
        "hardware": {key: environment.pop(key, None) for key in _MACHINE},
        "versions": environment,
        "log_probabilities": {
            split: _sha256(kept)
            for split in mapping(result.get("final"))
            if (kept := folder / LOG_PROBABILITIES.format(split)).is_file()
        },
    }


def _spectrum(folder: Path) -> dict[str, Any]:
    """Figures and protocol of `fullrank analyze spectrum` on the run, under `attention`; empty where it was not analysed."""
    if not (file := folder / "analysis" / "spectrum.json").is_file():
        return {}
    read = read_json(file)

    def mean(when: str) -> float:
        return fmean(rank for layer in read["layers"] for rank in layer[when]["effective_rank"])

    words = f"attention weights over {read['texts']} segments of {read['segment_length']} tokens of {read['text']}"
    figures = {"effective_rank": mean("after"), "effective_rank_before_mixing": mean("before")}
    return {"final": {"attention": figures}, "protocol": {"attention": {"words": words, "settings": None}}}


def _name(recipe: str) -> str:
    """The name of a recipe; of a file without its folder."""
    return Path(recipe).name if recipe.endswith((".yaml", ".yml")) else recipe


def _data(result: Mapping[str, Any], name: str, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Name, label, sizes and checksums of the text; of fine-tuning the splits that are slices."""
    corpus, slices = mapping(result.get("corpus")), result.get("slice")
    keys = ("label", "is_slice", "tokens", "pairs", "vocabulary", "fingerprint", "sha256")
    data = {key: corpus[key] for key in keys if key in corpus}
    if slices is not None:
        data |= {"is_slice": any(mapping(slices).values()), "slice": slices, "examples": result.get("examples")}
    return {
        "name": name,
        "label": name,
        **data,
        "sha256": data.get("sha256") or result.get("sha256") or identity.get("text"),
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
