"""The ledger: docs/results/ledger.csv has one row for each finished run, made from its folder.

`run` is the beginning of the checksum of result.json. `settings` are the settings that differ from the row of the recipe.
`final.test.perplexity` is a figure of the best checkpoint, `last.test.perplexity` one of the last checkpoint.
`protocol.test` says how the split was read, `text.test` is the beginning of the checksum of its text.
`curve` holds steps and validation perplexities. Numbers, settings and curves are read as JSON; an empty one is None.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from fullrank.config.finetune import FinetuneConfig
from fullrank.config.load import build_any, flatten, read_yaml, resolve_any
from fullrank.config.run import RunConfig
from fullrank.core.errors import FullRankError, InputError
from fullrank.files import read_json, sha256_of, write_text
from research import read_json_lines

Row = Mapping[str, Any]

CONTENTS = (
    "row",
    "scale",
    "seed",
    "tokens_seen",
    "steps",
    "wall_seconds",
    "ms_per_step",
)  # of result.json, as they are
MACHINE = (
    "precision",
    "device",
    "cpu",
    "cpu_flags",
    "engines",
    "threads",
    "commit",
    "fullrank",
    "torch",
    "transformers",
)
COLUMNS = (
    *("run", "recipe", "row", "scale", "seed", "settings", "corpus", "vocabulary"),
    *("tokens_seen", "steps", "parameters", "ms_per_step", "wall_seconds", *MACHINE, "date"),
    *("unigram.test", "signature", "next_token"),
)
SPLITS = ("valid", "test", "test2017", "dev", "attention")
MEASURES = (  # a page shows the first that a split has
    *("bleu", "perplexity", "accuracy", "f1", "matthews_correlation", "pearson", "effective_rank"),
    *("effective_rank_before_mixing", "exact_match", "spearman", "chrf", "bits_per_byte", "bits_per_character"),
    *("perplexity_without_sos", "last_position.perplexity"),
)
JSON = (  # columns begin so
    *("final.", "last.", "unigram", "settings", "curve", "seed", "tokens_seen", "steps", "parameters", "ms_per_step"),
    *("wall_seconds", "threads"),
)

# settings that say where a run lay and how it was watched
CIRCUMSTANCES = {
    *("train.seed", "train.device", "train.threads", "train.track", "train.log_every_steps", "train.save_every_steps"),
    *("train.keep_checkpoints", "train.keep_model"),
    *("eval.test", "eval.every_epochs", "eval.every_steps"),
    *("data.cache", "data.dir", "data.train", "data.valid", "data.test", "data.codes"),
}
SIZES_OF_THE_TEXT = ("vocab_size", "max_position_embeddings")


# -- reading and writing ----------------------------------------------------------------------------------------------


def read_ledger(path: Path) -> list[Row]:
    """Read the rows. A ledger that does not exist has none. Raises InputError with the line of a damaged row."""
    if not path.exists():
        return []
    rows: list[Row] = []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        for values in reader:
            try:
                row: dict[str, Any] = dict(zip(header, values, strict=True))
                row |= {column: json.loads(row[column] or "null") for column in header if column.startswith(JSON)}
            except ValueError as error:
                raise InputError(f"{path}: line {reader.line_num}: damaged ({error}); restore the line") from error
            rows.append(row)
    return rows


def write_ledger(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows. The header names the usual columns, then those of protocols, texts and figures."""
    rows = list(rows)
    others = {column for row in rows for column in row} - {*COLUMNS, "curve"}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *sorted(others), "curve"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        filled = {column: value for column, value in row.items() if value is not None}
        texts = {column: value if isinstance(value, str) else json.dumps(value) for column, value in filled.items()}
        writer.writerow(texts)
    write_text(path, text.getvalue())


def add_runs(path: Path, folders: Iterable[Path]) -> int:
    """Add the rows of finished runs, in the place of those of the same runs, and return how many rows are new or changed.

    Raises InputError for a run that has not finished, is damaged, or is from a tree with uncommitted changes.
    """
    added = {}
    for folder in folders:
        row = row_of(folder)
        if row["commit"].endswith("+changes"):
            raise InputError(
                f"{folder}: trained from a tree with uncommitted changes ({row['commit']}); train it again"
            )
        added[row["run"]] = row
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several trainings may end at once
        rows = {row["run"]: without_empty(row) for row in read_ledger(path)}
        changed = [row for run, row in added.items() if rows.get(run) != row]
        if changed:
            write_ledger(path, [*(rows | added).values()])
    finally:
        os.close(lock)
    return len(changed)


# -- values of a row --------------------------------------------------------------------------------------------------


def without_empty(row: Row) -> dict[str, Any]:
    """Return the row without what is None or empty."""
    return {column: value for column, value in row.items() if value not in (None, "")}


def figures_of(row: Row, split: str) -> dict[str, float]:
    """Return the figures of the best checkpoint on a split, by measure; the one that pages show stands first."""
    figures = {measure: row.get(f"final.{split}.{measure}") for measure in MEASURES}
    return {measure: figure for measure, figure in figures.items() if figure is not None}


def identity_of(row: Row) -> str:
    """Describe what was trained, as text: the row of a recipe at a scale, with its settings and seed."""
    trained = setting_of(row["recipe"], row.get("row"), row.get("scale"), row.get("settings"))
    return f"{trained} seed {row.get('seed')}"


def setting_of(recipe: str, row: str | None, scale: str | None, settings: Mapping[str, Any] | None) -> str:
    """Write a setting as text; runs with one text differ in their seed alone.

    Args:
        recipe: name of the recipe.
        row: row of the recipe; None without.
        scale: scale of the recipe; None without.
        settings: what differs from that row; None if unknown.

    Returns:
        JSON.
    """
    return json.dumps([recipe, row, scale, settings], sort_keys=True)


