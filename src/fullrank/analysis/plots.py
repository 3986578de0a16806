"""Drawings of the analyses: ink, axes without a frame, files that depend on the figures alone."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator

from fullrank.analysis.context import LayerReach, Reach
from fullrank.analysis.heads import Heads
from fullrank.analysis.mixing import LayerMixing
from fullrank.analysis.rank import LogProbRank
from fullrank.analysis.spectrum import AttentionSpectrum
from fullrank.core.errors import InputError, RunError
from fullrank.files import write_bytes

INK, MUTED, LINE = "#1b1d22", "#5c616b", "#dfe0e3"
COLOURS = ("#0072b2", "#c04f00", "#00795a", "#b0508b", "#7a6a00", "#4b5bd0", "#8c3b2f", "#5c616b")
_SETTINGS: dict[str, Any] = {  # in place of the user's own
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
# lines: a bound, and what is not of this kind
_DASHED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (4, 3))}
_DOTTED: dict[str, Any] = {"linestyle": (0, (1, 2))}
_LEGEND: dict[str, Any] = {
    "loc": "lower left", "frameon": False, "fontsize": 9.5, "labelcolor": MUTED, "handlelength": 2.2,
}  # fmt: skip


_MARK = b"fullrank"  # near the beginning of every figure, as the program that drew it


def clean(text: str) -> str:
    """Text that an XML document can hold."""
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]", "\N{REPLACEMENT CHARACTER}", text)


def write(draw: Callable[[], Figure], folder: Path, name: str) -> list[Path]:
    """`draw()` as NAME.png and NAME.svg in `folder`; equal figures give equal bytes.

    Raises InputError if `folder` is a file or holds a file of that name which is no figure of ours, RunError if it cannot be
    written to.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: a file of that name exists; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--out {folder}: cannot be made ({error.strerror})") from error
    files = {kind: folder / f"{name}.{kind}" for kind in ("png", "svg")}
    with matplotlib.style.context(_SETTINGS, after_reset=True):
        figure = draw()
        for kind, file in files.items():
            _put(file, _drawn(figure, kind))
    return list(files.values())


def write_png(draw: Callable[[], Figure], path: Path) -> None:
    """`draw()` as the PNG `path`; equal figures give equal bytes. Raises RunError if it cannot be written."""
    with matplotlib.style.context(_SETTINGS, after_reset=True):
        _put(path, _drawn(draw(), "png"))


def _put(file: Path, content: bytes) -> None:
    """Write a figure. InputError where another file that is none of ours has its name, outside of a run folder."""
    in_run = (file.parent.parent / "run.json").is_file()
    if file.exists() and not in_run:
        with file.open("rb") as older:
            if _MARK not in older.read(4096):
                raise InputError(
                    f"{file}: exists and is not a figure of fullrank, so it is left alone; give another --out"
                )
    write_bytes(file, content)


def _drawn(figure: Figure, kind: str) -> bytes:
    canvas = FigureCanvasAgg(figure) if kind == "png" else FigureCanvasSVG(figure)
    buffer = io.BytesIO()
    ours = {"Software": "fullrank"} if kind == "png" else {"Date": None, "Creator": "fullrank"}
    canvas.print_figure(buffer, format=kind, dpi=150, facecolor="white", metadata=ours)
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


def _head(figure: Figure, title: str, subtitle: str, size: float = 13.0) -> None:
    """Title and subtitle of a figure that is drawn from 0.085 of its width on."""
    height = figure.get_figheight()
    figure.text(0.085, 1 - 0.3 / height, title, color=INK, fontsize=size, fontweight="bold", va="center")
    figure.text(0.085, 1 - 0.58 / height, subtitle, color=MUTED, fontsize=9.5, va="center")


# -- rank: singular values against their number, and where a softmax must end ------------------------------------------

_WIDTH, _PLOT, _LEGEND_ROW = 8.6, 3.7, 0.21  # inches


