"""Recipes of models with memory: Transformer-XL and Skip Cross-head, totals by independent formulas and published settings."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from recipe_counts import config_of, count_of, total

from fullrank.config.load import load
from fullrank.core.config import stage_options

WIKITEXT = (20_000, 40_000, 200_000)


def blocks(layers: int, width: int, heads: int, inner: int) -> int:
    """Five matrices for attention (query, key, value, distances, output) without biases, a feed-forward layer, two norms;
    u and v once for all layers. `heads` is H D."""
    layer = 5 * width * heads + (width * inner + inner) + (inner * width + width) + 2 * 2 * width
    return layers * layer + 2 * heads


def clusters(vocabulary: int, width: int, cutoffs: tuple[int, ...], div: int) -> tuple[int, int]:
    """Numbers in the vectors of all clusters, and in their projections to the width of the model."""
    ends = (0, *cutoffs, vocabulary)
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    widths = [width // div**i for i in range(len(sizes))]
    return sum(n * w for n, w in zip(sizes, widths, strict=True)), width * sum(widths) if div != 1 else 0


def adaptive(vocabulary: int, width: int, cutoffs: tuple[int, ...], div: int, *, tied: bool) -> int:
    """Input and output; the output has a bias for each word and a class with its bias for each tail."""
    vectors, projections = clusters(vocabulary, width, cutoffs, div)
    own = projections if tied else vectors + projections  # only vectors are shared where there are projections
    return vectors + projections + own + vocabulary + len(cutoffs) * (width + 1)


def plain(vocabulary: int, width: int, *, tied: bool) -> int:
    return (1 if tied else 2) * vocabulary * width + vocabulary


def test_transformer_xl_totals() -> None:
    wikitext103 = blocks(16, 410, 410, 2100) + adaptive(267_735, 410, WIKITEXT, 1, tied=True)
    assert wikitext103 == 151_107_538
    assert total("mixhead/table1-transformer-xl", "plain") == wikitext103
    assert total("skip-cross-head/table2", "transformer-xl") == wikitext103
    wikitext2 = blocks(16, 410, 410, 1000) + plain(33_278, 410, tied=True)
    assert wikitext2 == 40_294_878
    assert total("mixhead/table2-transformer-xl", "plain") == wikitext2
    lm1b = blocks(18, 1024, 1024, 4096) + adaptive(793_471, 1024, WIKITEXT, 4, tied=True)
    assert lm1b == 294_452_082
    assert total("mixhead/table3-transformer-xl", "plain") == lm1b


def test_mixing_adds_what_the_paper_says() -> None:
    """A: L H^2; B: L (H^2 + D H)."""
    for name, layers, heads, dim, a, b in (
        ("mixhead/table1-transformer-xl", 16, 10, 41, 1_600, 8_160),
        ("mixhead/table2-transformer-xl", 16, 10, 41, 1_600, 8_160),
        ("mixhead/table3-transformer-xl", 18, 8, 128, 1_152, 19_584),
        ("mixhead/table1-synthesizer", 16, 8, 128, 1_024, 17_408),
        ("mixhead/table3-baevski", 16, 8, 128, 1_024, 17_408),
    ):
        assert (layers * heads**2, layers * (heads**2 + dim * heads)) == (a, b)
        assert total(name, "a") - total(name, "plain") == a
        assert total(name, "b") - total(name, "plain") == b


def test_skip_cross_head_totals() -> None:
    """Skipping and crossing heads add nothing."""
    main = blocks(15, 624, 624, 2496) + adaptive(267_735, 624, WIKITEXT, 4, tied=False)
    assert main == 122_215_992
    assert {total("skip-cross-head/table2", row) for row in ("context640", "context2000")} == {main}
    ablation = blocks(8, 512, 512, 2048) + adaptive(267_735, 512, WIKITEXT, 4, tied=False)
    for table in ("table5", "table6", "table7", "table8", "table9"):
        name = f"skip-cross-head/{table}"
        assert {total(name, row) for row in load(name).rows} == {ablation}
    narrow = blocks(8, 480, 480, 1920) + adaptive(267_735, 480, WIKITEXT, 4, tied=False)
    name = "skip-cross-head/table10"
    assert {total(name, row) for row in load(name).rows} == {narrow}


def test_enwik8_totals() -> None:
    """The paper's vocabulary has the 204 bytes that occur; ours all 256, which changes 41M in neither model."""
    name = "skip-cross-head/table1"
    for row, tied, published in (("transformer-xl", True, 41_055_436), ("context1600", False, 41_159_884)):
        for vocabulary in (204, 256):
            expected = blocks(12, 512, 512, 2048) + plain(vocabulary, 512, tied=tied)
            assert count_of(replace(config_of(name, row, "paper").model, vocab_size=vocabulary)) == expected
        assert blocks(12, 512, 512, 2048) + plain(204, 512, tied=tied) == published
        assert f"{published:,}" in load(name).notes
        assert config_of(name, row, "paper").model.vocab_size == 256


