"""Bad input: every case of tests/errors.yaml ends with its exit status and a line or two that name what has to be named."""

import shlex
from pathlib import Path

import pytest
import yaml

from cli_runs import call
from fullrank.config.load import build_any, merge
from fullrank.core.errors import InputError
from fullrank.experiments.run import task_of
from translation_runs import write_run

CASES = yaml.safe_load((Path(__file__).parents[1] / "errors.yaml").read_text(encoding="utf-8"))
COMMANDS = [case for case in CASES if "run" in case]
CONFIGURATIONS = [case for case in CASES if "config" in case]


@pytest.fixture(scope="module")
def paths(run, config, text, tmp_path_factory):
    """The folders and files that the cases name."""
    (text / "hollow").mkdir(exist_ok=True)
    (text / "half").mkdir(exist_ok=True)
    (text / "half" / "config.yaml").write_bytes(config.read_bytes())
    (text / "empty.txt").write_text("", encoding="utf-8")
    (text / "latin.txt").write_bytes("caf\xe9 au lait\n".encode("latin-1") * 50)
    translation = tmp_path_factory.mktemp("translation")
    write_run(translation)
    return {"run": run, "config": config, "text": text, "translation": translation, "new": text / "new"}


@pytest.mark.parametrize("case", COMMANDS, ids=[case["run"] for case in COMMANDS])
def test_commands(case, paths, tmp_path):
    """And nothing in the run that they name is changed."""
    before = {path: path.read_bytes() for path in paths["run"].rglob("*") if path.is_file()}
    for name, content in case.get("files", {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    process = call(*(part.format(**paths, here=tmp_path, long=256 * "x") for part in shlex.split(case["run"])))
    _, prefix, message = f"\n{process.stderr}".partition("\nfullrank")  # behind lines of progress
    assert (process.returncode, process.stdout) == (case.get("status", 2), ""), process.stderr
    assert prefix == "\nfullrank", process.stderr
    assert len(message.splitlines()) <= 4
    message = " ".join(f"fullrank{message}".split())
    assert [part for part in case["says"] if part not in message] == [], message
    assert not (paths["new"] / "result.json").exists()
    assert {path: path.read_bytes() for path in paths["run"].rglob("*") if path.is_file()} == before


def check(raw):
    config = build_any(merge({}, raw))
    task_of(config).check()


@pytest.mark.parametrize("case", CONFIGURATIONS, ids=[str(case["config"]) for case in CONFIGURATIONS])
def test_configurations(case):
    """Every fault is one line, which begins with its key."""
    with pytest.raises(InputError) as refusal:
        check(case["config"])
    (line,) = str(refusal.value).splitlines()
    assert [part for part in case["says"] if part not in line] == [], line
