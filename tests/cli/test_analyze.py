"""`fullrank analyze context`: what it reads, what it says, what it writes, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cli_runs import called

PHASES = "[{name: warm, steps: 5}, {name: skip_retain, skip: linear, steps: 5}, {name: vanilla, steps: 5}]"
FIFTEEN = f"""\
model: {{num_hidden_layers: 15, hidden_size: 32, num_attention_heads: 4, memory_length: 512}}
train: {{segment_length: 512, phases: {PHASES}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "fifteen.yaml"
    path.write_text(FIFTEEN, encoding="utf-8")
    return path


def context(*words: object) -> tuple[int, str, str]:
    return called("analyze", "context", *words)


def measured(*words: object) -> dict[str, Any]:
    code, out, said = context(*words, "--json")
    assert (code, said) == (0, "")
    content: dict[str, Any] = json.loads(out)
    return content


def values(content: dict[str, Any], measure: str, **labels: object) -> list[float]:
    return [
        record["value"]
        for record in content["records"]
        if record["measure"] == measure and record["labels"].items() >= labels.items()
    ]


def test_numbers_by_hand(config: Path) -> None:
    """Eq. 1 with M = N = 512: p = i / 30, mean M / (1 - p), deviation M sqrt(p) / (1 - p), P(K = k) = p^k (1 - p)."""
    content = measured(config)
    about = content["models"][0]
    assert (about["phase"], about["skip"]) == ("skip_retain", "linear")
    assert values(content, "memory length") == values(content, "segment length") == [512]
    for layer in range(15):
        p = layer / 30 if layer < 14 else 0.0
        expected = {
            "skipped": 100 * p, "mean reach": 512 / (1 - p), "deviation": 512 * math.sqrt(p) / (1 - p),
            "mean nearest": 1 + 512 * p / (1 - p),
        }  # fmt: skip
        for measure, number in expected.items():
            assert values(content, measure, layer=layer) == [pytest.approx(number)]
        reached = values(content, "reaches at least", layer=layer)
        assert reached == pytest.approx([p**k for k in range(len(reached))])
    quantiles = [values(content, f"reach, {share}% quantile", layer=13) for share in (50, 90, 99)]
    assert quantiles == [[512], [3 * 512], [6 * 512]]  # 1 - (13/30)^(k+1): .567 .812 .919 .965 .985 .993
    assert values(content, "Eq. 6") == [pytest.approx(1024 * 91 / 30)]
    assert values(content, "skipped layers") == [pytest.approx(91 / 30)]
