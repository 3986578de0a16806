"""The papers' parameter totals, exactly, without allocating anything."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fullrank as fr
from fullrank.analysis.size import parameters_by_part, size


def imagined(config: fr.ModelConfig) -> fr.LanguageModel:
    with torch.device("meta"):
        return fr.LanguageModel(config)


def vanilla(vocabulary: int, layers: int, mix: str = "none", normalize: str = "softmax") -> fr.ModelConfig:
    """Mixhead's Vanilla Transformer: fairseq's `transformer_lm`, tied, without an output bias."""
    return fr.ModelConfig(
        vocab_size=vocabulary, hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, head_dim=64,
        intermediate_size=2048, position="sinusoidal", scale_embedding=True, output=fr.OutputConfig(tied=True),
        attention=fr.AttentionConfig(mix=mix, normalize=normalize),
    )  # fmt: skip


@pytest.mark.parametrize("normalize", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize(
    ("vocabulary", "layers", "total", "a", "b"),
    [(267_744, 6, 156_000_256, 384, 3_456), (33_280, 16, 67_478_528, 1_024, 9_216)],
    ids=["WikiText-103", "WikiText-2"],
)
def test_the_papers_totals(vocabulary: int, layers: int, total: int, a: int, b: int, normalize: str) -> None:
    for mix, more in (("none", 0), ("position_independent", a), ("position_wise", b), ("random", 0), ("average", 0)):
        model = imagined(vanilla(vocabulary, layers, mix, normalize))
        parts = parameters_by_part(model)
        assert model.num_parameters() == total + more
        assert parts["total"] == total + more
        assert parts["mixing"] == more
        assert sum(number for part, number in parts.items() if part != "total") == total + more
        assert parts.get("other", 0) == 0


MIXTURES = {  # vocabulary (with <sos>), width -> softmaxes (0: no mixture) -> parameters, by the papers' code
    (10_001, 300): {0: 8_182_601, 10: 9_088_601},
    (10_001, 200): {0: 4_978_401, 10: 5_382_401},
    (33_279, 300): {0: 22_172_679, 10: 23_078_679},
    (33_279, 200): {0: 14_312_879, 2: 14_393_679, 5: 14_514_879, 10: 14_716_879, 15: 14_918_879},
}


@pytest.mark.parametrize(("vocabulary", "width"), MIXTURES, ids=str)
def test_mixtures_of_softmaxes(vocabulary: int, width: int) -> None:
    """Transformer-MoS: four layers with their norms behind them, no tie, an output bias; K d^2 + 2 K d for a mixture.

    FLOPs: latents and prior K d^2 + K d, and the vocabulary K times instead of once.
    """
    shape = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": 4,
             "intermediate_size": width, "norm": "post"}  # fmt: skip
    plain = size(fr.ModelConfig(**shape), 35)
    for mixtures, total in MIXTURES[vocabulary, width].items():
        mixture = fr.OutputConfig(kind="mixture_of_softmaxes", mixtures=mixtures or 1)
        found = size(fr.ModelConfig(**shape, output=mixture), 35) if mixtures else plain
        assert found["parameters"]["total"] == total
        assert found["parameters"].get("other", 0) == 0
        if mixtures:
            more = {part: number - plain["parameters"][part] for part, number in found["parameters"].items()}
            assert {part: number for part, number in more.items() if number} == dict.fromkeys(
                ("total", "output"), mixtures * width**2 + 2 * mixtures * width
            )
            flops = 2 * (mixtures * width**2 + mixtures * width + (mixtures - 1) * vocabulary * width)
            assert found["flops_per_token"]["forward"] - plain["flops_per_token"]["forward"] == flops


def adaptive(
    vocabulary: int, width: int, cutoffs: list[int], div_val: int, form: str, tied: bool, projections: bool
) -> dict[str, int]:
    """Parameters by part of a model without layers, an adaptive input and an adaptive softmax."""
    clusters = {"kind": "adaptive", "cutoffs": cutoffs, "div_val": div_val}
    config = fr.ModelConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=1, num_attention_heads=1, head_dim=1,
        final_norm=False, position="none", input=fr.InputConfig(**clusters),
        output=fr.OutputConfig(**clusters, form=form, tied=tied, tied_projections=projections),
    )  # fmt: skip
    return size(config, 1)["parameters"]


# layers, width, attention's inner width, feed-forward's: Transformer-XL's layer has a fifth matrix for relative positions
# and no attention biases; u and v are shared by all layers
def relative_layers(layers: int, width: int, heads: int, inner: int) -> int:
    layer = 5 * width * heads + 2 * width * inner + inner + width + 4 * width
    return layers * layer + 2 * heads


@pytest.mark.parametrize(
    ("clusters", "rest", "total"),
    [
        ((267_735, 410, [20_000, 40_000, 200_000], 1, "transformer_xl", True, True),
         relative_layers(16, 410, 410, 2100), 151_107_538),
        ((793_471, 1024, [60_000, 100_000, 640_000], 4, "transformer_xl", True, False),
         relative_layers(18, 1024, 1024, 4096), 357_812_082),
        ((267_735, 624, [20_000, 40_000, 200_000], 4, "transformer_xl", False, False),
         relative_layers(15, 624, 624, 2496), 122_215_992),
        ((267_735, 624, [20_000, 40_000, 200_000], 4, "transformer_xl", True, True),
         relative_layers(15, 624, 624, 2496), 99_249_705),
    ],
    ids=["Transformer-XL WikiText-103", "Transformer-XL LM1B", "skip cross-head WikiText-103", "the same tied"],
)  # fmt: skip
def test_adaptive_parts_of_published_totals(
    clusters: tuple[int, int, list[int], int, str, bool, bool], rest: int, total: int
) -> None:
    """By hand: sum V_i d_i + E sum d_i for the input, the same for the output unless tied, V biases, n (E + 1) for classes."""
    vocabulary, width, cutoffs, div, _, tied, projections = clusters
    parts = adaptive(*clusters)
    widths = [width // div**i for i in range(4)]
    tables = sum(n * d for n, d in zip(_differences([0, *cutoffs, vocabulary]), widths, strict=True))
    projected = width * sum(widths) * (div != 1)
    tails = width * sum(widths[1:]) * (div != 1)
    assert parts["embedding"] == tables + projected
    own = (0 if tied else tables) + projected - (tails if projections else 0)
    assert parts["output"] == own + vocabulary + 3 * (width + 1)
    if (tied, projections) == (True, True) and div != 1:  # the notes count the head's projection as shared, too
        rest -= width * width
    assert parts["embedding"] + parts["output"] + rest == total


def _differences(ends: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(ends)]


def baevski(
    vocabulary: int = 267_744, cutoffs: tuple[int, ...] = (20_000, 60_000), projections: bool = True, mix: str = "none",
    heads: int = 8, head_dim: int = 128,
) -> fr.LanguageModel:  # fmt: skip
    """fairseq's `transformer_lm_wiki103`."""
    return imagined(
        fr.ModelConfig(
            vocab_size=vocabulary, hidden_size=1024, num_hidden_layers=16, num_attention_heads=heads, head_dim=head_dim,
            intermediate_size=4096, final_norm=False, attention=fr.AttentionConfig(mix=mix),
            input=fr.InputConfig(kind="adaptive", cutoffs=list(cutoffs), div_val=4),
            output=fr.OutputConfig(kind="adaptive", tied=True, tied_projections=projections),
        )
    )  # fmt: skip


