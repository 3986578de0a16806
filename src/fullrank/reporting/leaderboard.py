"""Leaderboards of the ledger: rows measured on one text by one protocol, the best first, with what makes each again."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence

from fullrank.config.recipe import shipped
from fullrank.reporting import figures
from fullrank.reporting.figures import MISSING, code, literal, ranges, spread
from fullrank.reporting.ledger import Row, protocol_of, settings, text_of
from fullrank.reporting.runs import mapping, number

_MEASURES = {"bleu": "BLEU", "perplexity": "perplexity"}  # of the test text
_WIDTH, _HEIGHT = 120, 32  # of a curve
_SIZE = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
BEGINNING = f'<svg xmlns="http://www.w3.org/2000/svg" {_SIZE}>'  # of every drawing, by which ours are known


def page(rows: Sequence[Row]) -> Iterator[str | list[dict[str, str]]]:
    """Paragraphs and tables."""
    yield (
        "Test figures of the ledger, means over seeds, the best first; a table is one text read by one protocol. Figures of "
        "few seeds or of unequal numbers of tokens are shown and not judged: [the verdicts](README.md) are. A curve is the "
        "validation perplexity of each seed while training; runs that were added before the ledger kept it have none."
    )
    boards = dict[tuple[str, str, str], list[tuple[figures.Stat, list[Row]]]]()
    for group in settings(rows):
        protocol, final = protocol_of(group[0], "test"), mapping(group[0]["final"].get("test"))
        measure = next((name for name in _MEASURES if name in final), "")
        stat = figures.over_runs(number(mapping(row["final"].get("test")).get(measure)) for row in group)
        if stat and mapping(protocol.get("settings")).get("next_token", True):
            words = "; signature ".join(filter(None, (str(protocol.get("words")), protocol.get("signature"))))
            boards.setdefault((text_of(group[0]), measure, words), []).append((stat, group))
    for (text, measure, words), board in sorted(boards.items()):
        if len(board) > 1:
            yield f"## {literal(text)}: {_MEASURES[measure]}"
            yield literal(f"{words[:1].upper()}{words[1:]}.")
            board.sort(key=lambda one: one[0].mean, reverse=measure == "bleu")
            yield [_line(place, stat, group) for place, (stat, group) in enumerate(board, start=1)]


def _line(place: int, stat: figures.Stat, group: Sequence[Row]) -> dict[str, str]:
    first, changed = group[0], group[0]["set"]
    recipe, tokens = first["recipe"], figures.over_runs(number(row.get("tokens_seen")) for row in group)
    words = ["fullrank", "reproduce", recipe, "--rows", first["row"] or "", "--scale", first["scale"] or ""]
    words += ["--seeds", ",".join(str(row["seed"]) for row in group)]
    words += [f"{key}={json.dumps(value)}" for key, value in (changed or {}).items()]
    teacher = mapping(first.get("teacher")).get("name")
    words += ["train.distill.run=TEACHER"] if teacher else []
    again = recipe in shipped() and first["row"] and first["scale"] and changed is not None
    configuration = f"[{recipe}](../../src/fullrank/recipes/{recipe}.yaml)" if recipe in shipped() else code(recipe)
    return {
        "": str(place),
        "test": spread(stat, lambda figure: f"{figure:.1f}"),
        "configuration": f"{configuration} {literal(first['row'] or '')}"
        + (f", taught by {literal(teacher)}" if teacher else ""),
        "seeds": ranges(row["seed"] for row in group),
        "parameters": figures.count(mapping(first.get("parameters")).get("total")),
        "tokens": figures.count(tokens.mean if tokens else None),
        "commit": literal(", ".join(sorted({(row["environment"].get("commit") or MISSING)[:7] for row in group}))),
        "curve": f"![validation curves]({_name(group)})" if any(row.get("curve") for row in group) else MISSING,
        "command": code(shlex.join(words)) if again else MISSING,
    }


def curves(rows: Sequence[Row]) -> dict[str, str]:
    """A drawing of the validation curves of each group of seeds that has some, by the name of its file."""
    drawn = dict[str, str]()
    for group in settings(rows):
        lines = [[(step, math.log(figure)) for step, figure in row["curve"]] for row in group if row.get("curve")]
        if lines:
            drawn[_name(group)] = _drawing(lines)
    return drawn


def _name(group: Sequence[Row]) -> str:
    return f"curves/{group[0]['id']}.svg"


def _drawing(lines: Sequence[Sequence[tuple[float, float]]]) -> str:
    """Steps to the right, the logarithm of perplexity upwards."""
    steps, values = zip(*(point for line in lines for point in line), strict=True)
    low, height = min(values), max(values) - min(values) or 1.0
    paths = (
        " ".join(
            f"{3 + (_WIDTH - 6) * x / max(steps):.1f},{_HEIGHT - 3 - (_HEIGHT - 6) * (y - low) / height:.1f}"
            for x, y in line
        )
        for line in lines
    )
    drawn = "".join(f'<polyline points="{path}" fill="none" stroke="#2563eb" stroke-width="1.5"/>' for path in paths)
    return f"{BEGINNING}{drawn}</svg>\n"
