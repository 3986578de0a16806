"""The upper part of a report: summary, key figures, the comparison, single runs, what is not finished."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from fullrank.config.schema import NOT_NEXT_TOKEN
from fullrank.reporting import format
from fullrank.reporting.beside import last_position_table, rest_of_paper, without_sos_table
from fullrank.reporting.figures import dot_figure
from fullrank.reporting.markup import Html, details, el, join, section, swatch, table, td, th
from fullrank.reporting.measure import BITS_PER_BYTE, BITS_PER_CHARACTER, LAST_POSITION, Measure
from fullrank.reporting.results import SPLITS, RunRecord, integer, mapping, number
from fullrank.reporting.stats import Stat
from fullrank.reporting.summary import Summary, best_row, judged_split
from fullrank.reporting.table import MARK, Comparison, Row, ms_per_step

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
    rows, measure = [row.judged for row in compared.rows], compared.measure
    if not rows:
        return Html("")
    split = judged_split(rows if any(row.figures for row in rows) else compared.rows)
    best, first = best_row(rows, split), rows[0]
    shown = best or next(row for row in (*rows, *compared.rows) if split in row.figures)
    lowest = "Lowest" if best else "Final"
    value = shown.shown(measure.show(shown.figures[split].mean))
    tiles = [(f"{lowest} {_SPLIT[split]} {measure.words}", value, shown.name)]
    if not shown.next_token and (last := shown.last_position.get("final", {}).get(split)) is not None:
        tiles.append(("At last positions", LAST_POSITION.show(last.mean), "targets that are not read"))
    if best is not None and split in best.difference:
        change = format.signed_percent(best.difference[split])
        tiles.append(("Against the first row", change, f"{first.name}: {measure.show(first.figures[split].mean)}"))
    if best is not None and best is not first and best.extra_parameters is not None:
        tiles.append(("Parameters added", format.extra(best.extra_parameters), f"to {format.count(first.parameters)}"))
    if split in first.unigram:
        tiles.append((f"Unigram {measure.words}", measure.show(first.unigram[split]), "same vocabulary"))
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
    parts = [_comparison_table(compared), el("p", " ".join(_notes(compared)), cls="note")]
    if compared.counts_sos:
        parts.append(without_sos_table(compared))
    if any(row.last_position for row in rows):
        parts.append(last_position_table(compared))
    if compared.comparable and len(rows) > 1:
        parts.append(_dots(rows, compared.measure))
    if (more := rest_of_paper(rows)) is not None:
        parts.append(details("What else the paper states", more, cls="printed"))
    parts.append(
        details(
            f"Single runs ({sum(len(row.runs) for row in rows)})", _single_runs(rows, compared.measure), cls="printed"
        )
    )
    return section("comparison", "Comparison", *parts)


def _notes(compared: Comparison) -> list[str]:
    """How to read the table."""
    rows, measure = compared.rows, compared.measure
    notes = [f"{measure.words.capitalize()}: lower is better; the lowest of comparable rows is set bold."]
    if any(row.difference for row in rows):
        whose = "their" if measure.in_bits else "its"
        notes.append(f"Beneath {measure.article or 'the '}{measure.words}: {whose} difference to the first row.")
    if any(len(row.runs) > 1 for row in rows):
        notes.append(
            "Rows with several seeds (n) show mean ± sample standard deviation; the mean is that of the runs' "
            f"{measure.plural}. Speeds and times are means."
        )
    if compared.has_paper:
        notes.append("“Paper” is the published figure, as the recipe states it.")
    if compared.marked:
        notes.append(f"{MARK} {NOT_NEXT_TOKEN}; such a figure compares with no other, and is never set bold.")
    if measure is BITS_PER_BYTE and compared.states(BITS_PER_CHARACTER):
        notes.append(
            "The paper calls its figure bits per character; where the corpus is bytes (enwik8), a character is a byte."
        )
    return notes


def _dots(rows: Sequence[Row], measure: Measure) -> Html:
    split = judged_split(rows)
    words = f"Final {_SPLIT[split]} {measure.words}"
    values = ", ".join(f"{row.name} {row.shown(measure.spread(row.figures.get(split)))}" for row in rows)
    figure = Html(dot_figure(rows, range(len(rows)), split, measure, f"{words}: {values}."))
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
            el("b", words),
            el("span", caption + "The axis does not start at zero."),
            el("span", f"{MARK} {NOT_NEXT_TOKEN}.") if any(not row.next_token for row in rows) else "",
        ),
        figure,
        cls="wide",
    )


def _comparison_table(compared: Comparison) -> Html:
    rows = compared.rows
    seeds = any(len(row.runs) > 1 for row in rows)
    words, kinds = compared.measure.words, _kinds(compared)
    split_heads = [th(words.capitalize(), scope="colgroup", cls="num group", span=2)]
    if len(kinds) > 1:
        split_heads = [
            th(f"{_SPLIT[split].capitalize()} {words}", scope="colgroup", cls="num group", span=len(kinds))
            for split in SPLITS
        ]
    upper = [
        *([td("")] * (1 + seeds)),
        th("Parameters", scope="colgroup", cls="num group", span=2),
        *split_heads,
        th("Speed", scope="colgroup", cls="num group", span=3),
    ]
    lower = [th("Row"), *([th("n", cls="num")] if seeds else []), th("total", cls="num"), th("over first", cls="num")]
    for split in SPLITS:
        lower += [th(kind, cls="num") for kind in kinds] if len(kinds) > 1 else [th(_SPLIT[split], cls="num")]
    lower += [th(word, cls="num") for word in ("tokens/s", "ms/step", "wall time")]
    body = [_comparison_row(compared, row, place, seeds) for place, row in enumerate(rows)]
    foot = _unigram_rows(compared, seeds)
    return table([upper, lower], body, caption="Rows compared", foot=foot, cls="comparison")


def _kinds(compared: Comparison) -> list[str]:
    """What stands under each split: the paper's figure where there is one, and ours."""
    ours = ["ours, best", "ours, last"] if compared.shows_last else ["ours"]
    return ["paper", *ours] if compared.has_paper else ours


