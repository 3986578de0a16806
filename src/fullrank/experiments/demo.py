"""The main job: a plain Transformer and its variants on the built-in text, the same number of tokens for each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullrank.config.load import load, resolve, resolve_any
from fullrank.core.errors import InputError
from fullrank.experiments.analyze import Reading, measure_models
from fullrank.experiments.generation import generate
from fullrank.experiments.run import reproduce, task_of, try_training
from fullrank.experiments.run_folder import Cell
from fullrank.files import Entries, read_json, write_json
from fullrank.records import find_measurement

RECIPE = "demo/builtin"
_STARTUP = 3.0  # seconds of a model until it trains and after its figures
_REPORT = 8.0  # seconds of the report at the end
_LEAST_STEPS = 20
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
    settings = [f"train.steps={steps}", f"train.seed={seed}", "train.device=cpu"]
    settings.append(f"eval.every_steps={math.ceil(steps / _EVALUATIONS)}")
    planned = [Cell(resolve_any(RECIPE, row, overrides=settings), out / row) for row in rows]
    is_trained = all(cell.describe()["finished"] for cell in planned)
    reproduce("demo", planned)
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
    spent = f"{(time.monotonic() - started) / 60:.1f} minutes" if not is_trained else "already trained"
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
    trials = [try_training(resolve(RECIPE, row).config, prepared, _EVALUATIONS) for row in rows]
    left = minutes * 60 - (time.monotonic() - started) - _REPORT
    left -= sum(_STARTUP + trial.judging for trial in trials)
    steps = max(int(left / sum(trial.step for trial in trials)), _LEAST_STEPS)
    write_json(file, {**wanted, "steps": steps})
    tokens = steps * config.train.batch_size * config.train.segment_length
    remarks.print(f"Each of the {len(rows)} models will read {tokens:,} tokens.")
    return steps
