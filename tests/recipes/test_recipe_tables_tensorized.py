"""The recipes of the Tensorized Transformer: sizes from the architecture, masked and published rows, the paper's figures."""

from __future__ import annotations

import dataclasses

import pytest
from recipe_counts import config_of, total

from fullrank.config.load import load

NAMES = ("tensorized/table1", "tensorized/table2-ptb", "tensorized/table2-wikitext103")
MULTILINEAR = ("core1", "core2", "core1-as-published", "core2-as-published")
SCALES = ("paper", "small", "tiny")


def block(width: int, inner: int, length: int, cores: int, rank: int = 40) -> int:
    """Q, K, V, keys of places, output map of all pairs, cores; two norms; feed-forward with biases."""
    attention = 4 * width * rank + length**2 * width + cores * rank
    return attention + 4 * width + 2 * width * inner + inner + width


def vocabulary(size: int, width: int, cutoffs: tuple[int, ...] = (), division: int = 1, projected: int = 1) -> int:
    """Tied vectors, biases and vectors of the clusters, and projections wherever a cluster is narrower than the model."""
    if not cutoffs:
        return size * width + size
    total, ends = 0, [0, *cutoffs, size]
    for i in range(len(cutoffs) + 1):
        narrow = width // division**i
        total += (ends[i + 1] - ends[i]) * (narrow + 1)
        if division > 1:
            total += narrow * width * (1 + projected)  # the output's own beside the input's, or shared
    return total + len(cutoffs) * (width + 1)


