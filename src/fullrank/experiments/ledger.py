"""From a finished run folder to its row of the ledger."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from fullrank.analysis.size import size_of_run
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.experiments.run_folder import finished_result, open_any
from fullrank.experiments.task import LOG_PROBABILITIES
from fullrank.files import read_json, sha256_of
from fullrank.reporting.ledger import differences
from fullrank.reporting.runs import mapping, number, read_run

# of result.json: what stands in the recipe or elsewhere in the row, a text, and paths
_LEFT_OUT = {"name", "paper", "mixing_parameters", "protocol", "protocol_settings", "sample"}
_PATHS = {"details", "platform"}


def row_of(folder: Path) -> dict[str, Any]:
    """The row of the run in `folder`: its result.json, settings that differ from the recipe, checksums, curve and spectrum.

    Without paths. InputError if the run has not finished, or was changed since.
    """
    config, identity = open_any(folder)
    result = finished_result(folder)
    if result is None:
        raise InputError(f"{folder}: not finished (no result.json); finish it with `fullrank train {folder}`")
    training = mapping(result.get("training"))  # of another run, which this one measures again
    named = all(
        isinstance(section.get("recipe"), str) and isinstance(section.get("row"), str | None)
        for section in filter(None, (result, training))
    )
    if not (named and isinstance(result.get("scale"), str | None) and isinstance(result.get("final"), dict)):
        raise InputError(
            f"{folder / 'result.json'}: damaged: it lacks a recipe, its row and scale, or final figures; delete it, and "
            f"`fullrank train {folder}` writes it again"
        )
    figures, protocol = _spectrum(folder)
    same = {"words": result.get("protocol"), "settings": result.get("protocol_settings")}  # of every split
    row = {key: value for key, value in result.items() if key not in _LEFT_OUT}
    return row | {
        "result": sha256_of(folder / "result.json"),
        "recipe": _name(result["recipe"]),
        "training": {"recipe": _name(training["recipe"]), "row": training.get("row")} if training else None,
        "set": differences(config, result["recipe"], result.get("row"), result.get("scale")),
        "corpus": _without_paths(result.get("corpus")),
        "sha256": result.get("sha256") or identity.get("text"),
        "protocols": {**(mapping(result.get("protocols")) or dict.fromkeys(result["final"], same)), **protocol},
        "final": result["final"] | figures,
        "curve": [
            [line["step"], float(f"{perplexity:.5g}")]
            for line in read_run(folder).metrics
            if line.get("split") == "valid" and (perplexity := number(line.get("ppl")))
        ],
        "flops_per_token": size_of_run(config)["flops_per_token"] if isinstance(config, RunConfig) else None,
        "environment": _without_paths(training.get("environment") or result.get("environment")),
        "log_probabilities": {
            split: sha256_of(kept)
            for split in result["final"]
            if (kept := folder / LOG_PROBABILITIES.format(split)).is_file()
        },
    }


def _spectrum(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and protocol of `fullrank analyze spectrum` on the run, under `attention`; empty where it was not analysed."""
    if not (file := folder / "analysis" / "spectrum.json").is_file():
        return {}, {}
    read = read_json(file)

    def mean(when: str) -> float:
        return fmean(rank for layer in read["layers"] for rank in layer[when]["effective_rank"])

    words = f"attention weights over {read['texts']} segments of {read['segment_length']} tokens of {read['text']}"
    figures = {"effective_rank": mean("after"), "effective_rank_before_mixing": mean("before")}
    return {"attention": figures}, {"attention": {"words": words, "settings": None}}


def _name(recipe: str) -> str:
    """The name of a recipe; of a file without its folder."""
    return Path(recipe).name if recipe.endswith((".yaml", ".yml")) else recipe


def _without_paths(section: Any) -> dict[str, Any]:
    return {key: value for key, value in mapping(section).items() if key not in _PATHS}
