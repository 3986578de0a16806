"""Folders that appear whole or not at all, and what is said when the disk refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullrank.core.errors import InputError, RunError

_STALE_SECONDS = 24 * 3600
_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_root(cache: str | None) -> Path:
    """`data.cache`, else $FULLRANK_CACHE, else ~/.cache/fullrank."""
    if cache:
        return Path(cache).expanduser()
    named = os.environ.get("FULLRANK_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "fullrank"


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turns a failed write below `root` into one clear error: RunError if the disk is full, InputError if not allowed."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise RunError(
                f"no space left on the disk of {root}; free some, or set data.cache (or FULLRANK_CACHE) "
                "to a folder on another disk"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise InputError(
                f"data.cache: cannot write to {root} ({error.strerror}); set data.cache (or FULLRANK_CACHE) "
                "to a folder of yours"
            ) from error
        raise


@contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """A temporary folder inside `parent`, removed at the end unless `publish` has moved it away."""
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.glob(".tmp-*"):  # of processes that were killed
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=".tmp-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path) -> None:
    """Gives a finished folder its name, in one step. If another process was first, its folder stays: both made the same."""
    folder.chmod(0o755)
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def discard(folder: Path) -> None:
    """Takes a damaged folder away, in one step."""
    away = folder.parent / f".tmp-{folder.name}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # another process took it away
        folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)
