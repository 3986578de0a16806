"""The main job: a plain Transformer and its variants on the built-in text, the same budget of tokens for each.

Models train two at a time with one thread each, which on a small or busy machine beats one at a time with all threads.
"""

from __future__ import annotations

import bisect
import math
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fullrank.config.recipe import Resolved, load, resolve
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError, RunError
from fullrank.data import Corpus, prepare
from fullrank.experiments.analyze import Reading
from fullrank.experiments.generation import generate
from fullrank.experiments.language_model import LanguageModelTask, with_vocabulary
from fullrank.experiments.measurements import measure_models
from fullrank.experiments.speed import measure_speed
from fullrank.experiments.task import Prepared
from fullrank.files import parse_json, python_command, read_json, silent, usable_cores, write_json
from fullrank.records import find_measurement
from fullrank.training.device import catch_signals, is_locked

RECIPE = "demo/builtin"
_STARTUP, _REPORT = 7.0, 8.0  # seconds: of a model until it trains and after its figures; of the report at the end
_ALONE = 0.85  # speed of a model with another one beside it, against alone
_LEAST_STEPS, _MOST_STEPS, _EVALUATIONS = 20, 1_000_000, 5
_PROMPT, _SAMPLED = "This function", 60  # of the text that the best model writes


class _Training:
    """One row: the folder it trains in, its log, and from `start` on the process that trains it."""

    process: subprocess.Popen[bytes]

    def __init__(self, row: str, folder: Path) -> None:
        self.row, self.folder, self.log = row, folder, folder.parent / f"{row}.log"

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    def start(self, settings: Sequence[str]) -> None:
        """Start it, or resume it: the command is the same."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        words = ["-m", "fullrank", "train", RECIPE, *settings, "--row", self.row, "--out", str(self.folder)]
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                python_command(words),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches this process alone, which then tells the models once
            )

    def has_ended(self) -> bool:
        """True once the process is over; RunError with the end of its log if it failed."""
        status = self.process.poll()
        if status is not None and (status != 0 or not self.finished):
            tail = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            failure = f"the training of '{self.row}' failed (exit status {status}; {self.log}):"
            raise RunError("\n".join([failure, *tail]))
        return status is not None

    def progress(self) -> tuple[int, str]:
        """Steps made, and the newest figures in words."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0, ""
        records = []
        for line in lines[-80:]:
            with suppress(ValueError):  # half a line: being written
                records.append(parse_json(line))
        newest = {record["split"]: record for record in records}
        words = "  ".join(f"{split} {newest[split]['ppl']:.0f}" for split in ("train", "valid") if split in newest)
        return max((record["step"] for record in records), default=0), f"perplexity: {words}" if words else ""


def run_demo(
    minutes: float, out: Path, seed: int, rows: Sequence[str] | None = None, *, aside: bool = False
) -> dict[str, Any]:
    """Train the rows of the demo (None: all) in `out`, print the table and write `out/report.html`; its content as JSON.

    A demo that was stopped is resumed; a finished one shows its table again. aside: all goes to stderr, the table, too.
    Raises InputError if `out` holds another demo.
    """
    from rich.console import Console

    from fullrank.comparison.compare import build_report
    from fullrank.comparison.page import build_page, report_to_dict
    from fullrank.render.page import write_page
    from fullrank.render.terminal import print_page

    if not minutes > 0:  # NaN passes a comparison that is written the other way
        raise InputError(f"--minutes: a positive number up to 10000, given {minutes}")
    started = time.monotonic()
    console, remarks = Console(stderr=aside), Console(stderr=True, highlight=False)
    rows = list(rows or load(RECIPE).rows)
    plan = _plan(minutes, out, seed, rows, remarks, started)
    waiting = [training for row in rows if not (training := _Training(row, out / row)).finished]
    if waiting:
        settings = [f"train.steps={plan['steps']}", f"train.seed={seed}", "train.threads=1", "train.device=cpu"]
        settings.append(f"eval.every_steps={-(-plan['steps'] // _EVALUATIONS)}")
        _train_all(waiting, settings, plan["steps"], remarks)
    folders = [out / row for row in rows]
    results = {folder: read_json(folder / "result.json") for folder in folders}
    best = min(folders, key=lambda folder: results[folder]["final"]["test"]["nll"])
    words = generate(best, _PROMPT, max_new_tokens=_SAMPLED, temperature=0.8, top_p=0.9, seed=seed)
    console.print(f"{best.name} writes, after “{_PROMPT}”:\n", highlight=False)
    lines = "\n".join(f"    {line}" for line in words.splitlines() if line.strip())  # a line of the text ends at <eos>
    console.print(f"{lines}\n", highlight=False, markup=False)
    measure_models(find_measurement("spectrum"), list(map(str, folders)), Reading(device="cpu", say=silent, texts=8))
    table = build_report(folders)
    built = build_page(table, "A Transformer without its bottlenecks")
    page = write_page(built, out / "report.html")
    print_page(built, console)
    result = results[best]
    corpus, lowest = result["corpus"], math.exp(result["final"]["test"]["nll"])
    console.print(
        f"Perplexity is the number of words among which the model hesitates at each place: {lowest:.0f} for the best of these, "
        f"{corpus['unigram_perplexity']['test']:.0f} for one that knows only how often a word occurs, "
        f"{corpus['fourgram_perplexity']['test']:.0f} for one that counts what followed the last three words. Each read "
        f"{result['tokens_seen']:,} tokens of {corpus['label']}. One seed shows the road, not a ranking.",
        highlight=False,
    )
    spent = f"{(time.monotonic() - started) / 60:.1f} minutes" if waiting else "already trained"
    console.print(f"Report: {page} ({spent})", highlight=False)
    return {"report": str(page), **report_to_dict(table)}