XL = [
    # steps, segment, memory, batch, warm-up; evaluation: segment, memory, clamp, batch
    ("mixhead/table1-transformer-xl", "b", (200_000, 150, 150, 60, 0), (64, 640, 400, 10)),
    ("mixhead/table3-transformer-xl", "b", (500_000, 32, 32, 224, 20_000), (32, 128, None, 64)),
    ("skip-cross-head/table2", "transformer-xl", (200_000, 150, 150, 60, 0), (64, 640, 400, 10)),
    ("skip-cross-head/table1", "transformer-xl", (400_000, 512, 512, 22, 0), (80, 3800, 820, 10)),
]


@pytest.mark.parametrize(("name", "row", "training", "evaluation"), XL)
def test_transformer_xl_follows_its_scripts(
    name: str, row: str, training: tuple[int, ...], evaluation: tuple[int | None, ...]
) -> None:
    config = config_of(name, row, "paper")
    model, train, judged = config.model, config.train, config.eval
    assert (train.steps, train.segment_length, model.memory_length, train.batch_size, train.warmup_steps) == training
    keys = ("segment_length", "memory_length", "clamp_length", "same_length")
    assert [judged.protocol_setting(key, "test")[0] for key in keys] == [*evaluation[:3], True]
    assert judged.batch_size == evaluation[3]
    if name.startswith("mixhead/"):  # validation while training and in the table, as it is trained
        assert all(judged.protocol_setting(key, "valid")[0] is None for key in keys)
    assert (train.optimizer, train.betas, train.learning_rate, train.max_grad_norm) == (
        "adam",
        (0.9, 0.999),
        2.5e-4,
        0.25,
    )
    assert (train.schedule, train.min_learning_rate, train.weight_decay, train.order) == ("cosine", 0, 0, "contiguous")
    assert train.phases == []
    assert (model.norm, model.final_norm, model.position, model.initializer) == (
        "post",
        False,
        "relative",
        "transformer_xl",
    )
    assert (model.attention.bias, model.attention.cross_head, model.scale_embedding) == (False, 0.0, True)
    rate = 0.0 if "table3" in name else 0.1
    drop = model.dropout
    assert (drop.embedding, drop.residual, drop.activation, drop.output, drop.attention) == (
        rate,
        rate,
        rate,
        rate,
        0.0,
    )


SKIP = [
    (f"skip-cross-head/table{n}", row)
    for n in (1, 2, 5, 6, 7, 8, 9, 10)
    for row in load(f"skip-cross-head/table{n}").rows
]
SKIP = [(name, row) for name, row in SKIP if row != "transformer-xl"]


