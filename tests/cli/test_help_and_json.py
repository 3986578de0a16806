"""Every verb: its help page, `--json`, completion in the shell. Training where there is no POSIX."""

import itertools
import os

import typer

from cli_runs import SMALL, call
from fullrank.cli.app import load

# Verbs without it: a file or a schema is their output; the command line of `bench` is that of benchmarks/bench.py
WITHOUT = {"init", "config schema", "bench"}


def _verbs(group, path=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_every_verb_takes_json_and_lists_examples():
    commands = dict(_verbs(typer.main.get_command(load())))
    options = {
        verb: [*itertools.chain(*(option.opts for option in command.params))] for verb, command in commands.items()
    }
    assert {verb for verb, words in options.items() if "--json" not in words} == WITHOUT
    assert [verb for verb, command in commands.items() if not (command.epilog or "").startswith("Examples:")] == []
    assert "130 interrupted" in call("--help").stdout


def test_training_needs_no_affinity(config, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    process = call("train", config, *SMALL, "train.steps=2", "--out", tmp_path / "run", "--quiet")
    assert process.returncode == 0, process.stderr
