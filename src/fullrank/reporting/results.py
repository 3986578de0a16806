"""Reading run folders: whatever is there, in types, and every fault as a sentence instead of an exception."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fullrank.config.data import PAIR_CORPORA
from fullrank.config.finetune import finetunes
from fullrank.config.load import read_yaml
from fullrank.core.errors import InputError

SPLITS = ("valid", "test")
RUN_FILES = ("config.yaml", "metrics.jsonl", "result.json")
TRANSLATIONS = "translations"  # the folder of a run that keeps them: <split>.txt and <split>.reference.txt
_REFERENCE = ".reference.txt"
TRANSLATION, LANGUAGE_MODELING, MASKED_MODELING = "translation", "language_modeling", "masked_modeling"


@dataclass(frozen=True)
class RunRecord:
    """One run folder. `result` is None until the run has finished; `problems` says what is missing or damaged.

    `identity` is run.json, which a run has from its beginning: name, recipe, row, scale; so is `vocabulary`, vocabulary.json.
    `metrics` and `timing` hold the readable lines of the two files, in file order.
    """

    folder: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    timing: Sequence[Mapping[str, Any]] = ()
    result: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: Mapping[str, Any] = field(default_factory=dict)

    def origin(self, key: str) -> str:
        """`recipe`, `row` or `scale` of the run, from its result or else its identity; empty if there is none."""
        return str(mapping(self.result).get(key) or self.identity.get(key) or "")

    @property
    def task(self) -> str:
        """`translation`, `masked_modeling` or `language_modeling`, as recorded; else by what the configuration says."""
        recorded = mapping(self.result).get("task") or self.identity.get("task")
        name = str(mapping(self.config.get("data")).get("name"))
        masked = mapping(self.config.get("train")).get("objective") == "masked"
        configured = TRANSLATION if name in PAIR_CORPORA else MASKED_MODELING if masked else LANGUAGE_MODELING
        return str(recorded or configured)

    @property
    def finetunes(self) -> bool:
        """Whether a pretrained encoder was fine-tuned: its figures are scores of a task, not of a text."""
        return mapping(self.result).get("kind") == "finetuning" or finetunes(self.config)

    @cached_property
    def references(self) -> Mapping[str, str]:
        """The sha256 of the reference translations of each split that the run has kept, by name."""
        found = sorted((self.folder / TRANSLATIONS).glob(f"*{_REFERENCE}"))
        digests = {path.name.removesuffix(_REFERENCE): _digest(path) for path in found}
        return {split: digest for split, digest in digests.items() if digest is not None}

    @property
    def other_splits(self) -> tuple[str, ...]:
        """Splits besides validation and test that its result has figures of, as second test sets of translations."""
        return tuple(str(split) for split in mapping(mapping(self.result).get("final")) if split not in SPLITS)

    @property
    def seed(self) -> int | None:
        """The seed of the run, from its result or else from its configuration."""
        found = self.result.get("seed") if self.result else None
        return integer(found if found is not None else mapping(self.config.get("train")).get("seed"))

    @property
    def tokens(self) -> str:
        """What the tokens are: `word`, `byte`, `character` or `bpe`; empty if not recorded."""
        details = mapping(mapping(mapping(self.result).get("corpus")).get("details"))
        found = mapping(details.get("settings")).get("kind") or self.vocabulary.get("kind")
        return str(found or mapping(self.config.get("data")).get("tokens") or "")

    @property
    def sees_future(self) -> bool:
        """Whether tokens of the model see later ones: what it is judged by while it trains is no next-token perplexity."""
        model = mapping(self.config.get("model"))
        decoder = mapping(mapping(model.get("decoder")).get("attention")) if self.task == TRANSLATION else {}
        return (decoder or mapping(model.get("attention"))).get("causal") == "as_published"

    @property
    def next_token(self) -> bool:
        """Whether the final figures are of next tokens; where it is not recorded, by the configuration."""
        said = mapping(mapping(self.result).get("protocol_settings")).get("next_token")
        return said if isinstance(said, bool) else not self.sees_future and self.task != MASKED_MODELING

    def final(self, split: str, key: str = "perplexity", checkpoint: str = "final") -> float | None:
        """Perplexity of the finished run on a split; None if it was not measured or is no positive number.

        `key`: another figure of the kind, with dots where it is nested; `checkpoint`: `final` is the best one, `last` that of
        the last step.
        """
        figures = mapping(mapping(mapping(self.result).get(checkpoint)).get(split))
        *outer, key = key.split(".")
        for name in outer:
            figures = mapping(figures.get(name))
        found = number(figures.get(key))
        return found if found is not None and found > 0 else None


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """`value` as a finite float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def integer(value: Any) -> int | None:
    """`value` as an int if it is a whole number, else None."""
    found = number(value)
    return int(value) if found is not None and found.is_integer() else None


