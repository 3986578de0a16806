"""The main job: a plain Transformer and its variants on the built-in text, the same number of tokens for each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullrank.config.load import load, resolve
from fullrank.core.errors import InputError
from fullrank.experiments.analyze import Reading, measure_models
from fullrank.experiments.generation import generate
from fullrank.experiments.run import task_of, train, try_training
from fullrank.files import read_json, silent, write_json
from fullrank.records import find_measurement

RECIPE = "demo/builtin"
_STARTUP, _REPORT = 2.0, 8.0  # seconds: of a model until it trains and after its figures; of the report at the end
_LEAST_STEPS, _EVALUATIONS = 20, 5
_PROMPT, _SAMPLED = "This function", 60  # of the text that the best model writes


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
    steps = _plan(minutes, out, seed, rows, remarks, started)
    folders = [out / row for row in rows]
    waiting = [folder for folder in folders if not (folder / "result.json").is_file()]
    settings = [f"train.steps={steps}", f"train.seed={seed}", "train.device=cpu"]
    settings.append(f"eval.every_steps={-(-steps // _EVALUATIONS)}")
    for folder in waiting:
        train(resolve(RECIPE, folder.name, overrides=settings), folder, say=remarks.print)
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


def _plan(minutes: float, out: Path, seed: int, rows: Sequence[str], remarks: Any, started: float) -> int:
    """The steps of each model, all with the same batches: as written in `out/demo.json`, else from a probe of this machine."""
    wanted = {"minutes": minutes, "seed": seed, "rows": list(rows)}
    file = out / "demo.json"
    if file.is_file():
        plan: dict[str, Any] = read_json(file)
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
    prepared = task_of(config).prepare(config, {}, True, remarks.print)
    remarks.print("Measuring the speed of this machine ...")
    trials = [try_training(resolve(RECIPE, row).config, prepared, _EVALUATIONS) for row in rows]
    left = minutes * 60 - (time.monotonic() - started) - _REPORT
    training = left - sum(_STARTUP + trial.judging for trial in trials)
    steps = max(_LEAST_STEPS, int(training / sum(trial.step for trial in trials)))
    write_json(file, {**wanted, "steps": steps})
    tokens = steps * config.train.batch_size * config.train.segment_length
    remarks.print(f"Each of the {len(rows)} models will read {tokens:,} tokens, one after another.")
    return steps
