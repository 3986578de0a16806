"""Verbs that use a trained model: eval, generate, translate, report, average, export."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO, RawIOBase, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from fullrank import files
from fullrank.cli.app import (
    Checkpoint,
    Checkpoints,
    Device,
    Json,
    Kernel,
    Number,
    Quiet,
    Run,
    Runs,
    SamplingOptions,
    Split,
    drop_missing,
    exclude,
    make_options,
    name_option,
    show_report,
    tell,
    verb,
)
from fullrank.config.run import PROTOCOL_KEYS, SEARCH_KEYS
from fullrank.core.errors import InputError, count_things

if TYPE_CHECKING:
    from fullrank.experiments.translation import LineTranslator, Translation

logger = logging.getLogger(__name__)
_OF_TRANSLATION = ("beams", "length_penalty")


@verb(
    "fullrank eval runs/demo/b --split valid --json",
    "fullrank eval runs/demo/b --context 48 --stride 16",
    "fullrank eval runs/mine --text other.txt",
    "fullrank eval runs/xl --segment-length 64 --memory-length 640 --clamp-length 400",
    "fullrank eval runs/de-en --beam 5  # translation",
    name="eval",
)
def evaluate(
    run: Run,
    settings: Annotated[Any, make_options(*PROTOCOL_KEYS, "batch_size", *_OF_TRANSLATION)],
    split: Split = "test",
    text: Annotated[Path | None, Option(metavar="FILE", help="Any text in place of a split of the run.")] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    kernel: Kernel = "auto",
    json: Json = False,
) -> None:
    """Measure a run: perplexity (bits per character and byte where tokens spell text, BLEU of translations), with its protocol.

    For a masked language model: perplexity and accuracy at masked tokens.
    """
    from fullrank.experiments.run_folder import open_run

    config = open_run(run)[0]

    from fullrank.experiments.run import evaluate as measure

    if text is not None and config.translates:
        raise InputError(
            f"--text: one text for a language model, given {run}, which translates sentences; leave it out"
        )
    changes = drop_missing(settings)
    useless = [key for key in changes if (key in _OF_TRANSLATION) != config.translates]
    if names := ", ".join(map(name_option, useless)):
        does = "translates sentences" if config.translates else "translates nothing"
        raise InputError(f"{names}: {run} {does}, and has no such setting; leave it out")
    figures = measure(run, split, text=text, checkpoint=checkpoint, **changes, device_name=device, kernel_name=kernel)
    tell(figures, _describe_figures(figures), json=json)


def _describe_figures(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of `eval`: numbers by their names in JSON, with their signatures."""
    counts = [f"{figures[unit]:,} {unit}" for unit in ("sentences", "tokens") if unit in figures]
    yield f"{figures['run']}: {figures['corpus']}, {figures['split']}, {', '.join(counts)}"
    names = [name for name, value in figures.items() if isinstance(value, float)]
    for name in names:
        signature = figures.get(f"{name}_signature") or figures.get(f"{name}_label", "")
        yield f"  {name.replace('_', ' '):<24} {figures[name]:.4f}   {signature}".rstrip()
    if "perplexity" in (last := figures.get("last_position", {})):
        yield (
            f"  {'at last positions':<24} {last['perplexity']:.4f} (perplexity of the {last['tokens']:,} tokens that their "
            "segment does not hold)"
        )
    yield f"  {figures['protocol']}"


@verb(
    "fullrank generate runs/demo/b --prompt 'the function returns' --top-p 0.9",
    "fullrank generate runs/demo/b --prompt 'if the' --beam 4",
    "fullrank generate runs/demo/plain runs/demo/b --prompt 'if the' --min-p 0.05  # both together",
)
def generate(
    runs: Runs,
    sampling: SamplingOptions,
    settings: Annotated[Any, make_options("beams", "length_penalty", "memory_length")],
    prompt: Annotated[str, Option(help="The text to continue.")] = "",
    max_new_tokens: Annotated[int, Number(help="Number of new tokens.")] = 100,
    greedy: Annotated[bool, Option("--greedy", help="Always the likeliest token.")] = False,
    number: Annotated[int, Number("--number", "-n", help="Number of texts.")] = 1,
    stop: Annotated[bool, Option("--stop", help="Stop at the end of the line or text (<eos>).")] = False,
    checkpoint: Checkpoints = "best",
    device: Device = "auto",
    kernel: Kernel = "auto",
    json: Json = False,
) -> None:
    """Continue a prompt by sampling or beam search.

    Of several runs, or several checkpoints of a run, the mean of their probabilities is taken; their vocabularies must be one.
    """
    options = drop_missing(sampling) | ({"greedy": True} if greedy else {})
    if settings.beams is not None:
        exclude("--beam", "searches", options)
    elif settings.length_penalty is not None:
        raise InputError("--length-penalty is of beam search: give --beam too, or leave it out")
    if greedy:
        exclude(
            "--greedy", "always takes the likeliest token", options.keys() - {"greedy", "seed", "repetition_penalty"}
        )
        if number > 1:
            raise InputError(f"--greedy writes the same text every time: --number must be 1, given {number}")

    from fullrank.experiments.generation import write

    content = write(
        runs,
        prompt,
        **options,
        **drop_missing(settings),
        max_new_tokens=max_new_tokens,
        number=number,
        stop=stop,
        checkpoint=checkpoint,
        device_name=device,
        kernel_name=kernel,
    )
    tell(content, [f"\n{'-' * 40}\n".join(text["text"] for text in content["texts"])], json=json)


