"""Totals of parameters of the papers' recipes, by formulas that are written apart from the models."""

import itertools
from dataclasses import replace

import pytest
from recipe_counts import config_of, count_of, total

from fullrank.config.load import load

WIKITEXT = (20_000, 40_000, 200_000)
MIXES = ("plain", "a", "b")


def attention(width, inner):
    """Query, key, value (E, H D) and the output projection, with biases."""
    return 4 * width * inner + 3 * inner + width


def feed_forward(width, inner):
    return 2 * width * inner + inner + width


def layer(width, inner, heads=0):
    """Attention of inner width `heads` (E if 0), a feed-forward layer, two norms."""
    return attention(width, heads or width) + feed_forward(width, inner) + 2 * 2 * width


def mixing(mix, heads, head_dim):
    """A: H^2; B: H^2 + D H, of a layer."""
    return {"plain": 0, "a": heads**2, "b": heads**2 + head_dim * heads}[mix]


def relative_layers(layers, width, heads, inner):
    """Query, key, value, distances, output without biases; u and v once for all layers. `heads` is H D."""
    return layers * (5 * width * heads + feed_forward(width, inner) + 2 * 2 * width) + 2 * heads


def clusters(vocabulary, width, cutoffs, div):
    """Numbers in the vectors of all clusters, and in their projections to the width of the model."""
    sizes = [end - start for start, end in itertools.pairwise((0, *cutoffs, vocabulary))]
    widths = [width // div**i for i in range(len(sizes))]
    return sum(n * w for n, w in zip(sizes, widths, strict=True)), width * sum(widths) if div != 1 else 0


def adaptive(vocabulary, width, cutoffs, div, tied=True):
    """Input and output; the output has a bias for each word and a class with its bias for each tail."""
    vectors, projections = clusters(vocabulary, width, cutoffs, div)
    of_output = projections if tied else vectors + projections  # only vectors are shared where there are projections
    return vectors + projections + of_output + vocabulary + len(cutoffs) * (width + 1)


def plain(vocabulary, width, tied=True):
    """Vectors and biases of words."""
    return (1 if tied else 2) * vocabulary * width + vocabulary


# -- Mixhead -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocabulary", "layers", "expected"),
    [("mixhead/table1-vanilla", 267_744, 6, 156_000_256), ("mixhead/table2-vanilla", 33_280, 16, 67_478_528)],
)
def test_vanilla(name, vocabulary, layers, expected):
    """fairseq's `transformer_lm`, tied, without an output bias."""
    assert vocabulary * 512 + layers * layer(512, 2048) + 2 * 512 == expected == total(name, "plain")


def baevski(heads=8, head_dim=128, mix="plain", words=267_744, first=20_000):
    """fairseq's `transformer_lm_wiki103`: input and output share projections; two classes, no last norm."""
    cutoffs = (first, 60_000 if first == 20_000 else 160_000)
    layers = 16 * (layer(1024, 4096, heads * head_dim) + mixing(mix, heads, head_dim))
    return sum(clusters(words, 1024, cutoffs, 4)) + 2 * 1024 + layers


@pytest.mark.parametrize("mix", MIXES)
def test_baevski(mix):
    assert baevski() == 246_933_504 == total("mixhead/table1-baevski", "plain")
    assert total("mixhead/table1-baevski", mix) == baevski(mix=mix)
    for heads in (2, 4, 6, 8, 10):
        assert total("mixhead/table8", f"h{heads}-{mix}") == baevski(heads, 64, mix)
    for length in (32, 64, 128, 256, 512):
        assert total("mixhead/table9", f"n{length}-{mix}") == baevski(8, 64, mix)
    for head_dim in (32, 64, 128, 256, 512):
        assert total("mixhead/table10", f"d{head_dim}-{mix}") == baevski(8, head_dim, mix)
    assert total("mixhead/table3-baevski", mix) == baevski(mix=mix, words=793_472, first=60_000)
    assert total("mixhead/table7", mix) == baevski(8, 64, mix)
    for row in ("random", "average"):
        assert total("mixhead/table7", row) == baevski(8, 64)


