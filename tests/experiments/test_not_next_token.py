"""Models whose tokens see later ones: what is measured of them, against one pass for each segment, window or token."""

import math
from itertools import chain

import numpy as np
import pytest
import torch

from fullrank.experiments.measure import EvaluationProtocol, measure
from moving import narrow

START = 3
VOCABULARY = 11
LONGEST = 8
IDS = np.random.default_rng(0).integers(0, VOCABULARY, 37).astype(np.uint16)
INPUTS = [START, *IDS.tolist()]  # the input of token n is the token before it


def build(relative=False):
    attention = {"kind": "multilinear", "rank": 5, "causal": "as_published", "not_next_token_perplexity": True}
    attention |= {"score": "relative"} if relative else {}
    return narrow(
        position="relative" if relative else "sinusoidal", attention=attention, max_position_embeddings=LONGEST
    )


def nll(model, first, end):
    """-log p of tokens first .. end - 1, from one pass over their inputs and nothing else."""
    with torch.no_grad():
        log_p = model(torch.tensor([INPUTS[first:end]])).logits[0].log_softmax(-1)
    return [-float(log_p[index, IDS[first + index]]) for index in range(end - first)]


def evaluate(model, batch_size, **protocol):
    return measure(model, IDS, EvaluationProtocol(**protocol), batch_size=batch_size, start_id=START)


def check(evaluation, nats, nats_of_last):
    assert evaluation.tokens == len(nats)
    assert evaluation.nll == pytest.approx(math.fsum(nats), rel=1e-12)
    if nats_of_last is None:
        assert evaluation.last_position is None
    else:
        assert evaluation.last_position.tokens == len(nats_of_last)
        assert evaluation.last_position.nll == pytest.approx(math.fsum(nats_of_last), rel=1e-12)


@pytest.mark.parametrize("relative", [False, True])
def test_blocks_and_windows(relative):
    """37 tokens in blocks of 8, the last one of five: its padding is not seen."""
    model = build(relative=relative)
    blocks = [nll(model, start, min(start + 8, 37)) for start in range(0, 37, 8)]
    windows = [nll(model, max(0, at - 5), min(at + 3, 37))[at - max(0, at - 5) :] for at in range(0, 37, 3)]
    for parts, protocol in ((blocks, {"kind": "blocks"}), (windows, {"kind": "window", "context": 5, "stride": 3})):
        evaluation = evaluate(model, 2, segment_length=8, next_token=False, **protocol)
        check(evaluation, [*chain(*parts)], [part[-1] for part in parts])


@pytest.mark.parametrize("batch_size", [1, 40])
def test_stride_1_is_given_earlier_tokens_only(batch_size):
    """Every token by a pass that ends with the token before it: this is a next-token perplexity."""
    model = build()
    nats = [nll(model, max(0, at - 7), at + 1)[-1] for at in range(37)]
    check(evaluate(model, batch_size, kind="window", segment_length=8, context=7, stride=1), nats, None)
