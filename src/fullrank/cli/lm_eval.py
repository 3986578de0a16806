"""Verbs around lm-eval, EleutherAI's evaluation harness."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fullrank.cli.options import Json
from fullrank.cli.output import print_json, say


def add_to(app: typer.Typer) -> None:
    app.command(
        "lm-eval",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
        epilog="Example:  [cyan]fullrank lm-eval --model_args path=runs/demo/b --tasks lambada_openai --batch_size 8[/cyan]",
    )(lm_eval)
    app.command(
        "lm-eval-task",
        epilog="Example:  [cyan]fullrank lm-eval-task runs/demo/b --split test --out tasks[/cyan]",
    )(lm_eval_task)


def lm_eval(context: typer.Context) -> None:
    """The command lm_eval, with `--model fullrank` known to it: a run on tasks of lm-eval. Its arguments, and its --help.

    --model_args takes path=DIR and, with commas between them, checkpoint, memory_length, segment_length, streams, context,
    stride, same_length, clamp_length, kernel, device, batch_size and max_gen_toks.
    """
    from fullrank.experiments.lm_eval import run

    run(context.args)


def lm_eval_task(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    split: Annotated[str, typer.Option("--split", help="train, valid, test or another one of the corpus.")] = "test",
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the task is written.")] = Path("tasks"),
    json: Json = False,
) -> None:
    """Write the text a run was measured on as a task of lm-eval, whose word perplexity is that of `fullrank eval`."""
    from fullrank.experiments.evaluate import corpus_of
    from fullrank.experiments.lm_eval_task import write_task
    from fullrank.experiments.scoring import open_causal

    open_causal(run)
    file = write_task(corpus_of(run, split, say), split, out)
    command = ["fullrank", "lm-eval", "--model_args", f"path={run}", "--include_path", str(out), "--tasks", file.stem]
    if json:
        print_json({"task": file.stem, "file": str(file), "command": command})
        return
    print(f"{file}\n  {shlex.join(command)}")
