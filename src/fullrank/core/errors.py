"""Errors, by who can mend them.

`InputError`: the user can (exit status 2); its text says what was given, what is allowed and which key to change.
`RunError`: the machine or the run did (exit status 1): no space left, a diverged loss, a damaged checkpoint.
`Interrupted`: somebody stopped it (exit status 130), and it goes on with the same command.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FullRankError(Exception):
    """Base of the errors that `fullrank` raises on purpose. status: that of the command which it ends."""

    status = 1


class InputError(FullRankError, ValueError):
    """Input that cannot be used as given."""

    status = 2


class RangeError(InputError, IndexError):
    """A token id outside of the vocabulary."""


class ConfigError(InputError):
    """A configuration that cannot be used; `problems` lists every fault found, one line each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class RunError(FullRankError, RuntimeError):
    """A run that failed although its input was right."""


class Interrupted(RunError):
    """Training was asked to stop (SIGINT, SIGTERM) and has saved its state: the same command resumes it."""

    status = 130


def suggest(given: str, known: Iterable[str], *, whole: bool = False) -> str:
    """The end of an error message about an unknown name: the names that are near to it, or all.

    Near are those that begin with the name (`mixhead/table1` for its parts), or else the most similar one.
    whole: all of them stand after the nearest one, too.
    """
    known = list(known)
    near = [name for name in known if name.startswith(f"{given}-")]
    near = near or difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    every = f"known: {', '.join(sorted(known))}"
    if not near:
        return every
    return f"did you mean {' or '.join(map(repr, near))}?" + (f" ({every})" if whole else "")


def one_line(error: Exception, most: int = 200) -> str:
    """The message of an error in one line of at most `most` characters."""
    return " ".join(str(error).split())[:most]


def pip_install(extra: str) -> str:
    """The command that installs what an extra of this package brings."""
    return f"pip install 'fullrank[{extra}]' (in a clone: pip install -e '.[{extra}]')"