@pytest.mark.parametrize(("name", "row"), SKIP)
def test_skip_cross_head_follows_its_appendix(name: str, row: str) -> None:
    config = config_of(name, row, "paper")
    model, train, judged = config.model, config.train, config.eval
    layers, width, heads, dim, inner, batch, period, rate = {
        "skip-cross-head/table1": (12, 512, 8, 64, 2048, 60, 4_000, 0.15),
        "skip-cross-head/table2": (15, 624, 16, 39, 2496, 32, 16_000, 0.15),
        "skip-cross-head/table10": (
            8,
            480,
            int(row[1:].split("-")[0]) if row[0] == "h" else 0,
            0,
            1920,
            50,
            16_000,
            0.1,
        ),
    }.get(name, (8, 512, 8, 64, 2048, 50, 16_000, 0.1))
    assert (model.num_hidden_layers, model.hidden_size, model.intermediate_size) == (layers, width, inner)
    assert (model.num_attention_heads, model.head_dim) == (heads, dim or width // heads)
    assert (train.batch_size, train.segment_length, model.memory_length) == (batch, 512, 512)
    released = row.endswith("-released")
    schedule = "cosine_wave" if released else "cosine_restarts"
    assert (train.schedule, train.period) == (schedule, period)
    assert train.warmup_steps == (period if released else 0)
    started = ("zeros", "skip_cross_head", True) if released else ("empty", "transformer_xl", False)
    as_published = stage_options(model.attention.score).get("as_published", False)
    assert (model.memory_start, model.initializer, as_published) == started
    assert (train.optimizer, train.betas, train.learning_rate, train.max_grad_norm) == (
        "adam",
        (0.9, 0.999),
        2.5e-4,
        0.25,
    )
    drop = model.dropout
    assert (drop.residual, drop.activation) == (rate, rate)
    assert (drop.embedding, drop.output, drop.attention) == (0, 0, 0)
    context = load(name).rows[row].get("paper", {}).get("context", 640)
    assert (judged.segment_length, judged.batch_size, judged.clamp_length, judged.same_length) == (128, 10, 800, True)
    assert judged.memory_length == context
    assert (model.output.tied, model.norm, model.final_norm, model.position) == (False, "post", False, "relative")


def skipping(name: str, row: str, scale: str) -> list[tuple[str, float | list[float] | None, str]]:
    return [(phase.skip, phase.p, phase.gaps) for phase in config_of(name, row, scale).train.phases]


@pytest.mark.parametrize("scale", ["paper", "small", "tiny"])
def test_phases_and_schedules(scale: str) -> None:
    """The equation that each row skips by in each phase, and its cross-head attention."""
    vanilla, linear, drifting = ("none", None, "true"), ("linear", None, "true"), ("linear", None, "drifting")
    plain = [vanilla] if scale == "paper" else []
    expected = {
        ("table1", "context1600"): [linear, vanilla],
        ("table2", "context2000"): [linear, vanilla],
        ("table5", "plain"): plain,
        ("table5", "cross-head"): plain,
        ("table5", "phase1"): [linear],
        ("table5", "phase1-phase2"): [linear, vanilla],
        ("table5", "plain-released"): plain,
        ("table5", "phase1-phase2-released"): [drifting, vanilla],
        ("table5", "skip-cross-head-released"): [drifting, vanilla],
        ("table1", "context1600-released"): [drifting, vanilla],
        ("table2", "context640-released"): [drifting, vanilla],
        ("table5", "skip-cross-head"): [linear, vanilla],
        ("table6", "beta0.5"): plain,
        ("table7", "eq2-p0.1"): [("uniform", 0.1, "true")],
        ("table7", "eq3-p0.1"): [("not_first", 0.1, "true")],
        ("table7", "eq4-p0.1"): [("not_last", 0.1, "true")],
        ("table7", "eq5-p0.1"): [("not_first_or_last", 0.1, "true")],
        ("table8", "eq2-p0.3"): [("uniform", 0.3, "true")],
        ("table8", "eq1"): [linear],
        ("table9", "plain"): plain,
        ("table9", "eq5-p0.1"): [("not_first_or_last", 0.1, "true"), vanilla],
        ("table9", "eq1"): [linear, vanilla],
        ("table10", "h4-cross-head"): plain,
    }
    for (table, row), phases in expected.items():
        assert skipping(f"skip-cross-head/{table}", row, scale) == phases, (table, row)
    betas = {
        (name.removeprefix("skip-cross-head/"), row): config_of(name, row, scale).model.attention.cross_head
        for name, row in SKIP
    }
    crossed = {cell: beta for cell, beta in betas.items() if beta}
    assert crossed == {
        **{("table1", f"context{n}"): 0.1 for n in (1600, 3800, "1600-released")},
        **{("table2", f"context{n}"): 0.1 for n in (640, 2000, "640-released")},
        **{("table5", row): 0.1 for row in ("cross-head", "skip-cross-head", "skip-cross-head-released")},
        **{("table6", f"beta{beta}"): beta for beta in (0.04, 0.1, 0.2, 0.3, 0.5)},
        **{("table10", f"h{heads}-cross-head"): 0.1 for heads in (4, 8, 12, 16)},
    }


@pytest.mark.parametrize(("name", "row"), SKIP)
def test_ends_of_phases(name: str, row: str) -> None:
    """On a plateau at the paper's scale; at small scale the first of two phases takes three quarters of the steps."""
    train = config_of(name, row, "paper").train
    assert train.steps == 1_200_000
    assert train.phases
    for phase in train.phases:
        assert phase.plateau is not None
        assert (phase.plateau.ppl, phase.plateau.steps) == (0.01 if name.endswith("table1") else 0.2, 64_000)
    for scale in ("small", "tiny"):
        train = config_of(name, row, scale).train
        if len(train.phases) == 2:
            assert train.tokens is not None
            assert train.phases[0].steps is not None
            share = train.phases[0].steps * train.batch_size * train.segment_length / train.tokens
            assert 0.73 < share < 0.77