def test_transformer_xl():
    wikitext103 = relative_layers(16, 410, 410, 2100) + adaptive(267_735, 410, WIKITEXT, 1)
    assert wikitext103 == 151_107_538 == total("mixhead/table1-transformer-xl", "plain")
    assert total("skip-cross-head/table2", "transformer-xl") == wikitext103
    wikitext2 = relative_layers(16, 410, 410, 1000) + plain(33_278, 410)
    assert wikitext2 == 40_294_878 == total("mixhead/table2-transformer-xl", "plain")
    lm1b = relative_layers(18, 1024, 1024, 4096) + adaptive(793_471, 1024, WIKITEXT, 4)
    assert lm1b == 294_452_082 == total("mixhead/table3-transformer-xl", "plain")


def test_synthesizer():
    """Dense: a layer of 512 scores that all heads share, keys that nothing reads or none; random: 512 x 512 scores a head."""
    square = 1024 * 1024 + 1024
    dense = 246_933_504 + 16 * (128 * 512 + 512)
    learned = 246_933_504 - 16 * (2 * square - 8 * 512 * 512)
    totals = {"plain": 247_990_272, "without-keys": 231_196_672, "random": 246_900_736}
    assert totals == {"plain": dense, "without-keys": dense - 16 * square, "random": learned}
    for row, expected in totals.items():
        assert total("mixhead/table1-synthesizer", row) == expected
        assert f"{expected:,}" in load("mixhead/table1-synthesizer").notes


