"""Lines from whatever gives bytes, in any pieces, with any pauses."""

from __future__ import annotations

import io
import queue
import random

import pytest

from fullrank.cli.translate import buffers
from fullrank.core.errors import InputError, RunError

TEXT = ["erste Zeile", "", "äöü €  \U0001f600", "a\x0bb\x85c\u2028d", "\x00", "x" * 200_000, " ", "letzte"]


class Pieces(io.RawIOBase):
    """A stream that gives these pieces, one a call; an exception is raised."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = [*pieces]

    def readable(self) -> bool:
        return True

    def next_piece(self) -> bytes | Exception:
        return self.pieces.pop(0) if self.pieces else b""

    def readinto(self, buffer: bytearray) -> int:
        piece = self.next_piece()
        if isinstance(piece, Exception):
            raise piece
        now, later = piece[: len(buffer)], piece[len(buffer) :]
        if later:
            self.pieces.insert(0, later)
        buffer[: len(now)] = now
        return len(now)


class Arriving(Pieces):
    """A stream that waits for what is put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: queue.Queue[bytes] = queue.Queue()

    def next_piece(self) -> bytes:
        return self.arrived.get(timeout=20)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_are_whole_however_they_come(eager: bool, end: str, last: bool) -> None:
    given = (end.join(TEXT) + end * last).encode()
    parts = list(buffers(io.BytesIO(given), 3, eager))
    assert eager or parts == [TEXT[:3], TEXT[3:6], TEXT[6:]]
    rng = random.Random(1)
    cuts = sorted(rng.sample(range(len(given)), 60))
    pieces = [given[a:b] for a, b in zip([0, *cuts], [*cuts, len(given)], strict=True)]
    assert [line for part in buffers(Pieces(*filter(None, pieces)), 4, eager) for line in part] == TEXT


def test_nothing_and_a_line_end_alone() -> None:
    assert list(buffers(io.BytesIO(b""), 3)) == []
    assert list(buffers(io.BytesIO(b"\n"), 3)) == [[""]]
    assert list(buffers(io.BytesIO(b"a\n\n"), 1)) == [["a"], [""]]
    assert list(buffers(io.BytesIO("\ufeffa\n\ufeffb".encode()), 3)) == [["a", "\ufeffb"]]


def test_where_input_pauses_lines_are_not_kept_waiting() -> None:
    stream = Arriving()
    parts = buffers(stream, 3, eager=True)
    for given, expected in ((b"a\nb\nc", ["a", "b"]), (b"c\n", ["cc"]), (b"1\n2\n3\n4\n", ["1", "2", "3"])):
        stream.arrived.put(given)
        assert next(parts) == expected
    assert next(parts) == ["4"]
    stream.arrived.put(b"end")
    stream.arrived.put(b"")
    assert list(parts) == [["end"]]


@pytest.mark.parametrize("eager", [False, True])
def test_what_is_not_utf8_is_named_after_the_lines_before_it(eager: bool) -> None:
    parts = buffers(io.BytesIO(b"a\nb\nc\nna\xefve\nd\n"), 2, eager)
    assert [next(parts), next(parts)] == [["a", "b"], ["c"]]
    with pytest.raises(InputError, match=r"line 4 has the byte 0xef at offset 8 "):
        next(parts)
    with pytest.raises(InputError, match="not UTF-8 text: line 1 "):
        list(buffers(io.BytesIO("halb é".encode()[:-1]), 2, eager))


def test_a_stream_that_fails_is_a_failed_run() -> None:
    parts = buffers(Pieces(b"a\n", OSError("the disk is gone")), 1)
    assert next(parts) == ["a"]
    with pytest.raises(RunError, match="the disk is gone"):
        next(parts)
