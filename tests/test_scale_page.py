"""docs/scale.md: its table is what research/scale.py says, and that follows the equations."""

from pathlib import Path

import pytest

from fullrank.analysis.size import size_of_run
from fullrank.config.run import RunConfig
from research.scale import RESERVED, estimate, table_lines

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
VOCABULARY, WIDTH, LAYERS, LENGTH = 1000, 32, 3, 16


def run_of(**train):
    model = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "intermediate_size": 64, "output": {"tied": True},
    }  # fmt: skip
    settings = {"steps": 1, "segment_length": LENGTH, "batch_size": 8, "order": "shuffled", **train}
    return RunConfig.from_dict({"model": model, "train": settings})


@pytest.mark.full
def test_the_table_is_what_the_script_says():
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition("<!-- table -->\n")[2].partition("<!-- end -->")[0].splitlines() == table_lines()


def test_bytes_that_are_held_and_sent():
    """Ring all-reduce 2 (N - 1) / N, all-gather and reduce-scatter (N - 1) / N of the bytes."""
    size = size_of_run(run_of())
    total, activations = size["parameters"]["total"], size["memory"]["activations"]
    one, four = estimate(run_of(), 1), estimate(run_of(), 4)
    assert one.sent == one.exposed == 0
    assert one.memory == 16 * total + activations + RESERVED
    assert four.memory == 16 * total + activations / 4 + RESERVED
    assert four.sent == pytest.approx(2 * 3 / 4 * 4 * total)
    outside = size["parameters"]["embedding"] + size["parameters"]["output"]
    sharded = estimate(run_of(sharding="fsdp", precision="bf16", gradient_accumulation_steps=3), 4)
    assert sharded.sent == pytest.approx(3 / 4 * (3 * 2 * (2 * (total - outside) + outside) + 4 * total))
