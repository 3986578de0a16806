"""Keys of multi-linear attention: what does not go together is refused; the message names key, given and allowed."""

from __future__ import annotations

from typing import Any

import pytest

import fullrank as fr
from fullrank.core.errors import ConfigError

# keys of attention -> all of these words are in the message
WRONG_ATTENTION: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"causal": "maybe"}, ("model.attention.causal", "'masked' or 'as_published'", "'maybe'")),
    ({"core_weights": "tight"}, ("model.attention.core_weights", "'softmax' or 'free'", "'tight'")),
    ({"output_map": "rows"}, ("model.attention.output_map", "'pairs' or 'decayed'", "'rows'")),
    ({"cores": 0}, ("model.attention.cores", "positive whole number", "given 0")),
    ({"cores": True}, ("model.attention.cores", "positive whole number", "given True")),
    ({"rank": -2}, ("model.attention.rank", "positive whole number", "given -2")),
    ({"rank": 2.5}, ("model.attention.rank", "positive whole number", "given 2.5")),
    ({"rank": 2**40}, ("model.attention.rank",)),
    ({"output_map": "decayed", "decays": 0}, ("model.attention.decays", "positive whole number", "given 0")),
    ({"decays": 3}, ("model.attention.decays", "output_map: decayed", "given 3", "'pairs'")),
    ({"normalize": "sigsoftmax"}, ("model.attention.normalize", "'sigsoftmax'", "kind: weighted")),
    ({"mix": "average"}, ("model.attention.mix", "'average'", "kind: weighted")),
    ({"cross_head": 0.5}, ("model.attention.cross_head", "given 0.5", "kind: weighted")),
    ({"score": "dense_synthesizer"}, ("model.attention.score", "'dense_synthesizer'", "dot_product", "relative")),
    (
        {"score": {"name": "relative", "clamp_length": 3}},
        ("model.attention.score", "clamp_length", "shared_biases"),
    ),
    (
        {"score": "relative", "output_map": "decayed"},
        ("model.attention.output_map", "takes no position term", "score: dot_product"),
    ),
    (
        {"causal": "as_published", "output_map": "decayed"},
        ("model.attention.causal", "output_map: pairs", "given 'decayed'"),
    ),
    ({"not_next_token_perplexity": True}, ("model.attention.not_next_token_perplexity", "causal: as_published")),
]


@pytest.mark.parametrize(("keys", "words"), WRONG_ATTENTION, ids=str)
def test_keys_that_do_not_go_together(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as found:
        fr.AttentionConfig(kind="multilinear", **keys)
    assert any(all(word in line for word in words) for line in found.value.problems), found.value.problems
    assert len(found.value.problems) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("cores", 2), ("rank", 5), ("causal", "masked"), ("core_weights", "free"), ("output_map", "pairs"), ("decays", 4),
     ("not_next_token_perplexity", True)],
)  # fmt: skip
def test_keys_of_another_kind(key: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"model.attention.{key}: goes with `.*kind: multilinear`, given {value!r} with"
    ):
        fr.AttentionConfig(**{key: value})


KINDS: dict[str, dict[str, Any]] = {
    "pairs": {"position": "sinusoidal", "attention": {"cores": 2}},
    "decayed": {"position": "none", "attention": {"output_map": "decayed", "decays": 3}},
}


def config(kind: str = "pairs", attention: dict[str, Any] | None = None, **keys: Any) -> fr.ModelConfig:
    options = {"kind": "multilinear", "rank": 5} | KINDS[kind]["attention"] | (attention or {})
    settings = {"hidden_size": 10, "num_attention_heads": 2, "position": KINDS[kind]["position"]} | keys
    return fr.ModelConfig(**settings, attention=fr.AttentionConfig(**options))


PUBLISHED = {"causal": "as_published", "not_next_token_perplexity": True}
WRONG_MODELS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (
        "pairs",
        {"position": "rotary", "head_dim": 4},
        ("model.position", "rotary", "sinusoidal, learned, relative or none"),
    ),
    (
        "pairs",
        {"dropout": fr.DropoutConfig(attention=0.1)},
        ("model.dropout.attention", "given 0.1", "set it to 0", "model.dropout.residual"),
    ),
    (
        "pairs",
        {"attention": {"causal": "as_published"}},
        ("model.attention.causal", "'masked'", "not_next_token_perplexity: true"),
    ),
    (
        "decayed",
        {"memory_length": 4, "same_length": True},
        ("model.same_length", "output_map: decayed", "change one of them"),
    ),
    (
        "pairs",
        {"attention": PUBLISHED, "memory_length": 4},
        ("model.memory_length", "as_published", "given 4", "set it to 0"),
    ),
    (
        "pairs",
        {"memory_length": 4, "memory_start": "zeros"},
        ("model.memory_start", "output_map: pairs", "empty", "decayed"),
    ),
    ("pairs", {"position": "relative"}, ("model.attention.score", "model.position: relative", "dot_product")),
]


@pytest.mark.parametrize(("kind", "keys", "words"), WRONG_MODELS, ids=str)
def test_models_that_cannot_be(kind: str, keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as found:
        config(kind, **keys)
    assert any(all(word in line for word in words) for line in found.value.problems), found.value.problems
    assert len(found.value.problems) == 1


def test_what_may_stand_together() -> None:
    """Heads play no part: a width that they do not divide is no fault, and a memory may have a window with pairs."""
    assert config(num_attention_heads=7).attention.rank == 5
    assert config("pairs", memory_length=4, same_length=True).same_length
    assert config("decayed", memory_length=4, memory_start="zeros").memory_start == "zeros"
    defaults = fr.AttentionConfig(kind="multilinear")
    assert (defaults.cores, defaults.rank, defaults.causal, defaults.core_weights) == (1, 40, "masked", "softmax")
    assert (defaults.output_map, defaults.decays) == ("pairs", None)
    assert fr.AttentionConfig(kind="multilinear", output_map="decayed").decays == 8
