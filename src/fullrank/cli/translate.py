"""The verb `fullrank translate`: lines from a file, a pipe or a terminal, and their translations."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from fullrank.cli.app import verb
from fullrank.cli.options import Checkpoint, Device, Kernel, Number, Quiet, Seed, Temperature, TopK, TopP
from fullrank.cli.output import clear_progress, drop_missing, exclude, given, say, show_progress
from fullrank.core.errors import InputError, RunError
from fullrank.files import text_of

if TYPE_CHECKING:
    from fullrank.experiments.translate import LineTranslator, Translation


@verb(
    "fullrank translate runs/mine < source.de > target.en",
    "fullrank translate runs/mine --n-best 3 --json < source.de",
    "echo 'Ein Hund schläft.' | fullrank translate runs/mine --attention dog.png",
)
def translate(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A translation run's folder.")],
    source: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="Read this file instead of the standard input.")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write this file, as translations come, instead of stdout."),
    ] = None,
    beam: Annotated[int | None, Number("--beam", help="Width of the beam; the run's eval.beams.")] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option("--length-penalty", help="Score = log p / tokens ** this; the run's eval.length_penalty."),
    ] = None,
    no_repeat_ngram: Annotated[
        int | None, Number("--no-repeat-ngram", min=0, help="No N tokens twice in a translation; 0: they may.")
    ] = None,
    max_length_a: Annotated[
        float | None, typer.Option("--max-length-a", min=0.0, help="At most a M + b tokens for a source of M.")
    ] = None,
    max_length_b: Annotated[int | None, Number("--max-length-b", min=0, help="... and its b.")] = None,
    n_best: Annotated[int, Number("--n-best", help="Translations of a line, as `line ||| text ||| score`.")] = 1,
    sampled: Annotated[bool, typer.Option("--sample", help="Draw translations instead of searching.")] = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    batch_size: Annotated[int, Number("--batch-size", help="Lines translated together.")] = 64,
    buffer_lines: Annotated[
        int, Number("--buffer-lines", help="Lines read, sorted by length and written in order again.")
    ] = 1024,
    attention: Annotated[
        Path | None,
        typer.Option("--attention", metavar="FILE.png", help="Draw the attention of the translation of a single line."),
    ] = None,
    attention_layer: Annotated[
        int | None,
        typer.Option("--attention-layer", metavar="L", min=0, help="... every head of this layer, counted from 0."),
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    kernel: Kernel = "auto",
    quiet: Quiet = False,
    as_lines: Annotated[
        bool, typer.Option("--json", help="JSON lines: one object for each line, with scores and log-probabilities.")
    ] = False,
) -> None:
    """Translate lines of text, one sentence a line, in order: `fullrank translate DIR < source > target`.

    Translations are written after every --buffer-lines lines, or when a pipe or a terminal pauses.
    An empty line stays empty. A line that is longer than the model can read is cut, with a warning.
    """
    if attention_layer is not None and attention is None:
        raise InputError(
            "--attention-layer says what --attention draws: give --attention FILE.png too, or leave it out"
        )
    if attention is not None and attention.suffix.lower() != ".png":
        raise InputError(f"--attention {attention}: a PNG is drawn; give a file that ends with .png")
    drawing = {"--temperature": temperature, "--top-k": top_k, "--top-p": top_p, "--seed": seed}
    if sampled:
        exclude("--sample", "draws without a beam", {"--beam": beam})
    elif wrong := given(drawing):
        raise InputError(f"{wrong}: of sampling; give --sample too, or leave it out")
    if source is not None and target is not None and source.resolve() == target.resolve():
        raise InputError(f"--output {target}: is the input, too; give another file")

    from fullrank.experiments.translate import LineTranslator, Sampling, Search, open_translation_run

    stated = {
        "beams": beam, "length_penalty": length_penalty, "no_repeat_ngram_size": no_repeat_ngram,
        "max_length_a": max_length_a, "max_length_b": max_length_b,
    }  # fmt: skip
    search = dataclasses.replace(
        Search.of(open_translation_run(run).eval),
        **drop_missing(stated),
        n_best=n_best,
        sampling=Sampling(1.0 if temperature is None else temperature, top_k, top_p, seed) if sampled else None,
    )
    translator = LineTranslator(
        run, search, checkpoint=checkpoint, batch_size=batch_size, device_name=device, kernel_name=kernel, warn=say
    )
    if source is not None and target is not None and target.exists() and target.samefile(source):
        raise InputError(f"--output {target}: the file that is read; give another one")
    style = "json" if as_lines else "list" if n_best > 1 else "text"
    with _open_source(source) as stream, _open_target(target) as out:
        if attention is not None:
            lines = [line for part in buffers(stream, 2, None) for line in part]
            best = _draw_attention(translator, lines, attention, attention_layer)
            _send(out, format_line(1, lines[0], best, style))
            say(str(attention))
            return
        if stream.isatty() and not quiet:
            say("a sentence a line; Ctrl-D ends")
        is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        progress = Progress(quiet)
        for lines in buffers(stream, buffer_lines, None if is_file else PAUSE):
            first = progress.done + 1
            translations = translator.translate(lines, first=first, progress=progress.show)
            clear_progress()
            for number, line in enumerate(lines):
                _send(out, format_line(first + number, line, translations[number], style))
            progress.done += len(lines)
    if not quiet:
        say(progress.describe(progress.done))


def _open_source(path: Path | None) -> FileIO:
    """The source of lines, unbuffered: it can be closed while a thread waits for more of it."""
    if path is None and sys.stdin is None:
        raise InputError("the standard input is closed; give the source lines there, or a file with --input")
    try:
        return FileIO(0, closefd=False) if path is None else FileIO(path)
    except OSError as error:
        name = "the standard input" if path is None else f"--input {path}"
        raise InputError(f"{name}: cannot be read ({error.strerror})") from error


def _open_target(path: Path | None) -> AbstractContextManager[BinaryIO]:
    if path is None:
        return nullcontext(sys.stdout.buffer)
    try:
        return path.open("wb")
    except OSError as error:
        raise InputError(f"--output {path}: cannot be written ({error.strerror})") from error


def format_line(number: int, source: str, best: Sequence[Translation], style: str) -> list[str]:
    """The translations of line `number` (from 1) as text, as a list of Moses and Marian, which count from 0, or as JSON."""
    if style == "text":
        return [best[0].text]
    if style == "list":
        return [f"{number - 1} ||| {one.text} ||| {one.score:.6f}" for one in best]
    texts = [{"text": t.text, "tokens": t.tokens, "score": t.score, "log_prob": t.log_prob} for t in best]
    return [json.dumps({"line": number, "source": source, "translations": texts}, ensure_ascii=False)]


def _send(out: BinaryIO, lines: Iterable[str]) -> None:
    """UTF-8 whatever the locale, and at once. Where nobody reads any more, the verb ends."""
    try:
        out.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
        out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # what is left in the buffer goes nowhere, silently
        raise typer.Exit from None


class Progress:
    """Lines done and sentences per second, on stderr: several times a second on a terminal, else every ten seconds."""

    def __init__(self, quiet: bool) -> None:
        self.every = math.inf if quiet else 0.2 if sys.stderr.isatty() else 10.0
        self.start = self.last = time.monotonic()
        self.done = 0  # before the lines at hand

    def show(self, more: int) -> None:
        """Say that `more` of the lines at hand are done."""
        if time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            show_progress(self.describe(self.done + more))

    def describe(self, done: int) -> str:
        return f"{done:,} lines, {done / max(time.monotonic() - self.start, 1e-9):,.1f} sentences/s"


def _draw_attention(
    translator: LineTranslator, lines: Sequence[str], file: Path, layer: int | None
) -> Sequence[Translation]:
    """The translations of the only line, and a drawing of what the best of them attends to."""
    from fullrank.experiments.translate import CROSS_ATTENTION, cross_attention
    from fullrank.files import write_bytes
    from fullrank.render.figures import draw_bytes

    if len(lines) != 1 or not lines[0].strip():
        raise InputError(f"--attention draws one sentence: give one line that is not empty, given {len(lines)} lines")
    (best,) = translator.translate(lines)
    records = cross_attention(translator, lines[0], best[0], layer)
    write_bytes(file, draw_bytes(CROSS_ATTENTION, records, "png"))
    return best


# -- lines from a file, a pipe or a terminal, as many at a time as there are --------------------------------------------

PAUSE = 0.1  # seconds without input, after which lines at hand are not kept waiting


def buffers(stream: RawIOBase, size: int, pause: float | None) -> Iterator[list[str]]:
    """The lines of a stream of UTF-8, without line ends, in lists of `size`: fewer at the end, and where input pauses.

    pause: seconds to wait for more; None: as long as it takes, so that only the end makes a shorter list.
    Only a line feed (after a carriage return or not) ends a line, a carriage return only where there is no line feed. Raises
    InputError that names the first line that is not UTF-8, after those before it, and RunError where reading fails.
    """
    arrived: queue.Queue[bytes | Exception | None] = queue.Queue(maxsize=1 << 14)  # fast writers wait for translations
    # a daemon: it may be waiting for input when the command ends
    threading.Thread(target=_read, args=(stream, arrived), daemon=True, name="lines").start()
    lines: list[str] = []
    number = offset = 0
    while True:
        try:
            line = arrived.get(timeout=pause if lines else None)
        except queue.Empty:
            yield lines
            lines = []
            continue
        if isinstance(line, bytes):
            number += 1
            try:
                text = text_of(line, "the input", offset, line=number)
            except InputError:
                yield from [lines] if lines else []
                raise
            offset += len(line)
            lines.append(text.removesuffix("\n").replace("\n", " "))
        if lines and (len(lines) == size or line is None):
            yield lines
            lines = []
        if isinstance(line, Exception):
            raise RunError(f"the input cannot be read: {line}") from line
        if line is None:
            return


def _read(stream: RawIOBase, arrived: queue.Queue[bytes | Exception | None]) -> None:
    """Put the lines of a stream into a queue, each with its line feed; then None, or the error that ended them."""
    try:
        with BufferedReader(stream, 1 << 16) as reader:
            for number, line in enumerate(reader):
                if line.endswith(b"\n"):
                    arrived.put(line)
                    continue
                for part in [line] if number else line.removesuffix(b"\r").split(b"\r"):  # of old Macintoshes
                    arrived.put(part)
                break  # a terminal would be asked for its end a second time
        arrived.put(None)
    except Exception as error:  # it belongs to whoever waits for the lines
        arrived.put(error)
