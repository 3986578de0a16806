"""Small files that appear whole or not at all, and JSON that is what it was."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullrank.core.errors import RunError


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step; RunError if that fails, and then an older file is untouched."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` in one step; RunError if that fails, and then an older file is untouched."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        reason = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror
        raise RunError(f"{path}: cannot be written ({reason}); what was there before is unchanged") from error


def as_json(content: Any) -> str:
    """`content` as indented JSON that every reader takes: a number that is not finite becomes null."""
    return json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON in one step; a number that is not finite becomes null."""
    write_text(path, as_json(content) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError if it holds anything else."""
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("brackets inside brackets without end") from None
    if not isinstance(content, dict):
        raise ValueError(f"a JSON object is wanted, not {type(content).__name__}")
    return content


def digest(content: Any) -> str:
    """sha256 of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with the checksum that `without_checksum` compares."""
    return {**content, "sha256": digest(content)}


def without_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` as it was given to `with_checksum`; ValueError if it was changed since. Earlier versions wrote none."""
    values = {key: value for key, value in content.items() if key != "sha256"}
    if content.get("sha256", digest(values)) != digest(values):
        raise ValueError("it does not match its checksum")
    return values
