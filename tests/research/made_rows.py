"""Rows of a ledger and run folders that nobody trained."""

import json

from fullrank.config.load import resolve_any, to_yaml

RECIPE = "mixhead/table1-vanilla"


def make_row(name, seed, figure, **columns):
    row = {
        "recipe": RECIPE, "row": name, "scale": "small", "seed": seed, "settings": {}, "corpus": "a corpus (slice)",
        "vocabulary": "ff", "text.test": "aa", "protocol.test": "blocks of 7", "final.test.perplexity": figure,
        "parameters": 1000, "tokens_seen": 600_000, "wall_seconds": 60.0, "commit": "abc", "curve": None,
    }  # fmt: skip
    empty = dict.fromkeys(("signature", "next_token"), "")
    return {**empty, **row, "run": f"{name}{seed}{figure}{columns}", **columns}


def make_rows(plain, b, **columns):
    """Rows `plain` and `b` with a figure for each seed. The columns are those of `b`."""
    rows = [make_row("plain", seed, figure) for seed, figure in enumerate(plain, 1)]
    return rows + [make_row("b", seed, figure, **columns) for seed, figure in enumerate(b, 1)]


def make_run(folder, *overrides, perplexity=90.5, commit="abc", **result):
    """A finished run of Mixhead B, of which nothing but the records is there."""
    folder.mkdir(parents=True)
    config = resolve_any(RECIPE, "b", "small", ["train.seed=3", *overrides]).config
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    (folder / "run.json").write_text('{"text": {}}', encoding="utf-8")
    lines = [{"split": "train", "step": 5, "loss": 6.0}, {"split": "valid", "step": 10, "ppl": 412.3456}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    content = {
        "recipe": RECIPE, "row": "b", "scale": "small", "seed": 3, "steps": 20, "tokens_seen": 5120, "wall_seconds": 2.5,
        "corpus": {"label": "a corpus", "fingerprint": "f" * 64, "sha256": {"test": "a" * 64},
                   "unigram_perplexity": {"test": 680.25}},
        "parameters": {"total": 1000}, "ms_per_step": {"train": 12.5},
        "environment": {"commit": commit, "cpu": "fast", "precision": "bf16", "threads": 1},
        "protocols": {"test": {"words": "windows, of 7", "settings": {"next_token": True}}},
        "final": {"test": {"perplexity": perplexity, "nll": 4.5, "tokens": 7}},
        "last": {"test": {"perplexity": perplexity + 1}},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(content | result), encoding="utf-8")
    return folder
