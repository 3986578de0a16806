"""Which protocol a configuration and flags make, which of them are refused, and how a protocol is described."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import fullrank as fr
from fullrank.config.load import build
from fullrank.config.run import RunConfig
from fullrank.core.config import NOT_NEXT_TOKEN
from fullrank.experiments.measure import (
    EvaluationProtocol,
    change_evaluation,
    final_protocol,
    measure,
    validation_protocol,
)
from moving import narrow

PUBLISHED = {"kind": "multilinear", "causal": "as_published", "not_next_token_perplexity": True}
RELATIVE = {"position": "relative", "attention": {"score": "relative"}}


def config(model: dict[str, Any] | None = None, **evaluation: Any) -> RunConfig:
    """Segments of 512 tokens in training, 10 streams in evaluation."""
    return build({"model": model or {}, "train": {"segment_length": 512}, "eval": evaluation})


def settings(protocol: EvaluationProtocol) -> dict[str, Any]:
    """Settings that differ from a plain protocol."""
    values = {field.name: (getattr(protocol, field.name), field.default) for field in dataclasses.fields(protocol)}
    return {name: value for name, (value, default) in values.items() if value != default}


def window(context: int, stride: int) -> dict[str, Any]:
    return {"kind": "window", "segment_length": context + stride, "context": context, "stride": stride}


def memory(length: int, segment: int = 512, streams: int = 10, **more: Any) -> dict[str, Any]:
    return {"kind": "memory", "segment_length": segment, "streams": streams, "memory_length": length, **more}


@pytest.mark.parametrize(
    ("model", "evaluation", "flags", "expected"),
    [
        ({}, {}, {}, {"kind": "blocks", "segment_length": 512}),
        # fairseq: T = 512, C = 400 leaves 112 tokens at a time
        ({}, {"context": 400}, {}, window(400, 112)),
        ({}, {}, {"stride": 1, "segment_length": 64}, window(63, 1)),
        ({}, {"context": 400, "stride": 112}, {"segment_length": 500, "stride": 50}, window(450, 50)),
        ({}, {"context": 400}, {"context": 0, "stride": 64}, {"kind": "blocks", "segment_length": 64}),
        ({"memory_length": 64}, {}, {}, memory(64)),
        ({"memory_length": 64}, {"memory_length": 640, "batch_size": 1}, {}, memory(640, streams=1)),
        ({}, {"context": 400}, {"memory_length": 640}, memory(640)),  # the flag wins over a key that it excludes
        ({"memory_length": 64, "same_length": True}, {}, {}, memory(64, same_length=True)),
        ({"memory_length": 64, "memory_start": "zeros"}, {}, {}, memory(64, memory_start="zeros")),
        ({**RELATIVE, "memory_length": 64}, {"clamp_length": 400}, {"clamp_length": 9}, memory(64, clamp_length=9)),
        (
            {"position": "relative", "attention": {"score": {"name": "relative", "clamp_length": 70}}},
            {"context": 400},
            {},
            {**window(400, 112), "clamp_length": 70},
        ),
    ],
)
def test_what_configuration_and_flags_make(model, evaluation, flags, expected):
    assert settings(final_protocol(change_evaluation(config(model, **evaluation), flags))) == expected


XL = {**RELATIVE, "memory_length": 150}
# as Transformer-XL's scripts measure: in training as it is trained, in the end with a longer memory
OF_TEST = {"segment_length": 64, "memory_length": 640, "clamp_length": 400, "same_length": True}


@pytest.mark.parametrize(
    ("model", "evaluation", "flags", "valid", "test"),
    [
        ({}, {"test": {"context": 400}}, {}, {"kind": "blocks", "segment_length": 512}, window(400, 112)),
        ({}, {"context": 400, "valid": {"context": 0}}, {}, {"kind": "blocks", "segment_length": 512}, window(400, 112)),
        (XL, {"test": OF_TEST}, {}, memory(150, 512), memory(640, 64, same_length=True, clamp_length=400)),
        (XL, {"test": OF_TEST}, {"memory_length": 9, "same_length": False}, memory(9, 512), memory(9, 64, clamp_length=400)),
    ],
)  # fmt: skip
def test_each_split_has_its_own_protocol(model, evaluation, flags, valid, test):
    """Flags win over both; other texts (a training split) are read as `eval` says."""
    configured = config(model, **evaluation)
    for split, expected in (("valid", valid), ("test", test)):
        assert settings(final_protocol(change_evaluation(configured, flags, split), split)) == expected
    general = {key: value for key, value in evaluation.items() if key not in ("valid", "test")}
    assert final_protocol(configured, "train") == final_protocol(config(model, **general))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, {"kind": "blocks", "segment_length": 64}),
        ({**RELATIVE, "memory_length": 32, "same_length": True}, memory(32, 64, same_length=True)),
    ],
)
def test_a_model_is_judged_as_it_is_trained(model, expected):
    """The protocol of final figures plays no part."""
    final = {"memory_length": 640, "clamp_length": 400} if model else {"context": 50}
    validation = validation_protocol(config(model, segment_length=64, **final))
    assert settings(validation) == expected
    assert final_protocol(config(model, segment_length=64, **final)) != validation


# -- models whose tokens see later ones -------------------------------------------------------------------------------


def published(attention: dict[str, Any], **evaluation: Any) -> RunConfig:
    return build({"model": {"attention": attention}, "train": {"segment_length": 16}, "eval": evaluation})


@pytest.mark.parametrize(("flags", "honest"), [({}, False), ({"stride": 1}, True), ({"segment_length": 1}, True)])
def test_nothing_but_last_positions_is_a_next_token_perplexity(flags, honest):
    protocol = final_protocol(change_evaluation(published(PUBLISHED), flags))
    assert protocol.next_token is honest
    assert protocol.in_words().endswith(f"; {NOT_NEXT_TOKEN}") is not honest
    assert ("next-token" in protocol.in_words()) is not honest
    for attention in ({"kind": "multilinear"}, {"kind": "weighted"}):
        plain = final_protocol(change_evaluation(published(attention), flags))
        assert plain.next_token
        assert "next-token" not in plain.in_words()


@pytest.mark.parametrize("window", [{}, {"kind": "window", "context": 4, "stride": 4}], ids=["blocks", "windows"])
def test_the_check_of_scores_passes(window):
    """Every token counts once, given earlier ones alone, and sums and counts are true."""
    model = narrow(vocab_size=5, num_hidden_layers=1)
    protocol = EvaluationProtocol(**{"kind": "blocks", "segment_length": 8, **window})

    def score(ids):
        evaluation = measure(model, ids.numpy(), protocol, batch_size=2, start_id=1)
        return {"nll": evaluation.nll, "tokens": evaluation.tokens}

    assert fr.check_scoring(score, vocab_size=5, length=19, window=8).passes
