"""The command `fullrank`: parses, calls, prints. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from typing import NoReturn

_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with 0, 2 for bad input, 1 for a failed run, 130 when interrupted.

    `--debug`, anywhere on the line, shows the traceback of an error.
    """
    words = sys.argv[1:] if argv is None else argv
    if argv is None:
        os.environ["PYTHONSAFEPATH"] = (
            "1"  # helpers that libraries start import nothing from the working directory either
        )
    debug = "--debug" in words
    if sys.platform == "win32":  # a pipe there has an encoding without most of our characters
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8")
    try:
        from fullrank.cli.app import load

        sys.exit(load()([word for word in words if word != "--debug"], prog_name="fullrank", standalone_mode=False))
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left: nobody to tell
        sys.exit(0)
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as stopped:
        if stopped.code == _INTERRUPTED:  # Typer returns it for a verb that Ctrl-C stopped, and says nothing
            _interrupted()
        raise
    except Exception as error:
        from fullrank.cli.output import UsageError, explain
        from fullrank.core.errors import InputError, Interrupted

        if debug:
            raise
        print(explain(error), file=sys.stderr)
        if isinstance(error, Interrupted) and "TORCHELASTIC_RUN_ID" not in os.environ:  # else who started it says so
            print(f"fullrank: to go on: {shlex.join(['fullrank', *words])}", file=sys.stderr)
        wrong_name = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
        sys.exit(2 if wrong_name or isinstance(error, (InputError, UsageError)) else 1)


def _interrupted() -> NoReturn:
    print("fullrank: interrupted", file=sys.stderr)
    sys.exit(_INTERRUPTED)
