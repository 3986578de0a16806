"""Lines from whatever gives bytes, in any pieces."""

from __future__ import annotations

import io
import random

import pytest

from fullrank.cli.use import read_lines
from fullrank.core.errors import InputError

TEXT = ["erste Zeile", "", "äöü €  \U0001f600", "a\x0bb\x85c\u2028d", "\x00", "x" * 200_000, " ", "letzte"]


class Pieces(io.RawIOBase):
    """A stream that gives these pieces, one a call."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = [*pieces]

    def read(self, size: int = -1) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_are_whole_however_they_come(end: str, last: bool) -> None:
    content = (end.join(TEXT) + end * last).encode()
    draw = random.Random(1)
    cuts = sorted(draw.sample(range(len(content)), 60))
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    for stream in (io.BytesIO(content), Pieces(*pieces)):
        assert [line for lines in read_lines(stream) for line in lines] == TEXT


def test_lines_arrive_as_they_come_and_what_is_not_utf8_is_named() -> None:
    parts = read_lines(Pieces(b"one\ntwo\nthr", b"ee\n", b"\xff\n"))
    assert [next(parts), next(parts)] == [["one", "two"], ["three"]]
    with pytest.raises(InputError, match="line 4 has the byte 0xff"):
        next(parts)
