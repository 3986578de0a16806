"""Files: text read a megabyte at a time, and cache folders that appear whole or not at all.

`key` names the configuration key in errors.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import itertools
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np

from fullrank.core.errors import InputError, RunError

Report = Callable[[str], None]  # hears of every step, a line at a time
_PIECE = 1 << 20
_LONGEST = 16 << 20  # a longer line is cut, between characters, even where it has no space
_STALE_SECONDS = 24 * 3600


def open_text(path: Path, key: str) -> BufferedReader:
    """The file, open for reading; InputError if it is missing, a folder or empty."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
            raise InputError(f"{key}: {path} is {kind}; a text file is wanted")
        file = path.open("rb")
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{key}: no such file: {path}") from None
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be read ({error.strerror})") from error
    except ValueError as error:  # NUL in its name
        raise InputError(f"{key}: {str(path)!r} cannot be read ({error})") from error
    if not file.peek(1):
        file.close()
        raise InputError(f"{key}: {path} is empty")
    return file


def file_digest(path: Path, key: str) -> str:
    """sha256 of a file; errors as in `open_text`."""
    with open_text(path, key) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lines(path: Path, key: str) -> Iterator[str]:
    """Lines of a text file, without their ends. Only a newline ends a line. InputError for text that is not UTF-8."""
    with open_text(path, key) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8").removesuffix("\n")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{key}: {path} is not UTF-8 text: line {number:,} has the byte 0x{line[error.start]:02x} (convert the "
                    "file to UTF-8)"
                ) from None
            yield text.removeprefix("\ufeff") if number == 1 else text


def number_of_lines(path: Path, key: str) -> int:
    """Lines of a file; one without a newline at its end counts."""
    with open_text(path, key) as file:
        return sum(1 for _ in file)


@dataclass(frozen=True)
class Section:
    """A file, or the bytes [start, end) of it."""

    path: Path
    start: int = 0
    end: int | None = None


def pieces(section: Section, *, exact: bool, key: str = "data.train") -> Iterator[str]:
    """The text of a section, in pieces that end after a newline (or, in very long lines, before a space).

    `exact`: any bytes are accepted, and those that are not UTF-8 become lone surrogates ("surrogateescape"); otherwise
    they are an InputError with file and byte offset, a byte-order mark at the beginning is left out, and a section that
    begins or ends inside a character is moved to the next one.
    """
    with open_text(section.path, key) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start, end = section.start, len(data) if section.end is None else min(section.end, len(data))
        if not exact:
            start, end = _next_character(data, start), _next_character(data, end)
            if start == 0 and data[:3] == codecs.BOM_UTF8:
                start = 3
        read = start
        while start < end:
            read = min(read + max(_PIECE, read - start), end)
            cut = read if read == end else _cut(data, start, read)
            if cut > start:
                yield _decoded(data[start:cut], exact, section.path, start, key)
            start = cut


def _next_character(data: mmap.mmap, offset: int) -> int:
    """The offset at which the next character begins: at most three bytes further on."""
    last = min(offset + 3, len(data))
    while 0 < offset < last and _continues(data[offset]):
        offset += 1
    return offset


def _continues(byte: int) -> bool:
    """The second, third or fourth byte of a UTF-8 character."""
    return byte & 0xC0 == 0x80


def _cut(data: mmap.mmap, start: int, end: int) -> int:
    """The end of the piece of data[start:end]: after its last newline, else before its last space, else `start`: no piece."""
    if (cut := data.rfind(b"\n", start, end) + 1) > 0 or (cut := data.rfind(b" ", start, end)) > start:
        return cut
    if end - start < _LONGEST:
        return start
    cut = end - 1
    while cut > end - 5 and _continues(data[cut]):
        cut -= 1
    return cut


def _decoded(block: bytes, exact: bool, path: Path, offset: int, key: str) -> str:
    try:
        return block.decode("utf-8", "surrogateescape" if exact else "strict")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{key}: {path} is not UTF-8 text: byte 0x{block[error.start]:02x} at offset {offset + error.start:,} "
            "(convert the file to UTF-8, or use data.tokens=byte)"
        ) from None


def cut_by_lines(paths: Sequence[Path], shares: Sequence[float], key: str) -> list[list[Section]]:
    """The lines of files, in order, as consecutive parts: all but the first hold `shares[1:]` of the lines, at least one.

    Raises InputError if there are too few lines for every part to have one.
    """
    ends = {}  # byte offsets at which the lines of a file end
    for path in paths:
        with open_text(path, key) as file:
            ends[path] = np.fromiter(itertools.accumulate(map(len, file)), dtype=np.int64)
    total = sum(len(ends[path]) for path in paths)
    sizes = [max(1, int(total * share)) for share in shares[1:]]
    if total <= sum(sizes):
        raise InputError(
            f"{key}: {', '.join(map(str, paths))}: {total} lines are too few to cut {len(shares)} splits from; "
            "give files for data.valid and data.test"
        )
    parts: list[list[Section]] = [[] for _ in shares]
    borders = np.cumsum([0, total - sum(sizes), *sizes])
    first = 0  # number of the first line of the file
    for path in paths:
        offsets = np.append(0, ends[path])
        last = first + len(ends[path])
        for part, (low, high) in zip(parts, itertools.pairwise(borders.tolist()), strict=True):
            a, b = max(low, first), min(high, last)
            if a < b:
                part.append(Section(path, int(offsets[a - first]), int(offsets[b - first])))
        first = last
    return parts


def existing_folder(folder: Path, contents: str) -> Path:
    """The folder of `data.dir`; InputError if it is none. `contents`: the files that it should hold."""
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.exists() else f"no such folder: {folder}"
        raise InputError(f"data.dir: {problem}; give the folder that holds {contents}")
    return folder


def cache_root(cache: str | None) -> Path:
    """`data.cache`, else $FULLRANK_CACHE, else ~/.cache/fullrank."""
    if cache:
        return Path(cache).expanduser()
    named = os.environ.get("FULLRANK_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "fullrank"


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turn a failed write below `root` into one clear error: RunError if the disk is full, InputError if not allowed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"no space left on the disk of {root}; free some, or set data.cache (or FULLRANK_CACHE) "
                "to a folder on another disk"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG):
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
    """Give a finished folder its name, in one step. If another process was first, its folder stays: both made the same."""
    folder.chmod(0o755)
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def discard(folder: Path) -> None:
    """Take a damaged folder away, in one step."""
    away = folder.parent / f".tmp-{folder.name}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # another process took it away
        folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)
