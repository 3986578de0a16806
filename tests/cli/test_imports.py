"""`--import MODULE`: stages of one's own on the command line."""

import pytest

from cli_runs import SMALL, call
from fullrank.core import registry
from fullrank.plugins import imported_plugins

STAGE = """
import torch
import fullrank as fr
from fullrank.core.stages import Mixing

@fr.register("mix", "halfway_1")
class Halfway(Mixing):
    needs = ()
    starts_plain = False

    def __init__(self, config, size):
        super().__init__(config, size)
        self.heads = size.num_heads

    def matrix(self, query):
        return (torch.eye(self.heads) + 1 / self.heads) / 2
"""


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """The name of a module in the working directory, which registers a mixing."""
    (tmp_path / "halfway_module.py").write_text(STAGE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    imported_plugins.clear()  # what earlier tests of this process imported
    yield "halfway_module"
    registry.unregister("mix", "halfway_1")


def test_a_stage_of_ones_own_trains_generates_and_is_checked(stage, config, tmp_path):
    settings = ["--import", stage, *SMALL, "model.attention.mix=halfway_1", "train.steps=2", "--out", "run"]
    trained = call("train", config, *settings)
    assert trained.returncode == 0, trained.stderr
    assert f"fullrank generate run --import {stage}" in trained.stdout
    assert call("generate", "run", "--import", stage, "--prompt", "the", "--max-new-tokens", 2).returncode == 0
    assert call("info", "run", "--import", stage, "--json").returncode == 0
