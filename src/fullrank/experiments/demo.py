"""The main job: a plain Transformer and its variants on the built-in text, the same budget of tokens for each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fullrank.comparison.page import build_report
from fullrank.config.recipe import Resolved, load, resolve
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.data import Corpus, prepare
from fullrank.experiments.analyze import Reading
from fullrank.experiments.generation import generate
from fullrank.experiments.language_model import LanguageModelTask, with_vocabulary
from fullrank.experiments.measurements import measure_models
from fullrank.experiments.run import train
from fullrank.experiments.speed import measure_speed
from fullrank.experiments.task import Prepared
from fullrank.files import read_json, silent, write_json
from fullrank.records import find_measurement
from fullrank.render.page import write_page
from fullrank.render.terminal import print_page

RECIPE = "demo/builtin"
_STARTUP, _REPORT = 2.0, 10.0  # seconds: of a model until it trains and after its figures; of the report at the end
_LEAST_STEPS, _EVALUATIONS = 20, 5
_PROMPT, _SAMPLED = "This function", 60  # of the text that the best model writes


def run_demo(
    minutes: float, out: Path, seed: int, rows: Sequence[str] | None = None, *, aside: bool = False
) -> dict[str, Any]:
    """Train the rows of the demo (None: all) in `out`, print the table and write `out/report.html`; its content as JSON.

    A demo that was stopped is resumed; a finished one shows its table again. aside: all goes to stderr, the table, too.
    Raises InputError if `out` holds another demo.
    """
    if not minutes > 0:  # NaN passes a comparison that is written the other way
        raise InputError(f"--minutes: a positive number up to 10000, given {minutes}")
    started = time.monotonic()
    console, remarks = Console(stderr=aside, highlight=False), Console(stderr=True, highlight=False)
    rows = list(rows or load(RECIPE).rows)
    steps = _plan_steps(minutes, out, seed, rows, remarks)
    settings = [f"train.steps={steps}", f"train.seed={seed}", f"eval.every_steps={-(-steps // _EVALUATIONS)}"]
    results = {}
    for row in rows:
        resolved = resolve(RECIPE, row, overrides=[*settings, "train.device=cpu", "train.threads=1"])
        results[row] = train(resolved, out / row, say=remarks.print)
    best = min(rows, key=lambda row: results[row]["final"]["test"]["nll"])
    text = generate(out / best, _PROMPT, max_new_tokens=_SAMPLED, temperature=0.8, top_p=0.9, seed=seed)
    console.print(f"{best} writes, after “{_PROMPT}”:\n")
    lines = "\n".join(f"    {line}" for line in text.splitlines() if line.strip())  # a line of the text ends at <eos>
    console.print(f"{lines}\n", markup=False)
    folders = [out / row for row in rows]
    measure_models(find_measurement("spectrum"), list(map(str, folders)), Reading(device="cpu", say=silent, texts=8))
    report = build_report(folders)
    page = report.build_page("A Transformer without its bottlenecks")
    path = write_page(page, out / "report.html")
    print_page(page, console)
    corpus, lowest = results[best]["corpus"], math.exp(results[best]["final"]["test"]["nll"])
    console.print(
        f"Perplexity is the number of words among which the model hesitates at each place: {lowest:.0f} for the best of these, "
        f"{corpus['unigram_perplexity']['test']:.0f} for one that knows only how often a word occurs, "
        f"{corpus['fourgram_perplexity']['test']:.0f} for one that counts what followed the last three words. Each read "
        f"{results[best]['tokens_seen']:,} tokens of {corpus['label']}. One seed shows the road, not a ranking."
    )
    console.print(f"Report: {path} ({(time.monotonic() - started) / 60:.1f} minutes)")
    return {"report": str(path), **report.to_dict()}


def _plan_steps(minutes: float, out: Path, seed: int, rows: Sequence[str], remarks: Console) -> int:
    """The steps of each model, all with the same batches: as written in `out/demo.json`, else from a probe of this machine."""
    wanted = {"minutes": minutes, "seed": seed, "rows": list(rows)}
    file = out / "demo.json"
    if file.is_file():
        plan = read_json(file)
        if {key: plan.get(key) for key in wanted} == wanted:
            return int(plan["steps"])
        raise InputError(
            f"{out} holds a demo with other settings (--minutes {plan.get('minutes')}, --seed {plan.get('seed')}); "
            "use those to see or finish it, or give another --out"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not empty and holds no demo; give another --out")
    start = time.monotonic()
    remarks.print("Preparing the built-in text: the documentation of this Python's standard library ...")
    corpus = prepare(resolve(RECIPE).config.data, report=remarks.print)
    remarks.print("Measuring the speed of this machine ...")
    torch.set_num_threads(1)  # models as small as these take longer on two
    speeds = [_measure_row(resolve(RECIPE, row), corpus) for row in rows]
    evaluation, step = (sum(seconds) for seconds in zip(*speeds, strict=True))
    left = 60 * minutes - (time.monotonic() - start) - _REPORT - len(rows) * _STARTUP
    steps = max(int((left - evaluation) / step), _LEAST_STEPS)
    write_json(file, {**wanted, "steps": steps})
    options = resolve(RECIPE).config.train
    remarks.print(
        f"Each of the {len(rows)} models will read {steps * options.batch_size * options.segment_length:,} tokens: about "
        f"{(evaluation + steps * step) / 60:.1f} minutes for all, evaluation included."
    )
    return steps


def _measure_row(resolved: Resolved[RunConfig], corpus: Corpus) -> tuple[float, float]:
    """Seconds of all evaluation of a row, and of a training step, on the machine as busy as it is."""
    config = with_vocabulary(resolved.config, corpus)
    parts = LanguageModelTask().parts(Prepared(config, corpus, corpus.label, {}), Path(), torch.device("cpu"))
    speed = measure_speed(parts, time.perf_counter)
    valid, test = (corpus.splits[split]["tokens"] for split in ("valid", "test"))
    final = (valid + test) / min(config.eval.max_tokens or valid, valid)
    return speed.evaluation * (_EVALUATIONS + final), speed.step
