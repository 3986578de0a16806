"""Blocks of a page. The terminal and the HTML page render the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Cell:
    """A cell of a grid: its text, lines below it, a badge behind it, a colour slot in front of it."""

    text: str
    lines: tuple[str, ...] = ()
    strong: bool = False
    badge: str = ""
    slot: int | None = None


@dataclass(frozen=True)
class Heading:
    """The heading of a column. `left`: it holds text, not numbers. `page_only`: the terminal leaves it out."""

    text: str
    line: str = ""
    left: bool = False
    group: str = ""
    page_only: bool = False


@dataclass(frozen=True)
class Grid:
    headings: Sequence[Heading]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Headings above columns, with the number of neighbouring columns that share each; empty if there are none."""
        spans = [(name, len(list(shared))) for name, shared in groupby(self.headings, key=lambda one: one.group)]
        return spans if any(name for name, _ in spans) else []


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text. kind: `lead` (large), `note` (small), `warning`. short: what the terminal prints in its place."""

    text: str
    kind: str = "lead"
    short: str = ""


@dataclass(frozen=True)
class Figure:
    """A drawing: SVG text with a title and a description. The terminal leaves it out."""

    svg: str
    title: str
    subtitle: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Code:
    """Lines of commands or configuration, with a caption."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Facts:
    """Pairs of a term and its description. kind: `rows`, `tiles` (large numbers), `samples` (text as it is)."""

    items: Sequence[tuple[str, str]]
    kind: str = "rows"


@dataclass(frozen=True)
class Legend:
    """Names of series by their colour slot."""

    names: Sequence[tuple[int, str]]


@dataclass(frozen=True)
class Group:
    """Blocks that stand beside each other where there is room."""

    blocks: Sequence[Block]


@dataclass(frozen=True)
class Details:
    """Blocks that a reader has to open. The terminal leaves them out."""

    title: str
    blocks: Sequence[Block]


Block = Paragraph | Grid | Figure | Code | Facts | Legend | Group | Details


@dataclass(frozen=True)
class Section:
    """A section of a page. name: its address. page_only: the terminal leaves it out."""

    title: str
    blocks: Sequence[Block]
    name: str = ""
    badge: str = ""
    badge_kind: str = ""
    page_only: bool = False


@dataclass(frozen=True)
class Page:
    """A page: its headline says the result in one sentence."""

    title: str
    subtitle: str
    headline: str
    summary: Sequence[Block] = ()
    sections: Sequence[Section] = ()
