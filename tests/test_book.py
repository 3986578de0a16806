"""The book: every command on its pages is one that `fullrank` takes, blocks of Python run, and it builds without a warning."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fullrank.cli.app import load
from fullrank.cli.output import UsageError

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATED = DOCS / "results"
LONGER = {"hugging_face.md"}
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page.parent != GENERATED)]


def commands(page: Path) -> Iterator[str]:
    """The command lines of a page: in blocks of `sh` and in indented ones."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"^```sh\n(.*?)^```|((?:^    .*\n)+)", text, re.M | re.S):
        for line in "".join(block).splitlines():
            if re.match(r" *(fullrank|torchrun)\b", line):
                yield re.sub(r"^.* -m fullrank|^ *fullrank", "fullrank", line)


def parse(command: Any, words: list[str]) -> None:
    """Raises UsageError for a verb, an option or a value that the command line does not have."""
    with command.make_context(command.name or "fullrank", list(words)) as context:
        if hasattr(command, "commands"):
            _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            parse(inner, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one_that_the_command_line_takes(page: Path) -> None:
    faults = []
    for line in commands(page):
        try:
            parse(get_command(load()), [word.rstrip(",") for word in shlex.split(line, comments=True)[1:]])
        except UsageError as error:
            if "does not exist" not in error.format_message():  # a file of the reader's
                faults.append(f"{line}: {error.format_message()}")
    assert not faults


def test_there_are_commands() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 35


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_is_long(page: Path) -> None:
    assert page.name in LONGER or len(page.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.full
def test_it_builds_without_a_warning_and_asks_the_net_for_nothing(tmp_path: Path) -> None:
    words = ["-W", "--keep-going", "-q", "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "book")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "book").rglob("*.html"))
    assert len(pages) > 40
    for page in [*pages, *(tmp_path / "book").rglob("*.css")]:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(script|link|img|iframe)\b[^>]*(src|href)=\"(https?:)?//|url\(.?https?:|@import", text), page
