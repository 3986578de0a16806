"""Impossible settings of a run are refused when it is configured."""

import pytest

from fullrank.config.load import build
from fullrank.core.errors import ConfigError

SENTENCES = {"data": {"name": "multi30k-de-en"}, "train": {"batch_tokens": 4096}}


@pytest.mark.parametrize(
    ("raw", "keys"),
    [
        ({"model": {"encoder": {"num_hidden_layers": 2}}}, ["model.encoder: goes with", "translation"]),
        ({"train": {"batch_tokens": 4096}}, ["train.batch_tokens: goes with", "sentence pairs", "given 4096", "data.name"]),
        ({"eval": {"metric": "bleu"}}, ["eval.metric: goes with", "translation", "bleu"]),
        ({**SENTENCES, "eval": {"context": 8}}, ["eval.context: goes with", "given 8"]),
        (
            {"data": {"name": "parallel", "train": "a", "valid": "b", "test": "c", "source": "de", "target": "en",
                      "vocabulary": "separate"},
             "train": {"batch_tokens": 8}, "model": {"encoder": {"share_embedding": True}}},
            ["model.encoder.share_embedding", "data.vocabulary: separate"],
        ),
        (
            {**SENTENCES, "train": {"batch_tokens": 8, "overlap": 0.1}, "model": {"attention": {"kind": "multilinear"}}},
            ["train.overlap", "given 0.1", "model.attention.kind"],
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together(raw, keys):
    with pytest.raises(ConfigError) as caught:
        build(raw)
    (problem,) = caught.value.problems
    for key in keys:
        assert key in problem


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"train": {"order": "shuffled", "context": 8}}, "train.context"),
        ({"train": {"segment_length": 64, "segment_deviation": 20.0}}, "train.segment_deviation"),
        ({"train": {"swa_learning_rate": 0.1}}, "train.swa_learning_rate"),
        ({"train": {"context": 8}, "model": {"memory_length": 8}}, "train.context"),
    ],
)
def test_policies_of_a_running_text_elsewhere(settings, key):
    with pytest.raises(ConfigError, match=f"(^|\n| ){key}:"):
        build(settings)


def test_two_ends_of_training_are_refused():
    with pytest.raises(ConfigError, match="give exactly one of steps, epochs, tokens; given steps, tokens"):
        build({"train": {"tokens": 10**6, "steps": 5}})
