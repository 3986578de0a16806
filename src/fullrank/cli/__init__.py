"""The command `fullrank`: parses, calls, prints. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import errno
import io
import os
import shlex
import sys
from io import TextIOWrapper
from typing import Any, NoReturn

_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with 0, 2 for bad input, 1 for a failed run, 130 when interrupted.

    `--debug`, anywhere on the line, shows the traceback of an error.
    """
    words = sys.argv[1:] if argv is None else argv
    if argv is None:
        # processes that libraries start import nothing from the working directory either
        os.environ["PYTHONSAFEPATH"] = "1"
        _open_streams()
    debug = "--debug" in words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a pipe of Windows has an encoding without most of our characters
            stream.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="backslashreplace")
    try:
        from fullrank.cli.app import load

        status = load()([word for word in words if word != "--debug"], prog_name="fullrank", standalone_mode=False)
        sys.stdout.flush()  # while an error can still be told
        sys.exit(status)
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as stopped:
        if isinstance(stopped.__context__, BrokenPipeError):  # told by Rich or Typer, with status 1
            _nobody_reads()
        if stopped.code == _INTERRUPTED:  # Typer returns it for a verb that Ctrl-C stopped, and says nothing
            _interrupted()
        raise
    except Exception as error:
        from fullrank.cli.output import UsageError, clear_progress, explain
        from fullrank.core.errors import Interrupted

        if isinstance(error, BrokenPipeError):
            _nobody_reads()
        clear_progress()
        if debug:
            raise
        print(explain(error), file=sys.stderr)
        if isinstance(error, Interrupted) and "TORCHELASTIC_RUN_ID" not in os.environ:  # else who started it says so
            print(f"fullrank: to go on: {shlex.join(['fullrank', *words])}", file=sys.stderr)
        if isinstance(error, OSError):
            _flush_or_drop()
        wrong_name = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
        sys.exit(2 if wrong_name or isinstance(error, UsageError) else getattr(error, "status", 1))


class _Remarks(io.FileIO):
    """Standard error. That nobody reads it any more (`2>&1 | head`), or its disk is full, does not end the work."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _open_streams() -> None:
    """Let every standard stream be open, and standard error never fail.

    A closed one (`>&-`) becomes the null device: else the first file that is opened gets its number, and whatever is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    encoding = getattr(sys.stderr, "encoding", "utf-8")
    raw = io.BufferedWriter(_Remarks(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=True)


def _nobody_reads() -> NoReturn:
    _flush_or_drop()
    sys.exit(0)


def _flush_or_drop() -> None:
    """Print what is left of the output, or let it go nowhere: Python would complain about it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupted() -> NoReturn:
    print("fullrank: interrupted", file=sys.stderr)
    sys.exit(_INTERRUPTED)