@verb("fullrank report runs/demo/* --out comparison.html")
def report(
    runs: Annotated[list[Path], Argument(metavar="DIR", help="Run folders.")],
    out: Annotated[Path | None, Option(help="The page; report.html in the only run, or here.")] = None,
    title: Annotated[str | None, Option(help="Headline of the page.")] = None,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page: table, curves, differences between the runs, environment.

    For fine-tuning: mean and deviation over seeds, differences and their intervals.
    """
    from fullrank.comparison.runs import find_runs
    from fullrank.experiments.run_folder import sort_by_table

    # `runs/demo/*` also names files beside the runs, and a folder of runs stands for the runs in it
    folders = [path for path in runs if not path.is_file()] or runs
    runs = []
    for folder in folders:
        runs += find_runs(folder) or [folder]
    runs = sort_by_table(runs)
    out = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    show_report(runs, out, json=json, title=title)


@verb("fullrank average runs/mine --last 5", "fullrank eval runs/mine --checkpoint average")
def average(
    run: Annotated[Path, Argument(metavar="DIR", help="A run folder, trained with train.keep_checkpoints.")],
    last: Annotated[int | None, Number(help="Number of kept checkpoints, the newest ones; all if not given.")] = None,
    json: Json = False,
) -> None:
    """Average the weights of a run's last kept checkpoints (train.keep_checkpoints), for `--checkpoint average`."""
    from fullrank.experiments.run import average as average_weights

    mean = average_weights(run, last=last)
    steps = ", ".join(f"{step:,}" for step in mean["steps"])
    lines = [
        f"{run}: the mean of {count_things(len(mean['steps']), 'checkpoint')} (step {steps})",
        f"  {mean['folder']}   fullrank eval {run} --checkpoint average",
    ]
    tell(mean, lines, json=json)


@verb(
    "fullrank export runs/demo/b --to hf exported/b",
    "fullrank export runs/demo/b --checkpoint last --to hf exported/b-last",
)
def export(
    run: Annotated[Path, Argument(metavar="DIR", help="A run folder, or one that model.save wrote.")],
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to write; it must be new or empty.")],
    to: Annotated[Literal["hf"], Option("--to", help="hf: a folder of Hugging Face.")] = "hf",
    checkpoint: Checkpoint = "best",
    json: Json = False,
) -> None:
    """Write a trained model as a folder that Hugging Face's `from_pretrained` reads, also without this package."""
    from fullrank.hf.export import export_run

    folder = export_run(run, out, checkpoint)
    names = sorted(file.name for file in folder.iterdir())
    content = {"from": str(run), "to": to, "folder": str(folder), "files": names, "checkpoint": checkpoint}
    lines = [
        f"{folder}: {', '.join(names)}",
        "  Check README.md, the model card, and state a licence there before you publish it.",
    ]
    tell(content, lines, json=json)


# -- translations of lines ---------------------------------------------------------------------------------------------


@verb(
    "fullrank translate runs/mine < source.de > target.en",
    "fullrank translate runs/mine --n-best 3 --json < source.de",
    "fullrank translate runs/seed1 runs/seed2 --checkpoint average < source.de  # an ensemble",
    "fullrank translate runs/mine --score target.en < source.de",
)
def translate(
    runs: Runs,
    search: Annotated[Any, make_options(*SEARCH_KEYS)],
    source: Annotated[
        Path | None,
        Option(
            "--input", metavar="FILE", exists=True, dir_okay=False, help="Read this file instead of the standard input."
        ),
    ] = None,
    score: Annotated[
        Path | None, Option(metavar="TARGETS", help="Score these translations of the lines instead.")
    ] = None,
    n_best: Annotated[int, Number(help="Translations of a line, as `line ||| text ||| score`.")] = 1,
    batch_size: Annotated[int, Number(help="Lines translated together.")] = 64,
    checkpoint: Checkpoints = "best",
    device: Device = "auto",
    kernel: Kernel = "auto",
    quiet: Quiet = False,
    as_lines: Annotated[
        bool, Option("--json", help="JSON lines: one object for each line, with scores and log-probabilities.")
    ] = False,
) -> None:
    """Translate lines of text, one sentence a line, in order: `fullrank translate DIR < source > target`.

    Lines of a pipe or a terminal are translated as they come.
    An empty line stays empty. A line that is longer than the model can read is cut, with a warning.
    Several runs or checkpoints translate by the mean of their probabilities; their vocabularies must be one.
    --score prints for each line the log-probability of its translation in nats and nats per token, <eos> included.
    """
    from fullrank.experiments.translation import LineTranslator, Search, open_translation_run

    search_options = drop_missing(search)
    if score is not None:
        exclude("--score", "searches nothing", [*search_options, *(["n_best"] if n_best > 1 else [])])
    evaluation = dataclasses.replace(open_translation_run(runs[0]).eval, **search_options)
    translator = LineTranslator(
        runs,
        dataclasses.replace(Search.from_config(evaluation), n_best=n_best),
        checkpoint=checkpoint,
        batch_size=batch_size,
        device_name=device,
        kernel_name=kernel,
    )
    style = "json" if as_lines else "list" if n_best > 1 else "text"
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    start = time.monotonic()
    count = 0
    with FileIO(0, closefd=False) if source is None else FileIO(source) as stream:
        if stream.isatty():
            logger.info("a sentence a line; Ctrl-D ends")
        if score is not None:
            _score_lines(translator, stream, score, as_lines=as_lines)
            return
        for lines in read_lines(stream):
            translations = translator.translate(lines, first=count + 1)
            for line, best in zip(lines, translations, strict=True):
                count += 1
                print(*format_line(count, line, best, style), sep="\n")
            sys.stdout.flush()
    logger.info(f"{count:,} lines, {count / max(time.monotonic() - start, 1e-9):,.1f} sentences/s")


def _score_lines(translator: LineTranslator, stream: RawIOBase, targets: Path, *, as_lines: bool) -> None:
    """Print the log-probability of each translation in a file, of the line of the stream beside it."""
    sources = list(chain.from_iterable(read_lines(stream)))
    candidates = list(files.lines(targets, "--score"))
    scores = translator.score(sources, candidates)
    for number, (source, target, nlls) in enumerate(zip(sources, candidates, scores, strict=True), start=1):
        log_prob = -sum(nlls)
        mean = sum(nlls) / len(nlls)
        if as_lines:
            content = {"line": number, "source": source, "target": target, "tokens": len(nlls)}
            print(json.dumps({**content, "log_prob": log_prob, "nll": mean, "nlls": nlls}, ensure_ascii=False))
        else:
            print(f"{log_prob:.6f}\t{mean:.6f}")


def format_line(number: int, source: str, best: Sequence[Translation], style: str) -> list[str]:
    """Format the translations of a line.

    Args:
        number: that of the line, from 1.
        source: the line.
        best: its translations, best first.
        style: `text` (the best), `list` (that of Moses and Marian, which count from 0), or `json`.

    Returns:
        Lines of the output.
    """
    if style == "text":
        return [best[0].text]
    if style == "list":
        return [f"{number - 1} ||| {hypothesis.text} ||| {hypothesis.score:.6f}" for hypothesis in best]
    texts = [{"text": t.text, "tokens": t.tokens, "score": t.score, "log_prob": t.log_prob} for t in best]
    return [json.dumps({"line": number, "source": source, "translations": texts}, ensure_ascii=False)]


def read_lines(stream: RawIOBase) -> Iterator[list[str]]:
    """Yield the lines of a stream of UTF-8, without line ends, as many at a time as have arrived.

    Only a line feed (after a carriage return or not) ends a line. InputError names the first line that is not UTF-8.
    """
    unfinished = b""
    number = 0
    while data := stream.read(1 << 16):
        *lines, unfinished = (unfinished + data).split(b"\n")
        if lines:
            yield [decode_line(line, number + place) for place, line in enumerate(lines, start=1)]
            number += len(lines)
    if unfinished:
        yield [decode_line(unfinished, number + 1)]


def decode_line(line: bytes, number: int) -> str:
    """Decode a line; InputError, with its number, if it is not UTF-8."""
    return files.text_of(line.removesuffix(b"\r"), "the input", line=number).replace("\n", " ")
