"""The recipes of Transformer-MoS: sizes from the architecture, settings of paper and code, figures in both conventions."""

from __future__ import annotations

import math
import re

import pytest
from recipe_counts import config_of, total

from fullrank.config.load import load

NAMES = ("mos/table1-ptb", "mos/table1-wikitext2", "mos/table2")
ROWS = [(name, row) for name in NAMES for row in load(name).rows]
SHAPE = re.compile(r"(?:plain|k(?P<mixtures>\d+))(?:-d(?P<width>\d+))?")
TABLE_1 = {
    "mos/table1-ptb": {"plain": (100.04, 92.95), "k10": (91.88, 86.89)},
    "mos/table1-wikitext2": {"plain": (162.83, 153.38), "k10": (140.57, 131.75)},
}
TABLE_2 = {"k2": (89.2, 19.20), "k5": (88.58, 21.59), "k10": (86.89, 28.34), "k15": (90.69, 41.47)}
SIZES = {  # vocabulary, width: parameters by the number of softmaxes, counted with the papers' code
    (10_001, 300): {0: 8_182_601, 10: 9_088_601},
    (10_001, 200): {0: 4_978_401, 10: 5_382_401},
    (33_279, 300): {0: 22_172_679, 10: 23_078_679},
    (33_279, 200): {0: 14_312_879, 10: 14_716_879},
}
TOKENS = {  # with <sos>, and in the usual convention
    "mos/table1-ptb": {"valid": (77_130, 73_760), "test": (86_191, 82_430)},
    "mos/table1-wikitext2": {"valid": (221_406, 217_646), "test": (249_927, 245_569)},
}


def shape(row: str) -> tuple[int, int]:
    """(K, width) by the name of a row; K = 0 is the plain softmax."""
    found = SHAPE.fullmatch(row)
    assert found is not None
    return int(found["mixtures"] or 0), int(found["width"] or 200)


def parameters(vocabulary: int, mixtures: int, width: int) -> int:
    """Four encoder layers (packed q, k, v; merge; feed-forward as wide as the model; two norms), embedding, output, mixture."""
    layer = 3 * width**2 + 3 * width + width**2 + width + 2 * (width**2 + width) + 4 * width
    return 2 * vocabulary * width + vocabulary + 4 * layer + mixtures * width**2 + mixtures * width + mixtures * width


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_totals(name: str, row: str) -> None:
    vocabulary = 33_279 if name == "mos/table1-wikitext2" else 10_001
    mixtures, width = shape(row)
    assert total(name, row) == parameters(vocabulary, mixtures, width)
    assert SIZES[vocabulary, width].get(mixtures, total(name, row)) == total(name, row)
    for scale in ("small", "tiny"):
        assert total(name, row, scale) == parameters(20_000, *shape(row)), "the width stays as the row says"


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_figures_of_the_paper(name: str, row: str) -> None:
    """Equal rows at both widths: the paper does not say to which one they belong."""
    base = row.removesuffix("-d300")
    paper = dict(load(name).rows[row]["paper"])
    assert paper.pop("checkpoint") == "last"
    if name == "mos/table2":
        assert paper == dict(zip(("test", "ms_per_batch"), TABLE_2[base], strict=True))
    else:
        assert paper == dict(zip(("valid", "test"), TABLE_1[name][base], strict=True))


@pytest.mark.parametrize("name", TABLE_1)
def test_notes_convert_to_the_usual_convention(name: str) -> None:
    """exp(ln(ppl) N / (N - lines)): what the same probability of the text is per usual token."""
    notes = load(name).notes
    for figures in TABLE_1[name].values():
        for split, figure in zip(("valid", "test"), figures, strict=True):
            ours, usual = TOKENS[name][split]
            assert f"{math.exp(math.log(figure) * ours / usual):.1f}" in notes
    if name == "mos/table1-ptb":
        for figure, _ in TABLE_2.values():
            ours, usual = TOKENS[name]["test"]
            assert f"{math.exp(math.log(figure) * ours / usual):.1f}" in load("mos/table2").notes


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_model_as_in_the_released_code(name: str, row: str) -> None:
    config = config_of(name, row)
    model, output, dropout = config.model, config.model.output, config.model.dropout
    mixtures, width = shape(row)
    assert (model.num_hidden_layers, model.num_attention_heads) == (4, 4)
    assert (model.hidden_size, model.intermediate_size) == (width, width)
    assert (model.norm, model.final_norm, model.hidden_act, model.position) == ("post", False, "relu", "sinusoidal")
    assert (model.scale_embedding, model.initializer, model.memory_length) == (True, "xavier_uniform", 0)
    assert (dropout.embedding, dropout.attention, dropout.activation, dropout.residual) == (0.2, 0.1, 0.1, 0.1)
    assert (dropout.output, dropout.locked) == (0, False)
    assert (output.tied, output.bias) == (False, True)
    if mixtures:
        assert (output.kind, output.mixtures) == ("mixture_of_softmaxes", mixtures)
        assert (output.latent, output.latent_dropout) == (True, 0.2)
    else:
        assert output.kind == "softmax"
    assert config.data.sos
    assert (config.train.batch_size, config.train.segment_length, config.train.order) == (20, 35, "contiguous")
    assert (config.train.max_grad_norm, config.train.weight_decay) == (0.25, 0)


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_training_as_in_the_paper(name: str, row: str) -> None:
    train, judged = config_of(name, row).train, config_of(name, row).eval
    assert (train.optimizer, train.learning_rate, train.momentum) == ("sgd", 7.0, 0)
    assert (train.schedule, train.plateau_factor, train.plateau_patience) == ("plateau", 1.75, 0)
    assert (train.epochs, train.seed, train.warmup_steps) == (50, 26, 0)
    assert (judged.every_epochs, judged.max_tokens, judged.segment_length) == (1, None, None)
    assert config_of(name, row).data.name == ("wikitext-2" if "wikitext" in name else "ptb")
