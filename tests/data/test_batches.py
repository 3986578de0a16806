"""Batches of text, masked text, pairs and examples: pure functions of (seed, epoch, index), every token once an epoch."""

from __future__ import annotations

import itertools
import math
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank.config.data import DataConfig
from fullrank.core.errors import InputError
from fullrank.data import (
    Batch,
    Blocks,
    Masking,
    PairBatches,
    Streams,
    Windows,
    WordVocabulary,
    masked_blocks,
    pair_batch,
    prepare_pairs,
)
from fullrank.data.batches import Encoded, ExampleBatches, MaskedBatch, MaskedBatches, by_length, subset

START = 10_000  # no token of the texts below


def text(size: int) -> np.ndarray:
    """Every token differs, so that a token's value is its place."""
    return np.arange(size, dtype=np.uint16)


def scored(source: Blocks | Streams, epoch: int = 0) -> list[int]:
    """Targets of an epoch with weight 1; checks shapes, types, and that each input is the token before its target."""
    found: list[int] = []
    for index in range(source.batches_per_epoch):
        batch = source.batch(epoch, index)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.shape == batch.targets.shape
        weights = torch.ones(batch.targets.shape) if batch.weights is None else batch.weights
        assert weights.dtype == torch.float32
        assert set(weights.unique().tolist()) <= {0.0, 1.0}
        for x, y, w in zip(batch.inputs, batch.targets, weights, strict=True):
            size = int(w.sum())
            assert w[:size].all(), "padding stands only at the end of a row"
            expected = [START if t == 0 else t - 1 for t in y[:size].tolist()]
            assert x[:size].tolist() == expected
            found += y[:size].tolist()
        assert batch.tokens == int(weights.sum())
    return found


sizes = st.tuples(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))


@given(sizes, st.booleans(), st.integers(-5, 2**70), st.integers(0, 3))
@settings(deadline=None)
def test_blocks_score_every_token_once(size, shuffle, seed, epoch):
    tokens, rows, length = size
    blocks = Blocks(text(tokens), batch_size=rows, segment_length=length, start_id=START, shuffle=shuffle, seed=seed)
    found = scored(blocks, epoch)
    assert sorted(found) == list(range(tokens))
    if not shuffle:
        assert found == list(range(tokens))
    assert blocks.tokens_per_epoch == tokens
    assert blocks.batches_per_epoch == ceil(ceil(tokens / length) / rows)
    assert blocks.tokens_of_batches(epoch) == [blocks.batch(epoch, i).tokens for i in range(blocks.batches_per_epoch)]


@given(sizes)
@settings(deadline=None)
def test_kept_streams_score_every_token_once(size):
    tokens, rows, length = size
    streams = Streams(text(tokens), batch_size=rows, segment_length=length, start_id=START, remainder="keep")
    assert sorted(scored(streams)) == list(range(tokens))
    assert streams.tokens_per_epoch == tokens
    assert streams.tokens_of_batches(0) == [streams.batch(0, i).tokens for i in range(streams.batches_per_epoch)]


@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 40), st.integers(1, 40))
@settings(deadline=None)
def test_windows_score_every_token_once_with_the_context_before_it(tokens, rows, context, stride):
    windows = Windows(text(tokens), batch_size=rows, context=context, stride=stride, start_id=START)
    assert windows.tokens_per_epoch == tokens
    assert windows.batches_per_epoch == ceil(ceil(tokens / stride) / rows)
    found, counted = [], 0
    for index in range(windows.batches_per_epoch):
        batch = windows.batch(0, index)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.weights.dtype == torch.float32
        assert set(batch.weights.unique().tolist()) <= {0.0, 1.0}
        counted += batch.tokens
        for x, y, w in zip(batch.inputs.tolist(), batch.targets.tolist(), batch.weights.tolist(), strict=True):
            first = len(found) // stride * stride  # the window's own tokens begin here
            begins, ends = max(0, first - context), min(first + stride, tokens)
            size = ends - begins
            assert y[:size] == list(range(begins, ends))
            assert x[:size] == [START if t == 0 else t - 1 for t in y[:size]]
            assert w == [0.0] * (first - begins) + [1.0] * (ends - first) + [0.0] * (len(w) - size)
            found += [target for target, counts in zip(y, w, strict=True) if counts]
    assert found == list(range(tokens))
    assert counted == tokens


