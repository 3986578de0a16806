"""Made-up run folders: lines and results in the layout of a run, without training anything."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from fullrank.comparison.page import build_report
from fullrank.config import run
from fullrank.records import Record
from fullrank.render.terminal import print_page

CORPUS = {
    "name": "builtin",
    "label": "Python's documentation",
    "is_slice": False,
    "tokens": {"train": 700_000, "valid": 40_000, "test": 41_000},
    "vocabulary": 10_000,
    "unigram_perplexity": {"valid": 640.5, "test": 655.25},
}
SLICE = CORPUS | {
    "name": "ptb",
    "label": "Penn Treebank, a slice of 100,000 tokens",
    "is_slice": True,
    "vocabulary": 5_000,
}


def make_run(
    folder: Path,
    *,
    row: str = "plain",
    seed: int = 1,
    test: float | None = 120.0,
    valid: float | None = 125.0,
    mix: str = "none",
    finished: bool = True,
    steps: int = 400,
    lines: int = 40,
    extra: int = 0,
    corpus: Mapping[str, Any] | None = CORPUS,
    paper: Mapping[str, Any] | None = None,
    result: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a run folder. `result` overrides entries of result.json."""
    folder.mkdir(parents=True)
    drawn = random.Random(f"{row}-{seed}")
    config = run.RunConfig(train=run.TrainConfig(seed=seed, steps=steps)).to_dict()
    config["model"]["attention"]["mix"] = mix
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    end = math.log(valid or 125.0)
    metrics: list[dict[str, Any]] = []
    timing: list[dict[str, Any]] = []
    every = max(1, lines // 12)
    for index in range(1, lines + 1):
        step = round(index * steps / lines)
        share = step / steps if finished else 0.6 * step / steps
        nll = end + (9.2 - end) * math.exp(-6 * share) * (1 - share)
        lr = 1e-3 * min(1.0, 10 * share) * 0.5 * (1 + math.cos(math.pi * share))
        noisy = nll - 0.1 + drawn.gauss(0, 0.06)
        metrics.append(
            {"step": step, "split": "train", "nll": noisy, "ppl": math.exp(noisy), "tokens": step * 1280, "lr": lr}
        )
        rate = 9000 * (0.9 if mix != "none" else 1.0) * (1 + drawn.gauss(0, 0.04))
        timing.append(
            {"step": step, "seconds": step * 1280 / 9000, "tokens_per_second": rate, "peak_memory_mib": 512.25}
        )
        if index % every == 0 or index == lines:
            metrics.append({"step": step, "split": "valid", "nll": nll, "ppl": math.exp(nll), "tokens": 40_000})
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "timing.jsonl", timing)
    if finished:
        final = {
            split: {"nll": math.log(value), "perplexity": value, "tokens": 40_000}
            for split, value in (("valid", valid), ("test", test))
            if value is not None
        }
        parts = {"embedding": 1_280_000, "attention": 262_144, "feed_forward": 524_288, "output": 1_290_000}
        if extra:
            parts["mixing"] = extra
        content = {
            "name": row, "recipe": "mixhead/table1-vanilla", "row": row, "scale": "tiny", "seed": seed,
            "parameters": {"total": sum(parts.values()), **parts}, "mixing_parameters": extra, "final": final,
            "best": {"step": steps, "valid": final.get("valid")},
            "protocol": "blocks of 64 tokens, 10 at a time, no context carried over",
            "corpus": corpus, "paper": paper, "steps": steps,
            "tokens_seen": steps * 1280, "tokens_per_second": 9000.0 - extra / 10,
            "ms_per_step": {"train": 142.2}, "wall_seconds": steps * 0.1422, "peak_memory_mib": 512.25,
            "environment": {"fullrank": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "platform": "Linux x86_64",
                            "cpu": "Some CPU", "threads": 2, "device": "cpu", "precision": "fp32", "commit": "0123abc"},
        }  # fmt: skip
        (folder / "result.json").write_text(json.dumps(content | dict(result or {})), encoding="utf-8")
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def two_kinds(root: Path) -> list[Path]:
    """Two rows with two seeds each, with the paper's figures, and one unfinished run."""
    paper = {
        "plain": {"parameters": "156M", "valid": 30.75, "test": 29.78},
        "b": {"extra_parameters": 3456, "valid": 29.65, "test": 28.67},
    }
    return [
        make_run(root / "plain-1", row="plain", seed=1, test=120.0, valid=125.0, paper=paper["plain"]),
        make_run(root / "plain-2", row="plain", seed=2, test=122.0, valid=126.0, paper=paper["plain"]),
        make_run(
            root / "b-1", row="b", seed=1, test=110.0, valid=114.0, mix="position_wise", extra=3456, paper=paper["b"]
        ),
        make_run(
            root / "b-2", row="b", seed=2, test=113.0, valid=117.0, mix="position_wise", extra=3456, paper=paper["b"]
        ),
        make_run(root / "a-1", row="a", seed=1, mix="position_independent", finished=False),
    ]


def spelling_run(
    folder: Path,
    *,
    row: str = "plain",
    seed: int = 1,
    valid: float = 1.5,
    test: float = 1.4,
    kind: str = "byte",
    bytes_per_token: float = 1.0,
    result: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A finished run whose tokens spell text. `valid`, `test`: bits per token; two bytes of text are one character."""
    final = {
        split: {
            "nll": bits * math.log(2),
            "perplexity": 2**bits,
            "tokens": 40_000,
            "bits_per_character": 2 * bits / bytes_per_token,
            "bits_per_byte": bits / bytes_per_token,
        }
        for split, bits in (("valid", valid), ("test", test))
    }
    corpus = CORPUS | {
        "label": f"text of {kind}s",
        "vocabulary": 256,
        "unigram_perplexity": {"valid": 2.0**4.5, "test": 2.0**4.75},
        "details": {"settings": {"kind": kind}},
    }
    return make_run(
        folder, row=row, seed=seed, valid=2**valid, test=2**test, corpus=corpus, result={"final": final, **(result or {})},
        **options,
    )  # fmt: skip


def find(records: Iterable[Record], measure: str, **labels: object) -> Record:
    """The one record of a measure with these labels."""
    found = [record for record in records if record.measure == measure and record.has(labels)]  # type: ignore[arg-type]
    assert len(found) == 1, (measure, labels, [dict(record.labels) for record in found])
    return found[0]


def printed(runs: Sequence[Path], width: int = 200) -> str:
    """The report of `runs` as a terminal of that width shows it."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_page(build_report(runs).build_page(), console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]