def write_rank(spectra: Mapping[str, LogProbRank], folder: Path) -> list[Path]:
    """Draw the spectra, by the names of their models, into rank.png and rank.svg in `folder` (`write`)."""
    return write(lambda: _rank_figure(spectra), folder, "rank")


def _figure_with_legend(rows: int) -> tuple[Figure, Axes]:
    """A figure with room for its title above and for a legend of so many rows below."""
    below = 0.72 + _LEGEND_ROW * rows
    height = 0.95 + _PLOT + below
    figure = Figure(figsize=(_WIDTH, height))
    return figure, figure.add_axes((0.085, below / height, 0.885, _PLOT / height))


def _put_legend(figure: Figure, lines: list[Line2D]) -> None:
    place = (0.078, 0.06 / figure.get_figheight())
    figure.legend(handles=lines, bbox_to_anchor=place, labelspacing=0.35, **_LEGEND)


def _rank_figure(spectra: Mapping[str, LogProbRank]) -> Figure:
    figure, axes = _figure_with_legend(len(spectra) + 1)
    # down to the values that count: between them and the rounding there is often nothing
    lowest = 10 ** np.floor(np.log10(min(float(one.singular_values[one.rank - 1]) for one in spectra.values())) - 0.7)
    lines = []
    for i, (name, one) in enumerate(spectra.items()):
        colour = COLOURS[i % len(COLOURS)]
        values, rank = np.maximum(one.singular_values, lowest * 1e-3), one.rank
        numbers = np.arange(1, len(values) + 1)
        axes.plot(numbers[:rank], values[:rank], color=colour, linewidth=2.2, solid_capstyle="round", zorder=4)
        if rank < len(values):  # paler: rounding, which does not count
            beyond = slice(rank - 1, None)
            pale: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.35, "solid_joinstyle": "round"}
            axes.plot(numbers[beyond], values[beyond], color=colour, zorder=3, **pale)
        axes.axhline(one.tolerance, color=colour, linewidth=1.0, alpha=0.8, zorder=2, **_DOTTED)
        last = slice(rank - 1, rank)
        axes.plot(numbers[last], values[last], "o", color=colour, markersize=6, markeredgecolor="white", zorder=5)
        words = f"{clean(name)}: {one.layer.kind}, d = {one.layer.hidden_size:,}, rank {one.rank:,}"
        lines.append(Line2D([], [], color=colour, linewidth=2.2, label=words))
    bounds = sorted({one.layer.bound for one in spectra.values()})
    for bound in bounds:
        axes.axvline(bound, color=INK, zorder=2, **_DASHED)
    _furnish_rank(axes, spectra, lowest)
    _name_bounds(axes, spectra, bounds)
    eps = max(one.tolerance for one in spectra.values())
    where = "" if eps > lowest else f" = {eps:.0e} (beneath the figure)"
    tolerance = f"tolerance, s_max max(contexts, words) eps{where}: what lies below does not count"
    noise = Line2D([], [], color=MUTED, linewidth=1.2, label=tolerance, **_DOTTED)
    sizes = {(one.contexts, one.columns) for one in spectra.values()}
    shape = ", ".join(f"{contexts:,} contexts by {columns:,} words" for contexts, columns in sorted(sizes)[:2])
    subtitle = f"Singular values of the matrix of log p(word | context), {shape}{' ...' if len(sizes) > 2 else ''}"
    _head(figure, "How many dimensions the log-probabilities have", subtitle)
    _put_legend(figure, [*lines, noise])
    return figure


def _furnish_rank(axes: Axes, spectra: Mapping[str, LogProbRank], lowest: float) -> None:
    furnish(axes, "y", "number of the singular value", "singular value")
    counted = max(max(one.rank, one.layer.bound) for one in spectra.values())
    most = min(max(len(one.singular_values) for one in spectra.values()), 1.2 * counted)
    largest = max(float(one.singular_values[0]) for one in spectra.values())
    axes.set_yscale("log")
    axes.set_ylim(lowest, 10 ** np.ceil(np.log10(largest) + 0.3))
    axes.set_xlim(0, 1.03 * max(most, *(one.layer.bound for one in spectra.values())))
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=9))
    axes.yaxis.set_minor_locator(LogLocator(base=10, subs=[]))
    axes.yaxis.set_major_formatter(FuncFormatter(_power))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))


