"""Work on the parts of a text: in one process for each core, with a progress bar, kept as it is finished.

A finished part leaves a record in the folder of the corpus, last of its files, so that a preparation that was killed goes on
with those that are left.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fullrank.core.errors import Interrupted
from fullrank.data.files import Part, Report
from fullrank.files import read_checked, silent, usable_cores, write_checked

Item = TypeVar("Item")
Result = TypeVar("Result")
PREFIX = "part-"  # of the names of all files of parts
_LINES_EVERY = 10.0  # seconds between two lines of progress where there is no bar
_PARENT_DIED = 1  # PR_SET_PDEATHSIG of prctl(2)

Counts = dict[str, Any]  # of a part; `tokens` among them
_Task = tuple[Part, Path, int | None]
Work = Callable[[Part, Path, int | None], Counts]  # reads a part, at most so many tokens of it, and writes that file


def finished(
    work: Work, parts: Sequence[Part], folder: Path, name: str, doing: str, report: Report, *, limit: int | None = None
) -> list[tuple[Path, Counts]]:
    """Do `work` on every part; for each the file that it wrote into `folder`, and its counts, in order.

    `name`: part of the names of these files. `limit`: the most tokens of all parts together; parts behind these are left out.
    """
    tasks: list[_Task] = [
        (part, folder / f"{PREFIX}{name}-{number}-{part.cuts[0]}-{part.cuts[-1]}", limit)
        for number, part in enumerate(parts)
    ]
    known = {task: counts for task in tasks if (counts := _recorded(task)) is not None}
    if known:
        report(f"{doing}: {len(known)} of {len(tasks)} parts were done before")
    new = [task for task in tasks if task not in known]
    done: list[tuple[Path, Counts]] = []
    left = limit
    with (
        progress(doing, sum(part.bytes for part in parts), report) as advance,
        closing(in_processes(partial(_recording, work), new, len(new))) as fresh,
    ):
        for task in tasks:
            part, target, _ = task
            counts = known.get(task) or next(fresh)
            if left is not None and counts["tokens"] > left:
                counts = _recording(work, (part, target, left))
            done.append((target, counts))
            advance(part.bytes)
            if left is not None:
                left -= counts["tokens"]
                if left == 0:
                    break
    return done


def _recorded(task: _Task) -> Counts | None:
    try:
        counts: Counts = read_checked(_record_of(task))["counts"]
    except (OSError, ValueError, KeyError):
        return None
    return counts


def _recording(work: Work, task: _Task) -> Counts:
    counts = work(*task)
    with task[1].open("rb+") as file:
        os.fsync(file.fileno())  # after a power failure, too, a record is of a whole file
    write_checked(_record_of(task), {"counts": counts})
    return counts


def _record_of(task: _Task) -> Path:
    return task[1].with_name(f"{task[1].name}.json")


# -- processes ---------------------------------------------------------------------------------------------------------

_work: Callable[[Any], Any]  # of a process that was forked: it comes with its memory, a vocabulary is not copied


def in_processes(
    work: Callable[[Item], Result], items: Iterable[Item], most: int | None = None
) -> Generator[Result, None, None]:
    """`work` of each item, in order; `most`: how many items there are. Few of them are under way at a time.

    One process where there is one core or item, or processes cannot be forked safely.
    """
    cores = len(usable_cores()) if sys.platform == "linux" else 1
    count = cores if most is None else min(cores, most)
    if count < 2 or multiprocessing.current_process().daemon:
        yield from map(work, items)
        return
    context, waiting = multiprocessing.get_context("fork"), deque[Future[Result]]()
    try:
        with ProcessPoolExecutor(count, context, initializer=_begin, initargs=(work, os.getpid())) as pool:
            try:
                for item in items:
                    with warnings.catch_warnings():  # of threads of PyTorch, of which the new processes use nothing
                        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                        waiting.append(pool.submit(_do, item))
                    if len(waiting) > 2 * count:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
    except BrokenProcessPool as error:
        stopped = Interrupted(
            "a process that was making token ids was killed (by the system, for want of memory?); the same command goes on "
            "with the parts that are left, on fewer cores (taskset) it needs less memory"
        )
        stopped.status = 1  # nobody asked for it
        raise stopped from error


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)  # not to outlive that process, however it ends
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of that library do not come along


def _do(item: Any) -> Any:
    return _work(item)


# -- progress ----------------------------------------------------------------------------------------------------------


@contextmanager
def progress(doing: str, total: int, report: Report) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes that were read: a bar where stderr is a terminal, else a line now and then."""
    if report is not silent and sys.stderr.isatty() and total > 0:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
            task = bar.add_task(doing, total=total)
            yield lambda size: bar.update(task, advance=size, refresh=True)
        return
    read, said = 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal read, said
        read += size
        if time.monotonic() - said >= _LINES_EVERY and read < total:
            said = time.monotonic()
            report(f"{doing}: {read / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    yield advance
