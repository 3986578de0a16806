"""The main job: a plain Transformer and its variants on the built-in text, the same number of tokens for each.

Models train two at a time with one thread each, which on a small or busy machine beats one at a time with all threads.
"""

from __future__ import annotations

import bisect
import math
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank.config.load import load, resolve
from fullrank.core.errors import InputError, Interrupted, RunError
from fullrank.experiments.analyze import Reading, measure_models
from fullrank.experiments.generation import generate
from fullrank.experiments.run import task_of, try_training
from fullrank.files import Entries, parse_json, python_command, read_json, usable_cores, write_json
from fullrank.records import find_measurement
from fullrank.training.device import catch_signals

RECIPE = "demo/builtin"
_STARTUP = 7.0  # seconds of a model until it trains and after its figures
_REPORT = 8.0  # seconds of the report at the end
_BESIDE = 0.85  # speed of a model with another one beside it, against alone
_LEAST_STEPS = 20
_MOST_STEPS = 1_000_000
_EVALUATIONS = 5
_PROMPT = "This function"  # the best model goes on with it
_SAMPLED = 60  # tokens that the best model writes


def run_demo(minutes: float, out: Path, seed: int, *, aside: bool = False) -> Entries:
    """Train the rows of the demo, print the table and write the report.

    A demo that was stopped is resumed. A finished one shows its table again.

    Args:
        minutes: time that all of it takes.
        out: folder of the demo, in which the report is `report.html`.
        seed: seed of the trainings and of the text that the best model writes.
        aside: print everything to stderr, the table too.

    Returns:
        Content of the report as JSON.

    Raises:
        InputError: `minutes` is not above 0, or `out` holds something else, such as a demo with other settings.
        Interrupted: a signal stopped it.
        RunError: a row failed.
    """
    from rich.console import Console

    from fullrank.comparison.page import write_report
    from fullrank.render.terminal import print_page

    if not minutes > 0:  # NaN passes a comparison that is written the other way
        raise InputError(f"--minutes: a positive number up to 10000, given {minutes}")
    started = time.monotonic()
    console = Console(stderr=aside)
    remarks = Console(stderr=True, highlight=False)
    rows = list(load(RECIPE).rows)
    steps = _plan(minutes, out, seed, rows, remarks, started)
    folders = [out / row for row in rows]
    waiting = [folder for folder in folders if not (folder / "result.json").is_file()]
    _train_all(waiting, steps, seed, remarks)
    results = {folder: read_json(folder / "result.json") for folder in folders}
    best = min(folders, key=lambda folder: results[folder]["final"]["test"]["nll"])
    words = generate(best, _PROMPT, max_new_tokens=_SAMPLED, temperature=0.8, top_p=0.9, seed=seed)
    console.print(f"{best.name} writes, after “{_PROMPT}”:\n", highlight=False)
    lines = "\n".join(f"    {line}" for line in words.splitlines() if line.strip())  # a line of the text ends at <eos>
    console.print(f"{lines}\n", highlight=False, markup=False)
    measure_models(find_measurement("spectrum"), list(map(str, folders)), Reading(device="cpu", texts=8))
    page, content = write_report(folders, out / "report.html", "A Transformer without its bottlenecks")
    print_page(page, console)
    result = results[best]
    corpus = result["corpus"]
    lowest = math.exp(result["final"]["test"]["nll"])
    console.print(
        f"Perplexity is the number of words among which the model hesitates at each place: {lowest:.0f} for the best of these, "
        f"{corpus['unigram_perplexity']['test']:.0f} for one that knows only how often a word occurs, "
        f"{corpus['fourgram_perplexity']['test']:.0f} for one that counts what followed the last three words. Each read "
        f"{result['tokens_seen']:,} tokens of {corpus['label']}. One seed shows the road, not a ranking.",
        highlight=False,
    )
    spent = f"{(time.monotonic() - started) / 60:.1f} minutes" if waiting else "already trained"
    console.print(f"Report: {content['report']} ({spent})", highlight=False)
    return content


