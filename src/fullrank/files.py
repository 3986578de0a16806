"""Small files that appear whole or not at all, and JSON that is what it was."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fullrank.core.errors import RunError

_LARGEST_JSON = 1 << 26
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all but tab and the ends of lines


def silent(text: str) -> None:
    """A remark that nobody hears: `--quiet`."""


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step; RunError if that fails, and then an older file is untouched."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` in one step; RunError if that fails, and then an older file is untouched."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        with fresh.open("xb") as file:  # never through a link
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


def read_small(path: Path, largest: int = 1 << 20) -> bytes:
    """The content of a file; ValueError if it is a device, a pipe, or larger than a file of its kind ever is."""
    if (size := plain_size(path)) > largest:
        raise ValueError(f"{size:,} bytes; at most {largest:,} are read")
    return path.read_bytes()


def plain_size(path: Path) -> int:
    """Size of a file in bytes; ValueError if it is a device or a pipe, which need not end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a plain file")
    return status.st_size


def sha256_of(path: Path) -> str:
    """sha256 of a file; ValueError if it is a device or a pipe."""
    plain_size(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def visible(text: str) -> str:
    """`text` with its control characters written out: a name must not send commands to the terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def python_command(words: Iterable[str]) -> list[str]:
    """The command line of `python WORDS` in a process of its own, which imports nothing from the working directory (-P)."""
    return [sys.executable, "-P", *words]


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use; where the system does not say (macOS, Windows), of all."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def out_of_memory(error: BaseException) -> bool:
    """True for the errors by which Python, PyTorch on a CPU, and PyTorch on a GPU say so."""
    return (
        isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error).lower()
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError if it holds anything else."""
    try:
        content = json.loads(read_small(path, _LARGEST_JSON))
    except RecursionError:
        raise ValueError("brackets inside brackets without end") from None
    if not isinstance(content, dict):
        raise ValueError(f"a JSON object is wanted, not {type(content).__name__}")
    return content


def digest(content: Any) -> str:
    """sha256 of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON with the checksum that `read_checked` compares."""
    text = json.dumps({**content, "sha256": digest(content)}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_checked(path: Path) -> dict[str, Any]:
    """The content that `write_checked` wrote; ValueError if it was changed since. Earlier versions wrote no checksum."""
    content = read_json(path)
    values = {key: value for key, value in content.items() if key != "sha256"}
    if content.get("sha256", digest(values)) != digest(values):
        raise ValueError("it does not match its checksum")
    return values
