"""The book: every command on its pages is one that `fullrank` takes, blocks of Python run, and it builds without a warning."""

import contextlib
import functools
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from fullrank.cli import main
from fullrank.cli.app import UsageError, import_modules, load
from fullrank.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATED = DOCS / "results"
sys.path.insert(0, str(DOCS / "pictures"))
import draw  # noqa: E402

PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page.parent != GENERATED)]


NEW = [DOCS / "bottleneck.md", *sorted((DOCS / "mechanisms").glob("*.md"))]
FEW = "train.steps=4 eval.every_steps=4 eval.max_tokens=600 data.max_tokens=20000 data.max_vocabulary=400"
SMALLER = {"--scale tiny": f"--scale tiny {FEW}", "gpt2 --text book.txt --out gpt2.html": "runs/mixed --out mixed.html"}
RUNS = {
    "plain": "mixhead/table1-vanilla --row plain",
    "mixed": "mixhead/table1-vanilla --row b",
    "memory": "skip-cross-head/table5 --row phase1",
}


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def commands(page):
    """The command lines of a page: in blocks of `sh` and in indented ones."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"^```sh\n(.*?)^```|((?:^    .*\n)+)", text, re.M | re.S):
        for line in "".join(block).splitlines():
            if re.match(r" *(fullrank|torchrun)\b", line):
                yield re.sub(r"^.* -m fullrank|^ *fullrank", "fullrank", line)


@functools.cache
def application():
    return get_command(load())


def parse(command, words):
    """Raises UsageError for a verb, an option or a value that the command line does not have."""
    with command.make_context(command.name or "fullrank", list(words)) as context:
        if hasattr(command, "commands"):
            _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            parse(inner, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one_that_the_command_line_takes(page, monkeypatch):
    """Models and modules of the reader are taken for granted; measurements of a page are registered."""
    for module in ("models", "experiments.analyze", "experiments.check"):
        importlib.import_module(f"fullrank.{module}")  # they must not meet what stands in for `model_kind`
    monkeypatch.setattr("fullrank.names.model_kind", lambda name: "run")
    monkeypatch.setattr("fullrank.cli.app.import_plugin", lambda name: None)
    for code in blocks(page, "python"):
        if "@fr.measurement" in code:
            exec(compile(code, page.name, "exec"), {"__name__": "page"})
    faults = []
    for line in commands(page):
        line = re.sub(r" [<>] \S+", "", line)  # files that the shell reads and writes
        try:
            words = [word.rstrip(",") for word in shlex.split(line, comments=True)[1:]]
            parse(application(), import_modules(words))
        except UsageError as error:
            if "does not exist" not in error.format_message():  # a file of the reader's
                faults.append(f"{line}: {error.format_message()}")
    assert not faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_is_long(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("page", NEW, ids=lambda page: page.name)
def test_blocks_of_python_and_of_configurations(page):
    assert blocks(page, "python")
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), {"__name__": "page"})
    for text in blocks(page, "yaml"):
        RunConfig.from_dict(yaml.safe_load(text))


@pytest.mark.parametrize("name", list(draw.PICTURES))
def test_pictures_are_those_of_the_script(name):
    assert (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8") == draw.PICTURES[name]()


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder with the runs that pages name."""
    folder = tmp_path_factory.mktemp("reader")
    for name, row in RUNS.items():
        run(f"fullrank train {row} --scale tiny --out runs/{name}", folder)
    return folder


def run(line, folder):
    for words, smaller in SMALLER.items():
        line = line.replace(words, smaller)
    if "skip-cross-head" in line and "train" in line:
        line += " model.input.cutoffs=[100,200] model.output.cutoffs=[100,200]"
    if "--row phase1-phase2" in line:
        line += " 'train.phases=[{name: skip_retain, skip: linear, steps: 2}, {name: vanilla}]'"
    output = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        pytest.raises(SystemExit) as stopped,
    ):
        main(shlex.split(line, comments=True)[1:])
    assert not stopped.value.code, f"{line}\n{output.getvalue()}"


@pytest.mark.full
@pytest.mark.parametrize("page", NEW, ids=lambda page: page.name)
def test_its_commands_run(page, reader):
    for line in commands(page):
        run(line, reader)


@pytest.mark.full
def test_it_builds_without_a_warning_and_asks_the_net_for_nothing(tmp_path):
    words = ["-W", "--keep-going", "-q", "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "book")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    build = subprocess.run([sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, env=environment)
    assert build.returncode == 0, build.stderr
    pages = list((tmp_path / "book").rglob("*.html"))
    assert len(pages) > 40
    reference = (tmp_path / "book" / "api.html").read_text(encoding="utf-8")
    assert "<li><p><strong>attention_mask</strong> – " in reference  # arguments are a list, one a line
    for page in [*pages, *(tmp_path / "book").rglob("*.css")]:
        text = page.read_text(encoding="utf-8")
        assert not re.search(
            r"<(script|link|img|iframe)\b[^>]*(src|href)=\"(https?:)?//|url\(.?https?:|@import", text
        ), page
