"""The curves of a report: what training was judged by, its loss, its learning rate, its speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.reporting import curves, details, format, troubles
from fullrank.reporting.curves import Curve, Series
from fullrank.reporting.figures import NARROW, WIDTH, line_figure
from fullrank.reporting.markup import Html, el, section
from fullrank.reporting.measure import BLEU
from fullrank.reporting.results import MASKED_MODELING, RunRecord, number
from fullrank.reporting.table import MARK, Comparison

_TOKENS, _EPOCHS = "training tokens", "epochs"
_HALF = "The same curves from half of the longest training on; the axis does not start at zero."
_Reader = Callable[[Callable[[RunRecord], Curve | None]], list[Series]]


def curves_section(compared: Comparison, named: Sequence[details.Named]) -> Html:
    finished = len(compared.rows)
    # a model may be judged by next tokens at its end and not while it trains
    marked = {name for name, _, runs in named if any(run.sees_future for run in runs)}
    named = [(f"{name} {MARK}" if name in marked else name, slot, runs) for name, slot, runs in named]

    def series(read: Callable[[RunRecord], Curve | None]) -> list[Series]:
        found = [(name, slot, tuple(c for run in runs if (c := read(run)) is not None)) for name, slot, runs in named]
        return [Series(name, slot, drawn, slot < finished) for name, slot, drawn in found if drawn]

    kind = "masked token" if compared.task == MASKED_MODELING else "token"
    loss = series(curves.training_loss)
    rate, speed = curves.merged(series(curves.learning_rate)), series(curves.speed)
    smooth = _smoothing(named)
    judged = _translation_figures(compared, series) if compared.translates else _validation_figures(compared, series)
    others = [
        _figure("Training loss", f"Nats per {kind}. {smooth}", loss, f"nats per {kind}", _TOKENS, width=NARROW),
        _figure(
            "Learning rate", "As set at each logged step.", rate, "learning rate", _TOKENS, from_zero=True, width=NARROW
        ),
        _figure(
            "Speed",
            f"Training tokens per second. {smooth}",
            speed,
            "tokens per second",
            "minutes of training",
            from_zero=True,
            width=NARROW,
        ),
    ]
    if not any(judged + others):
        return Html("")
    grids = [
        el("div", *figures, cls=cls)
        for figures, cls in ((judged, "figures"), (others, "figures small"))
        if any(figures)
    ]
    key = troubles.legend([(name, slot, slot < finished) for name, slot, _ in named])
    hints = [] if compared.comparable else ["Curves measured on different texts do not compare."]
    if marked:
        hints.append(f"{MARK} {NOT_NEXT_TOKEN}; such a curve compares with no other.")
    return section("curves", "Curves", *(el("p", hint, cls="warning") for hint in hints), key, *grids)


def _validation_figures(compared: Comparison, series: _Reader) -> list[Html]:
    """By what training was judged: the whole of it, and its second half alone."""
    unit = compared.measure.unit
    validation = series(lambda run: curves.validation(run, compared.measure))
    ends = [value for one in validation for c in one.curves for value in (c.y.min(), c.y.max())]
    wide = bool(ends) and not compared.measure.in_bits and max(ends) > 4 * min(ends)  # bits are logarithms already
    return [
        _figure(
            f"Validation {unit}",
            f"Whole training{', logarithmic axis' if wide else ''}.{_of_seeds(validation)}",
            validation,
            unit,
            _TOKENS,
            log=wide,
            show_value=compared.measure.tick,
        ),
        _figure(
            f"Validation {unit}, second half",
            _HALF,
            curves.latter(validation),
            unit,
            _TOKENS,
            show_value=compared.measure.tick,
        ),
    ]


def _translation_figures(compared: Comparison, series: _Reader) -> list[Html]:
    """Validation BLEU (as Mixhead's Fig. 2) and validation loss by epoch, each also from the second half on."""
    runs = [run for row in compared.rows for run in row.runs]
    lengths = [length for run in (*runs, *compared.unfinished) if (length := curves.steps_per_epoch(run)) is not None]
    # an unfinished run does not say how long its epochs are; those of the same text are as long
    usual = lengths[0] if compared.comparable and lengths else None
    by_epoch = usual is not None

    def over_epochs(read: Callable[[Mapping[str, Any]], float | None]) -> list[Series]:
        return series(
            lambda run: curves.validation_of(run, read, curves.steps_per_epoch(run) or usual if by_epoch else None)
        )

    x_label = _EPOCHS if by_epoch else _TOKENS
    found: list[Html] = []
    for heading, note, unit, read in (
        ("Validation BLEU", "As measured while training; higher is better.", BLEU.unit, BLEU.of_line),
        (
            "Validation loss",
            "Nats per target token; lower is better.",
            "nats per token",
            lambda line: number(line.get("nll")),
        ),
    ):
        drawn = over_epochs(read)
        show = BLEU.tick
        found.append(_figure(heading, f"{note}{_of_seeds(drawn)}", drawn, unit, x_label, show_value=show))
        late = curves.latter(drawn)
        found.append(_figure(f"{heading}, second half", _HALF, late, unit, x_label, show_value=show))
    return found


def _of_seeds(drawn: Sequence[Series]) -> str:
    several = any(len(one.curves) > 1 for one in drawn)
    return " Thin lines are single seeds, the thick one is their mean." if several else ""


def _smoothing(named: Sequence[details.Named]) -> str:
    widths = {
        curves.window(lines)
        for _, _, runs in named
        for run in runs
        if (lines := sum(line.get("split") == "train" for line in run.metrics))
    }
    widest = max(widths, default=1)
    return (
        "Not smoothed."
        if widest == 1
        else f"Smoothed lightly: centred moving average over up to {widest} logged values."
    )


def _figure(
    heading: str,
    note: str,
    series: Sequence[Series],
    y_label: str,
    x_label: str,
    *,
    log: bool = False,
    from_zero: bool = False,
    width: int = WIDTH,
    show_value: Callable[[float], str] = format.short_count,
) -> Html:
    if not series:
        return Html("")
    ends = ", ".join(f"{one.name} {one.last:.4g}" for one in series)
    alt = f"{heading} over {x_label}. Last values: {ends}."
    drawing = Html(
        line_figure(
            series,
            y_label=y_label,
            x_label=x_label,
            alt=alt,
            log=log,
            from_zero=from_zero,
            width=width,
            show_value=show_value,
        )
    )
    return el("figure", el("figcaption", el("b", heading), el("span", note)), drawing)
