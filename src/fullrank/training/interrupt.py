"""Signals that ask for an end, and the lock that keeps a run folder to one process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fullrank.core.errors import RunError


class StopRequest:
    """Whether SIGINT or SIGTERM came, and which."""

    def __init__(self) -> None:
        self.signal: str | None = None


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Inside the block the first SIGINT or SIGTERM is a request to end after the step; the second acts as usual.

    Signals reach the main thread only: in any other, nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    former: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number).name
        restore()

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        former[number] = signal.SIG_DFL if handler is None else handler
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()


_lent: dict[Path, bool] = {}  # folders locked by this process for a training to come; whether it has come


@contextmanager
def only_one(folder: Path, *, lend: bool = False) -> Iterator[None]:
    """RunError if another process trains in `folder`; the lock goes with the process, however it ends.

    `lend`: held for what comes before and after a training; the one training inside the block takes it over.
    """
    place = folder.resolve()
    if _lent.get(place) is False:
        _lent[place] = True
        try:
            yield
        finally:
            _lent[place] = False
        return
    with _locked(folder):
        if lend:
            _lent[place] = False
        try:
            yield
        finally:
            _lent.pop(place, None)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "wb")  # noqa: SIM115 - held until the end of the block
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another folder with --out") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{folder}: another process is training there; wait for it, or choose another --out"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