@given(sizes)
@settings(deadline=None)
def test_dropped_streams_are_contiguous(size):
    tokens, rows, length = size
    if tokens < rows * length:
        with pytest.raises(InputError, match=r"too few for .* lower train.batch_size or train.segment_length"):
            Streams(text(tokens), batch_size=rows, segment_length=length, start_id=START)
        return
    streams = Streams(text(tokens), batch_size=rows, segment_length=length, start_id=START)
    batches = [streams.batch(0, i) for i in range(streams.batches_per_epoch)]
    assert all(batch.weights is None for batch in batches)
    assert streams.tokens_of_batches(0) == [batch.tokens for batch in batches]
    whole = torch.cat([batch.targets for batch in batches], dim=1)
    each = tokens // rows
    assert whole.shape == (rows, each // length * length)
    for row, targets in enumerate(whole.tolist()):
        assert targets == list(range(row * each, row * each + len(targets)))
    found = scored(streams)
    assert len(found) == len(set(found)) == streams.tokens_per_epoch
    assert tokens - len(found) <= rows * length + rows - 2


def test_a_worked_example():
    blocks = Blocks(np.array([5, 6, 7, 8, 9]), batch_size=2, segment_length=2, start_id=1)
    first, second = blocks.batch(0, 0), blocks.batch(0, 1)
    assert first.inputs.tolist() == [[1, 5], [6, 7]]
    assert first.targets.tolist() == [[5, 6], [7, 8]]
    assert first.weights is None
    assert second.inputs.tolist() == [[8, 1]]
    assert second.targets[0, 0] == 9
    assert second.weights.tolist() == [[1, 0]]
    streams = Streams(np.array([5, 6, 7, 8, 9]), batch_size=2, segment_length=2, start_id=1, remainder="keep")
    assert streams.batch(0, 0).inputs.tolist() == [[1, 5], [7, 8]]
    assert streams.batch(0, 1).weights.tolist() == [[1, 0], [0, 0]]


def test_a_worked_example_of_windows():
    windows = Windows(np.array([5, 6, 7, 8, 9]), batch_size=3, context=3, stride=2, start_id=1)
    batch = windows.batch(0, 0)
    assert batch.inputs.tolist() == [[1, 5, 1, 1], [1, 5, 6, 7], [5, 6, 7, 8]]
    assert batch.targets[1:].tolist() == [[5, 6, 7, 8], [6, 7, 8, 9]]
    assert batch.weights.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]]


def test_batches_do_not_depend_on_what_was_asked_before():
    def make() -> Blocks:
        return Blocks(text(1000), batch_size=4, segment_length=7, start_id=START, shuffle=True, seed=3)

    one, other = make(), make()
    places = [(epoch, index) for epoch in range(6) for index in (0, 5, 35)]
    forward = {place: one.batch(*place) for place in places}
    for place in reversed(places):
        again = other.batch(*place)
        assert torch.equal(again.inputs, forward[place].inputs)
        assert torch.equal(again.targets, forward[place].targets)


