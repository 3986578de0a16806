"""Files of sentence pairs, and their lines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank.core.errors import InputError
from fullrank.data.files import lines, number_of_lines

SIDES = ("source", "target")
_GLUE = re.compile("@@( |$)")

# the lines of a file; the second argument is the configuration key that errors name
Reader = Callable[[Path, str], Iterator[str]]


def whole_words(path: Path, key: str) -> Iterator[str]:
    """Lines of a file that BPE has split, with the marks `@@` taken out."""
    return (_GLUE.sub("", line) for line in lines(path, key))


@dataclass(frozen=True)
class SplitFiles:
    """Files of a split; several of a side are read one after another. `tokenized`: with the Moses rules already."""

    source: Sequence[Path]
    target: Sequence[Path]
    reader: Reader = lines
    tokenized: bool = False

    def sides(self) -> tuple[Sequence[Path], Sequence[Path]]:
        return self.source, self.target

    def pairs(self, key: str) -> Iterator[tuple[str, str]]:
        """The lines of both sides, side by side."""
        source, target = (
            itertools.chain.from_iterable(self.reader(path, key) for path in paths) for paths in self.sides()
        )
        return zip(source, target, strict=True)

    def check(self, key: str) -> None:
        """InputError if the two sides have different numbers of lines, or none."""
        m, n = (sum(self._count(path, key) for path in paths) for paths in self.sides())
        if m != n:
            source, target = (" + ".join(map(str, paths)) for paths in self.sides())
            raise InputError(
                f"{key}: {source} has {m:,} lines and {target} has {n:,}; line k of the one must be the translation of "
                "line k of the other (where there is none, an empty line)"
            )

    def _count(self, path: Path, key: str) -> int:
        return number_of_lines(path, key) if self.reader is lines else sum(1 for _ in self.reader(path, key))


@dataclass(frozen=True)
class PairFiles:
    """The files of each split. `codes`: BPE merges that go with them. `valid_every`: each so many-th training pair that
    cleaning keeps belongs to the validation split instead, which then has no files."""

    splits: Mapping[str, SplitFiles]
    languages: tuple[str, str]  # source, target
    codes: Path | None = None
    valid_every: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Of the splits, in order."""
        found = list(self.splits)
        return [found[0], "valid", *found[1:]] if self.valid_every else found
