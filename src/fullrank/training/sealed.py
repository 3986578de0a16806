"""Folders of tensors and plain values with the checksums of both: written whole, forced to the disk, verified when read.

Beside the tensors (*.safetensors) lies checkpoint.json: {"sha256": of its content, "content": {"format", "files", "state"}},
where `files` has size and sha256 of each of the others, and `state` plain values.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

FORMAT = 1
WEIGHTS, PLAIN = "model.safetensors", "checkpoint.json"


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the text says why."""


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A file of `tensors`, on the disk when this returns."""
    safetensors.torch.save_file(separate(tensors), path, metadata={"format": "pt"})
    sync(path)


def write_plain(folder: Path, names: tuple[str, ...], state: dict[str, Any]) -> None:
    """checkpoint.json about the files `names`, which lie in `folder`, and the plain values `state`."""
    content = {"format": FORMAT, "files": {name: _seal(folder / name) for name in names}, "state": state}
    text = json.dumps({"sha256": _digest(content), "content": content}, indent=1, allow_nan=False)
    with open(folder / PLAIN, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def read_plain(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What checkpoint.json says: files and their checksums, and plain values. Damaged if it is not whole."""
    try:
        document = json.loads((folder / PLAIN).read_text(encoding="utf-8"))
        content = document["content"]
        if document["sha256"] != _digest(content):
            raise Damaged(f"{PLAIN} does not match its checksum")
    except OSError as error:
        raise Damaged(f"{PLAIN} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{PLAIN} is not whole") from error
    if content["format"] != FORMAT:
        raise Damaged(f"{PLAIN} is of format {content['format']}, this version reads {FORMAT}")
    return content["files"], content["state"]


def read_tensors(path: Path, seal: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, in memory of their own; Damaged if it is not what `seal` says."""
    _verify(path, seal)
    try:  # copies: the loaded tensors may be views of the file
        return {key: value.clone() for key, value in safetensors.torch.load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path.name} cannot be read ({error})") from error


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values on the CPU, contiguous, none sharing memory with another (tied parameters are written twice)."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        apart[name] = plain
    return apart


def sync(path: Path) -> None:
    """Force a file, or the list of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _seal(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _verify(path: Path, seal: dict[str, Any]) -> None:
    try:
        found = _seal(path)
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from error
    if found["bytes"] != seal.get("bytes"):
        raise Damaged(f"{path.name} has {found['bytes']} bytes instead of {seal.get('bytes')}")
    if found["sha256"] != seal.get("sha256"):
        raise Damaged(f"{path.name} does not match its checksum")
