"""`fullrank check --census`: the check of every model type of the installed transformers, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fullrank.checking import Report, check
from fullrank.core.errors import InputError, one_line, pip_install
from fullrank.experiments.models import quiet
from fullrank.experiments.task import Say
from fullrank.experiments.tiny import classes, tiny
from fullrank.files import check_own, one_at_a_time, parse_json, write_text
from fullrank.reporting.census import why

Row = dict[str, Any]
LIMIT = 300.0  # seconds of a class
_BEGINNING = '{"classes": ['
_VERSIONS = ("transformers", "torch", "fullrank")
# imported once, by the process that the others are forked from
_PRELOADED = ["transformers.generation.utils", "transformers.modeling_layers", "transformers.masking_utils", __name__]
_OF_LEAKS = ("future", "rows of a batch", "last position")  # names of checks begin so


def census(
    folder: Path, *, only: Sequence[str] = (), jobs: int = 1, limit: float = LIMIT, say: Say = print
) -> list[Row]:
    """A row for each class that predicts next tokens, sorted; new ones are added to FOLDER/census.jsonl as they are made.

    Classes that the file holds for the installed versions are not checked again. At the end FOLDER/census.json has all rows.
    only: model types. limit: seconds after which a class is given up.
    Raises InputError without transformers, and for an unknown model type.
    """
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"--census: needs transformers; install it: {pip_install('hf')}")
    pairs, versions = classes(), {name: version(name) for name in _VERSIONS}
    if unknown := sorted(set(only) - {kind for kind, _ in pairs}):
        raise InputError(
            f"--only: {', '.join(unknown)}: no model type that predicts next tokens; give such as llama,t5"
        )
    file, whole = folder / "census.jsonl", folder / "census.json"
    check_own(file, '{"type": ', "a census")
    check_own(whole, _BEGINNING, "a census")
    folder.mkdir(parents=True, exist_ok=True)
    rows = {(row["type"], row["class"]): row for row in read_rows(file) if versions.items() <= row.items()}
    wanted = [pair for pair in pairs if pair[0] in only or not only]
    missing = [pair for pair in wanted if pair not in rows]
    if len(missing) < len(wanted):
        say(f"{len(wanted) - len(missing)} of {len(wanted)} classes are in {file}")
    with file.open("a", encoding="utf-8") as book:
        for number, outcome in enumerate(_outcomes(missing, jobs, limit), 1):
            row = {**outcome, **versions}
            rows[row["type"], row["class"]] = row
            print(json.dumps(row), file=book, flush=True)
            say(f"{number}/{len(missing)} {row['class']}: {': '.join(filter(None, (row['verdict'], why(row))))}")
    with one_at_a_time(folder):  # another census may have added to the file
        others = {(row["type"], row["class"]): row for row in read_rows(file) if versions.items() <= row.items()}
        rows = others | rows
        known = [rows[pair] for pair in pairs if pair in rows]
        lines = ",\n".join(json.dumps(row) for row in known)
        write_text(whole, f"{_BEGINNING}\n{lines}\n]}}\n")
    return [row for row in known if (row["type"], row["class"]) in wanted]


def read_rows(file: Path) -> list[Row]:
    """The rows of a census; a last line that was cut off is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(parse_json(line))
    return rows


def _row(pair: tuple[str, str], verdict: str, reason: str = "", **known: Any) -> Row:
    empty: Row = {"parameters": None, "seconds": None, "failures": [], "not_applicable": {}}
    return {"type": pair[0], "class": pair[1], "verdict": verdict, "reason": reason, **empty, **known}


def row_of(pair: tuple[str, str], report: Report, seconds: float) -> Row:
    """The row of a class that was checked."""
    failures = [{"check": one.check, **_told(one)} for one in report.failures]
    moved = [one.check for one in report.failures if one.difference is not None]  # else it could not be run so
    leaks = report.layers or any(check.startswith(_OF_LEAKS) for check in moved)
    return _row(
        pair,
        "leaks" if leaks else "fails otherwise" if failures else "passes",
        parameters=report.description["parameters"],
        seconds=round(seconds, 1),
        failures=failures,
        not_applicable={one.check: one.reason for one in report.findings if one.verdict == "not applicable"},
    )


def _told(finding: Any) -> dict[str, Any]:
    """The figures and words of a failing check, without empty ones."""
    names = ("path", "layers", "leaks", "difference", "tolerance", "remark", "reproduction")
    return {name: value for name in names if (value := getattr(finding, name, None)) not in (None, "", ())}


# -- processes ---------------------------------------------------------------------------------------------------------


def _checked(pair: tuple[str, str]) -> Row:
    start = time.process_time()
    try:
        model, inputs = tiny(*pair)
    except Exception as error:
        return _row(pair, "not applicable", str(error) if isinstance(error, InputError) else _words(error))
    try:
        report = check(model, inputs, say=lambda _: None)
    except InputError as error:
        return _row(pair, "not applicable", str(error), parameters=model.num_parameters())
    return row_of(pair, report, time.process_time() - start)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error, 240)}"


def _check(pair: tuple[str, str], out: Connection) -> None:
    """Send the row of a class."""
    import torch
    import transformers

    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(1)
    try:
        with quiet(transformers):
            row = _checked(pair)
    except Exception as error:
        row = _row(pair, "crashed", _words(error))
    out.send(row)


@dataclass
class _Running:
    pair: tuple[str, str]
    process: Any
    answer: Connection
    start: float = field(default_factory=time.monotonic)

    def row(self, limit: float) -> Row | None:
        """The row, once there is one: as it was sent, or what became of the process."""
        with contextlib.suppress(EOFError, OSError):
            if self.answer.poll():
                row: Row = self.answer.recv()
                self.process.join(5)  # it cleans up, if it has not hung
                return row
        if not self.process.is_alive():
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            return _row(self.pair, "crashed", f"its process {how}")
        if time.monotonic() - self.start > limit:
            return _row(self.pair, "too slow", f"not done after {limit:g} seconds")
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.answer.close()


def _outcomes(pairs: Sequence[tuple[str, str]], jobs: int, limit: float) -> Iterator[Row]:
    """Rows as they are made, `jobs` processes at a time."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    waiting, running = list(pairs), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                answer, out = context.Pipe(duplex=False)
                process = context.Process(target=_check, args=(pair := waiting.pop(0), out), daemon=True)
                process.start()
                out.close()
                running.append(_Running(pair, process, answer))
            wait([one.answer for one in running], timeout=1.0)
            for one in list(running):
                if (row := one.row(limit)) is not None:
                    running.remove(one)
                    one.end()
                    yield row
    finally:
        for one in running:
            one.end()
