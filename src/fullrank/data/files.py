"""Files: text read a megabyte at a time, and cache folders that appear whole or not at all.

`key` names the configuration key in errors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fullrank.core.errors import InputError, RunError
from fullrank.files import no_room, text_of

Report = Callable[[str], None]  # hears of every step, a line at a time
_PIECE = 1 << 20
_LONGEST = 16 << 20  # a longer line is cut, between characters, even where it has no space
_STALE_SECONDS = 24 * 3600
_TEMPORARY = ".tmp-fullrank-"  # of the names of folders that are being made: others are not ours


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
    """Lines of a text file, without their ends. InputError for text that is not UTF-8.

    A newline ends a line, a carriage return only in a file without newlines: in others it is white space, so that line k of
    one file stays the translation of line k of another.
    """
    ending, offset = _line_ending(path, key), 0
    with open_text(path, key) as file:
        for number, line in enumerate(file, start=1):
            text = text_of(line, f"{key}: {path}", offset, line=number).removesuffix("\n")
            offset += len(line)
            yield from text.split("\n") if ending == b"\r" else [text.replace("\n", " ")]


def _line_ending(path: Path, key: str) -> bytes:
    """The byte that ends the lines of a file: a carriage return where it holds no newline, as on the first Macintoshes."""
    return b"\n" if holds(path, b"\n", key) else b"\r"


def holds(path: Path, byte: bytes, key: str) -> bool:
    """True if a file has this byte."""
    with open_text(path, key) as file:
        return any(byte in block for block in iter(lambda: file.read(_PIECE), b""))


def note_returns(paths: Iterable[Path], key: str) -> tuple[str, ...]:
    """A note that names the texts with carriage returns, if any has one."""
    names = [path.name for path in dict.fromkeys(paths) if holds(path, b"\r", key)]
    if not names:
        return ()
    return (f"{', '.join(names[:3])}{' ...' * (len(names) > 3)}: carriage returns (CRLF, CR) are read as newlines",)


def number_of_lines(path: Path, key: str) -> int:
    """Lines of a file; one without an end at the end of the file counts."""
    count, block, ending = 0, b"", _line_ending(path, key)
    with open_text(path, key) as file:
        while more := file.read(_PIECE):
            block = more
            count += block.count(ending)
    return count + (not block.endswith(ending))


def _end_of_line(path: Path, number: int, key: str) -> int:
    """The byte offset at which line `number` of a file ends, counted from 1; 0 for number 0."""
    offset, ending = 0, _line_ending(path, key)
    with open_text(path, key) as file:
        while number > 0 and (block := file.read(_PIECE)):
            ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ending[0])
            offset += int(ends[number - 1]) + 1 if len(ends) >= number else len(block)
            number -= len(ends)
    return offset


@dataclass(frozen=True)
class Section:
    """A file, or the bytes [start, end) of it."""

    path: Path
    start: int = 0
    end: int | None = None


class Piece(NamedTuple):
    """About a megabyte of a text. `size`: its bytes in the file.

    `begins`: it begins at the beginning of a line. `open_end`: it is the end of its section, and no newline ends it.
    """

    text: str
    size: int
    begins: bool
    open_end: bool


def read_pieces(section: Section, *, exact: bool, key: str = "data.train") -> Iterator[Piece]:
    """The text of a section, in pieces that end after a newline (or, in very long lines, before a space).

    `exact`: any bytes are accepted, and those that are not UTF-8 become lone surrogates ("surrogateescape"); otherwise
    the text is as `text_of` gives it, and a section that begins or ends inside a character is moved to the next one.
    """
    with open_text(section.path, key) as file:
        size = section.path.stat().st_size
        start, end = section.start, size if section.end is None else min(section.end, size)
        if not exact:
            start, end = _next_character(file, start), _next_character(file, end)
        file.seek(start)
        left, block, begins = end - start, b"", True
        while left or block:
            fresh = file.read(min(left, max(_PIECE, len(block))))
            if left and not fresh:
                raise InputError(f"{key}: {section.path} became shorter while it was read")
            block, left = block + fresh, left - len(fresh)
            cut = _cut(block) if left else len(block)
            if cut == 0:
                continue
            data, block = block[:cut], block[cut:]
            text = data.decode("utf-8", "surrogateescape") if exact else _decode(data, section.path, start, key)
            yield Piece(text, cut, begins, not (left or block or text.endswith("\n")))
            start, begins = start + cut, text.endswith("\n")


def _decode(data: bytes, path: Path, offset: int, key: str) -> str:
    return text_of(data, f"{key}: {path}", offset, hint=", or use data.tokens=byte")


def _next_character(file: BufferedReader, offset: int) -> int:
    """The offset at which the next character, or the next line end, begins: at most three bytes further on."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    near = file.read(5)
    at = 1
    while at < min(4, len(near)) and _continues(near[at]):
        at += 1
    return offset + at - 1 + (near[at - 1 : at + 1] == b"\r\n")


def _continues(byte: int) -> bool:
    """The second, third or fourth byte of a UTF-8 character."""
    return byte & 0xC0 == 0x80


def _cut(block: bytes) -> int:
    """The end of a piece: after the last newline of the block, else before its last space, else 0: more has to be read."""
    if (cut := block.rfind(b"\n") + 1) > 0 or (cut := block.rfind(b" ")) > 0:
        return cut
    if len(block) < _LONGEST:
        return 0
    cut = len(block) - 1
    while cut > len(block) - 5 and _continues(block[cut]):
        cut -= 1
    return cut


def cut_by_lines(paths: Sequence[Path], shares: Sequence[float], key: str) -> list[list[Section]]:
    """The lines of files, in order, as consecutive parts: all but the first hold `shares[1:]` of the lines, at least one.

    Raises InputError if there are too few lines for every part to have one.
    """
    counts = [number_of_lines(path, key) for path in paths]
    total = sum(counts)
    sizes = [max(1, int(total * share)) for share in shares[1:]]
    if total <= sum(sizes):
        raise InputError(
            f"{key}: {', '.join(map(str, paths))}: {total} lines are too few to cut {len(shares)} splits from; "
            "give files for data.valid and data.test"
        )
    sections: list[list[Section]] = [[] for _ in shares]
    borders = list(itertools.accumulate(sizes, initial=total - sum(sizes)))
    first = 0  # number of the first line of the file
    for path, count in zip(paths, counts, strict=True):
        for some, (low, high) in zip(sections, itertools.pairwise([0, *borders]), strict=True):
            a, b = max(low - first, 0), min(high - first, count)
            if a < b:
                some.append(Section(path, _end_of_line(path, a, key), _end_of_line(path, b, key)))
        first += count
    return sections


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
        if no_room(error):
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
        for old in parent.glob(f"{_TEMPORARY}*"):  # of processes that were killed
            with contextlib.suppress(FileNotFoundError):  # another process took it away
                if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
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
    away = folder.parent / f"{_TEMPORARY}{folder.name}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # another process took it away
        folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)
