"""Verbs that use a trained model: eval, generate, report, average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fullrank.cli.app import verb
from fullrank.cli.options import Checkpoint, Device, Json, Kernel, Number, Run, Seed, Split, Temperature, TopK, TopP
from fullrank.cli.output import drop_missing, exclude, given, say, show_report, tell
from fullrank.core.errors import InputError


@verb(
    "fullrank eval runs/demo/b --split valid --json",
    "fullrank eval runs/demo/b --context 48 --stride 16",
    "fullrank eval runs/mine --text other.txt",
    "fullrank eval runs/xl --segment-length 64 --memory-length 640 --clamp-length 400",
    "fullrank eval runs/xl --temperature valid --dynamic --dynamic-rate 3e-4",
    "fullrank eval runs/de-en --beam 5  # translation",
    name="eval",
)
def evaluate(
    run: Run,
    split: Split = "test",
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Any text in place of a split of the run.")
    ] = None,
    segment_length: Annotated[int | None, Number("--segment-length", help="Tokens read at a time.")] = None,
    batch_size: Annotated[
        int | None, Number("--batch-size", help="Blocks or windows at a time; with memory, streams.")
    ] = None,
    context: Annotated[
        int | None, Number("--context", min=0, help="Slide: tokens that each window reads again, unscored.")
    ] = None,
    stride: Annotated[
        int | None, Number("--stride", help="Slide: tokens each window scores; the segment less --context.")
    ] = None,
    memory_length: Annotated[
        int | None, Number("--memory-length", min=0, help="Tokens that every layer remembers; 0: blocks.")
    ] = None,
    same_length: Annotated[
        bool | None,
        typer.Option("--same-length/--no-same-length", help="Every query sees as many keys as the memory has tokens."),
    ] = None,
    clamp_length: Annotated[int | None, Number("--clamp-length", help="Longer distances count as this one.")] = None,
    temperature: Annotated[
        str | None, typer.Option("--temperature", help="Divides the logits; valid: chosen on the validation text.")
    ] = None,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Dynamic evaluation, too: every segment is scored, then learned.")
    ] = False,
    dynamic_rate: Annotated[
        float | None,
        typer.Option(
            "--dynamic-rate", help="Size of its steps; of those of eval.dynamic the best on valid if not given."
        ),
    ] = None,
    dynamic_decay: Annotated[
        float | None, typer.Option("--dynamic-decay", help="Share of the way back to the trained parameters; likewise.")
    ] = None,
    beam: Annotated[int | None, Number("--beam", help="Translation: width of the beam; 1 is greedy.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option("--length-penalty", help="Translation: beam score / length ** this.")
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    kernel: Kernel = "auto",
    json: Json = False,
) -> None:
    """Perplexity of a run (bits per character and byte where tokens spell text, BLEU of translations), with its protocol.

    For a masked language model: perplexity and accuracy at masked tokens.
    """
    from fullrank.config.run import DynamicConfig
    from fullrank.experiments.run_folder import open_run

    config = open_run(run)[0]

    from fullrank.comparison.measures import choose
    from fullrank.comparison.runs import read_run
    from fullrank.evaluation.perplexity import Flags
    from fullrank.experiments.run import evaluate as measure

    protocol = {
        "segment_length": segment_length, "batch_size": batch_size, "context": context, "stride": stride,
        "memory_length": memory_length, "same_length": same_length, "clamp_length": clamp_length, "temperature": temperature,
    }  # fmt: skip
    steps = drop_missing({"rate": dynamic_rate, "decay": dynamic_decay})
    if steps and not dynamic:
        raise InputError("--dynamic-rate, --dynamic-decay: of dynamic evaluation; give --dynamic too")
    if dynamic and (config.task != "language_model" or config.model.sees_future):
        raise InputError(
            f"--dynamic: for models that predict the next token of a text, and {run} is none; leave it out"
        )
    if text is not None and (config.translates or dynamic):
        given_too = "--dynamic" if dynamic else f"{run}, which translates sentences"
        raise InputError(f"--text: one text for a language model as it was trained, given {given_too}; leave one out")
    of_search = {"--beam": beam, "--length-penalty": length_penalty}
    of_segments = {f"--{key.replace('_', '-')}": value for key, value in protocol.items()}
    if not config.translates and (wrong := given(of_search)):
        raise InputError(f"{wrong}: {run} is no translation run, and has nothing to search for; leave it out")
    if config.translates and (wrong := given(of_segments)):
        raise InputError(
            f"{wrong}: how a running text is read, and {run} translates sentences; its options are --beam and --length-penalty"
        )
    figures = measure(
        run,
        split,
        text=text,
        checkpoint=checkpoint,
        flags=Flags(**protocol),  # type: ignore[arg-type]  # read by its section
        dynamic=replace(config.eval.dynamic or DynamicConfig(), **steps) if dynamic else None,
        search=drop_missing({"beams": beam, "length_penalty": length_penalty}),
        device_name=device,
        kernel_name=kernel,
        say=say,
    )
    first = choose([read_run(run)]).key
    lines = [*_lines(figures, first, masked=config.masks)]
    if dynamic:
        apart = figures["final_dynamic"][split]
        lines += ["dynamic evaluation, no static figures:", *_figure_lines(apart, first), f"  {apart['protocol']}"]
    tell(figures, lines, json=json)


_FIGURES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "tokenised_bleu": "tokenised BLEU",
    "length_ratio": "length ratio",
    "perplexity": "perplexity per token",
    "accuracy_percent": "accuracy in %",
    "perplexity_without_sos": "... without <sos>",
    "perplexity_per_word": "perplexity per word",
    "bits_per_character": "bits per character",
    "bits_per_byte": "bits per byte",
    "nll": "nats per token",
}
_MASKED_FIGURES = {"perplexity": "masked-token perplexity", "nll": "nats per masked token"}


def _lines(figures: Mapping[str, Any], first: str, *, masked: bool) -> Iterator[str]:
    """The lines of `eval`; the figure `first` is that of the task."""
    count = f"{figures['tokens']:,} {'masked tokens' if masked else 'tokens'}"
    if "sentences" in figures:
        count = f"{figures['sentences']:,} sentences, {count}"
    yield f"{figures['run']}: {figures['corpus']}, {figures['split']}, {count}"
    yield from _figure_lines(figures, first, masked=masked)
    if "perplexity" in (last := figures.get("last_position", {})):
        yield (
            f"  {'at last positions':<20} {last['perplexity']:.4f} (perplexity of the {last['tokens']:,} tokens that their "
            "segment does not hold)"
        )
    yield f"  {figures['protocol']}"


def _figure_lines(figures: Mapping[str, Any], first: str, *, masked: bool = False) -> Iterator[str]:
    names = _FIGURES | _MASKED_FIGURES if masked else _FIGURES
    for key, words in sorted(names.items(), key=lambda item: item[0] != first):
        if figures.get(key) is not None:
            signature = figures.get(f"{key}_signature") or figures.get(f"{key}_label", "")
            yield f"  {words:<20} {figures[key]:.4f}   {signature}".rstrip()


@verb(
    "fullrank generate runs/demo/b --prompt 'the function returns' --top-p 0.9",
    "fullrank generate runs/demo/b --prompt 'if the' --beam 4",
)
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue.")] = "",
    max_new_tokens: Annotated[int, Number("--max-new-tokens", help="Number of new tokens.")] = 100,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    beam: Annotated[int | None, Number("--beam", help="Beam search of this width.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option("--length-penalty", help="Beam score / length ** this; 1 if not given.")
    ] = None,
    seed: Seed = None,
    number: Annotated[int, Number("--number", "-n", help="Number of texts.")] = 1,
    stop: Annotated[
        bool, typer.Option("--stop/--no-stop", help="Stop at the end of the line or text (<eos>).")
    ] = False,
    memory_length: Annotated[
        int | None, Number("--memory-length", min=0, help="Tokens remembered, 0: all of them; as trained if not given.")
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    kernel: Kernel = "auto",
    json: Json = False,
) -> None:
    """Continue a prompt by sampling or beam search."""
    drawing = {"--temperature": temperature, "--top-k": top_k, "--top-p": top_p}
    if beam is not None:
        exclude("--beam", "searches", {**drawing, "--greedy": greedy or None, "--seed": seed})
    elif length_penalty is not None:
        raise InputError("--length-penalty is of beam search: give --beam too, or leave it out")
    if greedy:
        exclude("--greedy", "always takes the likeliest token", drawing)
        if number > 1:
            raise InputError(f"--greedy writes the same text every time: --number must be 1, given {number}")

    from fullrank.experiments.run_folder import open_any

    open_any(run)

    from fullrank.experiments.generation import write

    drawing_or_search = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "greedy": greedy or None, "beams": beam,
        "length_penalty": length_penalty,
    }  # fmt: skip
    content = write(
        run,
        prompt,
        **drop_missing(drawing_or_search),
        max_new_tokens=max_new_tokens,
        number=number,
        stop=stop,
        memory_length=memory_length,
        checkpoint=checkpoint,
        device_name=device,
        kernel_name=kernel,
        say=say,
    )
    tell(content, [f"\n{'-' * 40}\n".join(text["text"] for text in content["texts"])], json=json)


@verb("fullrank report runs/demo/* --out comparison.html")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR", help="Run folders.")],
    out: Annotated[Path | None, typer.Option("--out", help="The page; report.html in the only run, or here.")] = None,
    title: Annotated[str | None, typer.Option("--title", help="Headline of the page.")] = None,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page: table, curves, differences between the runs, environment.

    For fine-tuning: mean and deviation over seeds, differences and their intervals.
    """
    from fullrank.comparison.runs import find_runs
    from fullrank.experiments.run_folder import in_table_order

    # `runs/demo/*` also names files beside the runs, and a folder of runs stands for the runs in it
    folders = [path for path in runs if path.is_dir()] or runs
    runs = in_table_order([run for folder in folders for run in (find_runs(folder) or [folder])])
    out = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    show_report(runs, out, json=json, title=title)


@verb("fullrank average runs/mine --last 5", "fullrank eval runs/mine --checkpoint average")
def average(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, trained with train.keep_checkpoints.")],
    last: Annotated[
        int | None, Number("--last", help="Number of kept checkpoints, the newest ones; all if not given.")
    ] = None,
    out: Annotated[
        str, typer.Option("--out", metavar="NAME", help="Name for --checkpoint: DIR/checkpoints/NAME.")
    ] = "average",
    json: Json = False,
) -> None:
    """Average the weights of a run's last kept checkpoints (train.keep_checkpoints), for `--checkpoint average`."""
    from fullrank.experiments.run_folder import open_run

    open_run(run)

    from fullrank.experiments.run import average as of_run

    mean = of_run(run, last=last, name=out)
    steps = ", ".join(f"{step:,}" for step in mean["steps"])
    lines = [
        f"{run}: the mean of {len(mean['steps'])} checkpoints, of step{'s' * (len(mean['steps']) > 1)} {steps}",
        f"  {mean['folder']}   fullrank eval {run} --checkpoint {out}",
    ]
    tell(mean, lines, json=json)
