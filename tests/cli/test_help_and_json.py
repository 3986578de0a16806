"""Every verb: its help page, `--json`, completion in the shell. Training where there is no POSIX."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import typer
from cli_runs import SMALL, call

from fullrank.cli import app
from fullrank.cli.app import load
from fullrank.kernels import NAMES

# Verbs without it: a file or a schema is their output
WITHOUT = {"init", "config schema"}


def _verbs(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_every_verb_takes_json_and_lists_examples():
    verbs = dict(_verbs(typer.main.get_command(load())))
    assert {verb for verb, one in verbs.items() if not any("--json" in each.opts for each in one.params)} == WITHOUT
    assert [verb for verb, one in verbs.items() if not (one.epilog or "").startswith("Examples:")] == []
    assert "130 interrupted" in call("--help").stdout


def test_training_needs_no_affinity(config, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    done = call("train", config, *SMALL, "train.steps=2", "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr


def test_every_kernel_is_named():
    said = app.Kernel.__metadata__[0].help
    assert set(re.findall(r"[a-z]+", said)) >= set(NAMES)
