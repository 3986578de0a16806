"""Lines to pieces word by word: a word is split once, however often it stands in a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CACHED = 1 << 20  # words


class WordCache:
    """`pieces_of` splits words; `segment` splits lines with its help."""

    def __init__(self, pieces_of: Callable[[list[str]], list[list[str]]]) -> None:
        self._pieces_of = pieces_of
        self._known: dict[str, list[str]] = {}

    def segment(self, lines: Sequence[str]) -> list[list[str]]:
        """The pieces of each line, those of its words one after another."""
        split, known = [line.split() for line in lines], self._known
        new = dict.fromkeys(word for words in split for word in words if word not in known)
        if len(known) + len(new) > _CACHED:
            known.clear()
            new = dict.fromkeys(word for words in split for word in words)
        known.update(zip(new, self._pieces_of(list(new)), strict=True))
        return [[piece for word in words for piece in known[word]] for words in split]
