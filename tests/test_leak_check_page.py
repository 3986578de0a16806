"""The page about leak checks in CI: its tests run as written, and the plugin writes verdicts into the JUnit report."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[1]
LEAKING = """

def test_a_leak(leak_check):
    model = MyModel()
    model.layer.register_forward_hook(lambda module, args, out: out + out.mean(1, keepdim=True))
    leak_check(model)
"""


def test_the_tests_of_the_page(pytester):
    page = (ROOT / "docs" / "leak_check.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- a test -->\n```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    pytester.makepyfile(test_leaks="\n".join(blocks) + LEAKING)
    plugin = () if _installed() else ("-p", "fullrank.testing.plugin")
    found = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--strict-markers", *plugin, "--junitxml=out.xml")
    found.assert_outcomes(passed=2, failed=1)
    assert "It enters at layer." in found.stdout.str()
    cases = {case.get("name"): case for case in ElementTree.parse(pytester.path / "out.xml").iter("testcase")}
    told = {name: {one.get("name"): one.get("value") for one in case.iter("property")} for name, case in cases.items()}
    check = "fullrank.future, by perturbation, training"
    assert (told["test_leaks"][check], told["test_a_leak"][check]) == ("passes", "fails")


def _installed():
    """The environment knows the plugin: it was made after the plugin was."""
    from importlib.metadata import entry_points

    return any(one.value == "fullrank.testing.plugin" for one in entry_points(group="pytest11"))


ALONE = """
import sys
for name in ("numpy", "scipy", "pydantic", "yaml", "typer", "rich", "safetensors", "matplotlib", "transformers", "tokenizers"):
    sys.modules[name] = None
import warnings
warnings.simplefilter("ignore")
import torch
import fullrank as fr
model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
assert fr.check(model, quick=True).passes
assert fr.check_scoring(lambda ids: torch.full((len(ids),), 2.0794415416798357), vocab_size=8).passes
"""


@pytest.mark.full
def test_checks_need_torch_alone():
    subprocess.run([sys.executable, "-c", ALONE], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
