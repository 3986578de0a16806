"""The page of a census: how many model types of transformers pass the check, and what is said of each of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NotRequired, TypedDict

from fullrank.core.section import CountOrZero
from fullrank.reporting.figures import code, literal, prose


class _Failure(TypedDict):
    check: str
    layers: NotRequired[list[str]]


class CensusRow(TypedDict):
    """A class of transformers that was checked."""

    type: str
    verdict: str
    reason: str
    parameters: CountOrZero | None
    seconds: float | None
    failures: list[_Failure]
    transformers: str
    torch: str


class Census(TypedDict):
    """The content of census.json."""

    classes: list[CensusRow]


NONE: Mapping[str, str] = {}
VERDICTS = ("passes", "leaks", "fails otherwise", "too slow", "crashed", "not applicable")


def counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Number of classes by verdict, of those that occur."""
    found = Counter(row["verdict"] for row in rows)
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def why(row: Mapping[str, Any]) -> str:
    """What a verdict rests on: the reason, or the first checks that fail with the layer where it enters."""
    failed = [
        failure["check"] + (f" ({failure['layers'][0]})" if failure.get("layers") else "")
        for failure in row["failures"]
    ]
    more = [f"and {len(failed) - 3} more"] if len(failed) > 3 else []
    return row["reason"] or "; ".join(failed[:3] + more)


def page(rows: Sequence[Mapping[str, Any]], notes: Mapping[str, str] = NONE) -> Iterator[list[dict[str, str]] | str]:
    """The page, piece by piece: text, and rows of tables. notes: what was found by hand, by class."""
    versions = sorted({(row["transformers"], row["torch"]) for row in rows})
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    yield (
        "`fullrank check --census` builds a tiny random model of every model type of the installed transformers that predicts "
        "next tokens, causal or sequence to sequence, and checks it in a process of its own. "
        f"Here: {literal(', '.join(f'transformers {one}, torch {torch}' for one, torch in versions))}; {len(rows)} classes"
        + (f"; CPU time of a class {median(seconds):.1f} s (median), {max(seconds):.1f} s at most." if seconds else ".")
    )
    yield [{"verdict": verdict, "classes": str(count)} for verdict, count in counts(rows).items()]
    for verdict in VERDICTS[1:]:
        if chosen := [row for row in rows if row["verdict"] == verdict]:
            yield f"## {verdict[0].upper()}{verdict[1:]}"
            yield [
                {"type": literal(row["type"]), "class": code(row["class"]), "why": literal(why(row))} for row in chosen
            ]
            yield "\n\n".join(_reproductions(chosen, notes))
    yield "## Every class"
    yield [
        {
            "type": literal(row["type"]),
            "class": code(row["class"]),
            "verdict": literal(row["verdict"]),
            "parameters": "" if row["parameters"] is None else f"{row['parameters']:,}",
            "CPU seconds": "" if row["seconds"] is None else f"{row['seconds']:.1f}",
        }
        for row in rows
    ]


def _reproductions(rows: Sequence[Mapping[str, Any]], notes: Mapping[str, str]) -> Iterator[str]:
    """Of each class what was found by hand, and its first failure in full, with the lines that show it."""
    for row in rows:
        if row["class"] in notes:
            yield f"{code(row['class'])}, by hand: {prose(notes[row['class']])}"
        for failure in row["failures"][:1]:
            told = dict.fromkeys(failure[key] for key in ("path", "leaks", "remark") if failure.get(key))
            yield f"{code(row['class'])}: {literal(failure['check'])}: {literal('; '.join(map(str, told)))}"
            if lines := failure.get("reproduction"):
                text = lines if isinstance(lines, str) else "\n".join(lines)
                yield f"```text\n{text.replace('```', chr(39) * 3)}\n```"
