"""The upper part of a report: summary, key figures, the comparison, single runs, what is not finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.reporting import format
from fullrank.reporting.beside import (
    every_score,
    last_position_table,
    rest_of_paper,
    significance_tables,
    without_sos_table,
)
from fullrank.reporting.cautions import signature_lines
from fullrank.reporting.columns import Column, columns
from fullrank.reporting.figures import dot_figure
from fullrank.reporting.markup import Html, details, el, join, section, swatch, table, td, th
from fullrank.reporting.measure import (
    BITS_PER_BYTE,
    BITS_PER_CHARACTER,
    BLEU,
    LAST_POSITION,
    TOKENISED_BLEU,
    Measure,
)
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
    best, first = best_row(rows, measure, split), rows[0]
    shown = best or next(row for row in (*rows, *compared.rows) if split in row.figures)
    extreme = measure.extreme.capitalize() if best else "Final"
    value = shown.shown(measure.show(shown.figures[split].mean))
    tiles = [(f"{extreme} {_SPLIT[split]} {measure.words}", value, shown.name)]
    if not shown.next_token and (last := shown.last_position.get("final", {}).get(split)) is not None:
        tiles.append(("At last positions", LAST_POSITION.show(last.mean), "targets that are not read"))
    if best is not None and split in best.difference:
        change = measure.show_difference(best.difference[split])
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
    parts += [el("p", line, cls="note") for line in signature_lines(compared)]
    if compared.counts_sos:
        parts.append(without_sos_table(compared))
    if any(row.last_position for row in rows):
        parts.append(last_position_table(compared))
    parts.append(significance_tables(compared))
    if compared.comparable and len(rows) > 1:
        parts.append(_dots(rows, compared.measure))
    if compared.measure is BLEU:
        parts.append(details("Every figure of the translations", every_score(compared), cls="printed"))
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
    notes = [
        f"{measure.title}: {measure.comparative} is better; the {measure.extreme} of comparable rows is set bold.",
    ]
    if any(row.difference for row in rows):
        whose, points = "their" if measure.in_bits else "its", ", in points" if measure.higher else ""
        notes.append(
            f"Beneath {measure.article or 'the '}{measure.words}: {whose} difference to the first row{points}."
        )
    if compared.measure is BLEU:
        notes.append("Perplexity is per target token.")
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
            el("span", f"{MARK} {NOT_NEXT_TOKEN}.") if any(row.marked for row in rows) else "",
        ),
        figure,
        cls="wide",
    )


def _comparison_table(compared: Comparison) -> Html:
    rows, shown = compared.rows, columns(compared)
    seeds = any(len(row.runs) > 1 for row in rows)
    groups, kinds = _heads(compared, shown)
    upper = [
        *([td("")] * (1 + seeds)),
        th("Parameters", scope="colgroup", cls="num group", span=2),
        *groups,
        th("Speed", scope="colgroup", cls="num group", span=3),
    ]
    lower = [th("Row"), *([th("n", cls="num")] if seeds else []), th("total", cls="num"), th("over first", cls="num")]
    lower += kinds
    lower += [th(word, cls="num") for word in ("tokens/s", "ms/step", "wall time")]
    body = [_comparison_row(compared, shown, row, place, seeds) for place, row in enumerate(rows)]
    foot = _unigram_rows(compared, shown, seeds)
    return table([upper, lower], body, caption="Rows compared", foot=foot, cls="comparison")


def _heads(compared: Comparison, shown: Sequence[Column]) -> tuple[list[Html], list[Html]]:
    """Over the columns of figures: a heading for each split and what stands in each column, or one heading over the splits."""
    measure, kinds = compared.measure, [column for column in shown if column.whose]
    more = [column for column in shown if not column.whose]
    if len(kinds) == len(SPLITS):
        groups = [th(measure.title, scope="colgroup", cls="num group", span=2)]
        names = [_SPLIT[column.split] for column in kinds]
    else:
        groups = [
            th(f"{_SPLIT[split].capitalize()} {measure.words}", scope="colgroup", cls="num group", span=len(kinds) // 2)
            for split in SPLITS
        ]
        names = [column.whose + (", tok." if column.measure is TOKENISED_BLEU else "") for column in kinds]
    if more:
        groups.append(th(_SPLIT[more[0].split].capitalize(), scope="colgroup", cls="num group", span=len(more)))
        names += [column.measure.words for column in more]
    return groups, [th(name, cls="num") for name in names]


def _comparison_row(compared: Comparison, shown: Sequence[Column], row: Row, place: int, seeds: bool) -> list[Html]:
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
    for column in shown:
        if not column.judged:
            cells.append(td(column.text(row), cls="num quiet" if column.kind == "paper" else "num"))
            continue
        best = column.split in row.best
        change = measure.show_difference(row.difference[column.split]) if column.split in row.difference else ""
        value = el("strong" if best else "span", column.text(row))
        cells.append(td(value, el("span", change, cls="sub") if change else "", cls="num best" if best else "num"))
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


def _unigram_rows(compared: Comparison, shown: Sequence[Column], seeds: bool) -> list[list[Html]]:
    """One row for each text: the figure of word frequencies alone."""
    texts = {row.text: row for row in reversed(compared.rows) if row.unigram}
    found: list[list[Html]] = []
    for _, row in sorted(texts.items()):
        name = "Unigram, same vocabulary" if compared.comparable else f"Unigram: {row.label}"
        cells = [th(name, scope="row", cls="row-name"), *([td("")] if seeds else []), td(""), td("")]
        cells += [td(column.unigram(row), cls="num" if column.judged else "") for column in shown]
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
