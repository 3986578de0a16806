"""A default training of a small text against a loop in the style of nanoGPT, at the same size and CPU time.

    taskset -c 1 python benchmarks/small_text.py TEXT --units byte word bpe --minutes 5 --json research/measured/small_text.json

Ours is trained as `fullrank init TEXT --tokens UNIT --size small --minutes N` says. All of its CPU
time counts: start, speed measurement, training, evaluation. The loop runs beside it, on the same core, so that both meet the
same load. It has a tenth more CPU time, for training alone: its cosine reaches its end with the time, and of five evaluations
on the whole validation text, whose time is not counted, the best weights are kept. It is GPT-2's block (pre-norm, learned
positions, GELU, tied table) with nanoGPT's settings for a CPU: 4 layers, 4 heads, width 128, block 64, batch 12, no dropout,
AdamW 1e-3 to 1e-4 after 100 steps of warm-up, betas 0.9 and 0.99, weight decay 0.1, gradients clipped to 1, random crops. It
reads the token ids, splits and vocabulary of our run.

Both are read alike, in blocks of 64 tokens and in windows of 64 that overlap by 32: every token of the split is scored once.
"""

import argparse
import copy
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullrank.experiments.measure import EvaluationProtocol, passages
from fullrank.experiments.run import corpus_of, evaluate
from machine import write_json
from train_step import GPT, Size

BLOCK = 64
BATCH = 12
SIZE = Size(4, 128, 4, BATCH, BLOCK, vocabulary=0, inner=512)
LEARNING_RATE = 1e-3
LOWEST = 1e-4  # learning rate at the end
WARMUP = 100  # steps
READINGS = {
    "blocks of 64": {"segment_length": BLOCK},
    "windows of 64": {"segment_length": BLOCK, "context": 32, "stride": 32},
}


def train_loop(
    ids: Tensor, vocabulary: int, seconds: float, seed: int, measure: Callable[[GPT], float]
) -> tuple[GPT, int, float]:
    """Train the loop on token ids for so many CPU seconds; of five evaluations by `measure` the best weights are kept.

    Returns the model, the steps, and the CPU seconds of training.
    """
    torch.manual_seed(seed)
    model = GPT(replace(SIZE, vocabulary=vocabulary))
    steps = 0
    spent = 0.0
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    best_cost = math.inf
    best_weights = model.state_dict()
    evaluations = 0
    while spent < seconds:
        begin = time.process_time()
        steps += 1
        decayed = (LEARNING_RATE - LOWEST) * (1 + math.cos(math.pi * spent / seconds)) / 2
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, steps / WARMUP) * (LOWEST + decayed)
        starts = torch.randint(len(ids) - BLOCK, (BATCH,)).tolist()
        rows = torch.stack([ids[start : start + BLOCK + 1] for start in starts])
        model.loss(rows[:, :-1], rows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        spent += time.process_time() - begin
        if spent >= seconds * (evaluations + 1) / 5:
            evaluations += 1
            cost = measure(model)
            if cost < best_cost:
                best_cost = cost
                best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return model, steps, spent


@torch.no_grad()
def measure_nats(model: GPT, ids: np.ndarray, start_id: int, reading: dict[str, int]) -> float:
    """Measure nats per token, every token scored once, in the very passages that `fullrank eval` reads."""
    protocol = EvaluationProtocol(kind="window" if "stride" in reading else "blocks", **reading)
    total = 0.0
    for passage in passages(ids, protocol, start_id):
        read = torch.from_numpy(passage.ids)
        logits = model(read[None, :-1])[0]
        each = F.cross_entropy(logits, read[1:], reduction="none")
        total += float(each[passage.unscored :].double().sum())
    return total / len(ids)


def measure_children() -> float:
    """Measure the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(text: Path, unit: str, seed: int, minutes: float, folder: Path) -> dict[str, Any]:
    """Train both arms on one unit of text, at the same time, and return what they cost and reach."""
    yaml = folder / f"{unit}-{seed}.yaml"
    run = folder / f"{unit}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    fullrank = [sys.executable, "-m", "fullrank"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # minutes are then of the processor
    words = ["--tokens", unit, "--size", "small", "--minutes", f"{minutes:g}", "--out", str(yaml), "--force"]
    subprocess.run([*fullrank, "init", str(text), *words], env=variables, check=True, stdout=subprocess.DEVNULL)
    command = [*fullrank, "train", str(yaml), f"train.seed={seed}", "--out", str(run), "--quiet"]
    before = measure_children()
    training = subprocess.Popen(command, env=variables)
    while not (run / "config.yaml").exists() and training.poll() is None:
        time.sleep(1)
    corpus = corpus_of(run, "valid")
    start = corpus.tokenizer.start_id
    ids = {split: corpus.ids(split) for split in ("train", "valid", "test")}

    def measure(model: GPT) -> float:
        return measure_nats(model, ids["valid"], start, READINGS["blocks of 64"])

    train_ids = torch.from_numpy(np.asarray(ids["train"], dtype=np.int64))
    model, steps, loop_seconds = train_loop(train_ids, len(corpus.tokenizer), 1.1 * 60 * minutes, seed, measure)
    if training.wait():
        raise SystemExit(f"{' '.join(command)}: ended with {training.returncode}")
    cpu_seconds = measure_children() - before
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    ours = {
        "arm": "fullrank init",
        "parameters": result["parameters"]["total"],
        "tokens_read": result["tokens_seen"],
        "cpu_seconds": round(cpu_seconds, 1),
    }
    theirs = {
        "arm": "nanoGPT-style loop",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_read": steps * BATCH * BLOCK,
        "cpu_seconds": round(loop_seconds, 1),
    }
    for name, reading in READINGS.items():
        for split in ("valid", "test"):
            ours[f"{split}, {name}"] = evaluate(run, split, **reading)["nll"]
            theirs[f"{split}, {name}"] = measure_nats(model, ids[split], start, reading)
            size = corpus.splits[split]
            for arm in (ours, theirs):
                nats = arm[f"{split}, {name}"]
                arm[f"{split}, {name}"] = round(nats, 4)
                if unit != "word":
                    bits = nats * size["tokens"] / size["bytes"] / math.log(2)
                    arm[f"{split}, {name}, bits per byte"] = round(bits, 4)
    for arm in (ours, theirs):
        print(unit, seed, json.dumps(arm), flush=True)
    tokens = {split: len(each) for split, each in ids.items()}
    return {"unit": unit, "seed": seed, "vocabulary": len(corpus.tokenizer), "arms": [ours, theirs], "tokens": tokens}


def main() -> None:
    """Compare the arms for every seed and unit that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--units", nargs="+", default=["byte", "word", "bpe"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--runs", type=Path, default=Path("runs/small_text"))
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = {"name": options.text.name, "bytes": options.text.stat().st_size}
    results = []
    for seed in options.seeds:
        for unit in options.units:
            results.append(compare(options.text, unit, seed, options.minutes, options.runs))
            write_json(options.json, {"text": text, "minutes": options.minutes, "results": results})


if __name__ == "__main__":
    main()