def _comparison_row(compared: Comparison, row: Row, place: int, seeds: bool) -> list[Html]:
    first, measure = row is compared.rows[0], compared.measure
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
        if compared.has_paper:
            cells.append(td(measure.stated(measure.of_paper(row.paper, split)), cls="num quiet"))
        best = split in row.best
        value = el("strong" if best else "span", row.shown(measure.spread(row.figures.get(split))))
        change = format.signed_percent(row.difference[split]) if split in row.difference else ""
        cells.append(td(value, el("span", change, cls="sub") if change else "", cls="num best" if best else "num"))
        if compared.shows_last:
            cells.append(td(row.shown(measure.spread(row.last.get(split))), cls="num"))
    steps = {phase: stat.mean for phase, stat in row.ms_per_step.items()}
    return [
        *cells,
        td(format.count(_mean(row.tokens_per_second)), cls="num"),
        td(*_by_phase(steps), cls="num"),
        td(format.duration(_mean(row.wall_seconds)), cls="num"),
    ]


def _by_phase(steps: Mapping[str, float]) -> list[Html]:
    """Milliseconds per step: a number, or a line for each phase with its name."""
    if len(steps) < 2:
        return [Html(format.milliseconds(next(iter(steps.values()), None)))]
    return [
        el("span", el("span", f"{phase} ", cls="quiet"), format.milliseconds(value), cls="phase")
        for phase, value in steps.items()
    ]


def _unigram_rows(compared: Comparison, seeds: bool) -> list[list[Html]]:
    """One row for each text: the figure of word frequencies alone."""
    texts = {row.text: row for row in reversed(compared.rows) if row.unigram}
    found: list[list[Html]] = []
    for _, row in sorted(texts.items()):
        name = "Unigram, same vocabulary" if compared.comparable else f"Unigram: {row.label}"
        cells = [th(name, scope="row", cls="row-name"), *([td("")] if seeds else []), td(""), td("")]
        for split in SPLITS:
            cells += [td("")] * compared.has_paper
            cells += [td(compared.measure.show(row.unigram.get(split)), cls="num"), *([td("")] * compared.shows_last)]
        found.append([*cells, *([td("")] * 3)])
    return found


def _mean(stat: Stat | None) -> float | None:
    return None if stat is None else stat.mean


def _single_runs(rows: Sequence[Row], measure: Measure) -> Html:
    heads = (
        *_SPLIT.values(),
        "best at step",
        "steps",
        "tokens seen",
        "tokens/s",
        "ms/step",
        "wall time",
        "peak memory",
    )
    head = [th("Row"), th("seed", cls="num"), *(th(word, cls="num") for word in heads), th("folder")]
    body = [_single_run(row, run, place, measure) for place, row in enumerate(rows) for run in row.runs]
    return table([head], body, caption="Single runs")


def _single_run(row: Row, run: RunRecord, place: int, measure: Measure) -> list[Html]:
    result = mapping(run.result)
    memory = number(result.get("peak_memory_mib"))
    cells = [
        *(row.shown(measure.show(measure.final(run, split))) for split in SPLITS),
        format.count(integer(mapping(result.get("best")).get("step"))),
        format.count(integer(result.get("steps"))),
        format.count(integer(result.get("tokens_seen"))),
        format.count(number(result.get("tokens_per_second"))),
        join(_by_phase(ms_per_step(run))),
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
        parts.append(_trouble(run, "not finished", [*_progress(run, compared.measure), *run.problems], resume))
    for row in compared.rows:
        parts += [
            _trouble(run, "finished, damaged in part", list(run.problems), Html("")) for run in row.runs if run.problems
        ]
    return section("unfinished", "Unfinished and damaged runs", *parts)


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
