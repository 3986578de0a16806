"""Made-up folders of translation runs: lines, results and translations in the layout of a run, without training anything."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from reporting_runs import write_lines

from fullrank.config import run
from fullrank.evaluation.tasks import TOKENISED_BLEU, tokenised_bleu, translation_scores

SENTENCE = "a man in red and two brown dogs run over the wet street near an old bridge while children watch"
WORDS = SENTENCE.split()
CORPUS = {
    "name": "multi30k-de-en",
    "label": "Multi30k De-En",
    "is_slice": False,
    "pairs": {"train": 29_000, "valid": 60, "test": 120},
    "tokens": {
        "train": {"source": 380_000, "target": 377_000},
        "valid": {"source": 800, "target": 790},
        "test": {"source": 1_600, "target": 1_580},
    },
    "vocabulary": {"source": 6_632, "target": 8_848},
}
SENTENCES = {"valid": 60, "test": 120}


@functools.cache
def references(split: str, seed: int = 0) -> tuple[str, ...]:
    drawn = random.Random(f"{split}-{seed}")
    lines = [[drawn.choice(WORDS) for _ in range(drawn.randint(5, 13))] for _ in range(SENTENCES[split])]
    return tuple(f"{' '.join(line).capitalize()}." for line in lines)


@functools.cache
def hypotheses(split: str, wrong: float, seed: int, lines: tuple[str, ...]) -> tuple[str, ...]:
    """The references with a share of the words wrong."""
    drawn = random.Random(f"{split}-{wrong}-{seed}")
    return tuple(
        " ".join(drawn.choice(WORDS) if drawn.random() < wrong else word for word in line.split()) for line in lines
    )


@functools.cache
def scores(found: tuple[str, ...], lines: tuple[str, ...], lowercase: bool, tokenize: str) -> Mapping[str, Any]:
    return translation_scores(found, lines, lowercase=lowercase, tokenize=tokenize) | tokenised_bleu(found, lines)


def make_translation_run(
    folder: Path,
    *,
    row: str = "plain",
    seed: int = 1,
    wrong: float = 0.2,
    mix: str = "none",
    extra: int = 0,
    finished: bool = True,
    keep: Sequence[str] = ("valid", "test"),
    steps: int = 500,
    epochs: float = 10.0,
    bleu_lines: bool = True,
    lowercase: bool = False,
    tokenize: str = "13a",
    lines: Mapping[str, tuple[str, ...]] | None = None,
    corpus: Mapping[str, Any] | None = CORPUS,
    paper: Mapping[str, Any] | None = None,
    result: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a run folder. `wrong`: the share of words that it translates wrongly; `keep`: splits of which it keeps files."""
    folder.mkdir(parents=True)
    config = run.RunConfig(train=run.TrainConfig(seed=seed, steps=steps)).to_dict()
    config["model"]["attention"]["mix"] = mix
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"name": row, "row": row, "task": "translation"}), encoding="utf-8")
    drawn, end = random.Random(f"{row}-{seed}"), 1.1 + 2 * wrong
    metrics: list[dict[str, Any]] = []
    timing: list[dict[str, Any]] = []
    for index in range(1, 41):
        step, share = index * steps // 40, index / 40 * (1.0 if finished else 0.6)
        nll = end + (7.5 - end) * math.exp(-5 * share)
        lr = 1e-3 * min(1.0, 8 * share) * min(1.0, (0.125 / share) ** 0.5)
        trained = {"step": step, "split": "train", "nll": nll + drawn.gauss(0, 0.05), "tokens": step * 3_900, "lr": lr}
        metrics.append(trained | {"ppl": math.exp(trained["nll"])})
        timing.append(
            {
                "step": step,
                "seconds": step * 0.6,
                "tokens_per_second": 6_500 + drawn.gauss(0, 90),
                "peak_memory_mib": 900.0,
            }
        )
        if index % 4 == 0:
            line = {"step": step, "split": "valid", "nll": nll + 0.1, "ppl": math.exp(nll + 0.1), "tokens": 790}
            bleu = max(0.0, (60 - 110 * wrong) * (1 - math.exp(-4 * share)) + drawn.gauss(0, 0.5) - 2)
            metrics.append(line | ({"bleu": bleu} if bleu_lines else {}))
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "timing.jsonl", timing)
    if not finished:
        return folder
    final = {}
    for split in SENTENCES:
        theirs = (lines or {}).get(split, references(split))
        found = hypotheses(split, wrong, seed, theirs)
        final[split] = {
            "nll": end,
            "perplexity": math.exp(end),
            "tokens": 790,
            **scores(found, theirs, lowercase, tokenize),
        }
        if split in keep:
            kept = folder / "translations"
            kept.mkdir(exist_ok=True)
            (kept / f"{split}.txt").write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
            (kept / f"{split}.reference.txt").write_text("".join(f"{line}\n" for line in theirs), encoding="utf-8")
    parts = {"embedding": 7_925_760, "attention": 9_455_616, "feed_forward": 12_607_488, "output": 0, "mixing": extra}
    content = {
        "task": "translation", "name": row, "recipe": "mixhead/table4", "row": row, "scale": "small", "seed": seed,
        "parameters": {"total": sum(parts.values()), **parts}, "mixing_parameters": extra, "final": final, "last": final,
        "best": {"step": steps, "nll": end, "protocol": "beam search of 5, length penalty 1", "next_token": True},
        "protocol": "beam search of 5, length penalty 1; sacreBLEU of detokenised text", "corpus": corpus, "paper": paper,
        "steps": steps, "epochs": epochs, "tokens_seen": steps * 3_900, "stopped_early": False,
        "tokens_per_second": 6_500.0 - extra / 100, "ms_per_step": {"train": 600.0}, "wall_seconds": steps * 0.6,
        "peak_memory_mib": 900.0,
        "environment": {"fullrank": "0.1.0", "torch": "2.13.0", "platform": "Linux x86_64", "cpu": "Some CPU", "threads": 2,
                        "device": "cpu", "precision": "fp32"},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(content | dict(result or {})), encoding="utf-8")
    return folder


def table4(root: Path, metric: str = "bleu") -> list[Path]:
    """Baseline, A and B with two seeds each and the paper's figures, and a fourth row on its way."""
    made: list[Path] = []
    for row, mix, extra, wrong, valid, test in (
        ("plain", "none", 0, 0.24, 28.69, 27.88),
        ("a", "position_independent", 18_432, 0.19, 31.74, 31.32),
        ("b", "position_wise", 24_576, 0.18, 31.75, 31.44),
    ):
        paper = {"extra_parameters": extra, "valid": valid, "test": test, "metric": metric}
        made += [
            make_translation_run(
                root / f"{row}-{seed}", row=row, seed=seed, wrong=wrong + 0.005 * seed, mix=mix, extra=extra, paper=paper
            )
            for seed in (1, 2)
        ]  # fmt: skip
    return [*made, make_translation_run(root / "k-1", row="k", mix="average", finished=False)]


__all__ = ["CORPUS", "TOKENISED_BLEU", "hypotheses", "make_translation_run", "references", "table4"]