def test_baevski_in_full() -> None:
    assert baevski().num_parameters() == 246_933_504
    assert baevski(projections=False).num_parameters() == 246_933_504 + 327_680
    assert baevski(mix="position_independent").num_parameters() == 246_933_504 + 1_024
    assert baevski(mix="position_wise").num_parameters() == 246_933_504 + 17_408
    assert round(baevski(793_472, (60_000, 160_000)).num_parameters() / 1e6, 1) == 330.5  # LM1B: 330M
    for head_dim, millions in ((256, 314), (512, 448)):  # Table 10
        assert int(baevski(head_dim=head_dim).num_parameters() / 1e6) == millions
    parts = parameters_by_part(baevski())
    assert parts["embedding"] == 20_000 * 1024 + 40_000 * 256 + 207_744 * 64 + 1024 * (1024 + 256 + 64)
    assert parts["output"] == 2 * 1024
    assert sum(number for part, number in parts.items() if part != "total") == parts["total"] == 246_933_504


sizes = st.integers(1, 12)


@settings(max_examples=8)
@given(
    layers=st.integers(1, 4), heads=sizes, head_dim=sizes, width=sizes, inner=sizes, vocabulary=st.integers(2, 40),
    tied=st.booleans(), attention_bias=st.booleans(), mlp_bias=st.booleans(), gated=st.booleans(), pre=st.booleans(),
    learned=st.booleans(),
)  # fmt: skip
def test_every_size_by_its_formula(
    layers: int, heads: int, head_dim: int, width: int, inner: int, vocabulary: int, tied: bool, attention_bias: bool,
    mlp_bias: bool, gated: bool, pre: bool, learned: bool,
) -> None:  # fmt: skip
    def count(mix: str, **choices: object) -> int:
        return imagined(
            fr.ModelConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                head_dim=head_dim,
                intermediate_size=inner,
                output=fr.OutputConfig(tied=tied),
                mlp_bias=mlp_bias,
                hidden_act="swiglu" if gated else "gelu",
                norm="pre" if pre else "post",
                position="learned" if learned else "none",
                max_position_embeddings=9,
                attention=fr.AttentionConfig(mix=mix, bias=attention_bias, **choices),
            )
        ).num_parameters()

    both = heads * head_dim
    attention = 4 * width * both + (3 * both + width) * attention_bias
    up = inner * (2 if gated else 1)
    feed_forward = width * up + inner * width + (up + width) * mlp_bias
    vocabularies = vocabulary * width if tied else 2 * vocabulary * width + vocabulary
    total = vocabularies + layers * (attention + feed_forward + 4 * width) + 2 * width * pre + 9 * width * learned
    assert count("none") == total
    assert count("position_independent") == total + layers * heads**2
    assert count("position_wise") == total + layers * (heads**2 + head_dim * heads)
    assert count("random") == count("average") == total
    assert count("none", gate="head") == total + layers * heads * width


