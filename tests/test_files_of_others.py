"""Files that appear whole, or not at all: whose they are, and why they cannot be written."""

import errno

import pytest
from safetensors import SafetensorError

from fullrank.core.errors import InputError
from fullrank.files import no_room, out_of_memory, write_own

MARK = "<!-- ours"


@pytest.mark.parametrize("content", [b"theirs", b" <!-- ours", b"<!-- our", b"\xff\xfe"])
def test_a_file_without_the_mark_stays(content, tmp_path):
    path = tmp_path / "page"
    path.write_bytes(content)
    with pytest.raises(InputError, match="page: exists and is not a page of fullrank"):
        write_own(path, f"{MARK} -->", MARK, "a page")
    assert path.read_bytes() == content


FULL, WANT, OTHER = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "x"), FULL),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), FULL),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), WANT),
        (MemoryError(), WANT),
        (OSError(errno.EACCES, "x"), OTHER),
        (ValueError("28"), OTHER),
    ],
)
def test_a_full_disk_and_want_of_memory_are_known_whoever_says_it(error, expected):
    assert (no_room(error), out_of_memory(error)) == expected