def is_run(folder: Path) -> bool:
    """Whether a folder holds at least one of the files by which a run is known."""
    return folder.is_dir() and any((folder / name).is_file() for name in RUN_FILES)


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in its sub-folders (two levels down), sorted by path."""
    if is_run(folder):
        return [folder]
    below = [*folder.glob("*/"), *folder.glob("*/*/")] if folder.is_dir() else []
    return sorted({path for path in below if is_run(path)})


def read_run(folder: Path) -> RunRecord:
    """The record of a run folder; InputError if the folder is not a run at all."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give run folders (each holds {', '.join(RUN_FILES)})")
    if not is_run(folder):
        inside = find_runs(folder)
        hint = f"; it holds runs: {', '.join(str(path) for path in inside[:4])}" if inside else ""
        raise InputError(f"{folder}: not a run folder, it has none of {', '.join(RUN_FILES)}{hint}")
    problems: list[str] = []
    config = _read_config(folder, problems)
    metrics = _read_lines(folder / "metrics.jsonl", problems)
    timing = _read_lines(folder / "timing.jsonl", problems)
    result = _read_result(folder / "result.json", problems)
    identity, vocabulary = _read_object(folder / "run.json"), _read_object(folder / "vocabulary.json")
    name = str(mapping(result).get("name") or identity.get("name") or folder.name or folder.resolve().name)
    record = RunRecord(folder, name, config, metrics, timing, result, tuple(problems), identity, vocabulary)
    return record if result is None or record.finetunes else _without_unusable_result(record)


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Records of several folders in the order given; a folder given twice counts once."""
    return [read_run(folder) for folder in {Path(folder).resolve(): Path(folder) for folder in folders}.values()]


def finetuned(folders: Sequence[Path]) -> bool:
    """Whether runs are of fine-tuning; False where there are none. InputError if some are and others are not."""
    kinds: dict[bool, Path] = {}
    for folder in filter(is_run, map(Path, folders)):
        result = _read_object(folder / "result.json")
        kinds.setdefault(RunRecord(folder, "", _read_config(folder, []), result=result).finetunes, folder)
    if len(kinds) > 1:
        raise InputError(
            f"{kinds[True]} is a run of fine-tuning and {kinds[False]} is not: no figure of theirs compares; "
            "make a report of each kind"
        )
    return True in kinds


def _without_unusable_result(record: RunRecord) -> RunRecord:
    """A result without any final perplexity or BLEU is no result: the run diverged or the file is not ours."""
    if any(record.final(split, key) is not None for split in SPLITS for key in ("perplexity", "bleu")):
        return record
    figure = "perplexity or BLEU" if record.task == TRANSLATION else "perplexity"
    problems = (
        *record.problems,
        f"result.json holds no finite {figure} under `final`: the run diverged or the file is damaged",
    )
    return dataclasses.replace(record, result=None, problems=problems)


def _read_object(path: Path) -> Mapping[str, Any]:
    """What a run wrote down of itself when it began; whatever is wrong with it, the rest of the folder says more."""
    try:
        return mapping(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}


def _read_config(folder: Path, problems: list[str]) -> Mapping[str, Any]:
    path = folder / "config.yaml"
    if not path.is_file():
        problems.append("config.yaml is missing")
        return {}
    try:
        return read_yaml(path)
    except InputError as error:
        problems.append(_short(error, path))
        return {}


def _read_lines(path: Path, problems: list[str]) -> list[Mapping[str, Any]]:
    """The JSON objects of a file with one per line; unreadable lines are counted, not fatal."""
    if not path.is_file():
        problems.append(f"{path.name} is missing")
        return []
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
        return []
    found: list[Mapping[str, Any]] = []
    damaged: list[int] = []
    for index, line in enumerate(text.splitlines(), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif line.strip():
            damaged.append(index)
    if damaged:
        where = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first is line {damaged[0]},"
        problems.append(f"{path.name}: {where} cannot be read and was left out")
    return found


def _read_result(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    if not path.is_file():
        problems.append("no result.json: the run has not finished")
        return None
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        problems.append(f"result.json cannot be read ({error.strerror})")
        return None
    except ValueError:
        problems.append("result.json is damaged: not valid JSON")
        return None
    if not isinstance(value, dict):
        problems.append("result.json is damaged: not a JSON object")
        return None
    return value


def _short(error: InputError, path: Path) -> str:
    return str(error).replace(str(path), path.name)
