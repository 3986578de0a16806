"""Work on the pieces of a text: in a process for each core, with a progress bar."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

from fullrank.core.errors import RunError
from fullrank.data.files import Piece, Report
from fullrank.files import silent, usable_cores

Item = TypeVar("Item")
Result = TypeVar("Result")
_PARENT_DIED = 1  # PR_SET_PDEATHSIG of prctl(2)

_work: Callable[[Any], Any]  # of a forked process, which has the memory of its parent: a vocabulary is not copied


def map_in_processes(
    work: Callable[[Item], Result], items: Iterable[Item], *, alone: bool = False
) -> Generator[Result, None, None]:
    """`work` of each item, in order. Few items are under way at a time.

    One process where there is one core or item, with `alone`, or where processes cannot be forked safely.
    """
    cores = len(usable_cores()) if sys.platform == "linux" and not alone else 1
    items = iter(items)
    first = list(islice(items, 2))
    items = chain(first, items)
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
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console, is_off = Console(stderr=True), report is silent or not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=is_off) as bar:
        task = bar.add_task(doing, total=total)
        for piece in pieces:
            yield piece
            bar.update(task, advance=piece.size, refresh=True)
