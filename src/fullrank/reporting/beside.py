"""What stands below the comparison: other figures of the paper, and ours in another count of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fullrank.reporting import format
from fullrank.reporting.markup import Html, el, swatch, table, td, th
from fullrank.reporting.measure import LAST_POSITION, MEASURES, WITHOUT_SOS, Measure
from fullrank.reporting.results import SPLITS
from fullrank.reporting.stats import Stat
from fullrank.reporting.summary import LAST_POSITION_TITLE
from fullrank.reporting.table import Comparison, Row


def rest_of_paper(rows: Sequence[Row]) -> Html | None:
    """What the recipe says of the rows in the paper besides figures; None if that is parameters at most."""
    figures = {split + end for measure in MEASURES for end in measure.paper for split in SPLITS}
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
