"""Run folders. A fault of a file becomes a sentence in `problems`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fullrank.config.data import PAIR_CORPORA
from fullrank.config.finetune import finetunes
from fullrank.config.load import flatten, read_yaml
from fullrank.core.errors import InputError
from fullrank.files import convert_to_record, read_json, sha256_of
from fullrank.records import Record, declaration_from_dict
from fullrank.seal import check_run, is_run

SPLITS = ("valid", "test")
TRANSLATIONS = "translations"  # the folder with <split>.txt and <split>.reference.txt
TRANSLATION, LANGUAGE_MODELING, MASKED_MODELING = "translation", "language_modeling", "masked_modeling"


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """`value` as a finite float, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def integer(value: Any) -> int | None:
    """`value` as an int if it is a whole number, else None."""
    finite = number(value)
    return int(value) if finite is not None and finite.is_integer() else None


@dataclass(frozen=True)
class Run:
    """One run folder. `result` is None until the run has finished; `problems` says what is missing or damaged.

    identity: run.json, which is written when a run begins. metrics, timing: the readable lines of the two files.
    """

    folder: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    timing: Sequence[Mapping[str, Any]] = ()
    result: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration as dotted keys."""
        return flatten(self.config)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return {**self.identity, **(self.result or {})}

    def get(self, key: str) -> Any:
        """A value of the result, else of run.json, by its dotted key; None where it is missing."""
        value: Any = self._facts
        for name in key.split("."):
            value = mapping(value).get(name)
        return value

    def get_mapping(self, key: str) -> Mapping[str, Any]:
        """A mapping of the result by its dotted key; empty where it is missing."""
        return mapping(self.get(key))

    def final(self, split: str, key: str, checkpoint: str = "final") -> float | None:
        """A final figure; dots in `key` lead to nested ones."""
        return number(self.get(f"{checkpoint}.{split}.{key}"))

    @property
    def label(self) -> str:
        """Label of the text, which says so if it is a slice; empty if not recorded."""
        return str(self.get("corpus.label") or self.get("corpus.name") or "")

    @property
    def is_slice(self) -> bool:
        """Its text, or its examples of a split, are a part of the published ones."""
        return bool(self.get("corpus.is_slice")) or any(self.get_mapping("slice").values())

    @property
    def finetunes(self) -> bool:
        """Fine-tuning of a pretrained encoder: its figures are scores of a task, not of a text."""
        return finetunes(self.config)

    @property
    def task(self) -> str:
        """`translation`, `masked_modeling` or `language_modeling`; of fine-tuning `glue/cola`, `squad` and so on."""
        data = str(self.settings.get("data.name"))
        if self.finetunes:
            return str(self.get("task") or data)  # which says if its examples were invented
        if data in PAIR_CORPORA:
            return TRANSLATION
        return MASKED_MODELING if self.settings.get("train.objective") == "masked" else LANGUAGE_MODELING

    @property
    def seed(self) -> int | None:
        return integer(self.settings.get("train.seed"))

    @property
    def seed_or_folder(self) -> int | str:
        return str(self.folder) if self.seed is None else self.seed

    @property
    def kind(self) -> str:
        """The task, by which runs compare; one for all tasks of fine-tuning."""
        return "fine-tuning" if self.finetunes else self.task

    @property
    def tokens(self) -> str:
        """`word`, `byte`, `character` or `bpe`; empty if not recorded."""
        return str(self.get("corpus.details.settings.kind") or self.settings.get("data.tokens") or "")

    @property
    def sees_future(self) -> bool:
        """Tokens of the model attend to later ones, so its validation figures while training are no perplexities."""
        causal = self.settings.get("model.decoder.attention.causal") or self.settings.get("model.attention.causal")
        return causal == "as_published"

    @property
    def next_token(self) -> bool:
        """Final figures are of next tokens."""
        protocols = self.get_mapping("protocols").values()
        return all(mapping(protocol.get("settings")).get("next_token", True) for protocol in protocols)

    @property
    def ms_per_step(self) -> dict[str, float]:
        """Milliseconds per training step, by phase."""
        numbers = {phase: number(value) for phase, value in self.get_mapping("ms_per_step").items()}
        return {phase: value for phase, value in numbers.items() if value is not None}

    @property
    def metric_names(self) -> list[str]:
        """Names of the scores of fine-tuning, the headline first."""
        return self.get("metrics") or []

    @property
    def scores(self) -> dict[tuple[str, str], float]:
        """Scores of fine-tuning in points (x 100), by split and metric."""
        keys = [(split, metric) for split in self.get_mapping("final") for metric in self.metric_names]
        values = {key: self.final(*key) for key in keys}
        return {key: 100 * value for key, value in values.items() if value is not None}

    @property
    def has_figures(self) -> bool:
        """False for a result without any final figure."""
        if self.finetunes:
            return bool(self.scores)
        values = [self.final(split, key) for split in SPLITS for key in ("perplexity", "bleu")]
        return any(value is not None and value > 0 for value in values)

    @property
    def bleu_signature(self) -> str | None:
        """sacreBLEU's signature of its BLEU."""
        signatures = [self.get(f"final.{split}.bleu_signature") for split in SPLITS]
        return next((str(signature) for signature in signatures if signature), None)

    @cached_property
    def references(self) -> Mapping[str, str]:
        """sha256 of the reference translations that the run has kept, by split."""
        paths = sorted((self.folder / TRANSLATIONS).glob("*.reference.txt"))
        return {path.name.removesuffix(".reference.txt"): sha256_of(path) for path in paths}

    @cached_property
    def analyses(self) -> Sequence[dict[str, Any]]:
        """Measurements that `fullrank analyze` kept in the folder: records with their tables and plots."""
        analyses = []
        for path in sorted((self.folder / "analysis").glob("*.json")):
            with contextlib.suppress(InputError, KeyError, TypeError):  # of another version
                content = read_json(path)
                content["records"] = [Record.from_dict(record) for record in content["records"]]
                for kind in ("tables", "plots"):
                    content[kind] = [declaration_from_dict(declared) for declared in content[kind]]
                analyses.append(content)
        return analyses


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in its sub-folders (two levels down), sorted by path."""
    if is_run(folder):
        return [folder]
    below = [*folder.glob("*/"), *folder.glob("*/*/")] if folder.is_dir() else []
    return sorted({path for path in below if is_run(path)})


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Runs of several folders in the order given; a folder given twice counts once."""
    unique = {Path(folder).resolve(): Path(folder) for folder in folders}
    return [read_run(folder) for folder in unique.values()]