def _plan(minutes: float, out: Path, seed: int, rows: Sequence[str], remarks: Any, started: float) -> int:
    """Choose the number of steps of each model, all with the same batches.

    It is read from `out/demo.json`, else chosen after a probe of this machine.
    """
    wanted = {"minutes": minutes, "seed": seed, "rows": list(rows)}
    file = out / "demo.json"
    if file.is_file():
        plan: Entries = read_json(file)
        if {key: plan.get(key) for key in wanted} == wanted:
            return int(plan["steps"])
        raise InputError(
            f"{out} holds a demo with other settings (--minutes {plan.get('minutes')}, --seed {plan.get('seed')}); "
            "use those to see or finish it, or give another --out"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty and holds no demo; give another --out")
    remarks.print("Preparing the built-in text: the documentation of this Python's standard library ...")
    config = resolve(RECIPE).config
    prepared = task_of(config).prepare()
    remarks.print("Measuring the speed of this machine ...")
    torch.set_num_threads(1)  # as each model has
    trials = [try_training(resolve(RECIPE, row).config, prepared, _EVALUATIONS) for row in rows]
    left = minutes * 60 - (time.monotonic() - started) - _REPORT

    def duration(steps: int) -> float:
        ends = [0.0] * _count_workers()
        for trial in trials:  # each begins, in their order, at the worker that is free first
            ends[ends.index(min(ends))] += _STARTUP + (trial.evaluation + steps * trial.step) / _BESIDE
        return max(ends)

    steps = max(bisect.bisect_right(range(_MOST_STEPS), left, key=duration) - 1, _LEAST_STEPS)
    write_json(file, {**wanted, "steps": steps})
    tokens = steps * config.train.batch_size * config.train.segment_length
    remarks.print(f"Each of the {len(rows)} models will read {tokens:,} tokens, {_count_workers()} at a time.")
    return steps


def _count_workers() -> int:
    """Choose how many models train at a time: two, or one where there is one core."""
    return min(2, len(usable_cores()))


def _train_all(folders: Sequence[Path], steps: int, seed: int, remarks: Any) -> None:
    """Train the row of each folder in a process of its own, with a log beside the folder, and show how far they are.

    Raises Interrupted after a signal, RunError with the end of its log for a row that failed.
    """
    from rich.progress import Progress

    settings = [f"train.steps={steps}", f"train.seed={seed}", "train.device=cpu", "train.threads=1"]
    settings.append(f"eval.every_steps={-(-steps // _EVALUATIONS)}")
    waiting = list(folders)
    running = dict[Path, subprocess.Popen[bytes]]()
    with catch_signals() as signals, Progress(console=remarks, disable=not remarks.is_terminal) as progress:
        bars = {folder: progress.add_task(folder.name, total=steps) for folder in folders}
        try:
            while (waiting or running) and signals.signal is None:
                while waiting and len(running) < _count_workers():
                    folder = waiting.pop(0)
                    words = ["-m", "fullrank", "train", RECIPE, *settings, "--row", folder.name, "--out", str(folder)]
                    with folder.with_suffix(".log").open("wb") as log:  # Ctrl-C reaches this process alone
                        running[folder] = subprocess.Popen(
                            python_command(words), stdout=log, stderr=log, start_new_session=True
                        )
                time.sleep(0.5)
                for folder, process in list(running.items()):
                    progress.update(bars[folder], completed=_count_steps(folder))
                    if process.poll() is not None:
                        del running[folder]
                        remarks.print(f"{folder.name}: {'failed' if process.returncode else 'trained'}")
                    if process.returncode:
                        log_of_row = folder.with_suffix(".log")
                        end = log_of_row.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
                        raise RunError("\n".join([f"the training of {folder.name} failed ({log_of_row}):", *end]))
        finally:
            for process in running.values():  # SIGTERM: they save and leave, so that the demo can go on later
                process.terminate()
            for process in running.values():
                process.wait()
    if signals.signal is not None:
        raise Interrupted(f"the demo was stopped by {signals.signal}")


def _count_steps(folder: Path) -> int:
    """Count the steps that a row has made, by its metrics.jsonl."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return int(parse_json(lines[-1])["step"])
    except (OSError, ValueError, IndexError):  # nothing yet, or half a line
        return 0
