"""Verbs that use a trained model: eval, generate, report, average."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from fullrank.cli.options import Checkpoint, Device, Json, Kernel
from fullrank.cli.output import exclude, print_json, say, show_report
from fullrank.core.errors import InputError


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
    app.command(
        epilog="Examples:  [cyan]fullrank average runs/mine --last 5[/cyan]   then "
        "[cyan]fullrank eval runs/mine --checkpoint average[/cyan]",
    )(average)


Run = Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")]


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


def evaluate_translation(
    run: Path,
    split: str,
    of_segments: Mapping[str, object],
    beam: int | None,
    length_penalty: float | None,
    against: Path | None,
    checkpoint: str,
    device: str,
    kernel: str,
    *,
    json: bool,
) -> None:
    """`of_segments`: options that say how a running text is read, by name; none may be given."""
    if given := [name for name, value in of_segments.items() if value is not None]:
        raise InputError(
            f"{', '.join(given)}: how a running text is read, and {run} translates sentences; its options are --beam and "
            "--length-penalty"
        )
    if against is not None:
        if beam is not None or length_penalty is not None or checkpoint != "best":
            raise InputError("--against compares the final translations that both runs kept: leave out other options")
        _compare(run, against, split, json=json)
        return
    from fullrank.experiments.evaluate import evaluate

    search: dict[str, object] = {}
    if beam is not None:
        search["beams"] = beam
    if length_penalty is not None:
        search["length_penalty"] = length_penalty
    found = evaluate(run, split, checkpoint=checkpoint, search=search, device_name=device, kernel_name=kernel, say=say)
    if json:
        print_json(found)
        return
    print(
        f"{found['run']}: {found['corpus']}, {split}, {found['sentences']:,} sentences, {found['tokens']:,} target tokens"
    )
    print(f"  BLEU                 {found['bleu']:.2f}   {found['bleu_signature']}")
    print(f"  chrF                 {found['chrf']:.2f}   {found['chrf_signature']}")
    if "tokenised_bleu" in found:
        print(f"  tokenised BLEU       {found['tokenised_bleu']:.2f}   {found['tokenised_bleu_label']}")
    print(f"  length ratio         {found['length_ratio']:.3f}")
    print(f"  perplexity per token {found['perplexity']:.4f}")
    print(f"  {found['protocol']}")


def _compare(run: Path, other: Path, split: str, *, json: bool) -> None:
    """Paired bootstrap of two runs' kept translations."""
    from fullrank.reporting import compare_runs

    found = compare_runs([other, run], split)
    if json:
        print_json(found)
        return
    difference = found["against_first"][0]
    print(f"{split}: BLEU {difference['b']:.2f} of {run}, {difference['a']:.2f} of {other}")
    print(
        f"  difference {difference['difference']:+.2f}, 95 % interval {difference['low']:+.2f} to {difference['high']:+.2f}, "
        f"p = {difference['p_value']:.3f} (paired bootstrap, {found['samples']:,} samples of {found['sentences']:,} sentences)"
    )


def average(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, trained with train.keep_checkpoints.")],
    last: Annotated[
        int | None,
        typer.Option("--last", min=1, help="How many of the kept checkpoints, the newest; all if not given."),
    ] = None,
    out: Annotated[
        str, typer.Option("--out", metavar="NAME", help="What --checkpoint calls it: DIR/checkpoints/NAME.")
    ] = "average",
    json: Json = False,
) -> None:
    """Average the weights of a run's last kept checkpoints (train.keep_checkpoints), for `--checkpoint average`."""
    from fullrank.experiments.evaluate import average as of_run

    found = of_run(run, last=last, name=out)
    if json:
        print_json(found)
        return
    steps = ", ".join(f"{step:,}" for step in found["steps"])
    print(f"{run}: the mean of {len(found['steps'])} checkpoints, of step{'s' * (len(found['steps']) > 1)} {steps}")
    print(f"  {found['folder']}   fullrank eval {run} --checkpoint {out}")
