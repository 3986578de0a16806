"""A run folder: what it is called, what identifies it, and when it may be used again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullrank.config.data import DataConfig
from fullrank.config.finetune import FinetuneConfig, finetunes
from fullrank.config.load import build, build_finetune, flatten, read_yaml, to_dict, to_yaml
from fullrank.config.recipe import Resolved, load
from fullrank.config.run import RunConfig
from fullrank.core.errors import FullRankError, InputError
from fullrank.files import write_json, write_text


def default_folder(resolved: Resolved[RunConfig | FinetuneConfig]) -> Path:
    """`runs/<recipe>/<row>[-scale]-seed<seed>`, or `runs/<file name>` for a configuration without rows."""
    seed = f"seed{resolved.config.train.seed}"
    name = resolved.recipe.removesuffix(".yaml").removesuffix(".yml")
    if resolved.row is None:
        return Path("runs") / f"{Path(name).name}-{seed}"
    scale = [] if resolved.scale in (None, "paper") else [str(resolved.scale)]
    table = name.replace("/", "-") if not Path(resolved.recipe).is_file() else Path(name).name
    return Path("runs") / table / "-".join([resolved.row, *scale, seed])


def absolute(data: DataConfig) -> DataConfig:
    """The same corpus from any working directory; given files are meant relative to `data.dir`."""
    base = Path(data.dir or ".").expanduser().resolve()

    def there(path: str | list[str] | None) -> Any:
        if path is None:
            return None
        return [str(base / Path(p).expanduser()) for p in path] if isinstance(path, list) else there([path])[0]

    def folder(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().resolve())

    return dataclasses.replace(
        data,
        train=there(data.train),
        valid=there(data.valid),
        test=there(data.test),
        codes=there(data.codes),
        dir=folder(data.dir),
        cache=folder(data.cache),
    )


def is_run(folder: Path) -> bool:
    """Whether `folder` holds a run, finished or not."""
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()


def open_run(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration and the identity (`run.json`) of the run in `folder`; InputError if there is none.

    InputError as well for a run of fine-tuning, whose model is not one of ours.
    """
    config, identity = open_any(folder)
    if isinstance(config, FinetuneConfig):
        raise InputError(
            f"{folder}: a run of fine-tuning on {config.data.name}; its figures are in result.json, its model in model/, and "
            f"`fullrank finetune {folder}` goes on with it"
        )
    return config, identity


def open_finetuning(folder: Path) -> tuple[FinetuneConfig, dict[str, Any]]:
    """The same of a run of fine-tuning; InputError if it is another."""
    config, identity = open_any(folder)
    if not isinstance(config, FinetuneConfig):
        raise InputError(f"{folder}: not a run of fine-tuning, but one on {config.data.name}; see `fullrank train`")
    return config, identity


def open_any(folder: Path) -> tuple[RunConfig | FinetuneConfig, dict[str, Any]]:
    """The same of any run."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not is_run(folder):
        raise InputError(f"{folder}: not a run folder (it lacks config.yaml or run.json)")
    try:
        identity: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / 'run.json'}: damaged ({error})") from error
    raw = read_yaml(folder / "config.yaml")
    return build_finetune(raw) if finetunes(raw) else build(raw), identity


def in_table_order(folders: Sequence[Path]) -> list[Path]:
    """Runs of one recipe in the order of its rows, so that the table begins with the baseline; others as given."""

    def place(folder: Path) -> tuple[str, int]:
        try:
            identity = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            return identity["recipe"], list(load(identity["recipe"]).rows).index(identity["row"])
        except (OSError, ValueError, KeyError, FullRankError):
            return "", 0

    places = {folder: place(folder) for folder in folders}
    if len({recipe for recipe, _ in places.values()}) > 1:
        return list(folders)
    return sorted(folders, key=lambda folder: places[folder][1])


def finished_result(folder: Path) -> dict[str, Any] | None:
    """The `result.json` of a run that is finished; None of one that is not, or where the file is damaged."""
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result


def trained(folder: Path) -> bool:
    """Whether training in `folder` has left anything; a run that failed before its first step has not."""
    return (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()


def check_place(folder: Path) -> None:
    """Raises InputError unless `folder` is a run, absent, empty, or what a start that was cut short leaves behind."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: a file of that name exists; give another folder")
    left = (".lock", "run.json", ".run.json.", ".config.yaml.")
    if folder.is_dir() and not is_run(folder) and not all(path.name.startswith(left) for path in folder.iterdir()):
        raise InputError(f"{folder} is not empty and holds no run; give another --out")


def claim(folder: Path, config: RunConfig | FinetuneConfig, identity: Mapping[str, Any]) -> bool:
    """Make `folder` the home of this run; True if the same run already lives there and is to be continued.

    Raises InputError if it holds anything else: nothing is ever overwritten.
    """
    check_place(folder)
    if is_run(folder) and trained(folder):
        before, known = open_any(folder)
        old, new = flatten(to_dict(before)), flatten(to_dict(config))
        other = [key for key in {**new, **old} if old.get(key) != new.get(key)]
        if other:
            shown = ", ".join(f"{key} is {old.get(key)!r} there, {new.get(key)!r} here" for key in other[:4])
            raise InputError(f"{folder} holds a run with another configuration: {shown}; give another --out")
        if known.get("vocabulary") != identity.get("vocabulary") or known.get("text") != identity.get("text"):
            raise InputError(f"{folder} was started on another text or vocabulary; give another --out")
        return True
    # config.yaml last, since a folder without it is not yet a run; run.json first, since nobody else writes one
    write_json(folder / "run.json", dict(identity))
    write_text(folder / "config.yaml", to_yaml(config))
    return False
