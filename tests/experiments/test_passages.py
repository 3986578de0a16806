"""Texts side by side have the scores of each by itself, which test_protocols.py compares with a loop over tokens."""

from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fullrank as fr
from fullrank.experiments.measure import EvaluationProtocol, Passage, measure, passages, score
from moving import narrow

START = 3
VOCABULARY = 13
TEXTS = [np.random.default_rng(length).integers(0, VOCABULARY, length) for length in (23, 1, 40, 7, 12)]
B = fr.AttentionConfig(mix="position_wise")
LEARNED = {"position": "learned", "max_position_embeddings": 50, "attention": B}
ADAPTIVE = {"output": fr.OutputConfig(kind="adaptive", cutoffs=[4, 9])}
XL = {"position": "relative", "attention": fr.AttentionConfig(score="relative"), "memory_length": 6}


build = partial(narrow, vocab_size=VOCABULARY)


@given(st.integers(0, 90), st.integers(0, 40), st.integers(1, 40), st.integers(1, 9))
@settings(deadline=None)
def test_every_token_counts_once_after_the_context_before_it(tokens, context, stride, streams):
    ids = np.arange(1, tokens + 1)
    windows = EvaluationProtocol(kind="window", segment_length=context + stride, context=context, stride=stride)
    memory = EvaluationProtocol(kind="memory", segment_length=4, streams=streams, memory_length=6)
    for protocol, before in ((windows, context), (memory, 0)):
        parts = passages(ids, protocol, 0)
        counted = [target for part in parts for target in part.ids[part.unscored + 1 :].tolist()]
        assert counted == ids.tolist()
        for part in parts:
            first = part.ids[part.unscored + 1]
            assert part.unscored == min(before, first - 1)
            assert part.ids.tolist() == list(range(part.ids[0], part.ids[-1] + 1))
    assert len(passages(ids, memory, 0)) <= streams


WINDOWS = EvaluationProtocol(kind="window", segment_length=8, context=5, stride=3)
MEMORY = EvaluationProtocol(kind="memory", segment_length=4, streams=1, memory_length=6)
CASES = {
    "blocks": (LEARNED, EvaluationProtocol(kind="blocks", segment_length=7)),
    "windows": (LEARNED, WINDOWS),
    "windows, rotary": ({"position": "rotary"}, WINDOWS),
    "windows, adaptive": (ADAPTIVE, WINDOWS),
    "memory": (XL, MEMORY),
    "memory of three streams": (XL, replace(MEMORY, streams=3)),
}


@pytest.mark.parametrize("name", CASES)
def test_texts_side_by_side_have_the_sums_of_each_text_by_itself(name):
    settings, protocol = CASES[name]
    model = build(**settings)
    pieces = [passages(text, protocol, START) for text in TEXTS]
    scores = iter(score(model, [*chain(*pieces)], segment_length=protocol.segment_length, batch_size=4))
    for text, pieces_of_text in zip(TEXTS, pieces, strict=True):
        nll = -sum(log_prob for log_prob, _ in islice(scores, len(pieces_of_text)))
        expected = measure(model, text, protocol, batch_size=1, start_id=START)
        assert nll == pytest.approx(expected.nll, rel=1e-12)


def test_every_passage_says_whether_it_is_greedy():
    """Half of the texts are what the model would write, and half are not, in one token somewhere."""
    model = build(**ADAPTIVE)
    texts = []
    for length in range(3, 9):
        text = [START, length]
        while len(text) < length + 2:
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        if length % 2:
            text[-1 - length // 2] = (text[-1 - length // 2] + 1) % VOCABULARY
        texts.append(text)
    scores = score(model, [Passage(np.asarray(text), 1) for text in texts], segment_length=9, batch_size=4)
    assert [greedy for _, greedy in scores] == [False, True, False, True, False, True]