def test_order_differs_between_epochs_and_seeds():
    def order(seed: int, epoch: int) -> list[int]:
        blocks = Blocks(text(800), batch_size=8, segment_length=4, start_id=START, shuffle=True, seed=seed)
        return scored(blocks, epoch)

    orders = {tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 6


def test_every_order_of_three_blocks_is_as_likely():
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(1200):
        blocks = Blocks(text(3), batch_size=3, segment_length=1, start_id=START, shuffle=True, seed=7)
        key = tuple(blocks.batch(epoch, 0).targets[:, 0].tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6
    # chi-squared with 5 degrees of freedom; 25.7 is its 99.99 % point
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 25.7


def test_batches_are_writable_copies_of_a_memory_map(tmp_path):
    text(50).tofile(tmp_path / "ids.bin")
    ids = np.memmap(tmp_path / "ids.bin", dtype=np.uint16, mode="r")
    batch = Blocks(ids, batch_size=2, segment_length=5, start_id=START).batch(0, 0)
    batch.targets.fill_(0)
    assert ids[3] == 3


@pytest.mark.parametrize("rows", [1, 2])
def test_inputs_and_targets_are_tensors_of_their_own(rows):
    batch = Blocks(text(50), batch_size=rows, segment_length=5, start_id=START).batch(0, 0)
    batch.inputs.fill_(0)
    assert batch.targets.flatten().tolist() == list(range(5 * rows))


def test_places_outside_an_epoch():
    blocks = Blocks(text(10), batch_size=2, segment_length=2, start_id=START)
    for place in [(0, 3), (0, -1), (-1, 0)]:
        with pytest.raises(IndexError, match="an epoch has batches 0 to 2"):
            blocks.batch(*place)


@pytest.mark.parametrize("kind", [Blocks, Streams])
def test_impossible_sizes(kind):
    with pytest.raises(InputError, match="non-empty sequence"):
        kind(text(0), batch_size=1, segment_length=1, start_id=0)
    with pytest.raises(InputError, match=r"train.batch_size: a positive number, given 0"):
        kind(text(5), batch_size=0, segment_length=1, start_id=0)
    with pytest.raises(InputError, match=r"train.segment_length: a positive number, given -1"):
        kind(text(5), batch_size=1, segment_length=-1, start_id=0)


def test_impossible_windows():
    for changed, said in (
        ({"context": -1}, "eval.context: zero or more tokens, given -1"),
        ({"stride": 0}, "eval.stride: a positive number, given 0"),
        ({"batch_size": 0}, "batch_size: a positive number, given 0"),
    ):
        with pytest.raises(InputError, match=said):
            Windows(text(5), **{"batch_size": 1, "context": 2, "stride": 2, "start_id": 0, **changed})
    with pytest.raises(InputError, match="non-empty sequence"):
        Windows(text(0), batch_size=1, context=2, stride=2, start_id=0)
    with pytest.raises(IndexError, match="an epoch has batches 0 to 1"):
        Windows(text(5), batch_size=2, context=2, stride=2, start_id=0).batch(0, 2)


def test_batch_moves_with_its_weights():
    batch = Batch(torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64), torch.tensor([[1.0, 0.0]]))
    moved = batch.to("meta")
    assert moved.inputs.device.type == moved.targets.device.type == moved.weights.device.type == "meta"
    assert batch.tokens == 1


def test_a_segment_beyond_the_text_is_the_whole_text_and_not_padding() -> None:
    """Otherwise one block of 2^31 - 1 tokens would ask for tens of gigabytes."""
    for source in (
        Blocks(text(23), batch_size=4, segment_length=2**31 - 1, start_id=START),
        Streams(text(23), batch_size=4, segment_length=2**31 - 1, start_id=START, remainder="keep"),
    ):
        assert source.batches_per_epoch == 1
        assert scored(source) == list(range(23))
        assert source.batch(0, 0).targets.numel() <= 24
    for context, stride in ((2**31 - 1, 10), (10, 2**31 - 1)):
        windows = Windows(text(23), batch_size=4, context=context, stride=stride, start_id=START)
        assert windows.batch(0, 0).targets.numel() <= 4 * 23


def lengths(seed: int, count: int) -> list[tuple[int, int]]:
    draw = np.random.default_rng(seed)
    return [(int(m), int(max(0, m + draw.integers(-3, 4)))) for m in draw.integers(0, 25, size=count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    for split, count in (("train", 500), ("valid", 40), ("test", 1)):
        rows = lengths(3, count)
        for side, suffix in enumerate(("de", "en")):
            text = "".join(" ".join(f"{suffix}{i % 7}" for i in range(row[side])) + "\n" for row in rows)
            (folder / f"{split}.{suffix}").write_text(text, encoding="utf-8")
    return prepare_pairs(
        DataConfig(
            name="parallel",
            dir=str(folder),
            train="train",
            valid="valid",
            test="test",
            source="de",
            target="en",
            tokens="word",
            vocabulary="separate",
            cache=str(folder / "cache"),
        )
    )


def test_a_batch_holds_its_pairs_padded_with_the_end_of_sentence(corpus):
    pairs = corpus.pairs("valid")
    chosen = np.array([3, 0, 7, int(np.argmin(pairs.source_lengths))])
    batch = pair_batch(pairs, chosen)
    assert batch.inputs.shape == batch.targets.shape == (4, int(pairs.target_lengths[chosen].max()) + 1)
    assert batch.source_ids.shape == (4, int(pairs.source_lengths[chosen].max()) + 1)
    assert {t.dtype for t in (batch.source_ids, batch.inputs, batch.targets)} == {torch.int64}
    eos, width = 0, batch.targets.shape[1]
    for row, i in enumerate(chosen.tolist()):
        source, target = pairs.source(i).tolist(), pairs.target(i).tolist()
        padding = batch.source_ids.shape[1] - len(source) - 1
        assert batch.source_ids[row].tolist() == [*source, eos] + [eos] * padding
        assert batch.source_mask[row].tolist() == [True] * (len(source) + 1) + [False] * padding
        rest = width - len(target) - 1
        assert batch.inputs[row, : len(target) + 1].tolist() == [eos, *target]
        assert batch.targets[row].tolist() == [*target, eos] + [eos] * rest
        assert batch.weights[row].tolist() == [1.0] * (len(target) + 1) + [0.0] * rest
        # what is read where nothing counts: the same entry as everywhere in the padding
        assert batch.inputs[row, len(target) + 1 :].tolist() == [eos] * rest
    assert batch.tokens == int((pairs.target_lengths[chosen] + 1).sum())
    assert batch.to("cpu").targets.tolist() == batch.targets.tolist()
    whole = pair_batch(pairs, np.array([5]))
    assert whole.source_mask is None
    assert whole.weights is None
    assert whole.to("cpu").weights is None
    assert whole.tokens == len(pairs.target(5)) + 1
    whole.inputs[:] = 1
    assert not torch.equal(whole.inputs, whole.targets)


@pytest.mark.parametrize("limit", [30, 128, 100_000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_pair_once_an_epoch_and_no_batch_beyond_the_limit(corpus, limit, shuffle):
    pairs = corpus.pairs("train")
    batches = PairBatches(pairs, batch_tokens=limit, seed=5, shuffle=shuffle)
    for epoch in (0, 1, 7):
        seen: list[int] = []
        tokens = 0
        for index in range(batches.batches_per_epoch):
            chosen, batch = batches.indices(epoch, index), batches.batch(epoch, index)
            seen += chosen.tolist()
            assert batch.source_ids.numel() <= limit
            assert batch.targets.numel() <= limit
            assert torch.equal(batch.targets, pair_batch(pairs, chosen).targets)
            tokens += batch.tokens
            assert batches.tokens_of_batches(epoch)[index] == batch.tokens
        assert sorted(seen) == list(range(len(pairs)))
        assert len(batches.tokens_of_batches(epoch)) == batches.batches_per_epoch
        assert tokens == batches.tokens_per_epoch == int((pairs.target_lengths + 1).sum())
    if limit == 100_000:
        assert batches.batches_per_epoch == 1
    with pytest.raises(IndexError):
        batches.batch(0, batches.batches_per_epoch)
    with pytest.raises(IndexError):
        batches.batch(-1, 0)


def test_batches_are_filled(corpus):
    """No batch could have taken the first pair of the next longer one."""
    pairs, limit = corpus.pairs("train"), 200
    batches = PairBatches(pairs, batch_tokens=limit, seed=5, shuffle=False)
    longer = np.maximum(pairs.source_lengths, pairs.target_lengths) + 1
    rows = [batches.indices(0, i) for i in range(batches.batches_per_epoch)]
    widths = [longer[row] for row in rows]
    for here, after in itertools.pairwise(widths):
        assert here.max() <= after.min()
        assert (len(here) + 1) * after.min() > limit


def test_a_batch_depends_on_seed_epoch_and_index_alone(corpus):
    pairs = corpus.pairs("train")
    one = PairBatches(pairs, batch_tokens=128, seed=5)
    two = PairBatches(pairs, batch_tokens=128, seed=5)
    places = [(0, 3), (4, 0), (1, one.batches_per_epoch - 1), (0, 0)]
    first = [one.indices(*place).tolist() for place in places]
    assert [two.indices(*place).tolist() for place in reversed(places)] == first[::-1]
    other = PairBatches(pairs, batch_tokens=128, seed=6)
    number = one.batches_per_epoch
    assert other.batches_per_epoch == number

    def epoch_of(batches, epoch):
        return [tuple(batches.indices(epoch, i).tolist()) for i in range(number)]

    assert epoch_of(one, 0) != epoch_of(one, 1)
    assert epoch_of(one, 0) != epoch_of(other, 0)
    # not only the order of batches changes: so does who is in them
    assert {frozenset(b) for b in epoch_of(one, 0)} != {frozenset(b) for b in epoch_of(one, 1)}

    # yet the shapes of an epoch are always the same
    def shapes(epoch):
        return sorted(tuple(one.batch(epoch, i).targets.shape) for i in range(number))

    assert shapes(0) == shapes(1)
    unshuffled = PairBatches(pairs, batch_tokens=128, seed=5, shuffle=False)
    assert epoch_of(unshuffled, 0) == epoch_of(unshuffled, 3)


def test_pairs_are_sorted_by_length_so_little_is_padding(corpus):
    pairs = corpus.pairs("train")
    batches = PairBatches(pairs, batch_tokens=256, seed=1)
    padded = real = 0
    for index in range(batches.batches_per_epoch):
        batch = batches.batch(0, index)
        padded += batch.source_ids.numel() + batch.targets.numel()
        real += batch.tokens + int(pairs.source_lengths[batches.indices(0, index)].sum()) + len(batch.targets)
    assert 1 - real / padded < 0.12


def test_what_cannot_be_a_batch(corpus):
    pairs = corpus.pairs("train")
    longest = int(max(pairs.source_lengths.max(), pairs.target_lengths.max())) + 1
    assert PairBatches(pairs, batch_tokens=longest, seed=1).batches_per_epoch > 0
    message = (
        rf"train.batch_tokens: pair [\d,]+ of train has {longest} tokens .* batch of {longest - 1} .*data.max_length"
    )
    with pytest.raises(InputError, match=message):
        PairBatches(pairs, batch_tokens=longest - 1, seed=1)
    with pytest.raises(InputError, match=r"train.batch_tokens: a positive number, given 0"):
        PairBatches(pairs, batch_tokens=0, seed=1)


def encoded(count: int, seed: int = 0) -> Encoded:
    """Row i begins with i + 10, so that it is known again."""
    lengths = np.random.default_rng(seed).integers(1, 40, count)
    rows = [[i + 10, *range(1, n)] for i, n in enumerate(lengths)]
    return Encoded(
        {
            "input_ids": rows,
            "token_type_ids": [[1] * len(r) for r in rows],
            "attention_mask": [[1] * len(r) for r in rows],
        },
        {"input_ids": 7, "token_type_ids": 0, "attention_mask": 0},
    )


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("count", "size"), [(1, 4), (23, 4), (24, 4), (1003, 8)])
def test_every_example_comes_once_an_epoch_and_in_another_order(count: int, size: int, grouped: bool) -> None:
    batches = ExampleBatches(encoded(count), batch_size=size, seed=3, group_by_length=grouped)
    orders = []
    for epoch in (0, 1):
        found = [batches.batch(epoch, i).indices.tolist() for i in range(batches.batches_per_epoch)]
        assert sorted(i for part in found for i in part) == list(range(count))
        assert sum(len(part) == size for part in found) >= batches.batches_per_epoch - 1
        orders.append(found)
    if count > 20:
        assert orders[0] != orders[1]


def test_a_batch_is_a_function_of_seed_epoch_and_index() -> None:
    def make(seed: int) -> ExampleBatches:
        return ExampleBatches(encoded(300), batch_size=8, seed=seed)

    one, two = make(1), make(1)
    two.batch(4, 2)
    two.batch(0, 9)
    assert two.batch(2, 5).indices.tolist() == one.batch(2, 5).indices.tolist()
    assert make(2).batch(2, 5).indices.tolist() != one.batch(2, 5).indices.tolist()
    with pytest.raises(IndexError):
        one.batch(0, one.batches_per_epoch)


def test_rows_are_padded_on_the_right_to_the_longest() -> None:
    examples = Encoded(
        {"input_ids": [[5, 6], [8], [1, 2, 3]], "attention_mask": [[1, 1], [1], [1, 1, 1]]},
        {"input_ids": 9, "attention_mask": 0},
    )
    rows = examples.rows(np.array([1, 0]))
    assert rows["input_ids"].tolist() == [[8, 9], [5, 6]]
    assert rows["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert rows["input_ids"].dtype == torch.int64


def test_grouping_spares_padding_and_keeps_chance() -> None:
    examples = encoded(2000)

    def padded(grouped: bool) -> float:
        batches = ExampleBatches(examples, batch_size=16, seed=1, group_by_length=grouped)
        parts = [batches.batch(0, i) for i in range(batches.batches_per_epoch)]
        return 1 - sum(part.tokens for part in parts) / sum(part.inputs["input_ids"].numel() for part in parts)

    assert padded(True) < 0.1 < 0.3 < padded(False)
    first = [ExampleBatches(examples, batch_size=16, seed=seed).batch(0, 0).indices.tolist() for seed in range(20)]
    assert len({tuple(found) for found in first}) == 20  # not the longest ones, whatever the seed


def test_evaluation_reads_every_example_once() -> None:
    examples = encoded(57)
    parts = list(by_length(examples, 8))
    assert sorted(i for part in parts for i in part.indices.tolist()) == list(range(57))
    for part in parts:
        assert (part.inputs["input_ids"][:, 0] - 10).tolist() == part.indices.tolist()


def test_a_subset_is_fixed_by_its_own_seed() -> None:
    assert subset(10, None, 0).tolist() == subset(10, 10, 0).tolist() == subset(10, 99, 0).tolist() == list(range(10))
    chosen = subset(100, 30, 5)
    assert len(set(chosen.tolist())) == 30
    assert chosen.tolist() == sorted(chosen.tolist()) == subset(100, 30, 5).tolist()
    assert chosen.tolist() != subset(100, 30, 6).tolist()
    assert set(subset(100, 20, 5).tolist()) < set(chosen.tolist())  # a smaller one is part of it


# masked text


WORDS = 20
TOKENIZER = WordVocabulary(["<eos>", *(f"w{i}" for i in range(WORDS - 2)), "<sos>"], line_start=True)
EOS, SOS, MASK = 0, WORDS - 1, WORDS


def masking(probability: float = 0.15, replaced: float = 0.8, drawn: float = 0.1) -> Masking:
    return Masking.of(TOKENIZER, MASK, probability=probability, replaced=replaced, drawn=drawn)


def marked_text(size: int, seed: int = 0) -> np.ndarray:
    """Words drawn at random, and every fifth token a mark."""
    ids = np.random.default_rng(seed).integers(1, WORDS - 1, size).astype(np.uint16)
    ids[::10], ids[5::10] = EOS, SOS
    return ids


def within(count: int, trials: int, p: float) -> bool:
    """True if a binomial count is within five standard deviations of its mean."""
    return abs(count - trials * p) <= 5 * math.sqrt(trials * p * (1 - p))


@pytest.mark.parametrize(
    ("p", "replaced", "drawn"), [(0.15, 0.8, 0.1), (0.5, 0.2, 0.5), (0.3, 1.0, 0.0), (0.3, 0.0, 1.0)]
)
def test_shares(p: float, replaced: float, drawn: float) -> None:
    ids = marked_text(100_000)
    (batch,) = masked_blocks(ids, masking(p, replaced, drawn), batch_size=1, segment_length=len(ids), seed=3)
    seen, at = batch.inputs[0].numpy(), batch.at.numpy()
    assert torch.equal(batch.targets, torch.from_numpy(ids.astype(np.int64))[batch.at])
    untouched = np.setdiff1d(np.arange(len(ids)), at)
    assert (seen[untouched] == ids[untouched]).all(), "nothing else is changed"
    assert not np.isin(ids[at], [EOS, SOS]).any(), "marks are not asked for"
    words = int((~np.isin(ids, [EOS, SOS])).sum())
    assert within(len(at), words, p)
    now, was = seen[at], ids[at]
    assert not np.isin(now, [EOS, SOS]).any(), "marks are not drawn"
    own = 1 / (WORDS - 2)  # a random token is now and then the right one
    for count, share in (
        ((now == MASK).sum(), replaced),
        (((now != MASK) & (now != was)).sum(), drawn * (1 - own)),
        ((now == was).sum(), 1 - replaced - drawn + drawn * own),
    ):
        assert within(int(count), len(at), share)
    other = now[(now != MASK) & (now != was)]
    if drawn:
        counts = np.bincount(other, minlength=WORDS)[1 : WORDS - 1]
        expected = len(other) / (WORDS - 2)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < (WORDS - 3) + 6 * math.sqrt(2 * (WORDS - 3)), "random tokens are drawn alike"


def test_the_three_kinds_by_chi_square() -> None:
    """2 degrees of freedom: 25 is beyond all chance."""
    ids = np.full(200_000, 7, dtype=np.uint16)
    (batch,) = masked_blocks(ids, masking(), batch_size=1, segment_length=len(ids), seed=1)
    now = batch.inputs[0].numpy()[batch.at.numpy()]
    own = 0.1 / (WORDS - 2)
    observed = np.array([(now == MASK).sum(), ((now != MASK) & (now != 7)).sum(), (now == 7).sum()])
    expected = len(now) * np.array([0.8, 0.1 - own, 0.1 + own])
    assert ((observed - expected) ** 2 / expected).sum() < 25


def test_masks_of_an_evaluation_depend_on_seed_and_place_only() -> None:
    ids = marked_text(1003)

    def read(seed: int = 0, size: int = 1003, **shape: int) -> tuple[list[int], list[int]]:
        inputs: list[int] = []
        targets: list[int] = []
        for batch in masked_blocks(ids[:size], masking(), seed=seed, **shape):
            mask = torch.ones_like(batch.inputs) if batch.attention_mask is None else batch.attention_mask
            assert batch.read == int(mask.sum())
            inputs += batch.inputs[mask != 0].tolist()
            targets += batch.targets.tolist()
        return inputs, targets

    once = read(batch_size=4, segment_length=16)
    assert len(once[0]) == 1003
    for batch_size, segment_length in ((1, 1003), (7, 16), (3, 50), (1, 1)):
        assert read(batch_size=batch_size, segment_length=segment_length) == once
    assert read(batch_size=4, segment_length=16, seed=1) != once
    assert read(batch_size=4, segment_length=16, size=400)[0] == once[0][:400], (
        "the beginning of a text is masked alike"
    )


@pytest.mark.parametrize("shuffled", [True, False])
def test_training_batches_are_pure_functions(shuffled: bool) -> None:
    ids = marked_text(1003)

    def batches(seed: int) -> MaskedBatches:
        options = {"batch_size": 4, "segment_length": 16, "start_id": EOS}
        plain = Blocks(ids, shuffle=True, seed=7, **options) if shuffled else Streams(ids, **options)
        return MaskedBatches(plain, masking(), seed=seed)

    def content(batch: MaskedBatch) -> tuple[list[int], list[int]]:
        return batch.inputs.flatten().tolist(), batch.at.tolist()

    made = batches(2)
    places = [(epoch, index) for epoch in range(3) for index in range(made.batches_per_epoch)]
    forwards = [content(made.batch(*place)) for place in places]
    again = batches(2)
    assert [content(again.batch(*place)) for place in reversed(places)] == forwards[::-1]
    assert len({str(asked) for _, asked in forwards}) == len(places), "every batch of every epoch has its own masks"
    assert content(batches(3).batch(0, 0)) != forwards[0]
    assert (made.tokens_per_epoch, made.batches_per_epoch) == (again.tokens_per_epoch, again.batches_per_epoch)
    read = [made.batch(0, index).read for index in range(made.batches_per_epoch)]
    assert sum(read) == made.tokens_per_epoch


def test_padding_is_not_asked_for() -> None:
    targets = torch.tensor([[3, 4, 5, 6], [7, 8, 3, 3]])
    weights = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    every = Masking.of(TOKENIZER, MASK, probability=1.0, replaced=1.0, drawn=0.0)
    batch = every.batch(Batch(targets, targets, weights), np.random.default_rng(0))
    assert batch.at.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.targets.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.inputs.tolist() == [[MASK] * 4, [MASK, MASK, 3, 3]]
    assert batch.attention_mask is not None
    assert torch.equal(batch.attention_mask, weights)
    assert (batch.read, batch.tokens) == (6, 6)
    assert targets[0, 0] == 3, "the text itself is left alone"
    moved = batch.to("cpu")
    assert torch.equal(moved.inputs, batch.inputs)


def test_the_mask_is_no_entry_of_the_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.vocab_size: .*at least 21, .*given 20"):
        Masking.of(TOKENIZER, WORDS - 1, probability=0.15, replaced=0.8, drawn=0.1)
    with pytest.raises(InputError, match="nothing to mask"):
        Masking.of(WordVocabulary(["<eos>"]), 1, probability=0.15, replaced=0.8, drawn=0.1)
