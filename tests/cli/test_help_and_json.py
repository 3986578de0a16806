"""Every verb: its help page, `--json`, completion in the shell. Training where there is no POSIX."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_runs import SMALL, call

from fullrank.cli.app import load

# CONFIG: of a small run, RUN: the finished run, NEW: a fresh folder, TEXT: a text. Long verbs (check, demo, bench) and
# those for other runs (finetune, translate, average, export) are called with --json in tests of their own.
REPORTING = [
    "recipes list", "recipes show mos/table2", "data list", "data prepare text data.train=TEXT data.valid=TEXT --to NEW",
    "config show CONFIG", "config validate CONFIG", "info CONFIG", "train RUN", "eval RUN", "generate RUN --max-new-tokens 3",
    "report RUN --out NEW/page.html", "analyze context skip-cross-head/table1", "analyze rank RUN --contexts 20",
    "analyze spectrum RUN --texts 1", "analyze heads RUN --texts 1", "analyze mixing RUN --texts 1", "diagnose RUN",
    "reproduce mos/table2 --scale tiny --list",
    "train CONFIG --out NEW/run --until 1",
]  # fmt: skip
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


@pytest.fixture(scope="module")
def analysed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run: analyses leave their figures in a run's folder."""
    return shutil.copytree(run, tmp_path_factory.mktemp("analysed") / "run", symlinks=True)


@pytest.mark.parametrize("line", REPORTING)
def test_json_is_all_that_stdout_gets(line: str, analysed: Path, config: Path, text: Path, tmp_path: Path) -> None:
    for name, value in {"RUN": analysed, "CONFIG": config, "NEW": tmp_path, "TEXT": text / "valid.txt"}.items():
        line = line.replace(name, str(value))
    done = call(*line.split(), *(SMALL if str(config) in line and "validate" not in line else []), "--json")
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fullrank tra", ["train", "translate"]),
        ("fullrank train mos/table1-", ["mos/table1-ptb", "mos/table1-wikitext2"]),
        ("fullrank info mixhead/table1-vanilla --row a", ["a", "a-sigsoftmax"]),
        ("fullrank reproduce mixhead/table1 --rows plain,b-", ["plain,b-sigsoftmax"]),
        ("fullrank train mos/table2 --scale s", ["small"]),
        ("fullrank train ./my", []),  # the shell completes names of files
    ],
)
def test_the_shell_completes(line: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_FULLRANK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert sorted(call().stdout.split()) == words


def test_training_needs_neither_locks_nor_affinity(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("fcntl", "resource"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    done = call("train", config, *SMALL, "train.steps=2", "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
