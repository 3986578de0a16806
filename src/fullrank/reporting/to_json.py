"""The comparison as plain objects, for `--json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fullrank.config.run import MASKED_TOKEN
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.reporting.measure import MEASURES, PERPLEXITY, SCORES, WITHOUT_SOS, Measure
from fullrank.reporting.results import SPLITS
from fullrank.reporting.significance import all_differences
from fullrank.reporting.stats import Stat, over_runs
from fullrank.reporting.table import Comparison, Row, over_seeds, unigram_of


def as_json(compared: Comparison) -> dict[str, Any]:
    """The comparison as plain objects for one JSON document; numbers in full precision.

    `measure` of a row is its key under which the figures compared stand (beside `perplexity`), and `difference_in` whether
    `difference` is a share or points. `significance` has what resampled test sets say of translations (`Differences`),
    an entry a split. `other_splits` of a row has its scores on further test sets.
    """
    return {
        "comparable": compared.comparable,
        "rows": [_row_as_json(row, compared.measure) for row in compared.rows],
        "unfinished": [
            {"folder": str(run.folder), "name": run.name, "seed": run.seed, "problems": list(run.problems)}
            for run in compared.unfinished
        ],
        "left_out": [{"folder": str(run.folder), "name": run.name, "task": run.task} for run in compared.left_out],
        "significance": [dataclasses.asdict(tested) for tested in all_differences(compared)],
    }


def _others(row: Row) -> list[Measure]:
    """The measures besides perplexity that its runs have: in bits, and scores."""
    return [measure for measure in MEASURES if measure is not PERPLEXITY and over_seeds(row.runs, measure)]


def _others_as_json(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for measure in _others(row):
        stats = over_seeds(row.runs, measure)
        found[measure.key] = {split: dataclasses.asdict(stat) for split, stat in stats.items()}
        if measure.in_bits:
            found[f"unigram_{measure.key}"] = unigram_of(row.runs[0], measure)
        if measure.key in row.signatures:
            found[f"{measure.key}_signature"] = list(row.signatures[measure.key])
    return found


def _other_splits(row: Row) -> dict[str, Any]:
    """Scores on splits besides validation and test, by split and measure."""
    found: dict[str, Any] = {}
    for split in dict.fromkeys(split for run in row.runs for split in run.other_splits):
        stats = {one.key: over_runs(one.final(run, split) for run in row.runs) for one in (PERPLEXITY, *SCORES)}
        found[split] = {key: dataclasses.asdict(stat) for key, stat in stats.items() if stat is not None}
    return found


def _row_as_json(row: Row, measure: Measure) -> dict[str, Any]:
    def plain(stat: Stat | None) -> dict[str, Any] | None:
        return None if stat is None else dataclasses.asdict(stat)

    def by_checkpoint(found: Mapping[str, Mapping[str, Stat]]) -> dict[str, Any] | None:
        return {name: {split: plain(stat) for split, stat in stats.items()} for name, stats in found.items()} or None

    return {
        "name": row.name,
        "task": row.runs[0].task,
        "corpus": row.label,
        "is_slice": row.is_slice,
        "text": row.text,
        "protocol": row.protocol,
        "parameters": row.parameters,
        "extra_parameters": row.extra_parameters,
        "measure": measure.key,
        "perplexity": {split: plain(stat) for split, stat in row.perplexity.items()},
        **_others_as_json(row),
        "last": {measure.key: {split: plain(stat) for split, stat in row.last.items()}} if row.last else None,
        WITHOUT_SOS.key: by_checkpoint(row.without_sos),
        "next_token": row.next_token,
        "remark": None if row.next_token else NOT_NEXT_TOKEN if row.marked else MASKED_TOKEN,
        "last_position": by_checkpoint(row.last_position),
        "difference": dict(row.difference),
        "difference_in": "points" if measure.higher else "share",
        "best": list(row.best),
        "other_splits": _other_splits(row),
        "paper": dict(row.paper) or None,
        "unigram_perplexity": unigram_of(row.runs[0], PERPLEXITY),
        "tokens_per_second": plain(row.tokens_per_second),
        "ms_per_step": {phase: plain(stat) for phase, stat in row.ms_per_step.items()},
        "wall_seconds": plain(row.wall_seconds),
        "peak_memory_mib": plain(row.peak_memory_mib),
        "runs": [
            {"folder": str(run.folder), "name": run.name, "seed": run.seed, "problems": list(run.problems)}
            | {one.key: {split: one.final(run, split) for split in SPLITS} for one in (PERPLEXITY, *_others(row))}
            for run in row.runs
        ],
    }