def identify_text(row: Row) -> tuple[str, str]:
    """Return the checksums of the test text and of the vocabulary."""
    return row.get("text.test") or "", row.get("vocabulary") or ""


def group_by_setting(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows that differ in nothing but their seed."""
    columns = ["recipe", "row", "scale", "settings", "corpus", "vocabulary", "text.test", "signature"]
    columns += [f"protocol.{split}" for split in SPLITS]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        setting = json.dumps([row.get(column) for column in columns], sort_keys=True)
        groups.setdefault(setting, []).append(row)
    return list(groups.values())


# -- from a run folder ------------------------------------------------------------------------------------------------


def row_of(folder: Path) -> dict[str, Any]:
    """Make the row of a finished run. Raises InputError if it has not finished, or if a file of it is damaged."""
    file = folder / "result.json"
    if not file.is_file():
        raise InputError(f"{folder}: not finished (no result.json); finish it with `fullrank train {folder}`")
    result = read_json(file)
    config = build_any(read_yaml(folder / "config.yaml"))
    try:
        lines = [line for line in read_json_lines(folder / "metrics.jsonl") if line.get("split") == "valid"]
        return without_empty({
            "run": sha256_of(file)[:16],
            "settings": differences(config, result["recipe"], result.get("row"), result.get("scale")),
            "date": datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat(),
            "curve": [[line["step"], float(f"{line['ppl']:.5g}")] for line in lines if line.get("ppl")] or None,
            **columns_of_result(result, read_json(folder / "run.json").get("text") or {}),
            **columns_of_spectrum(folder / "analysis" / "spectrum.json"),
        })  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder}: result.json, metrics.jsonl or analysis/spectrum.json is damaged ({error!r})"
        ) from error


def columns_of_result(result: Mapping[str, Any], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Read the columns that result.json states. texts: checksums of the run's texts, by split."""
    corpus = result.get("corpus") or {}
    machine = result["environment"]
    checksums = result.get("sha256") or corpus.get("sha256") or texts
    columns: dict[str, Any] = {
        **{column: result.get(column) for column in CONTENTS},
        **{column: join(machine.get(column)) for column in MACHINE},
        "recipe": short_name(result["recipe"]),
        "corpus": corpus.get("label") or result.get("task"),
        "vocabulary": (corpus.get("fingerprint") or "")[:16],
        "parameters": (result.get("parameters") or {}).get("total"),
        "unigram.test": (corpus.get("unigram_perplexity") or {}).get("test"),
    }
    for split, figures in result["final"].items():
        protocol = (result.get("protocols") or {}).get(split) or {"words": result.get("protocol")}
        settings = protocol.get("settings") or result.get("protocol_settings") or {}
        columns[f"protocol.{split}"] = protocol["words"]
        columns[f"text.{split}"] = (checksums.get(split) or "")[:16]
        if not settings.get("next_token", True):
            columns["next_token"] = "no"
        if "bleu_signature" in figures:
            columns["signature"] = re.sub(r"\|version:[^|]*", "", figures["bleu_signature"])
    for checkpoint in ("final", "last"):
        figures = flatten(result.get(checkpoint) or {})
        columns |= {
            f"{checkpoint}.{name}": figure for name, figure in figures.items() if name.partition(".")[2] in MEASURES
        }
    return columns


def join(value: Any) -> Any:
    """Join the words of a list by spaces; return any other value as it is."""
    return " ".join(value) if isinstance(value, list) else value


def columns_of_spectrum(file: Path) -> dict[str, Any]:
    """Read the effective rank of attention weights after and before mixing, means over layers and heads.

    Empty if `fullrank analyze spectrum` did not measure it.
    """
    if not file.is_file():
        return {}
    spectrum = read_json(file)
    columns: dict[str, Any] = {
        "protocol.attention": f"attention weights over {spectrum['texts']} segments of {spectrum['segment_length']} tokens "
        f"of {spectrum['text']}"
    }
    for measure, weights in (("effective_rank", "after"), ("effective_rank_before_mixing", "before")):
        ranks = [
            record["value"]
            for record in spectrum["records"]
            if record["measure"] == "effective rank"
            and record["labels"].keys() == {"layer", "weights"}
            and record["labels"]["weights"] == weights
        ]
        columns[f"final.attention.{measure}"] = fmean(ranks)
    return columns


def differences(
    config: RunConfig | FinetuneConfig, recipe: str, row: str | None, scale: str | None
) -> dict[str, Any] | None:
    """Find the settings in which a configuration differs from a recipe's row at a scale.

    Args:
        config: the configuration.
        recipe: name of the recipe.
        row: row of the recipe; None for the first one.
        scale: scale of the recipe; None for the largest that it has.

    Returns:
        The values by dotted key, circumstances such as the seed left out; None: there is no such recipe, row or scale.
    """
    try:
        settings_of_recipe = flatten(resolve_any(recipe, row, scale).config.to_dict())
    except FullRankError:
        return None
    settings = flatten(config.to_dict())
    changed = {}
    for name in {**settings, **settings_of_recipe}:
        value = settings.get(name)
        usual = settings_of_recipe.get(name)
        is_of_text = name.endswith(SIZES_OF_THE_TEXT) and usual is None
        if value != usual and name not in CIRCUMSTANCES and not is_of_text:
            changed[name] = Path(str(value)).name if name == "model.pretrained" else value
    return changed


def short_name(recipe: str) -> str:
    """Shorten the name of a recipe: that of a file loses its folder."""
    return Path(recipe).name if recipe.endswith((".yaml", ".yml")) else recipe
