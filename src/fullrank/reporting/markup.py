"""HTML from small functions. Text is escaped unless it is `Html`, and only these functions make `Html`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from fullrank.reporting.svg import SLOTS, clean

_VOID = {"meta", "input", "br", "hr"}


class Html(str):
    """Markup that is safe to place in a page as it stands."""

    __slots__ = ()


def el(tag: str, *children: str, cls: str = "", attrs: Mapping[str, str] | None = None) -> Html:
    """An element. Children that are plain text are escaped, attribute values always are."""
    given = ({"class": cls} if cls else {}) | dict(attrs or {})
    opening = "".join(f' {name}="{html.escape(clean(value))}"' for name, value in given.items())
    if tag in _VOID:
        return Html(f"<{tag}{opening}>")
    return Html(f"<{tag}{opening}>{join(children)}</{tag}>")


def join(parts: Iterable[str]) -> Html:
    """Parts one after another, plain text escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(clean(part)) for part in parts))


def preformatted(text: str) -> Html:
    """Several lines of code as they stand."""
    escaped = "\n".join(html.escape(clean(line)) for line in text.splitlines())
    return Html(f'<pre tabindex="0"><code>{escaped}</code></pre>')


def th(*children: str, scope: str = "col", cls: str = "", span: int = 1) -> Html:
    """A header cell of a column or row (or of a group of columns)."""
    attrs = {"scope": scope} | ({"colspan": str(span)} if span > 1 else {})
    return el("th", *children, cls=cls, attrs=attrs)


def td(*children: str, cls: str = "") -> Html:
    """A cell."""
    return el("td", *children, cls=cls)


def table(
    head: Sequence[Sequence[Html]],
    body: Sequence[Sequence[Html]],
    *,
    caption: str,
    foot: Sequence[Sequence[Html]] = (),
    cls: str = "",
) -> Html:
    """A table that scrolls sideways in a box of its own where the page is narrow."""

    def rows(cells: Sequence[Sequence[Html]]) -> Html:
        return join(el("tr", *row) for row in cells)

    parts = [el("caption", caption), el("thead", rows(head)), el("tbody", rows(body))]
    if foot:
        parts.append(el("tfoot", rows(foot)))
    box = {"role": "region", "tabindex": "0", "aria-label": caption}
    return el("div", el("table", *parts, cls=cls), cls="scroll", attrs=box)


def details(summary: str, *children: str, cls: str = "") -> Html:
    """A part that is closed until it is asked for."""
    return el("details", el("summary", summary), *children, cls=cls)


def section(identity: str, heading: str, *children: str) -> Html:
    """A section with its heading; nothing if it has no content."""
    content = join(children)
    if not content:
        return Html("")
    return el("section", el("h2", heading, attrs={"id": f"{identity}-heading"}), content,
              attrs={"id": identity, "aria-labelledby": f"{identity}-heading"})  # fmt: skip


def swatch(slot: int, dashed: bool = False) -> Html:
    """The colour of a row as in the figures, for the eye only."""
    style = {"style": f"--colour:var(--series-{slot % SLOTS})", "aria-hidden": "true"}
    return el("span", cls="swatch dashed" if dashed or slot >= SLOTS else "swatch", attrs=style)
