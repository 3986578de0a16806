"""Made-up run folders: lines, results and translations in the layout of a run, without training anything."""

import functools
import io
import json
import math
import random

import yaml
from rich.console import Console

from fullrank.comparison.compare import build_report
from fullrank.comparison.page import build_page
from fullrank.config import run
from fullrank.config.load import build_any
from fullrank.evaluation.tasks import tokenised_bleu, translation_scores
from fullrank.render.terminal import print_page
from run_files import read_metrics

CORPUS = {
    "name": "builtin",
    "label": "Python's documentation",
    "is_slice": False,
    "tokens": {"train": 700_000, "valid": 40_000, "test": 41_000},
    "vocabulary": 10_000,
    "unigram_perplexity": {"valid": 640.5, "test": 655.25},
}
SLICE = CORPUS | {"name": "ptb", "label": "Penn Treebank, a slice", "is_slice": True, "vocabulary": 5_000}
PAIRS = {
    "name": "multi30k-de-en",
    "label": "Multi30k De-En",
    "is_slice": False,
    "pairs": {"train": 29_000, "valid": 30, "test": 40},
    "vocabulary": {"source": 6_632, "target": 8_848},
}
ENVIRONMENT = {"fullrank": "0.1.0", "torch": "2.13.0", "platform": "Linux", "cpu": "Some CPU", "device": "cpu"}
SENTENCES = {"valid": 30, "test": 40}
WORDS = [
    "a", "man", "in", "red", "and", "two", "brown", "dogs", "run", "over", "the", "wet", "street", "near", "bridge",
]  # fmt: skip
PARTS = {"embedding": 1_280_000, "attention": 262_144, "feed_forward": 524_288, "output": 1_290_000}


def make_run(
    folder, *, row="plain", seed=1, test=120.0, valid=125.0, mix="none", finished=True, extra=0, corpus=CORPUS,
    result=None, **entries,
):  # fmt: skip
    """Writes the folder of a language model. `result`, `entries`: further entries of result.json."""
    config = run.RunConfig(train=run.TrainConfig(seed=seed, steps=400)).to_dict()
    config["model"]["attention"]["mix"] = mix
    end = math.log(valid)
    lines = []
    for step in range(20, 401, 20):
        nll = end + (9.2 - end) * math.exp(-step / 70)
        lines.append({"step": step, "split": "train", "nll": nll - 0.1, "tokens": step * 1280, "lr": 1e-3 / step})
        if step % 40 == 0:
            lines.append({"step": step, "split": "valid", "nll": nll, "ppl": math.exp(nll), "tokens": 40_000})
    values = {"valid": valid, "test": test}
    content = {
        "name": row, "recipe": "mixhead/table1-vanilla", "row": row, "scale": "tiny", "seed": seed,
        "parameters": {"total": sum(PARTS.values()) + extra, **PARTS, "mixing": extra},
        "final": {split: {"nll": math.log(value), "perplexity": value} for split, value in values.items()},
        "protocol": "blocks of 64 tokens", "corpus": corpus, "steps": 400, "tokens_seen": 512_000,
        "tokens_per_second": 9000.0 - extra / 10, "ms_per_step": {"train": 142.2}, "wall_seconds": 56.9,
        "environment": ENVIRONMENT, **(result or {}), **entries,
    }  # fmt: skip
    timing = [{"step": step, "tokens_per_second": 9000 - step} for step in range(20, 401, 20)]
    return write_run(folder, config, {"name": row, "row": row}, lines, timing, content if finished else None)


