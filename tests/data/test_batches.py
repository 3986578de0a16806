"""Batches of text: pure functions of (seed, epoch, index), every token once an epoch."""

from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.config.run import TrainConfig
from fullrank.core.errors import InputError
from fullrank.data.batches import Blocks, Streams

START = 10_000  # no token of the texts below


def text(size):
    """Every token differs: its value is its position."""
    return np.arange(size, dtype=np.uint16)


def scored(source, epoch=0):
    """Targets of an epoch with weight 1; checks shapes, types, and that each input is the token before its target."""
    targets = []
    for index in range(source.batches_per_epoch):
        batch = source.batch(epoch, index)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.shape == batch.targets.shape
        weights = torch.ones(batch.targets.shape) if batch.weights is None else batch.weights
        assert weights.dtype == torch.float32
        assert set(weights.unique().tolist()) <= {0.0, 1.0}
        for x, y, weight in zip(batch.inputs, batch.targets, weights, strict=True):
            size = int(weight.sum())
            assert weight[:size].all(), "padding stands only at the end of a row"
            expected = [START if t == 0 else t - 1 for t in y[:size].tolist()]
            assert x[:size].tolist() == expected
            targets += y[:size].tolist()
        assert batch.tokens == int(weights.sum())
    return targets


sizes = st.tuples(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))


@given(sizes, st.booleans(), st.integers(-5, 2**70), st.integers(0, 3))
@settings(deadline=None)
def test_blocks_score_every_token_once(size, shuffle, seed, epoch):
    tokens, rows, length = size
    blocks = Blocks(text(tokens), batch_size=rows, segment_length=length, start_id=START, shuffle=shuffle, seed=seed)
    targets = scored(blocks, epoch)
    assert sorted(targets) == list(range(tokens))
    if not shuffle:
        assert targets == list(range(tokens))
    assert sum(blocks.tokens_of_batches(0)) == tokens
    assert blocks.batches_per_epoch == ceil(ceil(tokens / length) / rows)
    assert blocks.tokens_of_batches(epoch) == [blocks.batch(epoch, i).tokens for i in range(blocks.batches_per_epoch)]


@given(sizes)
@settings(deadline=None)
def test_dropped_streams_are_contiguous(size):
    tokens, rows, length = size
    if tokens < rows * length:
        with pytest.raises(InputError, match=r"too few for .* lower train.batch_size or train.segment_length"):
            Streams(text(tokens), TrainConfig(batch_size=rows, segment_length=length), START)
        return
    streams = Streams(text(tokens), TrainConfig(batch_size=rows, segment_length=length), START)
    batches = [streams.batch(0, i) for i in range(streams.batches_per_epoch)]
    assert all(batch.weights is None for batch in batches)
    assert streams.tokens_of_batches(0) == [batch.tokens for batch in batches]
    read = torch.cat([batch.targets for batch in batches], dim=1)
    length_of_stream = tokens // rows
    assert read.shape == (rows, length_of_stream // length * length)
    for row, targets in enumerate(read.tolist()):
        assert targets == list(range(row * length_of_stream, row * length_of_stream + len(targets)))
    predicted = scored(streams)
    assert len(predicted) == len(set(predicted)) == sum(streams.tokens_of_batches(0))
    assert tokens - len(predicted) <= rows * length + rows - 2


def streams(tokens=4003, **options):
    return Streams(text(tokens), TrainConfig(batch_size=4, segment_length=20, seed=3, **options), START)


def test_random_segments_fill_every_stream_exactly():
    source = streams(segment_deviation=4.0, half_segments=0.25)
    stream = 4003 // 4
    assert source.batches_per_epoch == round(stream / (20 * 0.875))
    for epoch in (0, 1):
        batches = [source.batch(epoch, index) for index in range(source.batches_per_epoch)]
        read = torch.cat([batch.targets for batch in batches], 1)
        assert torch.equal(read, torch.arange(4 * stream).view(4, stream))
        assert source.tokens_of_batches(epoch) == [batch.tokens for batch in batches]
        assert sum(source.tokens_of_batches(epoch)) == 4 * stream
        assert all(torch.equal(b.inputs[:, 1:], b.targets[:, :-1]) and b.weights is None for b in batches)
    assert source.tokens_of_batches(0) != source.tokens_of_batches(1)
    again = streams(segment_deviation=4.0, half_segments=0.25)
    assert torch.equal(source.batch(1, 7).targets, again.batch(1, 7).targets)


def test_lengths_of_random_segments_are_normal():
    options = TrainConfig(batch_size=1, segment_length=70, segment_deviation=5.0, half_segments=0.05, seed=0)
    source = Streams(np.zeros(700_000, np.uint16), options, start_id=0)
    lengths = np.array(source.tokens_of_batches(2))
    short = lengths < 52  # between the means 35 and 70
    assert abs(short.mean() - 0.05) < 5 * (0.05 * 0.95 / len(lengths)) ** 0.5
    for those, mean in ((lengths[short], 35), (lengths[~short], 70)):
        assert abs(those.mean() - mean) < 0.01 * mean + 5 * 5 / len(those) ** 0.5
        assert abs(those.std() - 5) < 5 * 5 / (2 * len(those)) ** 0.5 + 0.1


def test_context_is_read_again_and_not_predicted():
    source = streams(context=15, segment_deviation=3.0)
    plain = streams(segment_deviation=3.0)
    seen = 0
    for index in range(source.batches_per_epoch):
        batch, without_context = source.batch(0, index), plain.batch(0, index)
        context = min(15, seen)
        assert torch.equal(batch.targets, without_context.targets)
        assert batch.inputs.shape[1] == context + batch.targets.shape[1]
        assert torch.equal(batch.inputs[:, context:], without_context.inputs)
        inner = batch.inputs[1:]  # row 0 begins with the start
        assert torch.equal(inner[:, 1:], inner[:, :1] + torch.arange(1, inner.shape[1]))
        seen += batch.targets.shape[1]


def test_partial_shuffle_turns_each_stream():
    source = streams(partial_shuffle=True, context=6)
    used = sum(source.tokens_of_batches(0)) // 4
    starts = []
    for epoch in (0, 1):
        batches = [source.batch(epoch, index) for index in range(source.batches_per_epoch)]
        read = torch.cat([batch.targets for batch in batches], 1)
        for row, targets in enumerate(read):
            first = int(targets[0]) - 1000 * row
            assert torch.equal(targets, (first + torch.arange(used)) % 1000 + 1000 * row)
        starts.append(read[:, 0] % 1000)
        assert torch.equal(batches[1].inputs[:, 1:6], batches[0].targets[:, -6:-1])
    assert len(set(starts[0].tolist())) > 1
    assert not torch.equal(*starts)


def test_no_random_segment_is_empty():
    random = {"segment_deviation": 16.0, "half_segments": 0.5, "segment_multiple": 12}
    source = Streams(text(20_000), TrainConfig(batch_size=1, segment_length=64, **random), START)
    lengths = [source.tokens_of_batches(epoch) for epoch in range(3)]
    assert all(min(epoch) > 0 and sum(epoch) == 20_000 for epoch in lengths)
    assert all(length % 12 == 0 for epoch in lengths for length in epoch[:-1])
