"""The recipes of our own best models: their sizes, and what the published Penn Treebank code does."""

import pytest
from recipe_counts import config_of, total

from fullrank.config.load import load


@pytest.mark.parametrize(
    "name", ["best/ptb", "best/ptb-cures", "best/ptb-shares", "best/wikitext", "best/enwik8-slice"]
)
def test_every_row_builds_at_every_scale_and_is_one_change(name):
    recipe = load(name)
    assert recipe.notes
    assert {"small", "tiny"} <= set(recipe.scales)
    for scale in recipe.scales:
        rows = {row: config_of(name, row, scale) for row in recipe.rows}
        assert len({repr(config) for config in rows.values()}) == len(rows)
        for config in rows.values():
            assert config.model.position == "relative"  # stated, whatever the default is
        if name != "best/ptb-cures":  # which has equal time
            assert len({(config.train.epochs, config.train.steps) for config in rows.values()}) == 1


def test_the_published_size():
    """Embedding and its bias; 16 layers of q, k, v and merge without biases, feed-forward with them, and two norms."""
    width, inner = 380, 900
    layer = 4 * width**2 + 2 * width * inner + inner + width + 4 * width
    assert total("best/ptb", "exact") == 10_000 * width + 10_000 + 16 * layer == 24_040_400


@pytest.mark.parametrize(
    ("name", "scale", "size"),
    [("best/mixers", "small", 5000), ("best/mixers", "tiny", 2000), ("best/enwik8-mixers", "small", 256)],
)
def test_mixers_are_of_one_size(name, scale, size):
    """To within 1 %, at the vocabulary of the text: 5,000 words, 2,000 in the built-in one, bytes."""
    first, *others = (total(name, row, scale, (f"model.vocab_size={size}",)) for row in load(name).rows)
    assert all(abs(other - first) <= 0.01 * first for other in others)


@pytest.mark.parametrize("name", ["best/ptb", "best/ptb-cures"])
@pytest.mark.parametrize("scale", ["paper", "small", "tiny"])
def test_the_rows_are_of_one_size(name, scale):
    """Smaller feed-forward layers make room for a mixture; mixed heads add at most 0.1 %."""
    first, *others = (total(name, row, scale) for row in load(name).rows)
    assert all(abs(other - first) <= 0.002 * first for other in others)
