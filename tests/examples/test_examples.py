"""The examples run, offline, and say what they are there to show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    completed = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words], capture_output=True, text=True, timeout=300, env=environment
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def figure(output, before):
    match = re.search(rf"{before}:?\s+([0-9.]+)", output)
    assert match is not None, output
    return float(match[1])


def test_gpt2_learns_to_mix_and_loses_nothing_on_disk():
    output = run("inject_gpt2.py", "--steps", "12")
    assert figure(output, "injected") == pytest.approx(figure(output, "plain"), abs=1e-4)
    assert figure(output, "trained") < figure(output, "plain")
    assert "the same logits: True" in output


def test_bert_learns_with_the_trainer_and_loses_nothing_on_disk():
    output = run("inject_bert.py", "--steps", "40")
    assert figure(output, "accuracy after") > 0.8 > figure(output, "accuracy before")
    assert "saved and loaded, the same logits: True" in output
