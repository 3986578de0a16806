"""A new mixing stage is one class and one registration: the property tests find it, and find its faults, by themselves.

The stages live in a plugin of a second pytest process, so that nothing of them is left in this one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fullrank.core import registry
from fullrank.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

# `neighbour` is right. `peeking` reads the query after its own, `dead` has a parameter that nothing uses, and `shifted` claims,
# by saying nothing, to start as plain attention. They need no base class.
PLUGIN = '''
import torch
from torch import nn
import fullrank as fr

@fr.register("mix", "neighbour")
class Neighbour(nn.Module):
    """P'_i = P_i + w_i P_{i-1}"""

    needs = ()  # no query

    def __init__(self, config, size):
        super().__init__()
        self.share = nn.Parameter(torch.zeros(size.num_heads))

    def matrix(self, query):
        share = self.share
        return torch.eye(len(share), dtype=share.dtype, device=share.device) + torch.diag(share).roll(-1, dims=0)

@fr.register("mix", "peeking")
class Peeking(nn.Module):
    def __init__(self, config, size):
        super().__init__()

    def matrix(self, query):
        return (query @ query.roll(-1, dims=2).transpose(-1, -2)).diagonal(dim1=-2, dim2=-1).transpose(1, 2).diag_embed()

@fr.register("mix", "dead")
class Dead(nn.Module):
    def __init__(self, config, size):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(size.num_heads))

    def matrix(self, query):
        return None

@fr.register("mix", "shifted")
class Shifted(nn.Module):
    def __init__(self, config, size):
        super().__init__()
        self.num_heads = size.num_heads

    def matrix(self, query):
        return torch.eye(self.num_heads).roll(1, dims=1)
'''

# stage -> the tests that are to fail
CAUGHT_BY = {
    "peeking": (
        "test_changing_a_token_changes_nothing_before_it",
        "test_no_gradient_from_the_future",
        "test_decoding_equals_one_pass",
        "test_segments_with_memory_equal_one_pass",
    ),
    "dead": ("test_gradients_reach_every_parameter",),
    "shifted": ("test_starts_as_plain_attention",),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Counter[str]]]:
    """stage -> test -> how often it passed and failed, of the property tests with one score, position and norm."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "mixing_stages.py").write_text(PLUGIN)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    paths = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    chosen = [f"product-softmax-{stage}-rotary-pre and ({' or '.join(tests)})" for stage, tests in CAUGHT_BY.items()]
    chosen += ["product-softmax-neighbour-rotary-pre", "test_equals_the_definition and neighbour"]
    chosen += ["softmax-neighbour-rotary and (saved_and_loaded or double_precision or learns)"]
    files = [f"tests/properties/{name}.py" for name in ("test_every_combination", "test_kernels_agree")]
    options = ["-p", "mixing_stages", "-p", "no:cacheprovider", "-rA", "--tb=no", "--no-header", "-m", ""]
    command = [sys.executable, "-m", "pytest", *files, *options, "-k", " or ".join(f"({one})" for one in chosen)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    found: dict[str, dict[str, Counter[str]]] = {}
    for verdict, test, case in re.findall(r"^(PASSED|FAILED) \S+::(\w+)\[(\S+)\]", done.stdout, re.MULTILINE):
        stage = next(name for name in ("neighbour", "peeking", "dead", "shifted") if name in case)
        found.setdefault(stage, {}).setdefault(test, Counter())[verdict] += 1
    assert set(found) == {"neighbour", "peeking", "dead", "shifted"}, done.stdout + done.stderr
    return found


def test_a_right_stage_is_found_and_passes_everything(verdicts: dict[str, dict[str, Counter[str]]]) -> None:
    assert set(verdicts["neighbour"]) == {
        "test_changing_a_token_changes_nothing_before_it",
        "test_no_gradient_from_the_future",
        "test_starts_as_plain_attention",
        "test_mixing_leaves_other_parameters_alone",
        "test_evaluation_is_deterministic",
        "test_decoding_equals_one_pass",
        "test_segments_with_memory_equal_one_pass",
        "test_padding_changes_nothing",
        "test_gradients_reach_every_parameter",
        "test_weight_decay_spares_mixing",
        "test_meta_build_is_the_real_one",
        "test_saved_and_loaded",
        "test_double_precision_agrees",
        "test_learns",
        "test_equals_the_definition",
    }
    assert all(set(counts) == {"PASSED"} for counts in verdicts["neighbour"].values()), verdicts["neighbour"]


@pytest.mark.parametrize(
    ("stage", "caught_by"), [(stage, test) for stage, tests in CAUGHT_BY.items() for test in tests]
)
def test_a_wrong_stage_is_caught(verdicts: dict[str, dict[str, Counter[str]]], stage: str, caught_by: str) -> None:
    assert verdicts[stage][caught_by]["FAILED"] > 0
    assert verdicts[stage][caught_by]["PASSED"] == 0


def test_registering_and_forgetting() -> None:
    @registry.register("mix", "test_only")
    class Mixing:
        pass

    assert "test_only" in registry.names("mix")
    assert registry.lookup("mix", "test_only") is Mixing
    with pytest.raises(ConfigError, match=r"already registered by .*Mixing"):
        registry.register("mix", "test_only")(dict)
    assert registry.lookup("mix", "test_only") is Mixing
    registry.unregister("mix", "test_only")
    assert "test_only" not in registry.names("mix")
    with pytest.raises(ConfigError, match="unknown slot 'mixx': did you mean 'mix'"):
        registry.register("mixx", "anything")
    registry.names("activation")
    with pytest.raises(ConfigError, match="'gelu' is already registered"):
        registry.register("activation", "gelu")(dict)
