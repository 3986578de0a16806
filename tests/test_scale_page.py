"""docs/scale.md: its table is what `fullrank info --gpus` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullrank.analysis.scale import assumptions, scale_of_run
from fullrank.config.recipe import resolve_any

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
LARGE = [
    "model.hidden_size=4096", "model.num_hidden_layers=32", "model.num_attention_heads=32", "model.intermediate_size=16384",
    "model.vocab_size=32000", "train.segment_length=2048", "train.sharding=fsdp", "train.activation_checkpointing=true",
]  # fmt: skip
MODELS = {
    "Mixhead B, 6 layers": ("mixhead/table1-vanilla", []),
    "Mixhead B, Transformer-XL, 16 layers": ("mixhead/table1-transformer-xl", []),
    "Mixhead B, 6.6 billion parameters": ("mixhead/table1-vanilla", LARGE),
}
BOUNDS = {"computing": "computing", "launching": "launches", "sending": "links", "latency": "latency", "rows": "rows"}


def line(model: str, gpus: int, batch: int, accumulation: int) -> str:
    """A row of the table."""
    recipe, changes = MODELS[model]
    words = [*changes, f"train.batch_size={batch}", f"train.gradient_accumulation_steps={accumulation}"]
    found = scale_of_run(resolve_any(recipe, "b", None, words).config, gpus, assumptions("h100", {}))
    seconds = found["seconds"]
    cells = [
        model,
        f"{gpus:,}",
        f"{batch:,} x {accumulation}",
        f"{found['memory']['total'] / 2**30:.1f}",
        f"{1e3 * max(seconds['computing'], seconds['launching']):,.1f} + {1e3 * seconds['exposed']:,.1f}",
        f"{found['bytes_sent'] / 1e6:,.0f}",
        f"{found['tokens_per_second']:,.0f}",
        f"{100 * found['efficiency']:.0f} %",
        BOUNDS[found["bound"]],
    ]
    return f"| {' | '.join(cells)} |"


def table() -> list[str]:
    """The rows of the page."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition("<!-- info --gpus -->")[2].partition("<!-- end -->")[0].strip().splitlines()[2:]


def test_every_model_is_shown() -> None:
    shown = [row.strip("| ").split(" | ")[:2] for row in table()]
    assert shown == [[model, gpus] for model in MODELS for gpus in ("1", "8", "64", "1,024")]


@pytest.mark.parametrize("index", [1, *(pytest.param(i, marks=pytest.mark.full) for i in range(12) if i != 1)])
def test_the_table_is_what_the_command_says(index: int) -> None:
    row = table()[index]
    model, gpus, rows = row.strip("| ").split(" | ")[:3]
    batch, accumulation = (int(number.replace(",", "")) for number in rows.split(" x "))
    assert row == line(model, int(gpus.replace(",", "")), batch, accumulation)
