"""The end of a report: runs that are not finished or damaged. And the legend of its curves."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.reporting.markup import Html, el, join, section, swatch
from fullrank.reporting.measure import Measure
from fullrank.reporting.results import RunRecord, integer
from fullrank.reporting.table import Comparison


def troubles_section(compared: Comparison) -> Html:
    """Runs that have not finished, and finished ones whose folders are damaged in part."""
    parts: list[Html] = []
    for run in compared.unfinished:
        parts.append(unfinished(run, [*_progress(run, compared.measure), *run.problems]))
    for row in compared.rows:
        parts += [
            _trouble(run, "finished, damaged in part", list(run.problems), Html("")) for run in row.runs if run.problems
        ]
    return section("unfinished", "Unfinished and damaged runs", *parts)


def unfinished(run: RunRecord, reasons: Sequence[str]) -> Html:
    """A run that has not finished, and how to go on with it."""
    verb = "finetune" if run.finetunes else "train"
    resume = el("p", "Resume with ", el("code", f"fullrank {verb} {shlex.quote(str(run.folder))}"), cls="note")
    return _trouble(run, "not finished", reasons, resume)


def _trouble(run: RunRecord, state: str, reasons: Sequence[str], more: Html) -> Html:
    heading = el("h3", run.name, " ", el("span", state, cls="badge"), " ", el("code", str(run.folder)))
    return el("div", heading, el("ul", *(el("li", reason) for reason in reasons)), more, cls="trouble")


def _progress(run: RunRecord, measure: Measure) -> list[str]:
    """How far an unfinished run has come."""
    steps = [step for line in run.metrics if (step := integer(line.get("step"))) is not None]
    if not steps:
        return ["no step is recorded yet"]
    lines = (line for line in run.metrics if line.get("split") == "valid")
    found = [value for line in lines if (value := measure.of_line(line)) is not None]
    last = f"; last validation {measure.unit} {measure.show(found[-1])}" if found else ""
    remark = f" ({NOT_NEXT_TOKEN})" if last and run.sees_future else ""
    return [f"reached step {max(steps):,}{last}{remark}"]


def legend(entries: Sequence[tuple[str, int, bool]]) -> Html:
    """Names and colours of the rows in the order of the table; `finished` False is drawn dashed."""
    items = [
        el("li", swatch(slot, not finished), name if finished else f"{name} (unfinished)", cls=f"key key-{slot % 8}")
        for name, slot, finished in entries
    ]
    return el("ul", join(items), cls="legend", attrs={"aria-label": "Legend"})
