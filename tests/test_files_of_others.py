"""Files that appear whole, or not at all: whose they are, what killed processes left, and one process at a time."""

import errno
import os
import subprocess

import pytest
from safetensors import SafetensorError

from fullrank.core.errors import InputError
from fullrank.files import no_room, out_of_memory, remove_leftovers, write_own

MARK = "<!-- ours"


@pytest.fixture
def dead():
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize("content", [b"theirs", b" <!-- ours", b"<!-- our", b"\xff\xfe"])
def test_a_file_without_the_mark_stays(content, tmp_path):
    path = tmp_path / "page"
    path.write_bytes(content)
    with pytest.raises(InputError, match="page: exists and is not a page of fullrank"):
        write_own(path, f"{MARK} -->", MARK, "a page")
    assert path.read_bytes() == content


def test_leftovers_of_killed_processes_go_and_no_others(dead, tmp_path):
    gone = [f".run.json.{dead}", f".config.yaml.{dead}", f".model.{dead}.abcd_123", f".out.{99**9}"]
    stay = [f".run.json.{os.getpid()}", ".run.json.1", ".hidden", f"run.json.{dead}", f".run.json.{dead}.old"]
    for name in (*gone, *stay):
        (tmp_path / name).mkdir() if name == gone[2] else (tmp_path / name).write_text("half")
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(stay)


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
