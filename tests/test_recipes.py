"""Every shipped recipe, row by row and scale by scale: it resolves, builds, and has the paper's parameter column."""

from __future__ import annotations

import re

import pytest
import torch

from fullrank.config.recipe import load, resolve, shipped
from fullrank.model.language_model import LanguageModel

ROWS = [(name, row) for name in shipped() for row in load(name).rows]
CELLS = [(name, row, scale) for name, row in ROWS for scale in load(name).scales]


def total(name: str, row: str, scale: str) -> int:
    config = resolve(name, row, scale, [] if scale == "paper" else ["model.vocab_size=1000"]).config.model
    with torch.device("meta"):
        return LanguageModel(config).num_parameters()


def test_recipes_are_there() -> None:
    names = shipped()
    assert {"mixhead/table1-vanilla", "mixhead/table1-baevski", "mixhead/table2-vanilla", "demo/builtin"} <= set(names)
    for name in ("mixhead/table1-vanilla", "mixhead/table1-baevski", "mixhead/table2-vanilla"):
        assert list(load(name).rows) == ["plain", "sigsoftmax", "a", "a-sigsoftmax", "b", "b-sigsoftmax"]
        assert set(load(name).scales) == {"paper", "small", "tiny"}


@pytest.mark.parametrize(("name", "row", "scale"), CELLS)
def test_every_row_builds_at_every_scale(name: str, row: str, scale: str) -> None:
    assert total(name, row, scale) > 0


@pytest.mark.parametrize(("name", "row"), [cell for cell in ROWS if cell[0].startswith("mixhead/")])
def test_the_papers_parameter_column(name: str, row: str) -> None:
    paper = load(name).rows[row]["paper"]
    plain = total(name, "plain", "paper")
    if "parameters" in paper:
        millions = re.fullmatch(r"(\d+)M", paper["parameters"])
        assert millions is not None
        assert round(total(name, row, "paper") / 1e6) == int(millions[1])
    else:
        assert total(name, row, "paper") - plain == paper["extra_parameters"]
    assert {"valid", "test"} <= set(paper)


@pytest.mark.parametrize(
    ("name", "expected"), [("mixhead/table1-vanilla", 156_000_256), ("mixhead/table2-vanilla", 67_478_528)]
)
def test_exact_totals(name: str, expected: int) -> None:
    """Counted from fairseq's architecture: V E + L (4 E^2 + 4 E + 2 E F + F + E + 4 E) + 2 E."""
    layers, vocabulary = (6, 267_744) if "table1" in name else (16, 33_280)
    width, inner = 512, 2048
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    assert vocabulary * width + layers * layer + 2 * width == expected
    assert total(name, "plain", "paper") == expected


def test_baevski_total() -> None:
    """fairseq's `transformer_lm_wiki103`: vectors and a projection for each cluster, two classes, 16 layers, no last norm."""
    width, inner = 1024, 4096
    vectors = 20_000 * 1024 + 40_000 * 256 + 207_744 * 64
    projections = width * (1024 + 256 + 64)
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    assert vectors + projections + 2 * width + 16 * layer == 246_933_504
    assert total("mixhead/table1-baevski", "plain", "paper") == 246_933_504


def test_baevski_follows_fairseq() -> None:
    """The values of its instructions for this model, with blocks of 512 tokens and half as many of them."""
    config = resolve("mixhead/table1-baevski", "plain", "paper").config
    train, model = config.train, config.model
    assert (train.optimizer, train.momentum, train.learning_rate, train.max_grad_norm) == ("nag", 0.99, 1.0, 0.1)
    assert (train.schedule, train.period, train.t_mult, train.lr_shrink) == ("cosine_restarts", 270_000, 2, 0.75)
    assert (train.warmup_steps, train.warmup_from, train.min_learning_rate, train.steps) == (
        16_000,
        1e-7,
        1e-4,
        286_000,
    )
    assert 2 * train.batch_size * train.segment_length * train.gradient_accumulation_steps == 8 * 3 * 3072
    dropout = model.dropout
    assert (dropout.embedding, dropout.residual, dropout.attention, dropout.activation) == (0.3, 0.3, 0.1, 0.1)
    assert (dropout.output, model.output.tail_dropout) == (0.2, 0.2)
    assert (model.norm, model.final_norm, model.hidden_act) == ("pre", False, "relu")
    assert (model.output.cutoffs, model.output.div_val, model.output.bias) == ([20_000, 60_000], 4, False)
    assert model.output.tied
    assert model.output.tied_projections


@pytest.mark.parametrize("name", [name for name in shipped() if "small" in load(name).scales])
@pytest.mark.parametrize("scale", ["small", "tiny"])
def test_rows_of_a_small_table_read_the_same_number_of_tokens(name: str, scale: str) -> None:
    """Equal terms: at small scale nothing but the mechanism differs between rows."""
    configs = [resolve(name, row, scale).config for row in load(name).rows]
    assert len({(c.train, c.data, c.eval) for c in map(_hashable, configs)}) == 1


def _hashable(config):  # type: ignore[no-untyped-def]
    from types import SimpleNamespace

    return SimpleNamespace(train=repr(config.train), data=repr(config.data), eval=repr(config.eval))