def _power(value: float, _place: int | None) -> str:
    """10 to a whole power, written with raised digits: a formula would need another font."""
    if value == 1:
        return "1"
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return f"10{str(round(np.log10(value))).translate(raised)}"


def _name_bounds(axes: Axes, spectra: Mapping[str, LogProbRank], bounds: list[int]) -> None:
    """Label of each bound: which sum it is; on the side where there is room."""
    words = {one.layer.bound: one.layer.in_words for one in spectra.values()}
    right = axes.get_xlim()[1]
    for i, bound in enumerate(bounds):
        far = bound > 0.6 * right
        axes.annotate(
            f"{words[bound]} = {bound:,}: a softmax ends here", (bound, 1), xycoords=("data", "axes fraction"),
            xytext=(-6 if far else 6, -9 - 15 * i), textcoords="offset points", ha="right" if far else "left", va="center",
            color=INK, fontsize=9.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2}, zorder=6,
        )  # fmt: skip


# -- spectrum: what the largest singular values of attention weights hold ------------------------------------------------


def write_spectrum(spectra: Mapping[str, AttentionSpectrum], folder: Path) -> list[Path]:
    """Draw the curves of layers and their mean, by the names of models, into spectrum.png and spectrum.svg in `folder`."""
    return write(lambda: _spectrum_figure(spectra), folder, "spectrum")


def _spectrum_figure(spectra: Mapping[str, AttentionSpectrum]) -> Figure:
    figure, axes = _figure_with_legend(len(spectra) + 1)
    lines = []
    for i, (name, one) in enumerate(spectra.items()):
        colour = COLOURS[i % len(COLOURS)]
        curves = np.array([layer.after.curves.mean(axis=0) for layer in one.layers])
        share = np.arange(1, curves.shape[1] + 1) / curves.shape[1]
        for curve in curves:
            axes.plot(share, curve, color=colour, alpha=0.5, zorder=3, **{**_DASHED, "linewidth": 0.9})
        axes.plot(share, curves.mean(axis=0), color=colour, linewidth=2.4, zorder=4)
        rank = np.mean([layer.after.effective_rank.mean() for layer in one.layers])
        words = f"{clean(name)}: effective rank {rank:.1f} of {one.length:,}, mean of {len(one.layers)} layers"
        lines.append(Line2D([], [], color=colour, linewidth=2.4, label=words))
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1.0, zorder=2, **_DOTTED)
    lines.append(Line2D([], [], color=MUTED, linewidth=1.0, label="all singular values equal", **_DOTTED))
    furnish(axes, "y", "share of the singular values, largest first", "share of their sum")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    subtitle = (
        "Cumulative singular values of attention weights, after mixing; dashed: each layer, mean over heads and texts"
    )
    _head(figure, "How many ways of attending the heads have", subtitle)
    _put_legend(figure, lines)
    return figure


# -- context: one row for each layer, tokens to the right --------------------------------------------------------------

_BARS, _FILL, _MEAN, _PUBLISHED = "#0072b2", "#9fcbe6", "#c04f00", "#b0508b"
_ROW, _LEAST_ROW, _TALLEST = 0.42, 0.16, 16.0  # inches
_HIGHEST = 0.82  # of a row: the step of a reach that is always attained


def write_context(reach: Reach, folder: Path, title: str) -> list[Path]:
    """Draw `reach` into context.png and context.svg in `folder` (`write`)."""
    return write(lambda: _context_figure(reach, title), folder, "context")


