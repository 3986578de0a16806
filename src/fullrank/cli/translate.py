"""The verb `fullrank translate`: lines from a file, a pipe or a terminal, and their translations."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from io import FileIO, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullrank.cli.app import verb
from fullrank.cli.options import Checkpoint, Device, Given, Kernel, Keys, Number, Quiet
from fullrank.cli.output import clear_progress, say, show_progress
from fullrank.config.run import EvalConfig
from fullrank.core.errors import InputError, RunError
from fullrank.files import text_of

if TYPE_CHECKING:
    from fullrank.experiments.translate import Translation

_SEARCH = ("beams", "length_penalty", "no_repeat_ngram_size", "max_length_a", "max_length_b")
_LINES = 1024  # read, sorted by length, and written in order again


@verb(
    "fullrank translate runs/mine < source.de > target.en",
    "fullrank translate runs/mine --n-best 3 --json < source.de",
)
def translate(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A translation run's folder.")],
    search: Annotated[Given, Keys(EvalConfig, _SEARCH)],
    source: Annotated[
        Path | None,
        typer.Option(
            "--input", metavar="FILE", exists=True, dir_okay=False, help="Read this file instead of the standard input."
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", dir_okay=False, help="Write this file, as translations come, instead of stdout."
        ),
    ] = None,
    n_best: Annotated[int, Number(help="Translations of a line, as `line ||| text ||| score`.")] = 1,
    batch_size: Annotated[int, Number(help="Lines translated together.")] = 64,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    kernel: Kernel = "auto",
    quiet: Quiet = False,
    as_lines: Annotated[
        bool, typer.Option("--json", help="JSON lines: one object for each line, with scores and log-probabilities.")
    ] = False,
) -> None:
    """Translate lines of text, one sentence a line, in order: `fullrank translate DIR < source > target`.

    Lines of a file are translated 1024 at a time, those of a pipe or a terminal as they come.
    An empty line stays empty. A line that is longer than the model can read is cut, with a warning.
    """
    if source is not None and target is not None and target.exists() and target.samefile(source):
        raise InputError(f"--output {target}: is the input, too; give another file")

    from fullrank.experiments.translate import LineTranslator, Search, open_translation_run

    translator = LineTranslator(
        run,
        dataclasses.replace(Search.of(open_translation_run(run).eval), **search, n_best=n_best),
        checkpoint=checkpoint,
        batch_size=batch_size,
        device_name=device,
        kernel_name=kernel,
        warn=say,
    )
    style = "json" if as_lines else "list" if n_best > 1 else "text"
    start, done = time.monotonic(), 0

    def show(count: int) -> None:
        if sys.stderr.isatty() and not quiet:
            show_progress(f"{done + count:,} lines")

    written = nullcontext(sys.stdout.buffer) if target is None else target.open("wb")
    with FileIO(0, closefd=False) if source is None else FileIO(source) as stream, written as out:
        if stream.isatty() and not quiet:
            say("a sentence a line; Ctrl-D ends")
        is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        for lines in buffers(stream, _LINES, eager=not is_file):
            translations = translator.translate(lines, first=done + 1, progress=show)
            clear_progress()
            for line, best in zip(lines, translations, strict=True):
                done += 1
                out.write("".join(f"{text}\n" for text in format_line(done, line, best, style)).encode("utf-8"))
            out.flush()
    if not quiet:
        say(f"{done:,} lines, {done / max(time.monotonic() - start, 1e-9):,.1f} sentences/s")


def format_line(number: int, source: str, best: Sequence[Translation], style: str) -> list[str]:
    """The translations of line `number` (from 1) as text, as a list of Moses and Marian, which count from 0, or as JSON."""
    if style == "text":
        return [best[0].text]
    if style == "list":
        return [f"{number - 1} ||| {one.text} ||| {one.score:.6f}" for one in best]
    texts = [{"text": t.text, "tokens": t.tokens, "score": t.score, "log_prob": t.log_prob} for t in best]
    return [json.dumps({"line": number, "source": source, "translations": texts}, ensure_ascii=False)]


def buffers(stream: RawIOBase, size: int, eager: bool = False) -> Iterator[list[str]]:
    """The lines of a stream of UTF-8, without line ends, in lists of `size`. eager: fewer where input pauses.

    Only a line feed (after a carriage return or not) ends a line, a carriage return only where there is no line feed. Raises
    InputError that names the first line that is not UTF-8, after those before it, and RunError where reading fails.
    """
    lines: list[str] = []
    number = offset = 0
    for arrived in _read_lines(stream):
        for line in arrived:
            number += 1
            try:
                text = text_of(line, "the input", offset, line=number)
            except InputError:
                yield from [lines] if lines else []
                raise
            offset += len(line)
            lines.append(text.removesuffix("\n").replace("\n", " "))
            if len(lines) == size:
                yield lines
                lines = []
        if eager and lines:
            yield lines
            lines = []
    yield from [lines] if lines else []


def _read_lines(stream: RawIOBase) -> Iterator[list[bytes]]:
    """The lines of a stream, each with its line feed: those that have arrived, whenever some have."""
    rest, is_fed = b"", False
    try:
        while data := stream.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            is_fed = is_fed or bool(lines)
            yield [line + b"\n" for line in lines]
    except OSError as error:
        raise RunError(f"the input cannot be read: {error}") from error
    if rest:
        yield [rest] if is_fed else rest.removesuffix(b"\r").split(b"\r")