PAPER = {  # layers, width, segment, vocabulary
    "tensorized/table1": (8, 1024, 32, vocabulary(793_471, 1024, (60_000, 100_000, 640_000), 4)),
    "tensorized/table2-ptb": (3, 512, 32, vocabulary(10_000, 512)),
    "tensorized/table2-wikitext103": (6, 256, 80, vocabulary(267_735, 256, (20_000, 40_000, 200_000))),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", MULTILINEAR)
def test_totals_by_an_independent_formula(name: str, row: str) -> None:
    layers, width, length, words = PAPER[name]
    cores = int(row[4])
    assert total(name, row) == layers * block(width, 2100, length, cores) + 2 * 40 + words


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", SCALES)
def test_rows_differ_in_attention_only(name: str, scale: str) -> None:
    base = config_of(name, "plain", scale)
    assert base.model.attention.kind == "weighted"
    assert base.model.max_position_embeddings == base.train.segment_length
    for row in (*MULTILINEAR, "decayed"):
        other = config_of(name, row, scale)
        assert (other.data, other.train, other.eval) == (base.data, base.train, base.eval)
        attention = other.model.attention
        assert (attention.kind, attention.rank, attention.bias) == ("multilinear", 40, False)
        assert attention.cores == (2 if row.startswith("core2") else 1)
        assert attention.sees_future == row.endswith("as-published") == attention.not_next_token_perplexity
        assert attention.output_map == ("decayed" if row == "decayed" else "pairs")
        assert other.model.memory_length == 0


def relative_block(width: int, heads: int, inner: int) -> int:
    """Q, K, V, keys of distances and W_O over heads of `heads` dimensions in all; two norms; feed-forward with biases."""
    return 5 * width * heads + 4 * width + 2 * width * inner + inner + width


def train(words: tuple[int, ...], widths: tuple[int, ...], rank: int) -> int:
    """Three cores (r, v, e, s)."""
    (v1, v2, v3), (e1, e2, e3) = words, widths
    return v1 * e1 * rank + rank * v2 * e2 * rank + rank * v3 * e3


def test_the_other_baselines_of_table_2() -> None:
    """By an independent formula; those of Penn Treebank round to what the table prints, the notes explain the others."""
    ptb, wikitext = "tensorized/table2-ptb", "tensorized/table2-wikitext103"
    layers, untied = 3 * relative_block(640, 320, 2100) + 2 * 320, 10_000 * 640
    assert total(ptb, "transformer-xl") == layers + 2 * untied + 10_000 == 23_962_540
    compressed = train((21, 22, 22), (8, 8, 10), 32)
    assert total(ptb, "transformer-xl-tt") == layers + compressed + untied + 10_000 == 17_755_180
    assert total(ptb, "sparse") == 3 * relative_block(512, 320, 2100) + 2 * 320 + vocabulary(10_000, 512) == 14_053_420
    block = 4 * (512 * 512 + 512) + 4 * 512 + 2 * 512 * 2048 + 2048 + 512
    clusters = 2_000 * 512 + 4_000 * 128 + 4_000 * 32 + 512 * (512 + 128 + 32) + 2 * 512
    assert total(ptb, "adaptive-input") == 7 * block + 2 * 512 + clusters
    for row in ("transformer-xl", "transformer-xl-tt", "adaptive-input", "sparse"):
        assert f"{round(total(ptb, row) / 1e6)}M" == load(ptb).rows[row]["paper"]["parameters"]
        assert f"{total(ptb, row):,}" in load(ptb).notes
    assert total(wikitext, "transformer-xl-tt") == 151_107_538 + train((64, 65, 65), (2, 5, 41), 32)
    heads = 12 * relative_block(512, 320, 2100) + 2 * 320
    assert total(wikitext, "sparse") == heads + vocabulary(267_735, 512, (20_000, 40_000, 200_000))
    for row in ("transformer-xl-tt", "sparse"):
        assert f"{total(wikitext, row):,}" in load(wikitext).notes


@pytest.mark.parametrize("scale", SCALES)
def test_a_baseline_differs_in_its_mechanism(scale: str) -> None:
    for name in ("tensorized/table2-ptb", "tensorized/table2-wikitext103"):
        sparse = config_of(name, "sparse", scale)
        stride, length = sparse.model.attention.stride, sparse.train.segment_length
        assert stride in (round(length**0.5), round(length**0.5) + 1, int(length**0.5))
        compressed, xl = (config_of(name, row, scale) for row in ("transformer-xl-tt", "transformer-xl"))
        assert (compressed.data, compressed.train, compressed.eval) == (xl.data, xl.train, xl.eval)
        changed = {"input": xl.model.input, "output": xl.model.output}
        assert dataclasses.replace(compressed.model, **changed) == xl.model
        assert (compressed.model.input.kind, compressed.model.output.tied) == ("tensor_train", False)


def test_the_papers_figures_stand_at_published_rows_only() -> None:
    """They are of a model that sees the word it has to predict; a masked model has no figure to stand beside."""
    assert {
        (name, row): {key: value for key, value in load(name).rows[row]["paper"].items() if key != "parameters_note"}
        for name in NAMES
        for row in load(name).rows
        if "paper" in load(name).rows[row]
    } == {
        ("tensorized/table1", "core1-as-published"): {"parameters": "0.16B", "test": 20.5},
        ("tensorized/table1", "core2-as-published"): {"parameters": "0.16B", "test": 19.5},
        ("tensorized/table1", "transformer-xl"): {"parameters": "0.46B", "test": 23.5},
        ("tensorized/table2-ptb", "core1-as-published"): {"parameters": "12M", "valid": 60.5, "test": 57.9},
        ("tensorized/table2-ptb", "core2-as-published"): {"parameters": "12M", "valid": 54.25, "test": 49.8},
        ("tensorized/table2-wikitext103", "core1-as-published"): {"parameters": "85.3M", "valid": 22.7, "test": 20.9},
        ("tensorized/table2-wikitext103", "core2-as-published"): {"parameters": "85.3M", "valid": 19.7, "test": 18.9},
        ("tensorized/table2-ptb", "transformer-xl"): {"parameters": "24M", "valid": 56.72, "test": 54.52},
        ("tensorized/table2-ptb", "transformer-xl-tt"): {"parameters": "18M", "valid": 57.9, "test": 55.4},
        ("tensorized/table2-ptb", "adaptive-input"): {"parameters": "24M", "valid": 59.1, "test": 57},
        ("tensorized/table2-ptb", "sparse"): {"parameters": "14M", "valid": 74.0, "test": 73.1},
        ("tensorized/table2-wikitext103", "transformer-xl"): {"parameters": "151M", "valid": 23.1, "test": 24.0},
        ("tensorized/table2-wikitext103", "transformer-xl-tt"): {"parameters": "130M", "valid": 23.61, "test": 25.70},
        ("tensorized/table2-wikitext103", "sparse"): {"parameters": "174M", "valid": 38.98, "test": 40.23},
    }