def _plan(minutes: float, out: Path, seed: int, rows: Sequence[str], remarks: Any, started: float) -> dict[str, Any]:
    """The steps of each model, all with the same batches: as written in `out/demo.json`, else from a probe of this machine."""
    wanted = {"minutes": minutes, "seed": seed, "rows": list(rows)}
    file = out / "demo.json"
    if file.is_file():
        plan: dict[str, Any] = read_json(file)
        if {key: plan.get(key) for key in wanted} == wanted:
            return plan
        raise InputError(
            f"{out} holds a demo with other settings (--minutes {plan.get('minutes')}, --seed {plan.get('seed')}); "
            "use those to see or finish it, or give another --out"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty and holds no demo; give another --out")
    remarks.print("Preparing the built-in text: the documentation of this Python's standard library ...")
    corpus = prepare(resolve(RECIPE).config.data, report=lambda text: remarks.print(text))
    remarks.print("Measuring the speed of this machine ...")
    speeds = [_speed(resolve(RECIPE, row), corpus) for row in rows]
    options = resolve(RECIPE).config.train
    per_step = options.batch_size * options.segment_length
    left = minutes * 60 - (time.monotonic() - started) - _REPORT

    def duration(steps: int) -> float:
        seconds = (_STARTUP + (evaluation + steps * per_step * token) / _ALONE for token, evaluation in speeds)
        return _makespan([*seconds], _workers())

    steps = max(bisect.bisect_right(range(_MOST_STEPS), left, key=duration) - 1, _LEAST_STEPS)
    plan = {**wanted, "steps": steps}
    write_json(file, plan)
    remarks.print(
        f"Each of the {len(rows)} models will read {steps * per_step:,} tokens, {_workers()} at a time: about "
        f"{duration(steps) / 60:.1f} minutes, evaluation included."
    )
    return plan


def _makespan(times: Sequence[float], workers: int) -> float:
    """The end of the last of them; each begins, in their order, at the worker that is free first."""
    ends = [0.0] * workers
    for time_ in times:
        ends[ends.index(min(ends))] += time_
    return max(ends)


def _workers() -> int:
    """The number of models that train at a time."""
    return min(2, len(usable_cores()))


def _speed(resolved: Resolved[RunConfig], corpus: Corpus) -> tuple[float, float]:
    """Seconds of a token of training, and of all evaluation, of a row with one thread on the machine as busy as it is."""
    config = with_vocabulary(resolved.config, corpus)
    per_step = config.train.batch_size * config.train.segment_length
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = LanguageModelTask().parts(Prepared(config, corpus, corpus.label, {}), Path(), torch.device("cpu"))
        speed = measure_speed(parts, time.perf_counter)
    finally:
        torch.set_num_threads(threads)
    valid, test = (corpus.splits[split]["tokens"] for split in ("valid", "test"))
    final = (valid + test) / min(config.eval.max_tokens or valid, valid)
    return speed.step / per_step, speed.evaluation * (_EVALUATIONS + final)


def _train_all(trainings: Sequence[_Training], settings: Sequence[str], steps: int, remarks: Any) -> None:
    """Run every training in a process of its own, `_workers()` at a time, and show how far they are."""
    from rich.progress import Progress, TextColumn

    waiting, running = list(trainings), list[_Training]()
    columns = [*Progress.get_default_columns(), TextColumn("{task.fields[words]}")]
    with catch_signals() as signals, Progress(*columns, console=remarks, disable=not remarks.is_terminal) as progress:
        bars = {training.row: progress.add_task(training.row, total=steps, words="") for training in trainings}
        try:
            while (waiting or running) and signals.signal is None:
                # a process of an earlier demo, which was killed, may still train there
                while waiting and len(running) < _workers() and not is_locked(waiting[0].folder):
                    running.append(waiting.pop(0))
                    running[-1].start(settings)
                time.sleep(0.5)
                for training in list(running):
                    step, words = training.progress()
                    progress.update(bars[training.row], completed=step, words=words)
                    if training.has_ended():
                        running.remove(training)
                        if not remarks.is_terminal:
                            remarks.print(f"{training.row}: trained  {words}")
        finally:
            for training in running:  # SIGTERM: they save and leave, so that the demo can go on later
                training.process.terminate()
            for training in running:
                training.process.wait(timeout=60)
    if signals.signal is not None:
        remarks.print("Stopped; the same command goes on from here.")
        raise KeyboardInterrupt
