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

from machine import describe_machine
from train_step import GPT, Size

BLOCK, BATCH = 64, 12
SIZE = Size(4, 128, 4, BATCH, BLOCK, vocabulary=0, inner=512)
LEARNING_RATE, LOWEST, WARMUP = 1e-3, 1e-4, 100
READINGS = {
    "blocks of 64": {"segment_length": BLOCK},
    "windows of 64": {"segment_length": BLOCK, "context": 32, "stride": 32},
}


def train_loop(
    ids: Tensor, vocabulary: int, seconds: float, seed: int, measure: Callable[[GPT], float]
) -> tuple[GPT, int, float]:
    """The best weights of the evaluations, the steps, and the CPU seconds of training."""
    torch.manual_seed(seed)
    model = GPT(replace(SIZE, vocabulary=vocabulary))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    spent, steps, best, kept, judged = 0.0, 0, math.inf, copy.deepcopy(model.state_dict()), 0
    while spent < seconds:
        begin = time.process_time()
        steps += 1
        low = LOWEST + (LEARNING_RATE - LOWEST) * (1 + math.cos(math.pi * spent / seconds)) / 2
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, steps / WARMUP) * low
        starts = torch.randint(len(ids) - BLOCK, (BATCH,)).tolist()
        rows = torch.stack([ids[start : start + BLOCK + 1] for start in starts])
        F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        spent += time.process_time() - begin
        if spent >= seconds * (judged + 1) / 5:
            judged, cost = judged + 1, measure(model)
            if cost < best:
                best, kept = cost, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return model, steps, spent


@torch.no_grad()
def nats(model: GPT, ids: np.ndarray, start_id: int, reading: dict[str, int]) -> float:
    """Nats per token, every token scored once, in the very passages that `fullrank eval` reads."""
    from fullrank.experiments.measure import EvaluationProtocol, passages

    protocol = EvaluationProtocol(kind="window" if "stride" in reading else "blocks", **reading)
    total = 0.0
    for passage in passages(ids, protocol, start_id):
        read = torch.from_numpy(passage.ids)
        logits = model(read[None, :-1])[0]
        each = F.cross_entropy(logits, read[1:], reduction="none")
        total += float(each[passage.unscored :].double().sum())
    return total / len(ids)


def compare(text: Path, unit: str, seed: int, minutes: float, folder: Path) -> dict[str, Any]:
    """Both arms on one unit of text, one after the other."""
    from fullrank.experiments.run import corpus_of, evaluate

    def silent(line: str) -> None:
        pass

    yaml, run = folder / f"{unit}-{seed}.yaml", folder / f"{unit}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    fullrank = [sys.executable, "-m", "fullrank"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # minutes are then of the processor
    words = ["--tokens", unit, "--size", "small", "--minutes", f"{minutes:g}", "--out", str(yaml), "--force"]
    subprocess.run([*fullrank, "init", str(text), *words], env=variables, check=True, stdout=subprocess.DEVNULL)
    command = [*fullrank, "train", str(yaml), f"train.seed={seed}", "--out", str(run), "--quiet"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    training = subprocess.Popen(command, env=variables)
    while not (run / "config.yaml").exists() and training.poll() is None:
        time.sleep(1)
    corpus = corpus_of(run, "valid", silent)
    start, ids = corpus.tokenizer.start_id, {split: corpus.ids(split) for split in ("train", "valid", "test")}

    def measure(model: GPT) -> float:
        return nats(model, ids["valid"], start, READINGS["blocks of 64"])

    train_ids = torch.from_numpy(np.asarray(ids["train"], dtype=np.int64))
    model, steps, spent = train_loop(train_ids, len(corpus.tokenizer), 1.1 * 60 * minutes, seed, measure)
    if training.wait():
        raise SystemExit(f"{' '.join(command)}: ended with {training.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    ours = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    per_byte = {split: corpus.splits[split]["tokens"] / corpus.splits[split]["bytes"] for split in ("valid", "test")}
    arms: list[dict[str, Any]] = [
        {"arm": "fullrank init", "parameters": result["parameters"]["total"], "tokens_read": result["tokens_seen"],
         "cpu_seconds": round(ours, 1)},
        {"arm": "nanoGPT-style loop", "parameters": sum(p.numel() for p in model.parameters()),
         "tokens_read": steps * BATCH * BLOCK, "cpu_seconds": round(spent, 1)},
    ]  # fmt: skip
    for name, reading in READINGS.items():
        for split in ("valid", "test"):
            mine = evaluate(run, split, **reading, say=silent)["nll"]
            values = [mine, nats(model, ids[split], start, reading)]
            for arm, value in zip(arms, values, strict=True):
                arm[f"{split}, {name}"] = round(value, 4)
                if unit != "word":
                    arm[f"{split}, {name}, bits per byte"] = round(value * per_byte[split] / math.log(2), 4)
    for arm in arms:
        print(unit, seed, json.dumps(arm), flush=True)
    return {"unit": unit, "seed": seed, "vocabulary": len(corpus.tokenizer), "arms": arms,
            "tokens": {split: len(each) for split, each in ids.items()}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--units", nargs="+", default=["byte", "word", "bpe"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--runs", type=Path, default=Path("runs/small_text"))
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for seed in given.seeds:
        for unit in given.units:
            results.append(compare(given.text, unit, seed, given.minutes, given.runs))
            document = {"text": {"name": given.text.name, "bytes": given.text.stat().st_size}, "minutes": given.minutes,
                        "results": results, "environment": describe_machine()}  # fmt: skip
            given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
