"""Trains runs without output, and reads the files in their folders."""

import json

from fullrank.config.load import Resolved, build_any
from fullrank.experiments.run import train
from fullrank.experiments.run_folder import reopen


def train_quietly(raw, folder, **options):
    """The result of a training of a configuration, {} where it pauses."""
    return train(Resolved(build_any(raw), "test", settings=raw), folder, quiet=True, **options)


def resume(folder, **options):
    """The result of a run that is resumed where it stopped."""
    return train(reopen(folder)[0], folder, **options)


def read_result(folder):
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def read_metrics(folder, split=None):
    """Lines of metrics, of one split or of all."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if split in (None, line["split"])]
