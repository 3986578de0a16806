"""The upper part of a report: summary, key figures, the comparison, single runs, what is not finished."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fullrank.reporting import format
from fullrank.reporting.figures import dot_figure
from fullrank.reporting.markup import Html, details, el, join, section, swatch, table, td, th
from fullrank.reporting.results import RunRecord, integer, mapping, number
from fullrank.reporting.stats import Stat
from fullrank.reporting.summary import Summary, best_row, judged_split
from fullrank.reporting.table import SPLITS, Comparison, Row, ms_per_step

_SPLIT = {"valid": "validation", "test": "test"}


def summary_block(compared: Comparison, summary: Summary) -> Html:
    """Warnings, the headline claim, the paragraph, the key figures and the cautions."""
    warnings = [
        el("p", el("strong", "Not comparable. "), text, cls="warning", attrs={"role": "note"})
        for text in summary.warnings
    ]
    cautions = [el("li", text) for text in summary.cautions]
    return el(
        "section",
        *warnings,
        el("h2", summary.headline, attrs={"id": "summary-heading"}, cls="claim"),
        *(el("p", line, cls="lead") for line in summary.paragraph.splitlines()),
        _tiles(compared) if compared.comparable else Html(""),
        el("ul", *cautions, cls="cautions") if cautions else Html(""),
        attrs={"id": "summary", "aria-labelledby": "summary-heading"},
    )


def _tiles(compared: Comparison) -> Html:
    rows = compared.rows
    if not rows:
        return Html("")
    split = judged_split(rows)
    best, first = best_row(rows, split), rows[0]
    shown = best or next(row for row in rows if split in row.perplexity)
    lowest = "Lowest" if best else "Final"
    tiles = [(f"{lowest} {_SPLIT[split]} perplexity", format.perplexity(shown.perplexity[split].mean), shown.name)]
    if best is not None and split in best.difference:
        change = format.signed_percent(best.difference[split])
        tiles.append(
            ("Against the first row", change, f"{first.name}: {format.perplexity(first.perplexity[split].mean)}")
        )
    if best is not None and best is not first and best.extra_parameters is not None:
        tiles.append(("Parameters added", format.extra(best.extra_parameters), f"to {format.count(first.parameters)}"))
    if split in first.unigram:
        tiles.append(("Unigram perplexity", format.perplexity(first.unigram[split]), "same vocabulary"))
    seen = [
        tokens
        for row in rows
        for run in row.runs
        if (tokens := integer(mapping(run.result).get("tokens_seen"))) is not None
    ]
    if seen:
        ends = dict.fromkeys(format.short_count(value) for value in (min(seen), max(seen)))
        tiles.append(("Training tokens", "–".join(ends), "per run"))
    return el(
        "dl",
        *(el("div", el("dt", label), el("dd", el("b", value), el("span", note))) for label, value, note in tiles),
        cls="tiles",
    )


def comparison_section(compared: Comparison) -> Html:
    """The comparison table with its notes, the dots beside it, and the single runs."""
    rows = compared.rows
    if not rows:
        return Html("")
    seeds = any(len(row.runs) > 1 for row in rows)
    notes = ["Perplexity: lower is better; the lowest of comparable rows is set bold."]
    if any(row.difference for row in rows):
        notes.append("Beneath a perplexity: its difference to the first row.")
    if seeds:
        notes.append(
            "Rows with several seeds (n) show mean ± sample standard deviation; the mean is that of the runs' "
            "perplexities. Speeds and times are means."
        )
    if compared.has_paper:
        notes.append("“Paper” is the published figure, as the recipe states it.")
    parts = [_comparison_table(compared), el("p", " ".join(notes), cls="note")]
    if compared.comparable and len(rows) > 1:
        parts.append(_dots(rows))
    parts.append(details(f"Single runs ({sum(len(row.runs) for row in rows)})", _single_runs(rows), cls="printed"))
    return section("comparison", "Comparison", *parts)


def _dots(rows: Sequence[Row]) -> Html:
    split = judged_split(rows)
    values = ", ".join(f"{row.name} {format.spread(row.perplexity.get(split))}" for row in rows)
    figure = Html(dot_figure(rows, range(len(rows)), split, f"Final {_SPLIT[split]} perplexity: {values}."))
    several = any(len(row.runs) > 1 for row in rows)
    caption = (
        "A dot is one run; the bar is the mean, the line mean ± standard deviation. "
        if several
        else "A dot is one run. "
    )
    return el(
        "figure",
        el(
            "figcaption",
            el("b", f"Final {_SPLIT[split]} perplexity"),
            el("span", caption + "The axis does not start at zero."),
        ),
        figure,
        cls="wide",
    )


def _comparison_table(compared: Comparison) -> Html:
    rows = compared.rows
    paper, seeds = compared.has_paper, any(len(row.runs) > 1 for row in rows)
    phases = list(dict.fromkeys(phase for row in rows for phase in row.ms_per_step))
    split_heads = [th("Perplexity", scope="colgroup", cls="num group", span=2)]
    if paper:
        split_heads = [
            th(f"{_SPLIT[split].capitalize()} perplexity", scope="colgroup", cls="num group", span=2)
            for split in SPLITS
        ]
    upper = [
        *([td("")] * (1 + seeds)),
        th("Parameters", scope="colgroup", cls="num group", span=2),
        *split_heads,
        th("Speed", scope="colgroup", cls="num group", span=2 + len(phases)),
    ]
    lower = [th("Row"), *([th("n", cls="num")] if seeds else []), th("total", cls="num"), th("over first", cls="num")]
    for split in SPLITS:
        lower += [th("paper", cls="num"), th("ours", cls="num")] if paper else [th(_SPLIT[split], cls="num")]
    steps = ["ms/step" if len(phases) == 1 else f"ms/step, {phase}" for phase in phases]
    lower += [th(word, cls="num") for word in ("tokens/s", *steps, "wall time")]
    body = [_comparison_row(compared, row, place, paper, seeds, phases) for place, row in enumerate(rows)]
    foot = _unigram_rows(compared, paper, seeds, len(phases))
    return table([upper, lower], body, caption="Rows compared", foot=foot, cls="comparison")


def _comparison_row(
    compared: Comparison, row: Row, place: int, paper: bool, seeds: bool, phases: Sequence[str]
) -> list[Html]:
    first = row is compared.rows[0]
    label = [swatch(place), el("span", row.name, cls="name")]
    if row.is_slice:
        label.append(el("span", "slice", cls="badge", attrs={"title": row.label}))
    if mark := compared.mark(row):
        label.append(el("span", f"protocol {mark}", cls="badge", attrs={"title": row.protocol}))
    if not compared.comparable:
        label.append(el("span", row.label or "text not recorded", cls="sub"))
    cells = [th(*label, scope="row", cls="row-name")]
    if seeds:
        cells.append(td(str(len(row.runs)), cls="num"))
    cells.append(td(format.count(row.parameters), cls="num"))
    cells.append(td("first" if first else format.extra(row.extra_parameters), cls="num quiet" if first else "num"))
    for split in SPLITS:
        if paper:
            cells.append(td(format.figure(row.paper.get(split)), cls="num quiet"))
        best = split in row.best
        value = el("strong" if best else "span", format.spread(row.perplexity.get(split)))
        change = format.signed_percent(row.difference[split]) if split in row.difference else ""
        cells.append(td(value, el("span", change, cls="sub") if change else "", cls="num best" if best else "num"))
    speeds = [format.milliseconds(_mean(row.ms_per_step.get(phase))) for phase in phases]
    cells += [
        td(text, cls="num")
        for text in (format.count(_mean(row.tokens_per_second)), *speeds, format.duration(_mean(row.wall_seconds)))
    ]
    return cells


def _unigram_rows(compared: Comparison, paper: bool, seeds: bool, phases: int) -> list[list[Html]]:
    """One row for each text: the perplexity of word frequencies alone."""
    texts = {row.text: row for row in reversed(compared.rows) if row.unigram}
    found: list[list[Html]] = []
    for _, row in sorted(texts.items()):
        name = "Unigram, same vocabulary" if compared.comparable else f"Unigram: {row.label}"
        cells = [th(name, scope="row", cls="row-name"), *([td("")] if seeds else []), td(""), td("")]
        for split in SPLITS:
            cells += [*([td("")] if paper else []), td(format.perplexity(row.unigram.get(split)), cls="num")]
        found.append([*cells, *([td("")] * (2 + phases))])
    return found


def _mean(stat: Stat | None) -> float | None:
    return None if stat is None else stat.mean


def _single_runs(rows: Sequence[Row]) -> Html:
    heads = (
        "validation",
        "test",
        "best at step",
        "steps",
        "tokens seen",
        "tokens/s",
        "ms/step",
        "wall time",
        "peak memory",
    )
    head = [th("Row"), th("seed", cls="num"), *(th(word, cls="num") for word in heads), th("folder")]
    body = [_single_run(row, run, place) for place, row in enumerate(rows) for run in row.runs]
    return table([head], body, caption="Single runs")


def _single_run(row: Row, run: RunRecord, place: int) -> list[Html]:
    result = mapping(run.result)
    memory = number(result.get("peak_memory_mib"))
    cells = [
        format.perplexity(run.final("valid")),
        format.perplexity(run.final("test")),
        format.count(integer(mapping(result.get("best")).get("step"))),
        format.count(integer(result.get("steps"))),
        format.count(integer(result.get("tokens_seen"))),
        format.count(number(result.get("tokens_per_second"))),
        " / ".join(format.milliseconds(value) for value in ms_per_step(run).values()) or format.MISSING,
        format.duration(number(result.get("wall_seconds"))),
        format.MISSING if memory is None else f"{memory:,.0f} MiB",
    ]
    seed = td(format.MISSING if run.seed is None else str(run.seed), cls="num")
    name = th(swatch(place), el("span", row.name, cls="name"), scope="row", cls="row-name")
    return [name, seed, *(td(text, cls="num") for text in cells), td(el("code", str(run.folder)))]


def troubles_section(compared: Comparison) -> Html:
    """Runs that have not finished, and finished ones whose folders are damaged in part."""
    parts: list[Html] = []
    for run in compared.unfinished:
        resume = el("p", "Resume with ", el("code", f"fullrank train {shlex.quote(str(run.folder))}"), cls="note")
        parts.append(_trouble(run, "not finished", [*_progress(run), *run.problems], resume))
    for row in compared.rows:
        parts += [
            _trouble(run, "finished, damaged in part", list(run.problems), Html("")) for run in row.runs if run.problems
        ]
    return section("unfinished", "Unfinished and damaged runs", *parts)


def _trouble(run: RunRecord, state: str, reasons: Sequence[str], more: Html) -> Html:
    heading = el("h3", run.name, " ", el("span", state, cls="badge"), " ", el("code", str(run.folder)))
    return el("div", heading, el("ul", *(el("li", reason) for reason in reasons)), more, cls="trouble")


def _progress(run: RunRecord) -> list[str]:
    """How far an unfinished run has come."""
    steps = [step for line in run.metrics if (step := integer(line.get("step"))) is not None]
    if not steps:
        return ["no step is recorded yet"]
    found = [
        value for line in run.metrics if line.get("split") == "valid" and (value := number(line.get("ppl"))) is not None
    ]
    last = f"; last validation perplexity {format.perplexity(found[-1])}" if found else ""
    return [f"reached step {max(steps):,}{last}"]


def legend(entries: Sequence[tuple[str, int, bool]]) -> Html:
    """Names and colours of the rows in the order of the table; `finished` False is drawn dashed."""
    items = [
        el("li", swatch(slot, not finished), name if finished else f"{name} (unfinished)", cls=f"key key-{slot % 8}")
        for name, slot, finished in entries
    ]
    return el("ul", join(items), cls="legend", attrs={"aria-label": "Legend"})