def write_run(folder, config, identity, metrics, timing, result):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    for name, lines in (("metrics.jsonl", metrics), ("timing.jsonl", timing)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def edit_config(folder, key, value):
    """Sets a dotted key of the saved configuration."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    *sections, last = key.split(".")
    section = config
    for name in sections:
        section = section[name]
    section[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return folder


def make_pairs_of_seeds(root):
    """Two rows with two seeds each, with the paper's figures, and one unfinished run."""
    plain = {"parameters": "156M", "valid": 30.75, "test": 29.78}
    mixed = {
        "row": "b", "mix": "position_wise", "extra": 3456,
        "paper": {"extra_parameters": 3456, "valid": 29.65, "test": 28.67},
    }  # fmt: skip
    return [
        make_run(root / "plain-1", seed=1, test=120.0, valid=125.0, paper=plain),
        make_run(root / "plain-2", seed=2, test=122.0, valid=126.0, paper=plain),
        make_run(root / "b-1", seed=1, test=110.0, valid=114.0, **mixed),
        make_run(root / "b-2", seed=2, test=113.0, valid=117.0, **mixed),
        make_run(root / "a-1", row="a", mix="position_independent", finished=False),
    ]


@functools.cache
def draw_references(split, seed=0):
    drawn = random.Random(f"{split}-{seed}")
    lines = [drawn.choices(WORDS, k=drawn.randint(5, 13)) for _ in range(SENTENCES[split])]
    return tuple(f"{' '.join(line).capitalize()}." for line in lines)


@functools.cache
def draw_hypotheses(split, wrong, seed, lines):
    """The references with a share of the words wrong."""
    drawn = random.Random(f"{split}-{wrong}-{seed}")

    def translate(line):
        return " ".join(drawn.choice(WORDS) if drawn.random() < wrong else word for word in line.split())

    return tuple(map(translate, lines))


@functools.cache
def score(hypotheses, lines, lowercase, tokenize):
    scores = translation_scores(hypotheses, lines, lowercase=lowercase, tokenize=tokenize)
    return scores | tokenised_bleu(hypotheses, lines)


def make_translation_run(
    folder, *, seed=1, wrong=0.2, lowercase=False, tokenize="13a", lines=None, corpus=PAIRS, **more
):
    """`wrong`: the share of words that it translates wrongly."""
    final = {}
    texts = {}
    for split in SENTENCES:
        theirs = (lines or {}).get(split, draw_references(split))
        ours = draw_hypotheses(split, wrong, seed, theirs)
        final[split] = {"perplexity": 4.0, **score(ours, theirs, lowercase, tokenize)}
        texts |= {f"{split}.txt": ours, f"{split}.reference.txt": theirs}
    make_run(
        folder, seed=seed, corpus=corpus, **{"task": "translation", "recipe": "mixhead/table4", "final": final, **more}
    )
    edit_config(folder, "data.name", "multi30k-de-en")
    metrics = read_metrics(folder)
    for line in metrics:
        line |= {"bleu": line["step"] / 10} if line["split"] == "valid" else {}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    for name, content in texts.items():
        (folder / "translations").mkdir(exist_ok=True)
        (folder / "translations" / name).write_text("".join(f"{line}\n" for line in content), encoding="utf-8")
    return folder


def make_translation_table(root):
    """Baseline, A and B with two seeds each and the paper's figures, and a fourth row on its way."""
    folders = []
    rows = {
        "plain": ("none", 0.24, 27.88),
        "a": ("position_independent", 0.19, 31.32),
        "b": ("position_wise", 0.18, 31.44),
    }
    for row, (mix, wrong, figure) in rows.items():
        for seed in (1, 2):
            options = {"wrong": wrong + 0.005 * seed, "mix": mix, "paper": {"test_bleu": figure}}
            folders.append(make_translation_run(root / f"{row}-{seed}", row=row, seed=seed, **options))
    return [*folders, make_translation_run(root / "k-1", row="k", mix="average", finished=False)]


def make_finetuned_run(
    folder, score, *, seed=1, task="glue/cola", row=None, metrics=("matthews_correlation",), final=None, model=None,
    train=None, data=None, **entries,
):  # fmt: skip
    """`score` is that of the first metric on dev, None for a run that has not finished."""
    raw = {
        "model": {"pretrained": "minilm", **(model or {})},
        "data": {"name": task, "dir": "/somewhere/glue", **(data or {})},
        "train": {"seed": seed, **(train or {})},
    }
    identity = {"name": row or folder.name, "recipe": "a/table" if row else "a.yaml", "row": row}
    result = {
        **identity, "kind": "finetuning", "seed": seed, "task": task, "title": task, "metrics": list(metrics),
        "final": final or {"dev": {metrics[0]: score, "loss": 0.5}}, "parameters": {"total": 1000, "fresh": 20},
        "checkpoint": "last", "protocol": "development split", "slice": {"train": True, "dev": False},
        "sha256": {"train": "aa", "dev": "bb"}, "steps": 804, "environment": ENVIRONMENT, **entries,
    }  # fmt: skip
    lines = [{"step": 4, "split": "train", "nll": 0.6}]
    return write_run(folder, build_any(raw).to_dict(), identity, lines, [], None if score is None else result)


def make_arms(folder, base, other, **more):
    """Fine-tuned runs of `plain` and of `b`, seeds from 1."""
    mixed = {"model": {"attention": {"mix": "position_wise"}}, "train": {"mixing_learning_rate": 1e-3}}
    runs = [("plain", seed, value, {}) for seed, value in enumerate(base, 1)]
    runs += [("b", seed, value, mixed) for seed, value in enumerate(other, 1)]
    return [
        make_finetuned_run(folder / f"{row}-{seed}", value, seed=seed, row=row, **settings, **more)
        for row, seed, value, settings in runs
    ]


def find(records, measure, **labels):
    """The one record of a measure with these labels."""
    matching = [record for record in records if record.measure == measure and record.has(labels)]
    assert len(matching) == 1, (measure, labels, [dict(record.labels) for record in matching])
    return matching[0]


def print_report(runs, width=200):
    """The report of `runs` as a terminal of that width shows it."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_page(build_page(build_report(runs)), console)
    return console.file.getvalue()
