"""The verb `fullrank translate`: lines from a file, a pipe or a terminal, and their translations."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from io import FileIO, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullrank.cli.app import verb
from fullrank.cli.options import Checkpoint, Device, Given, Kernel, Keys, Number, Quiet
from fullrank.cli.output import clear_progress, say, show_progress
from fullrank.config.run import EvalConfig
from fullrank.files import text_of

if TYPE_CHECKING:
    from fullrank.experiments.translation import Translation

_SEARCH = ("beams", "length_penalty", "no_repeat_ngram_size", "max_length_a", "max_length_b")


@verb(
    "fullrank translate runs/mine < source.de > target.en", "fullrank translate runs/mine --n-best 3 --json < source.de"
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

    Lines of a pipe or a terminal are translated as they come.
    An empty line stays empty. A line that is longer than the model can read is cut, with a warning.
    """
    from fullrank.experiments.translation import LineTranslator, Search, open_translation_run

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

    with FileIO(0, closefd=False) if source is None else FileIO(source) as stream:
        if stream.isatty() and not quiet:
            say("a sentence a line; Ctrl-D ends")
        for lines in read_lines(stream):
            translations = translator.translate(lines, first=done + 1, progress=show)
            clear_progress()
            for line, best in zip(lines, translations, strict=True):
                done += 1
                text = "".join(f"{one}\n" for one in format_line(done, line, best, style))
                sys.stdout.buffer.write(text.encode("utf-8"))
            sys.stdout.buffer.flush()
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


def read_lines(stream: RawIOBase) -> Iterator[list[str]]:
    """The lines of a stream of UTF-8, without line ends, as many at a time as have arrived.

    Only a line feed (after a carriage return or not) ends a line. InputError names the first line that is not UTF-8.
    """
    rest, number = b"", 0
    while data := stream.read(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield [decode_line(line, number + place) for place, line in enumerate(lines, start=1)]
            number += len(lines)
    if rest:
        yield [decode_line(rest, number + 1)]


def decode_line(line: bytes, number: int) -> str:
    return text_of(line.removesuffix(b"\r"), "the input", line=number).replace("\n", " ")
