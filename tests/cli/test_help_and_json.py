"""Every verb: its help page, `--json`, completion in the shell. Training where there is no POSIX."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_runs import SMALL, call

from fullrank.cli.app import load

# Verbs without it: a file or a schema is their output
WITHOUT = {"init", "config schema"}


def _verbs(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_every_verb_takes_json_and_lists_examples() -> None:
    verbs = dict(_verbs(typer.main.get_command(load())))
    assert {verb for verb, one in verbs.items() if not any("--json" in each.opts for each in one.params)} == WITHOUT
    assert [verb for verb, one in verbs.items() if not (one.epilog or "").startswith("Examples:")] == []
    assert "130 interrupted" in call("--help").stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fullrank tra", ["train", "translate"]),
        ("fullrank train mos/table1-", ["mos/table1-ptb", "mos/table1-wikitext2"]),
        ("fullrank train ./my", []),  # the shell completes names of files
    ],
)
def test_the_shell_completes(line: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_FULLRANK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert sorted(call().stdout.split()) == words


def test_training_needs_no_affinity(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    done = call("train", config, *SMALL, "train.steps=2", "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
