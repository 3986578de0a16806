"""The command `fullrank`: parses, calls, prints. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with 0, 2 for bad input, 1 for a failed run, 130 when interrupted.

    `--debug`, anywhere on the line, shows the traceback of an error.
    """
    from fullrank.cli.app import app
    from fullrank.cli.output import explain
    from fullrank.errors import InputError

    words = sys.argv[1:] if argv is None else argv
    debug = "--debug" in words
    try:
        app([word for word in words if word != "--debug"], prog_name="fullrank")
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left: nobody to tell
        sys.exit(0)
    except KeyboardInterrupt:
        print("fullrank: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        print(explain(error), file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
