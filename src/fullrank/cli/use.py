"""Verbs that use a trained model: eval, generate, report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from fullrank.cli.options import Checkpoint, Device, Json, Kernel
from fullrank.cli.output import exclude, print_json, say, show_report
from fullrank.core.errors import InputError

Run = Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")]


def add_to(app: typer.Typer) -> None:
    app.command(
        "eval",
        epilog="Examples:  [cyan]fullrank eval runs/demo/b --split valid --json[/cyan]   "
        "[cyan]fullrank eval runs/demo/b --context 48 --stride 16[/cyan]   "
        "[cyan]fullrank eval runs/xl --segment-length 64 --memory-length 640 --clamp-length 400[/cyan]   "
        "[cyan]fullrank eval runs/de-en --beam 5 --against runs/de-en-b[/cyan] (translation)",
    )(evaluate)
    app.command(
        epilog="Examples:  [cyan]fullrank generate runs/demo/b --prompt 'the function returns' --top-p 0.9[/cyan]   "
        "[cyan]fullrank generate runs/demo/b --prompt 'if the' --beam 4[/cyan]",
    )(generate)
    app.command(epilog="Example:  [cyan]fullrank report runs/demo/* --out comparison.html[/cyan]")(report)


def evaluate(
    run: Run,
    split: Annotated[str, typer.Option("--split", help="train, valid, test or another one of the corpus.")] = "test",
    segment_length: Annotated[
        int | None, typer.Option("--segment-length", min=1, help="Tokens read at a time.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Blocks or windows at a time; with memory, streams.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=0, help="Slide: tokens that each window reads again, unscored.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, help="Slide: tokens each window scores; the segment less --context."),
    ] = None,
    memory_length: Annotated[
        int | None, typer.Option("--memory-length", min=0, help="Tokens that every layer remembers; 0: blocks.")
    ] = None,
    same_length: Annotated[
        bool | None,
        typer.Option("--same-length/--no-same-length", help="Every query sees as many keys as are remembered."),
    ] = None,
    clamp_length: Annotated[
        int | None, typer.Option("--clamp-length", min=1, help="Relative positions beyond it count as it.")
    ] = None,
    beam: Annotated[
        int | None, typer.Option("--beam", min=1, help="Translation: width of the beam; 1 is greedy.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option("--length-penalty", help="Translation: beam score / length ** this.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="DIR",
            help="Translation: another run; paired bootstrap of the final translations of both.",
        ),
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    kernel: Kernel = "auto",
    json: Json = False,
) -> None:
    """Perplexity of a run (bits per character and byte where tokens spell text, BLEU of translations), with its protocol.

    Of a masked language model, perplexity and accuracy at masked tokens.
    """
    from fullrank.cli.evaluating import evaluate_translation
    from fullrank.evaluation.protocol import Flags
    from fullrank.experiments.evaluate import evaluate as measure
    from fullrank.experiments.run_folder import open_run

    flags = Flags(
        segment_length=segment_length,
        batch_size=batch_size,
        context=context,
        stride=stride,
        memory_length=memory_length,
        same_length=same_length,
        clamp_length=clamp_length,
    )
    config = open_run(run)[0]
    if config.translates:
        wrong = {f"--{key.replace('_', '-')}": value for key, value in vars(flags).items()}
        evaluate_translation(run, split, wrong, beam, length_penalty, against, checkpoint, device, kernel, json=json)
        return
    _exclude_of_translation(run, {"--beam": beam, "--length-penalty": length_penalty, "--against": against})
    masked = config.masks
    found = measure(run, split, checkpoint=checkpoint, flags=flags, device_name=device, kernel_name=kernel, say=say)
    if json:
        print_json(found)
        return
    kind = "masked token" if masked else "token"
    print(f"{found['run']}: {found['corpus']}, {split}, {found['tokens']:,} {kind}s")
    for key, words in (
        ("perplexity", "masked-token perplexity" if masked else "perplexity per token"),
        ("accuracy_percent", "accuracy in %"),
        ("perplexity_without_sos", "... without <sos>"),
        ("perplexity_per_word", "perplexity per word"),
        ("bits_per_character", "bits per character"),
        ("bits_per_byte", "bits per byte"),
        ("nll", f"nats per {kind}"),
    ):
        if found.get(key) is not None:
            print(f"  {words:<20} {found[key]:.4f}")
    if "perplexity" in (last := found.get("last_position", {})):
        print(
            f"  {'at last positions':<20} {last['perplexity']:.4f} (perplexity of the {last['tokens']:,} tokens that their "
            "segment does not hold)"
        )
    print(f"  {found['protocol']}")


def _exclude_of_translation(run: Path, options: Mapping[str, object]) -> None:
    """InputError if an option of translation was given for a run that does not translate."""
    if given := [name for name, value in options.items() if value is not None]:
        raise InputError(
            f"{', '.join(given)}: {run} is no translation run, and has nothing to search for; leave it out"
        )


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option("--prompt", help="The text to go on from.")] = "",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to write.")] = 100,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Below 1 safer, above 1 wilder; 1 if not given.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Only the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Only the likeliest tokens that make up p.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    beam: Annotated[int | None, typer.Option("--beam", min=1, help="Beam search of this width.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option("--length-penalty", help="Beam score / length ** this; 1 if not given.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="Makes a sample repeatable.")] = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="How many texts.")] = 1,
    stop: Annotated[
        bool, typer.Option("--stop/--no-stop", help="Stop at the end of the line or text (<eos>).")
    ] = False,
    memory_length: Annotated[
        int | None,
        typer.Option("--memory-length", min=0, help="Tokens remembered, 0: all of them; as trained if not given."),
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    kernel: Kernel = "auto",
    json: Json = False,
) -> None:
    """Write on from a prompt, by sampling or beam search."""
    drawing = {"--temperature": temperature, "--top-k": top_k, "--top-p": top_p}
    if beam is not None:
        exclude("--beam", "searches", {**drawing, "--greedy": greedy or None, "--seed": seed})
    elif length_penalty is not None:
        raise InputError("--length-penalty is of beam search: give --beam too, or leave it out")
    if greedy:
        exclude("--greedy", "always takes the likeliest token", drawing)
        if number > 1:
            raise InputError(f"--greedy writes the same text every time: --number must be 1, given {number}")

    from fullrank.experiments.generation import Decoding
    from fullrank.experiments.generation import generate as write

    how = Decoding(
        max_new_tokens,
        1.0 if temperature is None else temperature,
        top_k,
        top_p,
        greedy,
        beam,
        1.0 if length_penalty is None else length_penalty,
        seed,
        number,
        stop,
    )
    texts = write(
        run, prompt, how, memory_length=memory_length, checkpoint=checkpoint, device_name=device, kernel_name=kernel
    )
    if json:
        print_json(texts)
        return
    for i, found in enumerate(texts["texts"]):
        if i:
            print("-" * 40)
        print(found["text"])


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    out: Annotated[Path | None, typer.Option("--out", help="The page; report.html in the only run, or here.")] = None,
    title: Annotated[str | None, typer.Option("--title", help="Its headline.")] = None,
    json: Json = False,
) -> None:
    """One self-contained HTML page: table, curves, what differs between the runs, environment.

    Of runs of fine-tuning: mean and deviation over seeds, differences and their intervals.
    """
    from fullrank.experiments.run_folder import in_table_order
    from fullrank.reporting import find_runs

    # `runs/demo/*` also names files beside the runs, and a folder of runs stands for the runs in it
    folders = [path for path in runs if path.is_dir()] or runs
    runs = in_table_order([run for folder in folders for run in (find_runs(folder) or [folder])])
    out = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    show_report(runs, out, json=json, title=title)