@pytest.mark.parametrize("heads", [4, 32, 64])
@pytest.mark.parametrize("mix", MIXES)
def test_translation(heads, mix):
    """Post-norm, target vectors tied; mixing in two stacks of six layers, in three with cross-attention."""
    expected = {"plain": {}, "a": {4: 192, 32: 12_288, 64: 49_152}, "b": {4: 6_336, 32: 18_432, 64: 55_296}}
    base = translator(512, 1024, 8848 + 6632)
    row = f"h{heads}-{mix}"
    assert base == 39_469_056 == total("mixhead/table4", f"h{heads}-plain")  # fairseq's transformer_iwslt_de_en
    stack = 6 * mixing(mix, heads, 512 // heads)
    assert total("mixhead/table4", row) - base == 2 * stack == expected[mix].get(heads, 0)
    if mix != "plain":
        assert total("mixhead/table4", f"{row}-released") - base == 2 * stack
        assert total("mixhead/table4", f"{row}-cross") - base == 3 * stack


def translator(width, inner, words):
    """Six layers of an encoder, and six of a decoder, which have one more attention and norm each."""
    return words * width + 6 * (2 * layer(width, inner) + attention(width, width) + 2 * width)


# -- Skip Cross-head ---------------------------------------------------------------------------------------------------


def test_skip_cross_head():
    """Skipping and crossing heads add nothing."""
    main = relative_layers(15, 624, 624, 2496) + adaptive(267_735, 624, WIKITEXT, 4, tied=False)
    ablation = relative_layers(8, 512, 512, 2048) + adaptive(267_735, 512, WIKITEXT, 4, tied=False)
    narrow = relative_layers(8, 480, 480, 1920) + adaptive(267_735, 480, WIKITEXT, 4, tied=False)
    assert main == 122_215_992
    expected = {2: main, 5: ablation, 6: ablation, 7: ablation, 8: ablation, 9: ablation, 10: narrow}
    for table, count in expected.items():
        name = f"skip-cross-head/table{table}"
        assert {total(name, row) for row in load(name).rows if row != "transformer-xl"} == {count}


@pytest.mark.parametrize(("row", "tied"), [("transformer-xl", True), ("context1600", False)])
def test_enwik8(row, tied):
    """The paper's vocabulary has the 204 bytes that occur; ours has all 256; both models have 41M either way."""
    name = "skip-cross-head/table1"
    model = config_of(name, row, "paper").model
    assert model.vocab_size == 256
    for words in (204, 256):
        expected = relative_layers(12, 512, 512, 2048) + plain(words, 512, tied)
        assert count_of(replace(model, vocab_size=words)) == expected
        if words == 204:
            assert expected == (41_055_436 if tied else 41_159_884)
            assert f"{expected:,}" in load(name).notes


# -- Transformer-MoS ---------------------------------------------------------------------------------------------------

# vocabulary with <sos> and width -> parameters by the number of softmaxes, counted with the papers' code
MIXTURES = {
    (10_001, 300): {0: 8_182_601, 10: 9_088_601},
    (10_001, 200): {0: 4_978_401, 10: 5_382_401},
    (33_279, 300): {0: 22_172_679, 10: 23_078_679},
    (33_279, 200): {0: 14_312_879, 10: 14_716_879},
}
MOS = [(name, row) for name in ("mos/table1-ptb", "mos/table1-wikitext2", "mos/table2") for row in load(name).rows]


@pytest.mark.parametrize(("name", "row"), MOS)
def test_mixtures(name, row):
    """Four layers as wide as the model, embedding, output; latents K (E^2 + E) and prior K E. Widths hold at every scale."""
    kind, _, digits = row.partition("-d")
    mixtures, width = int(kind.removeprefix("k").replace("plain", "0")), int(digits or 200)
    body = 4 * layer(width, width) + mixtures * (width**2 + 2 * width)
    words = 33_279 if name == "mos/table1-wikitext2" else 10_001
    assert total(name, row) == plain(words, width, tied=False) + body
    assert MIXTURES[words, width].get(mixtures, total(name, row)) == total(name, row)
    for scale in ("small", "tiny"):
        assert total(name, row, scale) == plain(20_000, width, tied=False) + body


# -- Tensorized Transformer --------------------------------------------------------------------------------------------

TENSORIZED = {  # layers, width, segment, vocabulary; projections of LM1B are the output's own beside the input's
    "tensorized/table1": (8, 1024, 32, adaptive(793_471, 1024, (60_000, 100_000, 640_000), 4)),
    "tensorized/table2-ptb": (3, 512, 32, plain(10_000, 512)),
    "tensorized/table2-wikitext103": (6, 256, 80, adaptive(267_735, 256, WIKITEXT, 1)),
}


@pytest.mark.parametrize("name", TENSORIZED)
@pytest.mark.parametrize("row", ["core1", "core2", "core1-as-published", "core2-as-published"])
def test_pairs_of_positions(name, row):
    """Q, K, V, keys of places of rank 40, an output map of all pairs, cores; u and v once."""
    layers, width, length, words = TENSORIZED[name]
    attends = 4 * width * 40 + length**2 * width + int(row[4]) * 40
    assert total(name, row) == layers * (attends + feed_forward(width, 2100) + 2 * 2 * width) + 2 * 40 + words


def train(words, widths, rank):
    """Three cores (r, v, e, s)."""
    (v1, v2, v3), (e1, e2, e3) = words, widths
    return v1 * e1 * rank + rank * v2 * e2 * rank + rank * v3 * e3


def test_the_other_baselines_of_table_2():
    """The totals of Penn Treebank round to the printed ones; the notes explain the others."""
    ptb, wikitext = "tensorized/table2-ptb", "tensorized/table2-wikitext103"
    layers = relative_layers(3, 640, 320, 2100)
    untied = 10_000 * 640
    expected = {
        (ptb, "transformer-xl"): layers + 2 * untied + 10_000,
        (ptb, "transformer-xl-tt"): layers + train((21, 22, 22), (8, 8, 10), 32) + untied + 10_000,
        (ptb, "sparse"): relative_layers(3, 512, 320, 2100) + plain(10_000, 512),
        (ptb, "adaptive-input"): 7 * layer(512, 2048) + 2 * 2 * 512 + sum(clusters(10_000, 512, (2_000, 6_000), 4)),
        (wikitext, "transformer-xl-tt"): 151_107_538 + train((64, 65, 65), (2, 5, 41), 32),
        (wikitext, "sparse"): relative_layers(12, 512, 320, 2100) + adaptive(267_735, 512, WIKITEXT, 1),
    }
    assert list(expected.values())[:3] == [23_962_540, 17_755_180, 14_053_420]
    for (name, row), count in expected.items():
        assert total(name, row) == count
        assert f"{count:,}" in load(name).notes
        if name == ptb:
            assert f"{round(count / 1e6)}M" == load(name).rows[row].paper["parameters"]


def test_tensorized_translation():
    """One table of 16,000 entries; multi-linear attention in the six layers of the encoder only."""
    base = translator(512, 2048, 16_000)
    assert base == 52_330_496 == total("tensorized/table3", "plain")  # the paper's 52M
    maps = {"core1": 192**2 * 512, "core2": 192**2 * 512 + 64, "decayed": 8 * 64 * 512 + 2 * 8}  # and a core, or decays
    for row, output in maps.items():
        encoder = 3 * (512 * 64 + 64) + output + 512 + 64
        assert total("tensorized/table3", row) == base + 6 * (encoder - attention(512, 512))
    assert total("tensorized/table3", "core1") == 159_867_392
    for count in (base, 159_867_392):
        assert f"{count:,}" in load("tensorized/table3").notes