def read_run(folder: Path) -> Run:
    """Read a run folder; InputError if the folder is not a run at all."""
    if not is_run(folder):
        inside = ", ".join(str(path) for path in find_runs(folder)[:4])
        raise InputError(f"{folder}: not a run folder" + (f"; it holds runs: {inside}" if inside else ""))
    problems: list[str] = []
    config = _read(folder / "config.yaml", read_yaml, problems)
    metrics = _read(folder / "metrics.jsonl", partial(_read_lines, problems), problems)
    timing = _read(folder / "timing.jsonl", partial(_read_lines, problems), problems)
    result = _read(folder / "result.json", read_json, problems)
    identity = _read(folder / "run.json", read_json, [])
    try:
        check_run(folder)
    except InputError as error:
        problems.append(str(error))
    name = str({**identity, **result}.get("name") or folder.resolve().name)
    run = Run(folder, name, config, metrics or (), timing or (), result or None, tuple(problems), identity)
    if result and not run.has_figures:
        problem = "result.json holds no finite figure under `final`: the run diverged or the file is damaged"
        return dataclasses.replace(run, result=None, problems=(*problems, problem))
    return run


def _read(path: Path, parse: Callable[[Path], Any], problems: list[str]) -> Any:
    """Content of a file; an empty mapping, with a sentence in `problems`, if it is missing or damaged."""
    try:
        return parse(path)
    except (InputError, OSError) as error:
        missing = "is missing" if path.name != "result.json" else "is missing: the run has not finished"
        problems.append(str(error).replace(str(path), path.name) if path.exists() else f"{path.name} {missing}")
    return {}


def _read_lines(problems: list[str], path: Path) -> list[Mapping[str, Any]]:
    """The JSON objects of a file with one per line; unreadable lines are counted, not fatal."""
    lines: list[Mapping[str, Any]] = []
    damaged = 0
    for line in path.read_bytes().split(b"\n"):
        try:
            if line.strip():
                lines.append(convert_to_record(dict[str, Any], line, path))
        except InputError:
            damaged += 1
    if damaged:
        problems.append(f"{path.name}: {damaged} unreadable lines were left out")
    return lines
