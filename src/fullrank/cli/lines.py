"""Lines from a file, a pipe or a terminal, as many at a time as there are."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from fullrank.core.errors import InputError, RunError

PAUSE = 0.1  # seconds without input, after which lines at hand are not kept waiting
_CHUNK = 1 << 16
_MARK = b"\xef\xbb\xbf"  # of UTF-8, as some editors begin a file


class Readable(Protocol):
    """Bytes, as many as have arrived and at most `size`; none at the end. Unbuffered, or a reader would wait for more."""

    def read(self, size: int, /) -> bytes | None: ...


def buffers(stream: Readable, size: int, pause: float | None) -> Iterator[list[str]]:
    """The lines of a stream of UTF-8, without line ends, in lists of `size`: fewer at the end, and where input pauses.

    pause: seconds to wait for more; None: as long as it takes, so that only the end makes a shorter list.
    Only a line feed (after a carriage return or not) ends a line. Raises InputError that names the first line that is not
    UTF-8, after those before it.
    """
    lines: list[str] = []
    number = 0
    for line in _split(_directly(stream) if pause is None else _in_background(stream, pause)):
        if line is not None:
            number += 1
            try:
                lines.append(_decoded(line, number))
            except InputError:
                if lines:
                    yield lines
                raise
        if lines and (line is None or len(lines) == size):
            yield lines
            lines = []
    if lines:
        yield lines


def _split(receive: Callable[[bool], bytes | None]) -> Iterator[bytes | None]:
    """Lines of what is received, and None where it pauses."""
    begun: list[bytes] = []  # of a line whose end has not come
    waited = True
    while True:
        chunk = receive(waited)  # nobody waits for a second pause
        waited = chunk is None
        if chunk is None:
            yield None
            continue
        if not chunk:
            break
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            yield b"".join([*begun, part])
            begun = []
        begun.append(rest)
    if last := b"".join(begun):
        yield last


def _decoded(line: bytes, number: int) -> str:
    if number == 1:
        line = line.removeprefix(_MARK)
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"line {number}: not UTF-8 (byte 0x{line[error.start]:02x} at place {error.start + 1}); convert the text, for "
            "instance with `iconv -f latin1 -t utf-8`"
        ) from error


def _directly(stream: Readable) -> Callable[[bool], bytes | None]:
    return lambda patient: stream.read(_CHUNK) or b""


def _in_background(stream: Readable, pause: float) -> Callable[[bool], bytes | None]:
    """What is read next; None if nothing has come for `pause` seconds and the call is not patient."""
    arrived: queue.Queue[bytes | Exception] = queue.Queue(maxsize=16)  # a fast writer waits for the translations

    def read() -> None:
        try:
            while chunk := stream.read(_CHUNK):
                arrived.put(chunk)
            arrived.put(b"")
        except Exception as error:  # it belongs to whoever waits for the lines
            arrived.put(error)

    # a daemon: it may be waiting for input when the command ends
    threading.Thread(target=read, daemon=True, name="lines").start()

    def receive(patient: bool) -> bytes | None:
        try:
            found = arrived.get(timeout=None if patient else pause)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise RunError(f"the input cannot be read: {found}") from found
        return found

    return receive
