"""What the drawings of analyses have in common: ink, axes without a frame, files that depend on the figures alone."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fullrank.core.errors import InputError, RunError
from fullrank.files import write_bytes

INK, MUTED, LINE = "#1b1d22", "#5c616b", "#dfe0e3"
COLOURS = ("#0072b2", "#c04f00", "#00795a", "#b0508b", "#7a6a00", "#4b5bd0", "#8c3b2f", "#5c616b")

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
_INTERACTIVE = {"backend", "backend_fallback", "interactive", "toolbar", "webagg.open_in_browser"}


def settings() -> dict[str, object]:
    """Matplotlib settings of every figure; the user's own do not count."""
    return {**{key: value for key, value in matplotlib.rcParamsDefault.items() if key not in _INTERACTIVE}, **_SETTINGS}


def clean(text: str) -> str:
    """Text that an XML document can hold."""
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]", "\N{REPLACEMENT CHARACTER}", text)


def write(draw: Callable[[], Figure], folder: Path, name: str) -> list[Path]:
    """`draw()` as NAME.png and NAME.svg in `folder`; equal figures give equal bytes.

    Raises InputError if `folder` is a file, RunError if it cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: a file of that name exists; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--out {folder}: cannot be made ({error.strerror})") from error
    written = []
    with matplotlib.rc_context(settings()):  # type: ignore[arg-type]
        figure = draw()
        for kind in ("png", "svg"):
            write_bytes(folder / f"{name}.{kind}", _drawn(figure, kind))
            written.append(folder / f"{name}.{kind}")
    return written


def write_png(draw: Callable[[], Figure], path: Path) -> None:
    """`draw()` as the PNG `path`; equal figures give equal bytes. Raises RunError if it cannot be written."""
    with matplotlib.rc_context(settings()):  # type: ignore[arg-type]
        write_bytes(path, _drawn(draw(), "png"))


def _drawn(figure: Figure, kind: str) -> bytes:
    canvas = FigureCanvasAgg(figure) if kind == "png" else FigureCanvasSVG(figure)
    buffer = io.BytesIO()
    nobody = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    canvas.print_figure(buffer, format=kind, dpi=150, facecolor="white", metadata=nobody)
    return buffer.getvalue()


def furnish(axes: Axes, grid: Literal["x", "y"], below: str, beside: str) -> None:
    """Only the lower edge of the frame, thin lines across `grid`, whole numbers with commas below, and the axes' names."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.grid(True, axis=grid, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelcolor=MUTED, labelsize=10, pad=5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.set_xlabel(below, color=MUTED, fontsize=10)
    axes.set_ylabel(beside, color=MUTED, fontsize=10)
