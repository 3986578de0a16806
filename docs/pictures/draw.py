"""The pictures of the mechanisms' pages: `python docs/pictures/draw.py` writes them beside this file.

With two trained runs, a plain one and one with mixed heads, it measures their spectra first.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.core.skip_retain import SkipRetain

HERE = Path(__file__).parent
STYLE = """text{font:14px system-ui,sans-serif;fill:#1f2937}.s{font-size:12px;fill:#4b5563}.t{font-weight:600}
.b{fill:#f3f4f6;stroke:#9ca3af}.c{fill:#dbeafe;stroke:#2563eb;stroke-width:2}.w{fill:#fff}
.a{stroke:#6b7280;stroke-width:1.6;fill:none;marker-end:url(#m)}.k{stroke:#2563eb;stroke-width:1.6;fill:none}"""
HEAD = (
    '<marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#6b7280"/></marker>'
)
Matrix = Sequence[Sequence[float]]


def picture(width: int, height: int, label: str, *parts: str) -> str:
    """Frame parts as an SVG with a white ground, legible on a dark page, too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">\n'
        f'<style>{STYLE}</style><defs>{HEAD}</defs>\n<rect class="w" width="{width}" height="{height}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, kind: str = "b", below: str = "") -> str:
    middle = y + height / 2 + (-2 if below else 5)
    small = text(x + width / 2, middle + 17, below, "s") if below else ""
    shape = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    return shape + text(x + width / 2, middle, words) + small


def line(x: float, y: float, to_x: float, to_y: float, kind: str = "a") -> str:
    return f'<path class="{kind}" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>'


def grid(x: float, y: float, matrix: Matrix, cell: float = 13) -> str:
    """Draw a matrix: blue above zero, orange below, white at zero."""
    squares = [
        f'<rect x="{x + j * cell:g}" y="{y + i * cell:g}" width="{cell:g}" height="{cell:g}" '
        f'fill="{"#2563eb" if value >= 0 else "#ea580c"}" fill-opacity="{min(abs(value), 1):.2f}"/>'
        for i, row in enumerate(matrix)
        for j, value in enumerate(row)
        if abs(value) >= 0.005
    ]
    size = f'width="{len(matrix[0]) * cell:g}" height="{len(matrix) * cell:g}"'
    return "".join(squares) + f'<rect x="{x:g}" y="{y:g}" {size} fill="none" stroke="#9ca3af"/>'


def softmax(scores: Sequence[float]) -> list[float]:
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def make_head(signal: Sequence[float]) -> Matrix:
    """Make a causal head whose scores have rank one: 2 s_i s_j."""
    rows = []
    for i, query in enumerate(signal):
        scores = [2 * query * key for key in signal[: i + 1]]
        rows.append(softmax(scores) + [0.0] * (len(signal) - i - 1))
    return rows


def mix_heads(heads: Sequence[Matrix], mixing: Matrix, i: int) -> Matrix:
    """Mix heads to head i: sum_j M_ji P_j."""
    mixed = sum(row[i] * np.array(head) for row, head in zip(mixing, heads, strict=True))
    return mixed.tolist()


def mixhead() -> str:
    """Draw three causal heads of scores of rank one, a matrix M, and the heads that it makes."""
    n = 8
    signals = ([math.cos(i) for i in range(n)], [i / 4 - 1 for i in range(n)], [1 if i % 3 else -1 for i in range(n)])
    heads = [make_head(signal) for signal in signals]
    mixing = [[0.9, 0.2, -0.3], [0.3, 0.7, 0.5], [-0.2, 0.3, 0.8]]  # row j, the head that gives; column i, that takes
    mixed = [mix_heads(heads, mixing, i) for i in range(3)]
    parts = [
        text(20, 24, "attention weights P of three heads", "t", "start"),
        text(640, 24, "mixed heads P′", "t", "start"),
    ]
    for h in range(3):
        parts += [grid(20 + 125 * h, 40, heads[h]), text(72 + 125 * h, 162, f"P{'₁₂₃'[h]}", "s")]
        parts += [grid(640 + 125 * h, 40, mixed[h]), text(692 + 125 * h, 162, f"P′{'₁₂₃'[h]}", "s")]
    parts += [text(509, 24, "M", "t"), grid(470, 52, mixing, 26), line(395, 92, 462, 92), line(556, 92, 632, 92)]
    parts.append(text(509, 184, "column i makes head i; weights may be negative", "s"))
    return picture(1020, 198, "Attention weights of three heads, a mixing matrix, and the mixed heads", *parts)


def measure_spectra(plain: str, mixed: str) -> dict[str, Any]:
    """Measure the spectra of two trained runs, as means over layers and heads, with what the runs are."""
    command = [sys.executable, "-m", "fullrank", "analyze", "spectrum", plain, mixed, "--json"]
    models = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["models"]
    curves = {}
    for name, model, when in (("plain", 0, "after"), ("B, before mixing", 1, "before"), ("B, mixed", 1, "after")):
        layers = [layer[when] for layer in models[model]["layers"]]
        heads = [curve for layer in layers for curve in layer["curves"]]
        ranks = [rank for layer in layers for rank in layer["effective_rank"]]
        shares = [round(sum(values) / len(heads), 4) for values in zip(*heads, strict=True)]
        curves[name] = {"effective_rank": round(sum(ranks) / len(ranks), 2), "shares": shares}
    runs = []
    for run in (plain, mixed):
        result = json.loads((Path(run) / "result.json").read_text(encoding="utf-8"))
        names = ("recipe", "row", "scale", "seed", "parameters", "epochs", "environment")
        runs.append({name: result[name] for name in names})
    read = {key: models[0][key] for key in ("texts", "segment_length", "weights")}
    return {"runs": runs, "read": read, "curves": curves}


def spectrum() -> str:
    """Draw the mixing of heads, and what it did to the spectrum of trained models: `spectrum.json`, by `measure_spectra`."""
    curves = json.loads((HERE / "spectrum.json").read_text(encoding="utf-8"))["curves"]
    n = 6
    mixing = [[0.9, 0.3], [-0.4, 0.8]]
    signals = ([math.cos(i) for i in range(n)], [1 if i % 3 else -1 for i in range(n)])
    heads = [make_head(signal) for signal in signals]
    parts = [text(20, 24, "heads P", "t", "start"), text(150, 98, "M", "t")]
    parts += [text(226, 24, "mixed heads P′", "t", "start")]
    for h in range(2):
        parts += [grid(20, 40 + 100 * h, heads[h]), grid(226, 40 + 100 * h, mix_heads(heads, mixing, h))]
    parts += [grid(126, 108, mixing, 24), line(102, 132, 120, 132), line(178, 132, 218, 132)]
    left, top, width, height = 410, 40, 290, 178
    parts += [
        text(left, 24, "singular values of the attention weights, trained models", "t", "start"),
        f'<rect class="w" x="{left}" y="{top}" width="{width}" height="{height}" stroke="#9ca3af"/>',
        text(left + width / 2, top + height + 20, "the k largest hold this share of the sum", "s"),
        text(left, top + height + 20, "1", "s"),
        text(left - 8, top + 12, "1", "s", "end"),
        text(left - 8, top + height, "0", "s", "end"),
    ]
    for number, (name, colour) in enumerate(zip(curves, ("#6b7280", "#93c5fd", "#2563eb"), strict=True)):
        shares = curves[name]["shares"]
        rank = curves[name]["effective_rank"]
        step = width / (len(shares) - 1)
        points = " ".join(f"{left + step * k:.1f},{top + height * (1 - share):.1f}" for k, share in enumerate(shares))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        x, y = left + width + 20, top + 40 + 48 * number
        parts += [line(x, y - 5, x + 18, y - 5, "k").replace('class="k"', f'stroke="{colour}" stroke-width="3"')]
        parts += [text(x + 26, y, name, "", "start"), text(x + 26, y + 18, f"effective rank {rank:.1f}", "s", "start")]
    parts.append(text(left + width, top + height + 20, f"{len(shares)}", "s"))
    return picture(880, 250, "Mixed heads, and the singular values of the attention weights of trained models", *parts)


def mixture_of_softmaxes() -> str:
    """Draw three softmaxes over one matrix, and their weighted sum."""
    logits = ([2.2, 0, 0.4, 0, 1.0, 0, 0], [0, 0.3, 0, 2.4, 0, 0.8, 0], [0, 1.8, 0, 0, 0, 0, 1.9])
    prior = (0.5, 0.3, 0.2)
    components = [softmax(row) for row in logits]
    mixture = (np.array(prior) @ np.array(components)).tolist()

    def bars(x: float, y: float, row: Sequence[float]) -> str:
        shapes = [
            f'<rect x="{x + 18 * v:g}" y="{y - 70 * p:.1f}" width="14" height="{70 * p:.1f}" fill="#2563eb"/>'
            for v, p in enumerate(row)
        ]
        return "".join(shapes) + line(x - 4, y, x + 128, y, "k")

    parts = [box(20, 98, 130, 54, "hidden state g", below="of one token")]
    for k, row in enumerate(components):
        y = 20 + 76 * k
        parts += [
            line(150, 125, 206, y + 27),
            box(210, y, 150, 54, f"h{'₁₂₃'[k]}", "c", f"tanh(W{'₁₂₃'[k]} g + b{'₁₂₃'[k]})"),
        ]
        parts += [line(360, y + 27, 416, y + 27), bars(430, y + 54, row), line(562, y + 27, 690, 125)]
        parts.append(text((660, 626, 660)[k], (70, 113, 182)[k], f"π{'₁₂₃'[k]} = {prior[k]}", "s"))
    parts += [
        bars(712, 150, mixture),
        text(775, 176, "p(word), a weighted sum", "s"),
        text(493, 262, "K softmaxes over one matrix W", "s"),
    ]
    return picture(880, 276, "A mixture of three softmaxes for one token", *parts)


def skip_retain() -> str:
    """Draw which of eight layers run at twenty steps (Eq. 1, seed 1), and how old the memory of each is."""
    layers = 8
    steps = 20
    schedule = SkipRetain("linear", num_layers=layers)
    cell = 38
    parts = [text(110, 22, "training steps →", "s", "start")]
    ages = [0] * layers
    for step in range(steps):
        skipped = schedule.skipped(1, step)
        for layer in range(layers):
            ages[layer] = ages[layer] + 1 if layer in skipped else 0
            x, y = 110 + step * cell, 32 + (layers - 1 - layer) * 30
            parts.append(
                f'<rect class="{"b" if layer in skipped else "c"}" x="{x}" y="{y}" width="{cell - 4}" height="26" rx="4"/>'
            )
            parts.append(text(x + 17, y + 18, str(ages[layer]) if ages[layer] else "", "s"))
    parts += [text(98, 50 + (layers - 1 - layer) * 30, f"layer {layer + 1}", "s", "end") for layer in range(layers)]
    parts += [
        '<rect class="c" x="110" y="286" width="20" height="16" rx="4"/>',
        text(138, 299, "runs, and renews its memory", "s", "start"),
    ]
    parts += [
        '<rect class="b" x="340" y="286" width="20" height="16" rx="4"/>',
        text(368, 299, "skipped: its memory grows older by a segment (the number)", "s", "start"),
    ]
    return picture(880, 316, "Layers skipped at twenty training steps, and the age of their memories", *parts)


def cross_head() -> str:
    """Draw query heads and the key and value heads that they read, in training and in evaluation."""
    parts = []
    for left, title, order in (
        (20, "a training pass, with probability β", (2, 0, 3, 1)),
        (480, "evaluation, and all other passes", (0, 1, 2, 3)),
    ):
        parts.append(text(left + 190, 22, title, "t"))
        for head in range(4):
            parts += [box(left, 40 + 48 * head, 120, 36, f"query head {head + 1}")]
            parts += [box(left + 260, 40 + 48 * head, 120, 36, f"keys, values {head + 1}", "c")]
            parts.append(line(left + 120, 58 + 48 * head, left + 256, 58 + 48 * order[head]))
    return picture(880, 240, "Permuted key and value heads in training, each head its own in evaluation", *parts)


def multilinear() -> str:
    """Draw the tensor of one query over pairs of a key and a value, and the output map."""
    n = 6
    cell = 22
    query = 3
    key, value = np.indices((n, n))
    pairs = np.where((key <= query) & (value <= query), 0.25 + 0.75 * abs(np.cos(1 + 2 * key + value)), 0.0)
    parts = [box(20, 40, 120, 36, "query i"), box(20, 92, 120, 36, "keys j"), box(20, 144, 120, 36, "values m")]
    parts += [line(140, y, 192, 100 + 10 * k) for k, y in enumerate((58, 110, 162))] + [
        box(196, 82, 56, 56, "g", "c", "core")
    ]
    parts += [line(252, 110, 286, 110)]
    parts += [text(356, 30, "slice i of T: a number for each pair (j, m)", "t"), grid(290, 44, pairs.tolist(), cell)]
    parts += [text(356, 196, "j and m at most i: no token sees later ones", "s"), line(430, 110, 520, 110)]
    parts += [
        box(524, 83, 150, 54, "flatten", "c", "N² numbers"),
        line(674, 110, 730, 110),
        box(734, 83, 126, 54, "W", "b", "(N², E) → output"),
    ]
    return picture(
        880,
        212,
        "Multi-linear attention of one query: a matrix over pairs of positions, flattened and projected",
        *parts,
    )


PICTURES = {
    "mixhead": mixhead, "spectrum": spectrum, "mixture_of_softmaxes": mixture_of_softmaxes, "skip_retain": skip_retain,
    "cross_head": cross_head, "multilinear": multilinear,
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1:]:
        (HERE / "spectrum.json").write_text(json.dumps(measure_spectra(*sys.argv[1:])) + "\n", encoding="utf-8")
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw(), encoding="utf-8")
