"""What stands below the comparison: other figures of the paper, ours in other measures, and tests of differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fullrank.reporting import format
from fullrank.reporting.markup import Html, el, swatch, table, td, th
from fullrank.reporting.measure import BLEU, LAST_POSITION, MEASURES, PERPLEXITY, SCORES, WITHOUT_SOS, Measure
from fullrank.reporting.results import SPLITS, RunRecord, mapping, number
from fullrank.reporting.significance import Differences, how, interval, mean_and_runs
from fullrank.reporting.stats import Stat, over_runs
from fullrank.reporting.summary import LAST_POSITION_TITLE
from fullrank.reporting.table import Comparison, Row

_SPLIT = {"valid": "Validation", "test": "Test"}


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


def significance_table(compared: Comparison, tested: Differences) -> Html:
    """Every row against the first on resampled test sets."""
    words = (
        f"{_SPLIT[tested.split]} BLEU against {tested.first}, {mean_and_runs(tested.first_score, tested.first_runs)}"
    )
    heads = ("BLEU", "difference", "95 % interval over sentences", "p", "samples ahead", "95 % interval over seeds")
    places = {row.name: place for place, row in enumerate(compared.rows)}
    body = [
        [
            th(swatch(places[row.row]), el("span", row.row, cls="name"), scope="row", cls="row-name"),
            td(mean_and_runs(row.score, row.runs), cls="num"),
            td(el("strong" if row.decided else "span", BLEU.show_difference(row.difference)), cls="num"),
            td(interval(row.low, row.high), cls="num"),
            td(f"{row.p_value:.3f}", cls="num"),
            td(f"{row.ahead:.0%}", cls="num"),
            td(interval(row.seeds_low, row.seeds_high), cls="num"),
        ]
        for row in tested.rows
    ]
    note = " ".join(("A difference is set bold where its interval over sentences leaves out 0.", *how(tested)))
    head = [th("Row"), *(th(heading, cls="num") for heading in heads)]
    caption = "Differences on resampled test sets"
    return el("div", el("h3", words), table([head], body, caption=caption), el("p", note, cls="note"), cls="below")


def every_score(compared: Comparison) -> Html:
    """Of translations: BLEU, chrF, perplexity, and how long they are for their references."""
    measures = [score for score in SCORES if any(score.key in row.scores for row in compared.rows)]
    kinds = [*(score.words for score in measures), PERPLEXITY.words, "length ratio"]
    head = [th("Row"), *(th(f"{split}, {kind}", cls="num") for split in SPLITS for kind in kinds)]
    body = [
        [
            th(swatch(place), el("span", row.name, cls="name"), scope="row", cls="row-name"),
            *(td(text, cls="num") for split in SPLITS for text in _scores(row, split, measures)),
        ]
        for place, row in enumerate(compared.rows)
    ]
    note = "Length ratio: words of the translations over words of the references."
    return el("div", table([head], body, caption="Every figure of the translations"), el("p", note, cls="note"))


def _scores(row: Row, split: str, measures: Sequence[Measure]) -> list[str]:
    ratio = over_runs(number(_final(run, split).get("length_ratio")) for run in row.runs)
    return [
        *(score.spread(row.scores.get(score.key, {}).get(split)) for score in measures),
        PERPLEXITY.spread(row.perplexity.get(split)),
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