def test_size_counts_flops_by_their_formula() -> None:
    """Two for each multiply-add of a token: matrices, scores and values over (n + 1) / 2 keys, mixing, vocabulary."""
    e, h, d, f, v, layers, n = 12, 3, 5, 20, 30, 2, 9

    def flops(mix: str = "none", **attention: object) -> int:
        config = fr.ModelConfig(
            vocab_size=v, hidden_size=e, num_hidden_layers=layers, num_attention_heads=h, head_dim=d, intermediate_size=f,
            attention=fr.AttentionConfig(mix=mix, **attention),
        )  # fmt: skip
        found = size(config, n)
        assert found["flops_per_token"]["length"] == n
        assert found["flops_per_token"]["training"] == 3 * found["flops_per_token"]["forward"]
        assert found["bytes"]["weights_fp32"] == 4 * imagined(config).num_parameters()
        assert found["bytes"]["cache_per_token_fp32"] == 4 * 2 * layers * h * d
        return found["flops_per_token"]["forward"]

    keys = (n + 1) / 2
    plain = 2 * (layers * (4 * e * h * d + 2 * e * f) + layers * 2 * h * d * keys + v * e)
    assert flops() == plain
    assert flops(gate="head") == plain + 2 * layers * h * e
    assert flops("position_independent") == plain + 2 * layers * h * h * keys
    assert flops("position_wise") == plain + 2 * layers * (h * h * keys + h * h * d)
