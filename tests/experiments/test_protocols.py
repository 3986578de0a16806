"""Every protocol against a loop that reads one token at a time, and against one long pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import fullrank as fr
from fullrank.config.load import build as configuration
from fullrank.experiments.measure import (
    Evaluation,
    EvaluationProtocol,
    change_evaluation,
    final_protocol,
    measure,
    validation_protocol,
    warn_of_length,
)
from moving import narrow

START = 3
VOCABULARY = 13
IDS = np.random.default_rng(0).integers(0, VOCABULARY, 41).astype(np.uint16)
RELATIVE: dict[str, Any] = {"position": "relative", "attention": fr.AttentionConfig(score="relative")}
MODELS: dict[str, dict[str, Any]] = {
    "sinusoidal": {
        "position": "sinusoidal",
        "attention": fr.AttentionConfig(mix="position_wise", normalize="sigsoftmax"),
    },
    "learned": {"position": "learned", "max_position_embeddings": 50},
    "rotary": {"position": "rotary", "norm": "post"},
    "relative": RELATIVE,
    "adaptive": {"output": fr.OutputConfig(kind="adaptive", cutoffs=[4, 9])},
}
build = partial(narrow, size=0.2, vocab_size=VOCABULARY)
WITH_MEMORY = [name for name in MODELS if name != "learned"]


def nll_after(model: fr.LanguageModel, first: int, position: int) -> float:
    """-log p of token `position`, from logits, given the inputs from that of token `first` on and nothing else."""
    before = [START, *IDS.tolist()]  # the input of token n is the token before it
    with torch.no_grad():
        logits = model(torch.tensor([before[first : position + 1]])).logits
    return -float(logits[0, -1].log_softmax(-1)[IDS[position]])


def by_hand(model: fr.LanguageModel, first: list[int]) -> Evaluation:
    """The text token by token, each in a pass of its own; token n may see the tokens from `first[n]` on."""
    return Evaluation(sum(nll_after(model, start, position) for position, start in enumerate(first)), len(first))


def measured(
    model: fr.LanguageModel, protocol: EvaluationProtocol, *, batch_size: int = 4, ids: np.ndarray = IDS
) -> Evaluation:
    return measure(model, ids, protocol, batch_size=batch_size, start_id=START)


def blocks(length: int) -> EvaluationProtocol:
    return EvaluationProtocol(kind="blocks", segment_length=length)


def windows(context: int, stride: int) -> EvaluationProtocol:
    return EvaluationProtocol(kind="window", segment_length=context + stride, context=context, stride=stride)


def remembering(length: int, segment: int, streams: int = 1, **more: Any) -> EvaluationProtocol:
    return EvaluationProtocol(kind="memory", segment_length=segment, streams=streams, memory_length=length, **more)


def check(evaluation: Evaluation, expected: Evaluation) -> None:
    assert evaluation.tokens == expected.tokens
    assert evaluation.nll == pytest.approx(expected.nll, rel=1e-12)


# -- blocks and windows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_blocks_equal_a_loop_over_tokens(name):
    model = build(**MODELS[name])
    check(measured(model, blocks(7)), by_hand(model, [n // 7 * 7 for n in range(len(IDS))]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("context", "stride"), [(7, 4), (100, 9), (3, 1)])
def test_windows_equal_a_loop_over_tokens(name, context, stride):
    model = build(**MODELS[name])
    first = [max(0, n // stride * stride - context) for n in range(len(IDS))]
    check(measured(model, windows(context, stride)), by_hand(model, first))


@pytest.mark.parametrize(
    "protocol", [blocks(7), windows(7, 4), remembering(5, 6, 2)], ids=["blocks", "windows", "memory"]
)
def test_the_model_is_measured_without_dropout_and_left_as_it_was(protocol):
    model = build(dropout=fr.DropoutConfig(embedding=0.5, attention=0.5, output=0.5))
    expected = measured(model, protocol)
    model.train()
    assert measured(model, protocol) == expected
    assert model.training
    assert model.config.memory_length == 0
    model.eval()
    measured(model, protocol)
    assert not model.training


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize("streams", [1, 3])
def test_a_memory_of_all_that_came_before_is_one_long_pass(name, streams):
    """14 = the length of a stream of three; the last one is shorter."""
    model = build(**MODELS[name])
    length = -(-len(IDS) // streams)
    expected = by_hand(model, [n // length * length for n in range(len(IDS))])
    for segment in (1, 5, 13, 100):  # how it is cut makes no difference then
        check(measured(model, remembering(100, segment, streams)), expected)


@pytest.mark.parametrize("settings", [RELATIVE, {"position": "rotary"}, {"position": "none"}], ids=str)
@pytest.mark.parametrize(("memory_length", "segment"), [(3, 5), (9, 4)])
def test_a_memory_shows_so_many_tokens_before_the_segment(settings, memory_length, segment):
    """In one layer, whose output depends on distances alone, a pass over just what is visible gives the same."""
    model = build(num_hidden_layers=1, **settings)
    first = [max(0, n // segment * segment - memory_length) for n in range(len(IDS))]
    check(measured(model, remembering(memory_length, segment)), by_hand(model, first))


@pytest.mark.parametrize("segment", [2, 4, 7])
def test_with_same_length_every_query_sees_as_many_keys(segment):
    model = build(num_hidden_layers=1, **RELATIVE)
    first = [max(0, n - 6) for n in range(len(IDS))]  # seven keys, the query's own included
    check(measured(model, remembering(7, segment, same_length=True)), by_hand(model, first))


def test_clamped_positions():
    """Against one long pass of a model with the same parameters that is built with the clamp."""
    model = build(**RELATIVE)
    clamped = build(position="relative", attention=fr.AttentionConfig(score={"name": "relative", "clamp_length": 4}))
    clamped.load_state_dict(model.state_dict())
    expected = measured(clamped, blocks(len(IDS)))
    plain = measured(model, blocks(len(IDS)))
    assert abs(expected.nll - plain.nll) > 1e-3
    check(measured(model, remembering(100, 6, clamp_length=4)), expected)
    check(measured(model, EvaluationProtocol(kind="blocks", segment_length=100, clamp_length=4)), expected)
    check(measured(model, blocks(len(IDS))), plain)  # the model is as it was


# -- temperature ------------------------------------------------------------------------------------------------------


def test_a_temperature_divides_the_logits():
    model = build()
    text = torch.tensor([[START, *IDS.tolist()]])
    log_p = (model(text[:, :-1]).logits[0].detach() / 0.7).log_softmax(-1)
    protocol = replace(blocks(50), temperature=0.7)
    assert measured(model, protocol).nll == pytest.approx(-float(log_p.gather(1, text[0, 1:, None]).sum()), rel=1e-12)


def test_the_temperature_of_a_protocol():
    def protocol(split: str = "test", **evaluation: Any) -> EvaluationProtocol:
        return final_protocol(configuration({"eval": evaluation}), split)

    plain = protocol()
    assert protocol(temperature=1.08).in_words() == f"{plain.in_words()}; logits divided by 1.08"
    assert protocol("valid", test={"temperature": 1.08}) == plain
    assert protocol(test={"temperature": 1.08}).temperature == 1.08
    assert final_protocol(change_evaluation(configuration({"eval": {"temperature": 2}}), {"temperature": 1.0})) == plain
    assert validation_protocol(configuration({"eval": {"temperature": 3, "valid": {}}})).temperature == 1.0


@pytest.mark.parametrize(
    ("train", "settings", "warned"),
    [
        ({"segment_length": 20}, {"context": 12, "stride": 8}, False),
        ({"segment_length": 20}, {"context": 12, "stride": 9}, True),
        ({"segment_length": 20}, {"segment_length": 40}, True),
        ({"segment_length": 20, "context": 20, "order": "contiguous"}, {"segment_length": 40}, False),
    ],
)
def test_a_text_read_in_more_tokens_than_a_model_is_trained_on_is_warned_of(train, settings, warned, caplog):
    config = configuration({"data": {"name": "builtin"}, "train": train, "eval": settings})
    warn_of_length(config, final_protocol(config))
    assert [f"trained on {train['segment_length']} " in line for line in caplog.messages] == [True] * warned
