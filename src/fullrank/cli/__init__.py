"""The command `fullrank`: parses, calls, prints. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import os
import shlex
import sys
from io import TextIOWrapper
from typing import NoReturn

_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with 0, 2 for bad input, 1 for a failed run, 130 when interrupted.

    `--debug`, anywhere on the line, shows the traceback of an error.
    """
    words = sys.argv[1:] if argv is None else argv
    if argv is None:
        os.environ["PYTHONSAFEPATH"] = (
            "1"  # processes that libraries start import nothing from the working directory either
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a pipe of Windows has an encoding without most of our characters
            stream.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="backslashreplace")
    try:
        from fullrank.cli.app import load

        status = load()([word for word in words if word != "--debug"], prog_name="fullrank", standalone_mode=False)
        sys.stdout.flush()  # while an error can still be told
        sys.exit(status)
    except KeyboardInterrupt:
        _interrupt()
    except SystemExit as stopped:
        if isinstance(stopped.__context__, BrokenPipeError):  # told by Rich or Typer, with status 1
            _end_unread()
        if stopped.code == _INTERRUPTED:  # Typer returns it for a verb that Ctrl-C stopped, and says nothing
            _interrupt()
        raise
    except BrokenPipeError:
        _end_unread()
    except Exception as error:
        if "--debug" in words:
            raise
        sys.exit(_tell(error, words))


def _tell(error: Exception, words: list[str]) -> int:
    """Print an error; its exit status."""
    from fullrank.cli.output import UsageError, clear_progress, explain
    from fullrank.core.errors import Interrupted

    clear_progress()
    print(explain(error), file=sys.stderr)
    if isinstance(error, Interrupted) and "TORCHELASTIC_RUN_ID" not in os.environ:  # else who started it says so
        print(f"fullrank: to go on: {shlex.join(['fullrank', *words])}", file=sys.stderr)
    if isinstance(error, OSError):  # a full disk: Python would try to print what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 2 if isinstance(error, UsageError) else getattr(error, "status", 1)


def _end_unread() -> NoReturn:
    """End where nobody reads the output any more (`| head`): what is left of it goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _interrupt() -> NoReturn:
    print("fullrank: interrupted", file=sys.stderr)
    sys.exit(_INTERRUPTED)