def _context_figure(reach: Reach, title: str) -> Figure:
    count = len(reach.layers)
    row = max(_LEAST_ROW, min(_ROW, (_TALLEST - 2.2) / count))
    height = 2.2 + row * count
    figure = Figure(figsize=(8.6, height))
    axes = figure.add_axes((0.085, 1.3 / height, 0.885, row * count / height))
    end = max(max(layer.reach.quantile(0.99) for layer in reach.layers), 1.5 * reach.memory_length)
    shown = reach.memory_length < reach.published <= 2 * end  # farther away it would press the layers together
    end = max(end, reach.published) if shown else end
    for layer in reach.layers:
        _staircase(axes, layer)
    axes.axvline(reach.memory_length, color=MUTED, zorder=3, **_DASHED)
    if shown:
        axes.axvline(reach.published, color=_PUBLISHED, linewidth=1.4, zorder=3, **_DOTTED)
    _furnish_context(axes, reach, end)
    size = max(7.0, min(13.0, 13 * 60 / max(1, len(title))))  # what has more than 60 letters is set smaller
    subtitle = (
        f"How far back the oldest token stands that a layer remembers; memory of {reach.memory_length:,} tokens, "
        f"segments of {reach.segment_length:,}"
    )
    _head(figure, clean(title), subtitle, size)
    handles: list[Line2D | Patch] = [
        Patch(color=_FILL, label="height: how often it reaches at least so far"),
        Line2D([], [], color=_BARS, linewidth=1.6, label="99 % of the steps reach no farther"),
        Line2D([], [], color=_MEAN, marker="D", linestyle="", markersize=5, label="mean"),
        Line2D([], [], color=MUTED, label="without skipping", **_DASHED),
    ]
    if shown:
        words = "the paper's Eq. 6, a sum over layers"
        handles.append(Line2D([], [], color=_PUBLISHED, linewidth=1.4, label=words, **_DOTTED))
    figure.legend(handles=handles, bbox_to_anchor=(0.078, 0.02 / height), ncols=2, columnspacing=2.0, **_LEGEND)
    return figure


def _staircase(axes: Axes, layer: LayerReach) -> None:
    """A staircase: at how large a share of the steps the memory reaches at least so far; a mark at the mean."""
    base, last = layer.layer - 0.3, layer.reach.quantile(0.99)
    kept = layer.reach.tokens <= last
    tokens, chances = layer.reach.tokens[kept], layer.reach.probabilities[kept]
    at_least = 1 - np.concatenate([[0.0], np.cumsum(chances)[:-1]])
    edges = np.concatenate([[0], tokens])
    axes.stairs(base + _HIGHEST * at_least, edges, baseline=base, fill=True, color=_FILL, linewidth=0, zorder=2)
    axes.plot([0, last], [base, base], color=_BARS, linewidth=1.6, zorder=3)
    axes.plot([layer.mean], [base], marker="D", markersize=5, color=_MEAN, markeredgecolor="white", zorder=4)


def _furnish_context(axes: Axes, reach: Reach, end: int | float) -> None:
    furnish(axes, "x", "tokens before the first query of the segment", "layer")
    axes.set_xlim(0, 1.04 * end)
    axes.set_ylim(-0.6, len(reach.layers) - 0.3)
    if len(reach.layers) <= 32:
        axes.set_yticks([layer.layer - 0.1 for layer in reach.layers], [str(layer.layer) for layer in reach.layers])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    # then every reach is a number of segments: so are the ticks
    whole = reach.memory_length % reach.segment_length == 0
    step = reach.segment_length * math.ceil(end / reach.segment_length / 9)
    axes.xaxis.set_major_locator(MultipleLocator(step) if whole else MaxNLocator(nbins=8))


# -- heat maps: attention of a translation, heads, mixing --------------------------------------------------------------

_UNSIGNED = LinearSegmentedColormap.from_list("weights", ["#ffffff", "#9ecae8", "#0072b2", "#00304d"])
_SIGNED = LinearSegmentedColormap.from_list("signed", ["#7a3200", "#e08a4a", "#ffffff", "#6fb1dd", "#00304d"])
_FEW = 0.42  # inches of a cell where there are few
_WIDEST, _CELL, _LEAST, _GAP = 16.0, 0.24, 0.09, 0.32  # inches: of the panels together, of a token, between panels
_LABELS = 60  # tokens of an axis that are named; of longer texts every second, third ...


