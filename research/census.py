"""The check of every model type of the installed transformers that predicts next tokens, each in a process of its own.

    python -m research.census                            goes on where it stopped
    python -m research.census --only llama,t5 --jobs 2

research/census.jsonl has a line for each class; docs/results/census.md is made from it by `python -m research.pages`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fullrank.core.errors import InputError, one_line
from fullrank.files import write_text
from research import RESEARCH, read_json_lines
from research.markdown import code, make_table, prose, show

if TYPE_CHECKING:
    from fullrank.checking import Report

Row = dict[str, Any]
Class = tuple[str, str]  # model type and name
VERDICTS = ("passes", "leaks", "fails otherwise", "too slow", "crashed", "not applicable")
LEAKS = ("future", "rows of a batch")  # names of checks begin so
FIRST_FAILURE = ("path", "leaks", "difference", "tolerance", "remark", "reproduction")
VERSIONS = ("transformers", "torch", "fullrank")


def take_census(file: Path, only: Sequence[str], jobs: int, limit: float) -> list[Row]:
    """Check the classes that the file does not have for the installed versions, and add them to it, each when it is done.

    Args:
        file: JSON lines of the census, a line for each class.
        only: model types; empty for all.
        jobs: classes that are checked at once.
        limit: seconds after which a class is given up.

    Returns:
        The rows of all classes that were asked for.

    Raises:
        InputError: there is no such model type.
    """
    from fullrank.hf.tiny import list_classes

    pairs = list_classes()
    if unknown := set(only) - {kind for kind, _ in pairs}:
        raise InputError(
            f"--only: {', '.join(sorted(unknown))}: no model type that predicts next tokens; as in llama,t5"
        )
    versions = {name: version(name) for name in VERSIONS}
    rows = {(row["type"], row["class"]): row for row in read_json_lines(file)}
    wanted = [pair for pair in pairs if not only or pair[0] in only]
    missing = [pair for pair in wanted if not versions.items() <= rows.get(pair, {}).items()]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} classes are in {file}")
    with file.open("a", encoding="utf-8") as book, ThreadPoolExecutor(jobs) as pool:
        for number, row in enumerate(pool.map(lambda pair: check_apart(pair, limit), missing), start=1):
            rows[row["type"], row["class"]] = row = {**row, **versions}
            print(json.dumps(row), file=book, flush=True)
            print(f"{number}/{len(missing)} {row['class']}: {row['verdict']} {explain(row)}", flush=True)
    lines = [json.dumps(rows[pair]) for pair in pairs if pair in rows]
    write_text(file, "".join(f"{line}\n" for line in lines))
    return [rows[pair] for pair in wanted]


# -- a class ----------------------------------------------------------------------------------------------------------


def check_apart(pair: Class, limit: float) -> Row:
    """Check a class in a process of its own, as it may crash; it is given up after `limit` seconds."""
    command = [sys.executable, "-m", "research.census", "--check", *pair]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=one_thread)
    except subprocess.TimeoutExpired:
        return make_row(pair, "too slow", f"not done after {limit:g} seconds")
    if done.returncode:
        return make_row(pair, "crashed", f"its process ended with status {done.returncode}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def check_class(pair: Class) -> Row:
    """Build a tiny random model of a class, and check it."""
    from fullrank.checking import check
    from fullrank.hf.tiny import build_tiny

    start = time.process_time()
    try:
        model, inputs = build_tiny(*pair)
    except Exception as error:
        return make_row(pair, "not applicable", describe_error(error))
    try:
        report = check(model, inputs)
    except InputError as error:
        return make_row(pair, "not applicable", str(error), parameters=model.num_parameters())
    except Exception as error:
        return make_row(pair, "crashed", describe_error(error))
    return row_of(pair, report, time.process_time() - start)


def row_of(pair: Class, report: Report, seconds: float) -> Row:
    """Make the row of a class that was checked: the failing checks with their layers, and the figures of the first.

    Args:
        pair: model type and class.
        report: the checks.
        seconds: processor time of building the model and of the checks.

    Returns:
        The row.
    """
    failures = [{"check": failure.check, "layers": list(failure.layers)} for failure in report.failures]
    for finding in report.failures[:1]:
        values = {name: getattr(finding, name, None) for name in FIRST_FAILURE}
        failures[0] |= {name: value for name, value in values.items() if value not in (None, "", ())}
    figures = [failure.check for failure in report.failures if failure.difference is not None]
    leaks = any(name.startswith(LEAKS) for name in figures)
    verdict = "leaks" if leaks else "fails otherwise" if failures else "passes"
    measured = {"parameters": report.description["parameters"], "seconds": round(seconds, 1), "failures": failures}
    cached = (finding for finding in report.findings if finding.check.startswith("incremental decoding"))
    cache = next(cached, None)
    return make_row(pair, verdict, **measured, cache=f"{cache.verdict} {cache.reason}" if cache else "")


def make_row(pair: Class, verdict: str, reason: str = "", **measured: Any) -> Row:
    """Make a row of the census.

    Args:
        pair: model type and class.
        verdict: one of `VERDICTS`.
        reason: what it rests on, in words.
        **measured: further columns.

    Returns:
        The row.
    """
    empty: Row = {"parameters": None, "seconds": None, "failures": []}
    return {"type": pair[0], "class": pair[1], "verdict": verdict, "reason": reason, **empty, **measured}


def describe_error(error: Exception) -> str:
    """Describe an error on one line."""
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {one_line(error, 240)}"


def explain(row: Mapping[str, Any]) -> str:
    """Explain a verdict: by its reason, or the first checks that fail with the layer where it enters."""
    failures = [(failure["check"], failure["layers"][:1]) for failure in row["failures"]]
    names = [f"{check} ({layer[0]})" if layer else check for check, layer in failures]
    more = [f"and {len(names) - 3} more"] if len(names) > 3 else []
    return row["reason"] or "; ".join(names[:3] + more)


# -- the page ---------------------------------------------------------------------------------------------------------


def make_page(rows: Sequence[Row], notes: Mapping[str, str]) -> Iterator[str]:
    """Yield the pieces of the page. notes: what was found by hand, by class."""
    versions = sorted({f"transformers {row['transformers']}, torch {row['torch']}" for row in rows})
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    counts = Counter(row["verdict"] for row in rows)
    yield "# Census of transformers"
    yield (
        "`python -m research.census` builds a tiny random model of every model type of the installed transformers that "
        "predicts next tokens, causal or sequence to sequence, and checks it in a process of its own. "
        f"Here: {', '.join(versions)}; {len(rows)} classes; CPU time of a class {median(seconds):.1f} s (median), "
        f"{max(seconds):.1f} s at most."
    )
    yield make_table([{"verdict": name, "classes": str(counts[name])} for name in VERDICTS if counts[name]])
    for verdict in VERDICTS[1:]:
        chosen = [row for row in rows if row["verdict"] == verdict]
        if chosen:
            yield f"## {verdict.capitalize()}"
            table = []
            for row in chosen:
                table.append({"type": row["type"], "class": code(row["class"]), "why": prose(explain(row))})
            yield make_table(table)
            for row in chosen:
                yield from describe_failure(row, notes)
    yield "## Every class"
    yield make_table([
        {
            "type": row["type"], "class": code(row["class"]), "verdict": row["verdict"],
            "parameters": show(row["parameters"]), "CPU seconds": "" if row["seconds"] is None else f"{row['seconds']:.1f}",
        }
        for row in rows
    ])  # fmt: skip


def describe_failure(row: Row, notes: Mapping[str, str]) -> Iterator[str]:
    """Yield what was found by hand, and the first failure in full, with the lines that show it."""
    if row["class"] in notes:
        yield f"{code(row['class'])}, by hand: {prose(notes[row['class']])}"
    for failure in row["failures"][:1]:
        words = dict.fromkeys(str(failure[key]) for key in ("path", "leaks", "remark") if failure.get(key))
        yield f"{code(row['class'])}: {prose(failure['check'])}: {prose('; '.join(words))}"
        if lines := failure.get("reproduction"):
            text = lines if isinstance(lines, str) else "\n".join(lines)
            yield f"```text\n{text}\n```"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TYPE,TYPE", help="these model types")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a class may take")
    parser.add_argument("--file", type=Path, default=RESEARCH / "census.jsonl")
    parser.add_argument("--check", nargs=2, metavar=("TYPE", "CLASS"), help="print the row of this class alone")
    options = parser.parse_args()
    if options.check:
        print(json.dumps(check_class(tuple(options.check))))
        return
    only = [word.strip() for word in options.only.split(",") if word.strip()]
    try:
        rows = take_census(options.file, only, options.jobs, options.limit)
    except InputError as error:
        sys.exit(f"research.census: {error}")
    counts = Counter(row["verdict"] for row in rows)
    print(f"{len(rows)} classes: " + ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name]))
    sys.exit(bool(counts["leaks"] or counts["fails otherwise"] or counts["crashed"]))


if __name__ == "__main__":
    main()
