"""Made-up runs of fine-tuning, in the layout of a run, without training anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fullrank.config.load import build_any

ENVIRONMENT = {"torch": "2.13.0", "transformers": "5.23.0", "device": "cpu", "cpu": "a processor", "fullrank": "0.1.0"}


def make_run(
    folder: Path,
    score: float | None,
    *,
    seed: int = 1,
    task: str = "glue/cola",
    row: str | None = None,
    paper: Mapping[str, Any] | None = None,
    metrics: Sequence[str] = ("matthews_correlation",),
    scores: Mapping[str, Mapping[str, float]] | None = None,
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    **result: Any,
) -> Path:
    """A run folder; `score` is that of the first metric on dev, None for a run that has not finished."""
    folder.mkdir(parents=True)
    raw = {
        "model": {"pretrained": "minilm", **(model or {})},
        "data": {"name": task, "dir": "/somewhere/glue", **(data or {})},
        "train": {"seed": seed, **(train or {})},
    }
    config = build_any(raw).to_dict()
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    identity = {
        "name": row or folder.name,
        "recipe": "a/table" if row else "a.yaml",
        "row": row,
        "scale": "small" if row else None,
        "paper": paper,
    }
    (folder / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"step": 4, "split": "train", "nll": 0.6}\n', encoding="utf-8")
    (folder / "timing.jsonl").write_text("", encoding="utf-8")
    if score is None:
        return folder
    mixes = config["model"]["attention"]["mix"] != "none"
    content = {
        **identity,
        "kind": "finetuning",
        "seed": seed,
        "task": task,
        "title": "Corpus of Linguistic Acceptability" if task == "glue/cola" else task,
        "metrics": list(metrics),
        "final": scores or {"dev": {metrics[0]: score, "loss": 0.5, "examples": 1043}},
        "parameters": {"total": 1000, "mixing": 144 if mixes else 0, "fresh": 20},
        "checkpoint": "last",
        "protocol": "development split, fp32, at most 128 tokens",
        "slice": {"train": True, "dev": False},
        "examples": {"train": 2000, "dev": 1043},
        "sha256": {"train": "aa", "dev": "bb"},
        "kernel": "auto",
        "steps": 804,
        "epochs": 3.0,
        "wall_seconds": 90.0,
        "ms_per_step": 100.0,
        "environment": ENVIRONMENT,
        **result,
    }
    (folder / "result.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def two_arms(
    folder: Path, base: Sequence[float], other: Sequence[float], *, prefix: str = "", **options: Any
) -> list[Path]:
    """Runs of `plain` and of `b`, seeds from 1."""
    plain = [
        make_run(folder / f"{prefix}plain-{seed}", score, seed=seed, row=f"{prefix}plain", **options)
        for seed, score in enumerate(base, 1)
    ]
    mixed = [
        make_run(
            folder / f"{prefix}b-{seed}",
            score,
            seed=seed,
            row=f"{prefix}b",
            model={"attention": {"mix": "position_wise"}},
            train={"mixing_learning_rate": 1e-3},
            **options,
        )
        for seed, score in enumerate(other, 1)
    ]
    return [*plain, *mixed]
