"""The verb `fullrank translate`: lines from a file, a pipe or a terminal, and their translations."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Protocol

import typer

from fullrank.cli.app import verb
from fullrank.cli.options import Checkpoint, Device, Kernel, Number, Quiet, Seed, Temperature, TopK, TopP
from fullrank.cli.output import exclude, given, say
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

    changes: dict[str, Any] = {
        "beams": beam, "length_penalty": length_penalty, "no_repeat_ngram_size": no_repeat_ngram,
        "max_length_a": max_length_a, "max_length_b": max_length_b,
    }  # fmt: skip
    search = dataclasses.replace(
        Search.of(open_translation_run(run).eval),
        **{key: value for key, value in changes.items() if value is not None},
        n_best=n_best,
        sampling=Sampling(1.0 if temperature is None else temperature, top_k, top_p, seed) if sampled else None,
    )
    translator = LineTranslator(
        run, search, checkpoint=checkpoint, batch_size=batch_size, device_name=device, kernel_name=kernel, warn=say
    )
    formatted: Format = _json_lines if as_lines else _n_best if n_best > 1 else _texts
    if source is not None and target is not None and target.exists() and target.samefile(source):
        raise InputError(f"--output {target}: the file that is read; give another one")
    with _reading(source) as (stream, pause), _writing(target) as out:
        if attention is not None:
            _with_attention(translator, stream, out, formatted, attention, attention_layer)
            return
        if pause is not None and stream.isatty() and not quiet:
            say("a sentence a line; Ctrl-D ends")
        progress = Progress(quiet)
        first = 1
        for lines in buffers(stream, buffer_lines, pause):
            translations = translator.translate(lines, first=first, progress=partial(progress, first - 1))
            progress.clear()
            _send(out, formatted(first, lines, translations))
            first += len(lines)
        progress.finish(first - 1)


@contextlib.contextmanager
def _reading(path: Path | None) -> Iterator[tuple[FileIO, float | None]]:
    """The source of lines, unbuffered, and how long to wait for more of them: files never pause."""
    if path is None and sys.stdin is None:
        raise InputError("the standard input is closed; give the source lines there, or a file with --input")
    try:
        stream = FileIO(0, closefd=False) if path is None else FileIO(path)
    except OSError as error:
        name = "the standard input" if path is None else f"--input {path}"
        raise InputError(f"{name}: cannot be read ({error.strerror})") from error
    with stream:
        yield stream, None if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else PAUSE


@contextlib.contextmanager
def _writing(path: Path | None) -> Iterator[BinaryIO]:
    """The destination of translations; a file holds those that have come, whatever happens then."""
    if path is None:
        yield sys.stdout.buffer
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise InputError(f"--output {path}: cannot be written ({error.strerror})") from error
    with file:
        yield file


Translations = Sequence[Sequence["Translation"]]  # of each line, best first
Format = Callable[[int, Sequence[str], Translations], Iterable[str]]  # of the number of the first line and the sources


def _texts(first: int, sources: Sequence[str], translations: Translations) -> Iterable[str]:
    return (best[0].text for best in translations)


def _n_best(first: int, sources: Sequence[str], translations: Translations) -> Iterable[str]:
    """The lists of Moses and Marian, which count lines from 0."""
    numbered = enumerate(translations, first - 1)
    return (f"{number} ||| {one.text} ||| {one.score:.6f}" for number, best in numbered for one in best)


def _json_lines(first: int, sources: Sequence[str], translations: Translations) -> Iterable[str]:
    for number, (source, best) in enumerate(zip(sources, translations, strict=True), first):
        texts = [{"text": t.text, "tokens": t.tokens, "score": t.score, "log_prob": t.log_prob} for t in best]
        yield json.dumps({"line": number, "source": source, "translations": texts}, ensure_ascii=False)


def _send(out: BinaryIO, lines: Iterable[str]) -> None:
    """UTF-8 whatever the locale, and at once. Where nobody reads any more, the verb ends."""
    try:
        out.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
        out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # what is left in the buffer goes nowhere, silently
        raise typer.Exit from None


class Progress:
    """Lines done and sentences per second on stderr: rewritten on a terminal, else a line now and then."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.rewrites = quiet, sys.stderr.isatty()
        self.every = 0.2 if self.rewrites else 10.0
        self.start = self.last_print = time.monotonic()
        self.shown = False

    def __call__(self, before: int, done: int) -> None:
        now = time.monotonic()
        if not self.quiet and now - self.last_print >= self.every:
            self.last_print = now
            text = self._text(before + done, now)
            if self.rewrites:
                print(f"\r{text}", end="", file=sys.stderr, flush=True)
                self.shown = True
            else:
                say(text)

    def clear(self) -> None:
        """Before something else is written to the terminal."""
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.shown = False

    def finish(self, done: int) -> None:
        if not self.quiet:
            say(self._text(done, time.monotonic()))

    def _text(self, done: int, now: float) -> str:
        return f"{done:,} lines, {done / max(now - self.start, 1e-9):,.1f} sentences/s"


