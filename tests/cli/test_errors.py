"""Bad input: every case of tests/errors.yaml ends with its exit status and a line or two that name what has to be named."""

from pathlib import Path

import pytest
import yaml
from cli_runs import call

from translation_runs import write_run

CASES = yaml.safe_load((Path(__file__).parents[1] / "errors.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def places(run, config, text, tmp_path_factory):
    """The folders and files that the cases name."""
    (text / "hollow").mkdir(exist_ok=True)
    (text / "half").mkdir(exist_ok=True)
    (text / "half" / "config.yaml").write_bytes(config.read_bytes())
    (text / "empty.txt").write_text("", encoding="utf-8")
    (text / "latin.txt").write_bytes("caf\xe9 au lait\n".encode("latin-1") * 50)
    translation = tmp_path_factory.mktemp("translation")
    write_run(translation)
    return {"run": run, "config": config, "text": text, "translation": translation, "new": text / "new"}


@pytest.mark.parametrize("case", CASES, ids=[case["run"] for case in CASES])
def test_errors(case, places):
    done = call(*(word.format(**places) for word in case["run"].split()))
    said = " ".join(done.stderr.split())
    assert (done.returncode, done.stdout) == (case.get("status", 2), ""), said
    for word in case["says"]:
        assert word in said
    assert len(done.stderr.splitlines()) <= 4
    assert not (places["new"] / "result.json").exists()
