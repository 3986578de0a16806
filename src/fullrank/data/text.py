"""Reading text files in pieces: a corpus of any size passes through memory a megabyte at a time."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np

from fullrank.core.errors import InputError

_PIECE = 1 << 20
_LONGEST = 16 << 20  # a line longer than this is cut, between characters, even where it has no space


@dataclass(frozen=True)
class Section:
    """A file, or the bytes [start, end) of it."""

    path: Path
    start: int = 0
    end: int | None = None

    def size(self) -> int:
        """Bytes in this section."""
        end = self.path.stat().st_size if self.end is None else self.end
        return end - self.start


def open_text(path: Path, key: str) -> BufferedReader:
    """The file, open for reading; InputError (naming the configuration `key`) if it is missing, a folder or empty."""
    if path.is_dir():
        raise InputError(f"{key}: {path} is a folder; a text file is wanted")
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise InputError(f"{key}: no such file: {path}") from None
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be read ({error.strerror})") from error
    if not file.read(1):
        file.close()
        raise InputError(f"{key}: {path} is empty")
    file.seek(0)
    return file


def file_digest(path: Path, key: str) -> str:
    """sha256 of a file; errors as in `open_text`."""
    with open_text(path, key) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _continues(byte: int) -> bool:
    """Whether a byte is the second, third or fourth of a UTF-8 character."""
    return byte & 0xC0 == 0x80


def _cut(block: bytes) -> int:
    """Where `block` may end: after its last newline, else before its last space, else nowhere (0)."""
    at = block.rfind(b"\n") + 1
    if at:
        return at
    at = block.rfind(b" ")
    if at > 0:
        return at
    if len(block) < _LONGEST:
        return 0
    at = len(block)
    while at > len(block) - 4 and _continues(block[at - 1]):
        at -= 1
    return max(at - 1, 0)


def _aligned(file: BufferedReader, section: Section) -> tuple[int, int]:
    """Start and end of the section, moved forward to where characters begin."""
    size = section.path.stat().st_size
    ends = []
    for place in (section.start, size if section.end is None else min(section.end, size)):
        if 0 < place < size:
            file.seek(place)
            after = file.read(3)
            place += next((i for i, byte in enumerate(after) if not _continues(byte)), len(after))
        ends.append(place)
    return ends[0], ends[1]


def pieces(section: Section, *, exact: bool, key: str = "data.train") -> Iterator[str]:
    """The text of a section, in pieces that end after a newline (or, in very long lines, before a space).

    `exact`: any bytes are accepted, and those that are not UTF-8 become lone surrogates ("surrogateescape"); otherwise
    they are an InputError with file and byte offset, a byte-order mark at the beginning is left out, and a section that
    begins or ends inside a character is moved to the next one.
    """
    with open_text(section.path, key) as file:
        if exact:
            start, end = section.start, section.start + section.size()
        else:
            start, end = _aligned(file, section)
        if not exact and start == 0 and file.read(3) == b"\xef\xbb\xbf":
            start = 3
        file.seek(start)
        carry = b""
        offset = start  # of the first byte of `carry`
        left = end - start
        while left > 0 or carry:
            more = file.read(min(left, max(_PIECE, len(carry))))
            if not more:
                left = 0
            left -= len(more)
            block = carry + more
            at = _cut(block) if left > 0 else len(block)
            if at:
                yield _decoded(block[:at], exact, section.path, offset, key)
                offset += at
            carry = block[at:]


def _decoded(block: bytes, exact: bool, path: Path, offset: int, key: str) -> str:
    try:
        return block.decode("utf-8", "surrogateescape" if exact else "strict")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{key}: {path} is not UTF-8 text: byte 0x{block[error.start]:02x} at offset {offset + error.start:,} "
            "(convert the file to UTF-8, or use data.tokens=byte)"
        ) from None


def line_ends(path: Path, key: str) -> np.ndarray:
    """Byte offsets at which the lines of a file end (after the newline; the end of the file for a last line without one)."""
    found = []
    with open_text(path, key) as file:
        offset = 0
        while block := file.read(_PIECE):
            found.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + offset + 1)
            offset += len(block)
    ends = np.concatenate(found)
    return ends if len(ends) and ends[-1] == offset else np.append(ends, offset)


def cut_by_lines(paths: Sequence[Path], shares: Sequence[float], key: str) -> list[list[Section]]:
    """The lines of files, in order, as consecutive parts: all but the first hold `shares[1:]` of the lines, at least one.

    Raises InputError if there are too few lines for every part to have one.
    """
    ends = {path: line_ends(path, key) for path in paths}
    total = sum(len(e) for e in ends.values())
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
        offsets = np.concatenate([[0], ends[path]])
        last = first + len(ends[path])
        for part, (low, high) in enumerate(itertools.pairwise(borders)):
            a, b = max(int(low), first), min(int(high), last)
            if a < b:
                parts[part].append(Section(path, int(offsets[a - first]), int(offsets[b - first])))
        first = last
    return parts