def _with_attention(
    translator: LineTranslator, stream: FileIO, out: BinaryIO, formatted: Format, file: Path, layer: int | None
) -> None:
    """The only line's translation, and a drawing of what it attends to."""
    from fullrank.experiments.translate import CROSS_ATTENTION, cross_attention
    from fullrank.files import write_bytes
    from fullrank.render.figures import draw_bytes

    lines = [line for part in buffers(stream, 2, None) for line in part]
    if len(lines) != 1 or not lines[0].strip():
        raise InputError(f"--attention draws one sentence: give one line that is not empty, given {len(lines)} lines")
    translations = translator.translate(lines)
    records = cross_attention(translator, lines[0], translations[0][0], layer)
    _send(out, formatted(1, lines, translations))
    write_bytes(file, draw_bytes(CROSS_ATTENTION, records, "png"))
    say(str(file))


# -- lines from a file, a pipe or a terminal, as many at a time as there are --------------------------------------------

PAUSE = 0.1  # seconds without input, after which lines at hand are not kept waiting
_CHUNK = 1 << 16


class Readable(Protocol):
    """Bytes, as many as have arrived and at most `size`; none at the end. Unbuffered, or a reader would wait for more."""

    def read(self, size: int, /) -> bytes | None: ...


def buffers(stream: Readable, size: int, pause: float | None) -> Iterator[list[str]]:
    """The lines of a stream of UTF-8, without line ends, in lists of `size`: fewer at the end, and where input pauses.

    pause: seconds to wait for more; None: as long as it takes, so that only the end makes a shorter list.
    Only a line feed (after a carriage return or not) ends a line, a carriage return only where there is no line feed. Raises
    InputError that names the first line that is not UTF-8, after those before it.
    """
    lines: list[str] = []
    number = offset = 0
    for line in _split(stream) if pause is None else _in_background(stream, pause):
        if line is not None:
            number += 1
            try:
                lines.append(text_of(line, "the input", offset, line=number).removesuffix("\n").replace("\n", " "))
            except InputError:
                if lines:
                    yield lines
                raise
            offset += len(line)
        if lines and (line is None or len(lines) == size):
            yield lines
            lines = []
    if lines:
        yield lines


def _split(stream: Readable) -> Iterator[bytes]:
    """Lines with their line feeds."""
    begun: list[bytes] = []  # of a line whose end has not come
    ending = b"\r"  # of old Macintoshes, until a line feed has come
    while chunk := stream.read(_CHUNK):
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            yield b"".join([*begun, part, b"\n"])
            begun, ending = [], b"\n"
        begun.append(rest)
    if last := b"".join(begun):
        yield from last.removesuffix(b"\r").split(b"\r") if ending == b"\r" else [last]


def _in_background(stream: Readable, pause: float) -> Iterator[bytes | None]:
    """The lines of a stream, and None, once, where none has come for `pause` seconds."""
    arrived: queue.Queue[bytes | Exception | None] = queue.Queue(maxsize=1 << 14)  # fast writers wait for translations

    def read() -> None:
        try:
            for line in _split(stream):
                arrived.put(line)
            arrived.put(None)
        except Exception as error:  # it belongs to whoever waits for the lines
            arrived.put(error)

    # a daemon: it may be waiting for input when the command ends
    threading.Thread(target=read, daemon=True, name="lines").start()
    patience = None
    while True:
        try:
            line = arrived.get(timeout=patience)
        except queue.Empty:
            patience = None  # nobody waits for a second pause
            yield None
            continue
        if line is None:
            return
        if isinstance(line, Exception):
            raise RunError(f"the input cannot be read: {line}") from line
        patience = pause
        yield line
