"""The house: the script that keeps .venv, the layers, the licence, links between pages, and what may be committed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Stands in for a Python interpreter. It answers the script's questions, writes down what it is asked to do, and fails
# or is "killed" where a file of that name lies beside it.
FAKE_PYTHON = """#!/bin/sh
home=HOME_FOLDER
version=$(cat "$home/version")
case "$*" in
    "--version") echo "Python $version" ;;
    *platform*) echo "$version" ;;
    *version_info*3,\\ 11*) [ "${version#3.}" -ge 11 ] ;;
    *base_prefix*) echo "$home $version" ;;
    "-m venv --clear "*)
        echo "venv" >>"$home/calls"
        rm -rf .venv
        mkdir -p .venv/bin
        cp "$home/python" .venv/bin/python ;;
    *ensurepip*)
        echo "ensurepip" >>"$home/calls"
        if [ -e "$home/ensurepip_fails" ]; then rm "$home/ensurepip_fails"; exit 1; fi ;;
    *"pip --version"*) exit 0 ;;
    *"pip install"*)
        echo "install $PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT $*" >>"$home/calls"
        if [ -e "$home/killed" ]; then rm "$home/killed"; kill -9 $PPID; fi
        if [ -e "$home/pip_fails" ]; then rm "$home/pip_fails"; exit 1; fi ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""


class Clone:
    """A folder with what the script reads, and a stand-in for Python beside it."""

    def __init__(self, folder):
        self.home = folder / "interpreter"
        self.place = folder / "clone with a space"
        self.home.mkdir()
        (self.place / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "venv.sh", self.place / "scripts")
        shutil.copy(ROOT / "Makefile", self.place)
        for name in ("pyproject.toml", "constraints.txt"):
            (self.place / name).write_text("as it was\n")
        self.python = self.home / "python"
        self.python.write_text(FAKE_PYTHON.replace("HOME_FOLDER", str(self.home)))
        self.python.chmod(0o755)
        self.set("version", "3.12")

    def set(self, name, text=""):
        (self.home / name).write_text(text)

    def setup(self, extras="run", python=None):
        environment = {**os.environ, "PYTHON": str(self.python) if python is None else python}
        return subprocess.run(
            ["sh", "scripts/venv.sh", extras], cwd=self.place, env=environment, capture_output=True, text=True
        )

    def calls(self):
        """Calls of the interpreter since the last look: the first word of each line."""
        log = self.home / "calls"
        words = [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return words


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def test_environment_is_built_once_and_then_left_alone(clone):
    assert clone.setup().returncode == 0
    assert clone.calls() == ["venv", "ensurepip", "install"]
    again = clone.setup()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert clone.calls() == []


def test_killed_installation_is_built_anew(clone):
    clone.set("killed")
    assert clone.setup().returncode != 0
    assert clone.calls() == ["venv", "ensurepip", "install"]
    assert clone.setup().returncode == 0
    assert clone.calls() == ["venv", "ensurepip", "install"]
    assert clone.setup().returncode == 0
    assert clone.calls() == []


def test_old_python_is_refused(clone):
    clone.set("version", "3.10")
    refused = clone.setup()
    assert refused.returncode == 2
    assert refused.stderr.strip() == f"PYTHON={clone.python} is Python 3.10; fullrank needs Python 3.11 or later"
    assert not (clone.place / ".venv").exists()
    missing = clone.setup(python="no-such-python")
    assert missing.returncode == 2
    assert "PYTHON=no-such-python cannot be run" in missing.stderr


# An import that the layers forbid, from the first to the second; one for every rule
FORBIDDEN = [
    ("core", "config"), ("config", "data"), ("config", "torch"), ("data", "evaluation"),
    ("evaluation", "training"), ("decoding", "training"), ("comparison", "training"), ("core", "data"), ("core", "training"),
    ("core", "experiments"), ("training", "core"), ("training", "data"), ("training", "comparison"), ("hf", "analysis"),
    ("analysis", "experiments"), ("hf", "checking"), ("checking", "experiments"), ("experiments", "cli"),
]  # fmt: skip


def test_layers_hold_and_every_forbidden_import_is_seen(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def lint():
        command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "200"}
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return ran.returncode, ran.stdout + ran.stderr

    status, output = lint()
    assert status == 0, output
    for importer, imported in FORBIDDEN:
        package = tmp_path / "src" / "fullrank" / importer
        file = package / "layer_fault.py"
        target = imported if imported == "torch" else f"fullrank.{imported}"
        with file.open("a", encoding="utf-8") as out:
            out.write(f"\nimport {target}\n")
    status, output = lint()
    assert status == 1, output
    for importer, imported in FORBIDDEN:
        module = f"{importer}.layer_fault"
        target = imported if imported == "torch" else f"fullrank.{imported}"
        assert f"fullrank.{module} -> {target} (l." in output, f"{importer} -> {imported} was not seen in:\n{output}"


def test_links_between_pages_lead_somewhere():
    count = 0
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith("mailto:"):
                count += 1
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
    assert count > 5


def test_nothing_heavy_is_committed():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of committed files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert len(files) > 20
    most = {"ledger.csv": 2 << 20}  # grows by half a KB with every finished run
    assert [file.name for file in files if file.stat().st_size > most.get(file.name, 500 << 10)] == []


def test_files_has_the_only_reader_of_json():
    """`files.parse_json` bounds nesting and knows no NaN, and nothing in the source unpickles."""
    words = (
        r"json\.loads?\(",
        r"JSONDecoder\b",
        r"^\s*(import|from) (c?pickle|marshal|shelve|joblib|dill)\b",
        r"torch\.(save|load)\(",
        "allow_pickle",
        r"distributed\.checkpoint",
    )
    readers = re.compile("|".join(words))
    lines = ((path, line) for path in (ROOT / "src").rglob("*.py") for line in path.read_text("utf-8").splitlines())
    calls = [(path.name, line.strip()) for path, line in lines if readers.search(line)]
    assert [(name, line.partition("(")[0]) for name, line in calls] == [("files.py", "return json.loads")]
