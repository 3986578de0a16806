"""The main job: a plain Transformer and its variants on the built-in text, the same number of tokens for each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fullrank.config.recipe import Resolved, load, resolve
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.data import Corpus, prepare
from fullrank.experiments.analyze import Reading
from fullrank.experiments.generation import generate
from fullrank.experiments.language_model import LanguageModelTask, with_vocabulary
from fullrank.experiments.measurements import measure_models
from fullrank.experiments.run import train
from fullrank.experiments.speed import Speed, measure_speed
from fullrank.experiments.task import Prepared
from fullrank.files import read_json, silent, write_json
from fullrank.records import find_measurement

RECIPE = "demo/builtin"
_STARTUP, _REPORT = 3.0, 8.0  # seconds: of a model until it trains and after its figures; of the report at the end
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
    is_trained = all((folder / "result.json").is_file() for folder in folders)
    settings = [f"train.steps={steps}", f"train.seed={seed}", "train.device=cpu"]
    settings.append(f"eval.every_steps={-(-steps // _EVALUATIONS)}")
    results = {}
    for row, folder in zip(rows, folders, strict=True):
        resolved = resolve(RECIPE, row, overrides=settings)
        results[folder] = train(resolved, folder, quiet=is_trained, say=silent if is_trained else remarks.print)
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
    spent = f"{(time.monotonic() - started) / 60:.1f} minutes" if not is_trained else "already trained"
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
    corpus = prepare(resolve(RECIPE).config.data, report=remarks.print)
    remarks.print("Measuring the speed of this machine ...")
    speeds = [_measure_row(resolve(RECIPE, row), corpus) for row in rows]
    left = minutes * 60 - (time.monotonic() - started) - _REPORT
    left -= sum(_STARTUP + speed.evaluation for speed in speeds)
    steps = max(int(left / sum(speed.step for speed in speeds)), _LEAST_STEPS)
    write_json(file, {**wanted, "steps": steps})
    options = resolve(RECIPE).config.train
    tokens = steps * options.batch_size * options.segment_length
    remarks.print(f"Each of the {len(rows)} models will read {tokens:,} tokens.")
    return steps


def _measure_row(resolved: Resolved[RunConfig], corpus: Corpus) -> Speed:
    """Seconds of a step of training, and of all evaluation, of a row on the machine as busy as it is."""
    config = with_vocabulary(resolved.config, corpus)
    parts = LanguageModelTask().parts(Prepared(config, corpus, corpus.label, {}), Path(), torch.device("cpu"))
    speed = measure_speed(parts, time.perf_counter)
    valid, test = (corpus.splits[split]["tokens"] for split in ("valid", "test"))
    final = (valid + test) / min(config.eval.max_tokens or valid, valid)
    return Speed(speed.step, speed.evaluation * (_EVALUATIONS + final))
