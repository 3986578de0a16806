"""From a finished run folder to its row of the ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NotRequired, TypedDict

from fullrank.analysis.size import size_of_run
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.core.section import CountOrZero
from fullrank.experiments.run import evaluate
from fullrank.experiments.run_folder import open_any
from fullrank.experiments.task import LOG_PROBABILITIES, Say
from fullrank.files import read_json, sha256_of
from fullrank.reporting.ledger import differences
from fullrank.reporting.runs import Figures, Origin, Protocol, Spectrum, find_runs, mapping, number, read_run
from fullrank.seal import read_identity

# of result.json: what stands in the recipe or elsewhere in the row, a text, and paths
_LEFT_OUT = {"name", "paper", "mixing_parameters", "protocol", "protocol_settings", "sample"}
_PATHS = {"details", "platform"}
_CLOSE = 1e-4  # of figures: another machine, kernel or number of threads adds up in another order


class FinishedResult(TypedDict):
    """The keys of result.json that a row of the ledger needs, beside those of `Result`."""

    recipe: str
    row: NotRequired[str | None]
    scale: NotRequired[str | None]
    seed: CountOrZero
    final: dict[str, Figures]
    training: NotRequired[Origin | None]
    protocols: NotRequired[dict[str, Protocol] | None]
    environment: NotRequired[dict[str, Any] | None]


def row_of(folder: Path) -> dict[str, Any]:
    """The row of the run in `folder`: its result.json, settings that differ from the recipe, checksums, curve and spectrum.

    Without paths. InputError if the run has not finished, or was changed since.
    """
    config, identity = open_any(folder)
    if not (folder / "result.json").is_file():
        raise InputError(f"{folder}: not finished (no result.json); finish it with `fullrank train {folder}`")
    try:
        result = read_json(folder / "result.json", FinishedResult)
    except InputError as error:
        raise InputError(f"{error}; delete it, and `fullrank train {folder}` writes it again") from error
    training = result.get("training") or {}  # of another run, which this one measures again
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
            [line.get("step"), float(f"{perplexity:.5g}")]
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


def verify(rows: Iterable[Mapping[str, Any]], runs: Path, say: Say) -> tuple[int, list[str]]:
    """Evaluate again the best checkpoint of each row whose run lies in `runs`: how many there are, and figures that differ.

    A run is known by the checksum of its result.json. Runs of fine-tuning are left out.
    """
    there = {sha256_of(run / "result.json"): run for run in find_runs(runs) if (run / "result.json").is_file()}
    verified, different = 0, list[str]()
    for row in rows:
        folder = there.get(str(row.get("result")))
        if folder is None or not isinstance(open_any(folder)[0], RunConfig):
            continue
        verified += 1
        for split in read_identity(folder).get("text") or {}:
            stated = row["final"].get(split, {})
            figures = evaluate(folder, split, say=say) if stated else {}
            for key in ("nll", "perplexity", "bleu"):
                before, now = number(stated.get(key)), number(figures.get(key))
                if before is not None and (now is None or not math.isclose(before, now, rel_tol=_CLOSE)):
                    different.append(
                        f"{folder}: final.{split}.{key} is {before:.6g} in the ledger, and {now:.6g} evaluated"
                    )
    return verified, different


def _spectrum(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and protocol of `fullrank analyze spectrum` on the run, under `attention`; empty where it was not analysed."""
    if not (file := folder / "analysis" / "spectrum.json").is_file():
        return {}, {}
    read = read_json(file, Spectrum)

    def mean(when: str) -> float:
        return fmean(rank for layer in read["layers"] for rank in layer[when]["effective_rank"])

    try:
        words = f"attention weights over {read['texts']} segments of {read['segment_length']} tokens of {read['text']}"
        figures = {"effective_rank": mean("after"), "effective_rank_before_mixing": mean("before")}
    except (KeyError, ValueError) as error:
        raise InputError(f"{file}: damaged (lacks {error}); run `fullrank analyze spectrum {folder}` again") from error
    return {"attention": figures}, {"attention": {"words": words, "settings": None}}


def _name(recipe: str) -> str:
    """The name of a recipe; of a file without its folder."""
    return Path(recipe).name if recipe.endswith((".yaml", ".yml")) else recipe


def _without_paths(section: Any) -> dict[str, Any]:
    return {key: value for key, value in mapping(section).items() if key not in _PATHS}
