"""What stands below the comparison: other figures of the paper, and ours in another count of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from fullrank.reporting import format
from fullrank.reporting.markup import Html, el, swatch, table, td, th
from fullrank.reporting.measure import MEASURES, WITHOUT_SOS
from fullrank.reporting.results import SPLITS
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
    ours = {"final": ", best", "last": ", last"} if compared.shows_last else {"final": ""}
    head = [th("Row"), *(th(f"{split}{ending}", cls="num") for split in SPLITS for ending in ours.values())]
    body = [
        [
            th(swatch(place), el("span", row.name, cls="name"), scope="row", cls="row-name"),
            *(
                td(WITHOUT_SOS.spread(row.without_sos.get(checkpoint, {}).get(split)), cls="num")
                for split in SPLITS
                for checkpoint in ours
            ),
        ]
        for place, row in enumerate(compared.rows)
    ]
    words = f"{WITHOUT_SOS.words.capitalize()}, as tokens are usually counted"
    return el("div", el("h3", words), table([head], body, caption=words), cls="below")
