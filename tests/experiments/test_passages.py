"""Texts scored side by side against a loop that reads one token at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fullrank as fr
from fullrank.experiments.measure import EvaluationProtocol, Passage, measure, passages, score
from moving import moved

START, VOCABULARY = 3, 13
TEXTS = [np.random.default_rng(length).integers(0, VOCABULARY, length) for length in (23, 1, 40, 7, 12)]
MODELS = {
    "learned": {
        "position": "learned",
        "max_position_embeddings": 50,
        "attention": fr.AttentionConfig(mix="position_wise"),
    },
    "rotary": {"position": "rotary"},
    "adaptive": {"output": fr.OutputConfig(kind="adaptive", cutoffs=[4, 9])},
}
XL = {"position": "relative", "attention": fr.AttentionConfig(score="relative"), "memory_length": 6}


def build(**settings):
    """A small model in float64 whose every parameter matters."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 12, "num_attention_heads": 3}
    model = fr.LanguageModel(fr.ModelConfig(**sizes, num_hidden_layers=2, **settings)).double()
    return moved(model, 0.3).eval()


def log_probs_after(model, read):
    """log p of what follows these tokens, read at once."""
    with torch.no_grad():
        return model(torch.tensor([read])).logits[0, -1].log_softmax(-1)


def by_hand(model, text, first, scored=1):
    """nll of tokens `scored` .. of text (start mark included), each in a pass of its own that begins at token first(n)."""
    nll, greedy = 0.0, True
    for n in range(scored, len(text)):
        log_probs = log_probs_after(model, text[first(n) : n])
        nll -= float(log_probs[text[n]])
        greedy = greedy and int(log_probs.argmax()) == text[n]
    return nll, greedy


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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("context", "stride"), [(0, 7), (5, 3)])
def test_blocks_and_windows_of_many_texts_equal_a_loop_over_tokens(name, context, stride):
    model = build(**MODELS[name])
    kind = "window" if context else "blocks"
    protocol = EvaluationProtocol(
        kind=kind, segment_length=context + stride, context=context or None, stride=stride if context else None
    )
    pieces = [passages(text, protocol, START) for text in TEXTS]
    scores = iter(score(model, [p for some in pieces for p in some], segment_length=context + stride, batch_size=4))
    for text, some in zip(TEXTS, pieces, strict=True):
        found = -sum(next(scores)[0] for _ in some)
        expected, _ = by_hand(model, [START, *text.tolist()], lambda n: max((n - 1) // stride * stride - context, 0))
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("batch_size", [3])
@pytest.mark.parametrize("streams", [1, 3])
def test_memory_is_carried_through_every_text_by_itself(batch_size, streams):
    model = build(**XL)
    protocol = EvaluationProtocol(kind="memory", segment_length=4, streams=streams, memory_length=6)
    pieces = [passages(text, protocol, START) for text in TEXTS]
    scores = iter(score(model, [p for some in pieces for p in some], segment_length=4, batch_size=batch_size))
    for text, some in zip(TEXTS, pieces, strict=True):
        found = -sum(next(scores)[0] for _ in some)
        expected = measure(model, text, protocol, batch_size=1, start_id=START)
        assert found == pytest.approx(expected.nll, rel=1e-12)


def test_greedy_is_told_of_every_passage():
    """Half of the texts are what the model would write, and half are not, in one token somewhere."""
    model, texts = build(**MODELS["adaptive"]), []
    for length in range(3, 9):
        text = [START, length]
        while len(text) < length + 2:
            text.append(int(log_probs_after(model, text).argmax()))
        if length % 2:
            text[-1 - length // 2] = (text[-1 - length // 2] + 1) % VOCABULARY
        texts.append(text)
    found = score(model, [Passage(np.asarray(text), 1) for text in texts], segment_length=9, batch_size=4)
    assert [greedy for _, greedy in found] == [False, True, False, True, False, True]
    assert [greedy for _, greedy in found] == [by_hand(model, text, lambda n: 0, 2)[1] for text in texts]
