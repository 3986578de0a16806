"""Seal of a checkpoint: a record with checksums of its own files and of the run around it.

checkpoint.json is {"sha256": of its content, "content": {"format", "files", "run", "state"}}. `files` has size and sha256 of
the files beside it, `run` the configuration and the run record that the weights were trained with.
Every reader of a run compares them (`check_run`): a changed activation or flag would give another figure without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fullrank.config.load import build_any, flatten, read_yaml
from fullrank.core.errors import ConfigError, InputError
from fullrank.files import digest, parse_json, read_json, sha256_of, sync

FORMAT = 1
PLAIN = "checkpoint.json"
# where a run lies and how it is watched: these may change under a finished run; texts have checksums of their own
MOVABLE = {
    *(f"data.{key}" for key in ("dir", "cache", "train", "valid", "test", "codes")),
    "train.device", "train.threads", "train.track", "train.sharding", "train.activation_checkpointing",
}  # fmt: skip
LINKS = ("last", "best", "previous")  # in the folder `checkpoints`


class DamagedError(InputError):
    """A checkpoint that cannot be trusted."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} is damaged: {problem}")


class Record(NamedTuple):
    """The content of checkpoint.json.

    files: size and sha256 of each file. run: configuration and the part of run.json about data; empty where a model was
    trained outside of a run folder. state: the plain values of the training.
    """

    files: dict[str, Any]
    run: dict[str, Any]
    state: dict[str, Any]


def seal_file(path: Path) -> dict[str, Any]:
    """Return size and sha256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def write_record(
    folder: Path, names: tuple[str, ...], state: Mapping[str, Any], run: Mapping[str, Any] | None = None
) -> None:
    """Write checkpoint.json, with size and checksum of each file, and force it to the disk.

    Args:
        folder: the checkpoint.
        names: its files, which are there already.
        state: plain values of the training.
        run: what the record says about the run; None outside of a run folder.
    """
    files = {name: seal_file(folder / name) for name in names}
    content = {"format": FORMAT, "files": files, "run": run or {}, "state": state}
    text = json.dumps({"sha256": digest(content), "content": content}, indent=1, allow_nan=False)
    (folder / PLAIN).write_text(text + "\n", encoding="utf-8")
    sync(folder / PLAIN)
    sync(folder)


def read_record(folder: Path) -> Record:
    """Read the record of the checkpoint in `folder`. DamagedError if it is not whole."""
    try:
        document = read_json(folder / PLAIN)
        content = document["content"]
        is_whole = document["sha256"] == digest(content)
    except (InputError, KeyError) as error:
        raise DamagedError(folder, str(error).replace(str(folder / PLAIN), PLAIN)) from error
    if not is_whole or content["format"] != FORMAT:
        raise DamagedError(folder, f"{PLAIN} does not match its checksum, or is of another version of fullrank")
    return Record(content["files"], content["run"], content["state"])


def seal_run(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part `run` of a checkpoint's record: the configuration, and what of run.json is about data and kernel."""
    return {"config": dict(config), "identity": _select_data(read_identity(folder))}


def _select_data(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: identity[key] for key in ("text", "vocabulary", "kernel", "parts") if key in identity}


def is_run(folder: Path) -> bool:
    """Return whether `folder` holds a run, finished or not."""
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()


def read_identity(folder: Path) -> dict[str, Any]:
    """Read the run record (run.json), which is written once, when a training begins; InputError if it is damaged."""
    return read_json(folder / "run.json")


def check_run(folder: Path, checkpoint: str | None = None) -> None:
    """Check that configuration and run record in `folder` are those of its `checkpoint`; InputError if they are not.

    None: the newest checkpoint that can be read; without any there is nothing to compare. Vocabulary files have a checksum
    inside.
    """
    for name in ("last", "previous", "best") if checkpoint is None else (checkpoint,):
        try:
            trained = read_record(folder / "checkpoints" / name).run
            break
        except DamagedError as damage:
            if checkpoint is not None:
                raise InputError(f"{damage}; take another checkpoint or train again") from damage
    else:
        return
    if not trained:
        return
    try:
        config = build_any(trained["config"]).to_dict()
    except ConfigError as error:
        raise InputError(f"{folder}: trained by another version of fullrank, or with other modules: {error}") from error
    path = folder / "config.yaml"
    _compare(path, build_any(read_yaml(path)).to_dict(), config)
    _compare(folder / "run.json", _select_data(read_identity(folder)), trained["identity"])


def _compare(file: Path, current: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    """Raise InputError unless the values of a file are, as JSON has them, those that were trained with."""
    new, old = (parse_json(json.dumps(flatten(values))) for values in (current, trained))
    fixed = [key for key in {**old, **new} if key not in MOVABLE]
    keys = [key for key in fixed if key not in old or old[key] != new.get(key)]
    if keys:
        shown = ", ".join(f"{key} is {new.get(key)!r}, trained with {old.get(key)!r}" for key in keys[:4])
        raise InputError(
            f"{file} was changed after the training began: {shown}, so the figures would be others; set it back, or begin a "
            "new run with another --out"
        )