@dataclass(frozen=True)
class HeatMaps:
    """Panels of the same rows and columns, by name: figures (rows, columns), on one scale.

    cell: inches of a row and of a column, where they fit.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    panels: Mapping[str, np.ndarray]
    title: str
    subtitle: str
    cell: float = _CELL


def write_maps(maps: HeatMaps, folder: Path, name: str) -> list[Path]:
    """Draw the panels into NAME.png and NAME.svg in `folder` (`write`)."""
    return write(lambda: _maps_figure(maps), folder, name)


def write_heads(models: Mapping[str, Heads], folder: Path) -> list[Path]:
    """Draw heads.png and heads.svg, the change of perplexity by layer and head, and similarity.png and .svg, into `folder`."""
    first = next(iter(models.values()))
    most = max(len(layer.change) for one in models.values() for layer in one.layers)
    changes = {
        clean(name): np.array(
            [np.pad(layer.change, (0, most - len(layer.change)), constant_values=np.nan) for layer in one.layers]
        )
        for name, one in models.items()
    }
    columns, rows = tuple(f"H{i}" for i in range(most)), tuple(f"layer {i}" for i in range(len(first.layers)))
    subtitle = "Change of perplexity by layer and head (brown: it falls without the head)"
    maps = HeatMaps(columns, rows, changes, "What a model loses without each head", subtitle, _FEW)
    alike = {
        f"{clean(name)}, layer {i}": layer.similarity
        for name, one in models.items()
        for i, layer in enumerate(one.layers)
        if len(layer.change) == most
    }
    words = "Linear CKA of the outputs of two heads: 1 where they are the same but for rotation and scale"
    return [
        *write_maps(maps, folder, "heads"),
        *write_maps(HeatMaps(columns, columns, alike, "How alike heads are", words), folder, "similarity"),
    ]


# names of checkpoints, their steps and layers, by model
Steps = Mapping[str, Sequence[tuple[str, int | None, Sequence[LayerMixing]]]]


def write_mixing(models: Steps, folder: Path) -> list[Path]:
    """Draw mixing.png and .svg, the last matrices of each model; training.png and .svg, where there are several steps."""
    files = []
    sizes = sorted({len(layer.matrix) for steps in models.values() for layer in steps[-1][2]})
    for size in sizes:  # one figure for each number of heads
        panels = {
            f"{clean(name)}, layer {layer.layer}": layer.matrix
            for name, steps in models.items()
            for layer in steps[-1][2]
            if len(layer.matrix) == size
        }
        names = tuple(f"H{i}" for i in range(size))
        subtitle = "Column i: how much of the attention weights of each head (rows) head i takes"
        own = "mixing" if size == sizes[0] else f"mixing_{size}"
        files += write_maps(HeatMaps(names, names, panels, "Mixing matrices", subtitle), folder, own)
    if any(len(steps) > 1 for steps in models.values()):
        files += write(lambda: _mixing_figure(models), folder, "training")
    return files


def _mixing_figure(models: Steps) -> Figure:
    figure, axes = _figure_with_legend(len(models))
    lines = []
    for i, (name, steps) in enumerate(models.items()):
        colour = COLOURS[i % len(COLOURS)]
        at = [step or 0 for _, step, _ in steps]
        distances = np.array([[layer.distance for layer in layers] for _, _, layers in steps])  # (steps, layers)
        for one in distances.T:
            axes.plot(at, one, color=colour, alpha=0.5, zorder=3, **{**_DASHED, "linewidth": 0.9})
        axes.plot(at, distances.mean(axis=1), "o-", color=colour, linewidth=2.2, markersize=4, zorder=4)
        lines.append(Line2D([], [], color=colour, linewidth=2.2, label=clean(name)))
    furnish(axes, "y", "step", "distance from plain attention")
    axes.set_ylim(bottom=0)
    _head(figure, "How far mixing is from plain attention", "||M - I||; dashed: each layer; bold: their mean")
    _put_legend(figure, lines)
    return figure


def write_attention(maps: HeatMaps, path: Path) -> None:
    """Draw the panels, one scale for all, into the PNG `path`; equal figures give equal bytes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a box stands for it
        write_png(lambda: _maps_figure(maps), path)


