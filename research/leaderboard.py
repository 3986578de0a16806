"""Leaderboard: rows of the ledger measured on one text by one protocol, the best first, with their commands."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from fullrank.config.load import list_shipped
from research import markdown as md
from research import ngrams
from research.ledger import Row, figures_of, group_by_setting, identify_text

MEASURES = {"bleu": "BLEU", "perplexity": "perplexity"}  # of the test text
INTRODUCTION = (
    "Test figures of the ledger, means over seeds, the best first; a table is one text read by one protocol. Figures of few "
    "seeds or of unequal numbers of tokens are shown and not judged: [the verdicts](README.md) are."
)
Board = list[list[Row]]
Texts = Mapping[tuple[str, str], Mapping[str, str]]  # the lines of ngrams.csv by checksums of test text and vocabulary


def find_boards(rows: Sequence[Row]) -> dict[tuple[str, ...], Board]:
    """Group seeds by corpus, measure, protocol, text and vocabulary, the best first.

    Texts with one group have no board, and figures that are not of next tokens are on none.
    """
    boards: dict[tuple[str, ...], Board] = {}
    for group in group_by_setting(rows):
        measure = next((name for name in MEASURES if name in figures_of(group[0], "test")), "")
        if measure and group[0]["next_token"] != "no":
            words = "; signature ".join(filter(None, (group[0]["protocol.test"], group[0]["signature"])))
            texts = identify_text(group[0]) if measure == "perplexity" else ("", "")
            boards.setdefault((group[0]["corpus"], measure, words, *texts), []).append(group)
    for (_, measure, *_), board in boards.items():
        board.sort(key=lambda group: fmean(test_figures(group)), reverse=measure == "bleu")
    return {key: boards[key] for key in sorted(boards) if len(boards[key]) > 1}


def test_figures(group: Sequence[Row]) -> list[float]:
    """List the test figure of each seed: BLEU where it was measured, else perplexity."""
    return [next(iter(figures_of(row, "test").values())) for row in group]


def make_page(rows: Sequence[Row], texts: Texts) -> Iterator[str]:
    """Yield the pieces of the page."""
    yield "# Leaderboard"
    yield INTRODUCTION
    for (corpus, measure, words, *text), board in find_boards(rows).items():
        counted = texts.get((text[0], text[1])) if measure == "perplexity" else None
        size = f", {int(counted['tokens']):,} tokens to train on" if counted else ""
        yield f"## {md.prose(corpus)}{size}: {MEASURES[measure]}"
        yield md.prose(f"{words[:1].upper()}{words[1:]}.")
        line = float(counted[ngrams.LINE]) if counted else math.inf
        if counted:
            yield f"Counting 4-grams has {line:.1f}. A row above it has not learned trigrams; it is marked *."
        yield md.make_table([make_line(place, group, line) for place, group in enumerate(board, start=1)])


def make_line(place: int, group: Sequence[Row], line: float) -> dict[str, str]:
    """Make a line of a board.

    Args:
        place: its place, from 1.
        group: rows of one setting.
        line: perplexity of counting 4-grams.

    Returns:
        The cells by heading.
    """
    first = group[0]
    is_shipped = group[0]["recipe"] in list_shipped()
    recipe = first["recipe"]
    name = f"[{recipe}](../../src/fullrank/recipes/{recipe}.yaml)" if is_shipped else md.code(recipe)
    figures = test_figures(group)
    commits = {row["commit"][:7] or md.MISSING for row in group}
    return {
        "": str(place),
        "test": md.show_spread(figures, lambda figure: f"{figure:.1f}") + (" \\*" if fmean(figures) > line else ""),
        "configuration": f"{name} {first['row']}",
        "seeds": md.show_seeds(row["seed"] for row in group),
        "parameters": md.show_count([first["parameters"]]),
        "tokens": md.show_count(row["tokens_seen"] for row in group),
        "commit": ", ".join(sorted(commits)),
        "command": md.code(make_command(group)) if is_shipped else md.MISSING,
    }


def make_command(group: Sequence[Row]) -> str:
    """Write the command that trains these rows again; a dash where settings, row or scale were not recorded."""
    first = group[0]
    settings = first["settings"]
    if settings is None or not first["row"] or not first["scale"]:
        return md.MISSING
    words = ["fullrank", "reproduce", first["recipe"], "--rows", first["row"], "--scale", first["scale"]]
    words += ["--seeds", ",".join(str(row["seed"]) for row in group)]
    words += [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return shlex.join(words)
