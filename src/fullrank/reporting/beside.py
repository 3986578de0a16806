"""What stands below the comparison: other figures of the paper, ours in other measures, and tests of differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fullrank.reporting import format
from fullrank.reporting.markup import Html, el, join, swatch, table, td, th
from fullrank.reporting.measure import LAST_POSITION, MEASURES, PERPLEXITY, SCORES, WITHOUT_SOS, Measure
from fullrank.reporting.results import SPLITS, RunRecord, mapping, number
from fullrank.reporting.significance import Differences, all_differences, heading, how, table_of
from fullrank.reporting.stats import Stat, over_runs
from fullrank.reporting.summary import LAST_POSITION_TITLE
from fullrank.reporting.table import Comparison, Row


def rest_of_paper(rows: Sequence[Row]) -> Html | None:
    """What the recipe says of the rows in the paper besides figures; None if that is parameters at most."""
    figures = {split + end for measure in MEASURES for end in measure.paper for split in SPLITS} | {"metric"}
    keys = list(dict.fromkeys(key for row in rows for key in row.paper if key not in figures))
    if set(keys) <= {"parameters", "extra_parameters"}:
        return None
    head = [th("Row"), *(th(format.readable(str(key)), cls="num") for key in keys)]
    body = [
        [
            th(swatch(place), el("span", row.name, cls="name"), scope="row", cls="row-name"),
            *(td(format.figure(row.paper.get(key), format.plain), cls="num") for key in keys),
        ]
        for place, row in enumerate(rows)
    ]
    return table([head], body, caption="What else the paper states")


def without_sos_table(compared: Comparison) -> Html:
    """Perplexity in the usual count of tokens, of the best checkpoint and, where it has a column, of the last."""
    words = f"{WITHOUT_SOS.words.capitalize()}, as tokens are usually counted"
    rows = enumerate(compared.rows)
    return _below(words, compared, [(place, row, row.without_sos) for place, row in rows], WITHOUT_SOS, marked=True)


def last_position_table(compared: Comparison) -> Html:
    """Perplexity at last positions of the rows whose other figures are no next-token perplexities."""
    rows = [(place, row, row.last_position) for place, row in enumerate(compared.rows) if row.last_position]
    return _below(LAST_POSITION_TITLE, compared, rows, LAST_POSITION, marked=False)


def significance_tables(compared: Comparison) -> Html:
    """Rows against their baselines on resampled test sets; nothing where no translations are kept."""
    if not (tests := all_differences(compared)):
        return Html("")
    note = " ".join(("A difference is set bold where its interval over sentences leaves out 0.", *how(tests)))
    return join([*(_significance(compared, tested) for tested in tests), el("p", note, cls="note")])


def _significance(compared: Comparison, tested: Differences) -> Html:
    heads, rows = table_of(tested)
    places = {row.name: place for place, row in enumerate(compared.rows)}
    bold = heads.index("difference")
    body = [
        [
            th(swatch(places[name]), el("span", name, cls="name"), scope="row", cls="row-name"),
            *(
                td(el("strong" if at == bold and row.decided else "span", text), cls="num")
                for at, text in enumerate(cells)
            ),
        ]
        for row, (name, *cells) in zip(tested.rows, rows, strict=True)
    ]
    head = [th("Row"), *(th(text.replace("95 % over", "95 % interval over"), cls="num") for text in heads)]
    caption = f"Differences on resampled {tested.split} sets"
    return el("div", el("h3", heading(tested)), table([head], body, caption=caption), cls="below")


def every_score(compared: Comparison) -> Html:
    """Of translations, on every split: BLEU, chrF, perplexity, and how long they are for their references."""
    measures = [score for score in SCORES if any(score.key in row.scores for row in compared.rows)]
    others = dict.fromkeys(split for row in compared.rows for run in row.runs for split in run.other_splits)
    kinds = [*(score.words for score in measures), PERPLEXITY.words, "length ratio"]
    head = [th("Row"), th("split"), *(th(kind, cls="num") for kind in kinds)]
    body = [
        [
            th(swatch(place), el("span", row.name, cls="name"), scope="row", cls="row-name"),
            td(split),
            *(td(text, cls="num") for text in _scores(row, split, measures)),
        ]
        for split in (*SPLITS, *others)
        for place, row in enumerate(compared.rows)
    ]
    note = "Length ratio: words of the translations over words of the references."
    return el("div", table([head], body, caption="Every figure of the translations"), el("p", note, cls="note"))


def _scores(row: Row, split: str, measures: Sequence[Measure]) -> list[str]:
    ratio = over_runs(number(_final(run, split).get("length_ratio")) for run in row.runs)
    perplexity = over_runs(PERPLEXITY.final(run, split) if run.next_token else None for run in row.runs)
    return [
        *(score.spread(over_runs(score.final(run, split) for run in row.runs)) for score in measures),
        PERPLEXITY.spread(perplexity),
        format.spread(ratio, lambda value: f"{value:.3f}"),
    ]


def _final(run: RunRecord, split: str) -> Mapping[str, Any]:
    return mapping(mapping(mapping(run.result).get("final")).get(split))


def _below(
    words: str,
    compared: Comparison,
    rows: Sequence[tuple[int, Row, Mapping[str, Mapping[str, Stat]]]],
    measure: Measure,
    *,
    marked: bool,
) -> Html:
    """Figures of rows by checkpoint and split, beside the colours of the rows."""
    ours = {"final": ", best", "last": ", last"} if compared.shows_last else {"final": ""}
    head = [th("Row"), *(th(f"{split}{ending}", cls="num") for split in SPLITS for ending in ours.values())]
    body = [
        [
            th(swatch(place), el("span", row.name, cls="name"), scope="row", cls="row-name"),
            *(
                td(row.shown(text) if marked else text, cls="num")
                for split in SPLITS
                for checkpoint in ours
                for text in [measure.spread(found.get(checkpoint, {}).get(split))]
            ),
        ]
        for place, row, found in rows
    ]
    return el("div", el("h3", words), table([head], body, caption=words), cls="below")
