"""Matplotlib figures as SVG that lives in a page: colours from the page's CSS, text as text, no ids, no links."""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ET

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Matplotlib draws in these colours, and the page's CSS variable of the same place replaces each:
# one drawing serves the light and the dark page.
_ROLES = {"#010102": "--muted", "#010103": "--line", "#010104": "--surface"}
MUTED, LINE, SURFACE = _ROLES
SLOTS = 8  # colours of the palette; more rows take them again

_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fullrank",
    "svg.id": None,
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 12.0,
    "path.simplify": True,
    "path.simplify_threshold": 0.1,
}
_NUMBER = re.compile(r"-?\d+\.\d+")
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def series_colour(slot: int) -> str:
    """The colour that stands for a place in the palette."""
    return f"#0201{slot % SLOTS:02x}"


def settings() -> dict[str, object]:
    """Matplotlib settings under which a figure has to be made and drawn; the user's own do not count."""
    return {**{key: value for key, value in matplotlib.rcParamsDefault.items() if key not in _INTERACTIVE}, **_SETTINGS}


_INTERACTIVE = {"backend", "backend_fallback", "interactive", "toolbar", "webagg.open_in_browser"}


def clean(text: str) -> str:
    """Text that an XML document can hold."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def to_svg(figure: Figure, alt: str) -> str:
    """The figure as an `<svg>` element with `alt` as its accessible name; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a glyph that the measuring font lacks is drawn by the browser
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    root = ET.fromstring(buffer.getvalue())
    view = root.get("viewBox", "0 0 1 1")
    root.attrib.clear()
    root.attrib.update({"viewBox": _rounded(view), "role": "img", "aria-label": clean(alt), "class": "figure"})
    _tidy(root)
    return ET.tostring(root, encoding="unicode", method="xml", short_empty_elements=True)


def _tidy(element: ET.Element) -> None:
    element.tag = element.tag.partition("}")[2] or element.tag
    for child in list(element):
        if child.tag.rpartition("}")[2] in ("metadata", "style", "defs"):
            element.remove(child)
        else:
            _tidy(child)
    identity = element.attrib.pop("id", "")
    if identity.startswith("slot-"):
        element.set("class", f"slot-{int(identity[5:].split(':')[0]) % SLOTS}")
    element.attrib.pop("clip-path", None)
    for key in ("d", "x", "y", "transform", "points"):
        if key in element.attrib:
            element.set(key, _rounded(" ".join(element.attrib[key].split())))
    if "style" in element.attrib:
        element.set("style", _themed(element.attrib["style"]))
    if not (element.text or "").strip():
        element.text = None
    if not (element.tail or "").strip():
        element.tail = None


def _themed(style: str) -> str:
    """A style with the page's colours and font."""
    kept: list[str] = []
    for part in style.split(";"):
        key, _, value = (piece.strip() for piece in part.partition(":"))
        if key == "font":
            size = re.search(r"[\d.]+px", value)
            kept.append(f"font-size:{size.group() if size else '12px'}")
            if "bold" in value or re.match(r"[6-9]00 ", value):
                kept.append("font-weight:600")
        elif key and not (key.startswith("font-family") or (key == "stroke-linejoin" and value == "miter")):
            kept.append(f"{key}:{_COLOUR.sub(_variable, value)}")
    return ";".join(kept)


def _variable(found: re.Match[str]) -> str:
    colour = found.group().lower()
    if colour.startswith("#0201"):
        return f"var(--series-{int(colour[5:], 16)})"
    return f"var({_ROLES[colour]})" if colour in _ROLES else colour


def _rounded(text: str) -> str:
    return _NUMBER.sub(lambda found: f"{float(found.group()):.1f}".removesuffix(".0"), text)