def _maps_figure(maps: HeatMaps) -> Figure:
    count, (rows, columns) = len(maps.panels), next(iter(maps.panels.values())).shape
    side = 0.12 + 0.085 * max(map(len, maps.rows))  # inches for the names of rows, and for those of columns
    top = 0.12 + 0.085 * max(map(len, maps.columns))
    cell = max(0.05, min(maps.cell, (_WIDEST - side) / columns, _WIDEST / rows))
    while True:  # many heads are drawn smaller, until they fit on a page
        beside = _columns(count, columns * cell + _GAP, side)
        down = math.ceil(count / beside)
        if down * (rows * cell + _GAP) <= _WIDEST or cell <= _LEAST:
            break
        cell *= 0.9
    wide, high = columns * cell, rows * cell
    least = 5.2  # for title and words below
    width = max(least, 0.2 + side + beside * (wide + _GAP) + 0.75)
    above, below = 0.8 + top, 0.42
    height = above + down * (high + _GAP) + below
    figure = Figure(figsize=(width, height))
    limit = max(float(np.nanmax(np.abs(weights))) for weights in maps.panels.values()) or 1.0
    signed = any(float(np.nanmin(weights)) < 0 for weights in maps.panels.values())
    image = None
    for i, (name, weights) in enumerate(maps.panels.items()):
        row, column = divmod(i, beside)
        left, upper = 0.2 + side + column * (wide + _GAP), above + row * (high + _GAP)
        axes = figure.add_axes((left / width, 1 - (upper + high) / height, wide / width, high / height))
        image = axes.imshow(
            weights, cmap=_SIGNED if signed else _UNSIGNED, vmin=-limit if signed else 0.0, vmax=limit, aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        _label_tokens(axes, maps, cell, names=(row == 0, column == 0))
        axes.set_xlabel(name, color=MUTED, fontsize=9, labelpad=4)
    bar_left = 0.2 + side + beside * (wide + _GAP) - _GAP + 0.14
    bar = figure.add_axes((bar_left / width, 1 - (above + high) / height, 0.1 / width, high / height))
    assert image is not None
    figure.colorbar(image, cax=bar)
    bar.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    bar.spines["outline"].set_edgecolor(LINE)
    figure.text(0.2 / width, 1 - 0.24 / height, maps.title, color=INK, fontsize=12, fontweight="bold", va="center")
    figure.text(0.2 / width, 1 - 0.5 / height, maps.subtitle, color=MUTED, fontsize=9, va="center")
    return figure


def _columns(count: int, wide: float, side: float) -> int:
    """Panels beside each other: as many as fit, but not so many that the last row is nearly empty."""
    fit = max(1, int((_WIDEST - side) / wide))
    return math.ceil(count / math.ceil(count / min(count, fit)))


def _label_tokens(axes: Axes, maps: HeatMaps, cell: float, names: tuple[bool, bool]) -> None:
    """Names of tokens above the first row and beside the first column of panels."""
    size = max(5.0, min(9.0, cell * 72 * 0.62))
    above, beside = names
    axes.tick_params(length=0, labelcolor=INK, labelsize=size, pad=2)
    axes.tick_params(axis="x", labeltop=above, labelbottom=False)
    for axis, tokens, named, angle in ((axes.xaxis, maps.columns, above, 90), (axes.yaxis, maps.rows, beside, 0)):
        step = math.ceil(len(tokens) / _LABELS)
        axis.set_ticks(range(0, len(tokens), step))
        axis.set_ticklabels([clean(token) for token in tokens[::step]] if named else [], rotation=angle)
    for spine in axes.spines.values():
        spine.set_color(LINE)
