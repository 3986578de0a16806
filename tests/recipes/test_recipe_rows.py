"""Rows of every recipe: they build at every scale, and differ in the mechanism of their table alone."""

import pytest
from recipe_counts import config_of, total

from fullrank.config.load import flatten, is_finetuning, list_shipped, load

# our own recipes: test_recipe_best.py
SHIPPED = [name for name in list_shipped() if not name.startswith(("demo/", "best/"))]
NAMES = [name for name in SHIPPED if not is_finetuning(name)]
TRANSLATION = ["mixhead/table4", "mixhead/table4-long", "tensorized/table3"]
SCALES = ("paper", "small", "tiny")
ROWS = [(name, row) for name in NAMES for row in load(name).rows] + [("demo/builtin", "b")]
CELLS = [  # every sixth is an everyday one
    pytest.param(name, row, scale, marks=() if (i + j) % 6 == 1 else pytest.mark.full)
    for i, (name, row) in enumerate(ROWS)
    for j, scale in enumerate(load(name).scales)
]


@pytest.mark.parametrize(("name", "row", "scale"), CELLS)
def test_every_row_builds_at_every_scale(name, row, scale):
    assert total(name, row, scale) > 0


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_what_their_names_say(name):
    corpora = {}
    for scale in SCALES:
        corpora[scale] = {config_of(name, row, scale).data.name for row in load(name).rows}
    assert corpora["tiny"] == {"synthetic-translation" if name in TRANSLATION else "builtin"}
    assert "builtin" not in corpora["small"] | corpora["paper"]
    for row in load(name).rows:
        config = config_of(name, row, "paper")
        assert config.data.max_tokens is None


# settings besides the model in which rows of one table may differ at small scale
_LENGTHS = {"train.segment_length", "train.batch_size", "eval.segment_length", "eval.batch_size", "eval.test.context"}
_WAVE = {f"train.{key}" for key in ("schedule", "warmup_steps", "period")}  # of released code, or not
_OF_TEST = {f"eval.test.{key}" for key in ("segment_length", "memory_length", "same_length", "clamp_length")}
MAY_DIFFER = {
    "mixhead/table9": _LENGTHS,
    **{f"skip-cross-head/table{n}": _WAVE | {"train.phases", "eval.memory_length"} for n in (1, 2)},
    "skip-cross-head/table5": _WAVE | {"train.phases"},
    **{f"skip-cross-head/table{n}": {"train.phases"} for n in (7, 8, 9)},
    **{f"tensorized/table{n}": _OF_TEST for n in ("1", "2-wikitext103")},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["small", pytest.param("tiny", marks=pytest.mark.full)])
def test_rows_of_a_small_table_read_the_same_number_of_tokens(name, scale):
    """Equal terms: at small scale nothing but the mechanism differs between rows; phases share one budget of tokens."""
    settings = []
    for row in load(name).rows:
        config = config_of(name, row, scale)
        assert (config.train.steps, config.train.epochs) == (None, None)
        assert all(phase.steps is not None or phase.plateau is not None for phase in config.train.phases[:-1])
        assert all(phase.steps is None and phase.epochs is None for phase in config.train.phases[-1:])
        settings.append(flatten({key: value for key, value in config.to_dict().items() if key != "model"}))
    keys = {key for flat in settings for key in flat}
    differ = {key for flat in settings for key in keys if flat.get(key) != settings[0].get(key)}
    assert differ <= MAY_DIFFER.get(name, set())
    assert len({flat["train.tokens"] for flat in settings}) == 1


@pytest.mark.parametrize("name", ["tensorized/table1", "tensorized/table2-ptb", "tensorized/table2-wikitext103"])
@pytest.mark.parametrize("scale", SCALES)
def test_multi_linear_rows_differ_in_attention_only(name, scale):
    base = config_of(name, "plain", scale)
    assert base.model.attention.kind == "weighted"
    assert base.model.max_position_embeddings == base.train.segment_length
    for row in ("core1", "core2", "core1-as-published", "core2-as-published", "decayed"):
        other = config_of(name, row, scale)
        assert (other.data, other.train, other.eval) == (base.data, base.train, base.eval)
        attention = other.model.attention
        assert (attention.kind, attention.rank, attention.bias) == ("multilinear", 40, False)
        assert attention.cores == (2 if row.startswith("core2") else 1)
        assert attention.sees_future == row.endswith("as-published") == attention.not_next_token_perplexity
        assert attention.output_map == ("decayed" if row == "decayed" else "pairs")
        assert other.model.memory_length == 0


@pytest.mark.parametrize("scale", SCALES)
def test_translation_differs_in_heads_and_mixing_only(scale):
    base = flatten(config_of("mixhead/table4", "h4-plain", scale).to_dict())
    mixes = {"plain": "none", "a": "position_independent", "b": "position_wise"}
    for row in load("mixhead/table4").rows:
        config = config_of("mixhead/table4", row, scale)
        heads, mix, *how = row.split("-")
        model = config.model
        assert f"h{model.num_attention_heads}" == heads
        assert model.head_dim == model.hidden_size // model.num_attention_heads
        assert model.decoder.released_decoding == (how == ["released"])
        parts = (model, model.get_encoder_config(), model.get_decoder_config())
        assert {part.attention.mix for part in parts} == {mixes[mix]}
        assert model.get_cross_config().attention.mix == (mixes[mix] if how == ["cross"] else "none")
        flat = flatten(config.to_dict())
        assert {key for key in flat if flat[key] != base[key]} <= {
            "model.num_attention_heads", "model.head_dim", "model.attention.mix", "model.decoder.released_cross",
            "model.decoder.released_decoding",
        }  # fmt: skip


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("row", ["plain", "a", "b"])
def test_joined_sentences_are_longer_than_heads_are_wide(scale, row):
    """The paper's n / d_k = 240 / 128 at every scale; but for the length, rows are those of Table 4 at h = 4."""
    joined = config_of("mixhead/table4-long", row, scale)
    single = config_of("mixhead/table4", f"h4-{row}", scale)
    assert (joined.model, joined.train, joined.eval) == (single.model, single.train, single.eval)
    differ = {key for key, value in joined.data.to_dict().items() if value != single.data.to_dict()[key]}
    assert differ == {"concatenate"}
    assert joined.data.concatenate * 128 == 240 * joined.model.head_dim
