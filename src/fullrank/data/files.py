"""Files: text in pieces of a megabyte, work on them in processes, and cache folders that appear whole or not at all.

`key` names the configuration key in errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from fullrank.core.errors import InputError, RunError
from fullrank.files import no_room, silent, text_of, usable_cores

Report = Callable[[str], None]  # hears of every step, a line at a time
Item = TypeVar("Item")
Result = TypeVar("Result")
_PIECE = 1 << 20
_LONGEST_LINE = 16 << 20  # a longer line is cut
_PARENT_DIED = 1  # PR_SET_PDEATHSIG of prctl(2)


def open_text(path: Path, key: str) -> BufferedReader:
    """The file, open for reading; InputError if it is missing, a folder or empty."""
    if not path.is_file():
        problem = "a folder or a device, no file" if path.exists() else "no such file"
        raise InputError(f"{key}: {problem}: {path}")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be read ({error.strerror})") from error
    if path.stat().st_size == 0:
        file.close()
        raise InputError(f"{key}: {path} is empty")
    return file


def file_digest(path: Path, key: str) -> str:
    """sha256 of a file; errors as in `open_text`."""
    with open_text(path, key) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lines(path: Path, key: str, start: int = 0, end: int | None = None) -> Iterator[str]:
    """Lines of a text file, or of its bytes [start, end), without their ends. InputError for text that is not UTF-8.

    Only a newline ends a line: a carriage return becomes white space, so that line k of one file stays the translation of
    line k of another.
    """
    offset = start
    with open_text(path, key) as file:
        file.seek(start)
        for number, line in enumerate(file, start=1):
            if end is not None and offset >= end:
                break
            text = text_of(line, f"{key}: {path}", offset, line=0 if start else number)
            offset += len(line)
            yield text.removesuffix("\n").replace("\n", " ")


def count_lines(path: Path, key: str) -> int:
    """Lines of a file; one without an end at the end of the file counts."""
    count, block = 0, b""
    with open_text(path, key) as file:
        while more := file.read(_PIECE):
            block = more
            count += block.count(b"\n")
    return count + (not block.endswith(b"\n"))


@dataclass(frozen=True)
class Section:
    """A file, or the bytes [start, end) of it."""

    path: Path
    start: int = 0
    end: int | None = None

    @property
    def size(self) -> int:
        """Bytes of it."""
        end = self.path.stat().st_size if self.end is None else self.end
        return end - self.start


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
        start, end = section.start, section.start + section.size
        if not exact:
            start, end = _find_character(file, start), _find_character(file, end)
        file.seek(start)
        begins = True
        while start < end:
            data = file.read(min(_PIECE, end - start))
            if not data:
                raise InputError(f"{key}: {section.path} became shorter while it was read")
            if not data.endswith(b"\n"):
                data += file.readline(min(_LONGEST_LINE, end - start - len(data)))
            if start + len(data) < end and not data.endswith(b"\n"):
                data = data[: _find_cut(data)]
                file.seek(start + len(data))
            if exact:
                text = data.decode("utf-8", "surrogateescape")
            else:
                text = text_of(data, f"{key}: {section.path}", start, hint=", or use data.tokens=byte")
            start += len(data)
            yield Piece(text, len(data), begins, start >= end and not text.endswith("\n"))
            begins = text.endswith("\n")


def _find_character(file: BufferedReader, offset: int) -> int:
    """The offset at which the next character begins: at most three bytes further on."""
    file.seek(offset)
    while (byte := file.read(1)) and _continues(byte[0]):
        offset += 1
    return offset


def _continues(byte: int) -> bool:
    """The second, third or fourth byte of a UTF-8 character."""
    return byte & 0xC0 == 0x80


def _find_cut(data: bytes) -> int:
    """The end of a piece of a very long line: before its last space, else between characters."""
    cut = data.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(data) - 1
    while cut > 1 and _continues(data[cut]):
        cut -= 1
    return cut


def cut_by_lines(
    paths: Sequence[Path], shares: Sequence[float], key: str, most: int | None = None
) -> list[list[Section]]:
    """The lines of files, in order, as consecutive parts: all but the first hold `shares[1:]` of the lines, at least one.

    most: lines of such a part. Raises InputError if there are too few lines for every part to have one.
    """
    counts = [count_lines(path, key) for path in paths]
    total = sum(counts)
    sizes = [max(1, min(int(total * share), most or total)) for share in shares[1:]]
    if total <= sum(sizes):
        raise InputError(
            f"{key}: {', '.join(map(str, paths))}: {total} lines are too few to cut {len(shares)} splits from; "
            "give files for data.valid and data.test"
        )
    borders = [0, *itertools.accumulate(sizes, initial=total - sum(sizes))]
    sections: list[list[Section]] = [[] for _ in shares]
    first = 0  # number of the first line of the file
    for path, count in zip(paths, counts, strict=True):
        for part, (low, high) in zip(sections, itertools.pairwise(borders), strict=True):
            start, end = max(low - first, 0), min(high - first, count)
            if start < end:
                part.append(Section(path, _find_line(path, start), _find_line(path, end)))
        first += count
    return sections


def _find_line(path: Path, number: int) -> int:
    """The byte offset at which line `number` of a file begins, counted from 0."""
    with path.open("rb") as file:
        return sum(map(len, itertools.islice(file, number)))


# work on the pieces of a text: in a process for each core, with a progress bar

_work: Callable[[Any], Any]  # of a forked process, which has the memory of its parent: a vocabulary is not copied


def map_in_processes(
    work: Callable[[Item], Result], items: Iterable[Item], *, alone: bool = False
) -> Generator[Result, None, None]:
    """`work` of each item, in order. Few items are under way at a time.

    One process where there is one core or item, with `alone`, or where processes cannot be forked safely.
    """
    cores = len(usable_cores()) if sys.platform == "linux" and not alone else 1
    items = iter(items)
    first = list(itertools.islice(items, 2))
    items = itertools.chain(first, items)
    if cores < 2 or len(first) < 2:
        yield from map(work, items)
        return
    waiting = deque[Future[Result]]()
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(cores, fork, initializer=_begin, initargs=(work,)) as pool:
            for item in items:
                with warnings.catch_warnings():  # of threads of PyTorch, of which the new processes use nothing
                    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                    waiting.append(pool.submit(_do, item))
                if len(waiting) > 2 * cores:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RunError(
            "a process that was making token ids was killed (by the system, for want of memory?); on fewer cores (taskset) "
            "the same command needs less memory"
        ) from error


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)  # not to outlive that process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of that library do not come along


def _do(item: Any) -> Any:
    return _work(item)


def show_progress(pieces: Iterable[Piece], doing: str, total: int, report: Report) -> Iterator[Piece]:
    """The pieces of `total` bytes, one by one, with a bar where stderr is a terminal."""
    if report is silent or not sys.stderr.isatty():
        yield from pieces
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(doing, total=total)
        for piece in pieces:
            yield piece
            bar.update(task, advance=piece.size, refresh=True)


# folders


def check_folder(folder: Path, contents: str) -> Path:
    """The folder of `data.dir`; InputError if it is none. `contents`: the files that it should hold."""
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.exists() else f"no such folder: {folder}"
        raise InputError(f"data.dir: {problem}; give the folder that holds {contents}")
    return folder


def cache_root(cache: str | None) -> Path:
    """`data.cache`, else $FULLRANK_CACHE, else ~/.cache/fullrank."""
    root = cache or os.environ.get("FULLRANK_CACHE") or "~/.cache/fullrank"
    return Path(root).expanduser()


@contextmanager
def create_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `final` at the end. If another process was first, its folder stays.

    Raises RunError if the disk is full, InputError if the cache cannot be written.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".new-", dir=final.parent, ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary) / final.name
            folder.mkdir()
            yield folder
            with contextlib.suppress(FileExistsError):
                if not final.exists():
                    folder.rename(final)
    except OSError as error:
        remedy = "set data.cache (or FULLRANK_CACHE) to a folder"
        if no_room(error):
            message = f"no space left on the disk of {final.parent}; free some, or {remedy} on another disk"
            raise RunError(message) from error
        message = f"data.cache: cannot write to {final.parent} ({error.strerror}); {remedy} of yours"
        raise InputError(message) from error
