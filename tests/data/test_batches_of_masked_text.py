"""Batches of masked text: the shares of tokens that are predicted, replaced and drawn, and masks as pure functions."""

import math

import numpy as np
import pytest
import torch

from fullrank.config.run import TrainConfig
from fullrank.data import build_words
from fullrank.data.batches import Blocks, MaskedBatches, Masking, Streams, iterate_masked_blocks

WORDS = 20
TOKENIZER = build_words(["\n", *(f"w{i}" for i in range(WORDS - 2)), "<unk>"])
EOS = 0
MASK = WORDS


def masking(probability=0.15, replaced=0.8, drawn=0.1, seed=1):
    options = TrainConfig(mlm_probability=probability, mask_replace_prob=replaced, random_replace_prob=drawn, seed=seed)
    return Masking(TOKENIZER, MASK, options)


def marked_text(size, seed=0):
    """Words drawn at random, and every fifth token a mark."""
    ids = np.random.default_rng(seed).integers(1, WORDS, size).astype(np.uint16)
    ids[::5] = EOS
    return ids


def within(count, trials, p):
    """True if a binomial count is within five standard deviations of its mean."""
    return abs(count - trials * p) <= 5 * math.sqrt(trials * p * (1 - p))


@pytest.mark.parametrize(
    ("p", "replaced", "drawn"), [(0.15, 0.8, 0.1), (0.5, 0.2, 0.5), (0.3, 1.0, 0.0), (0.3, 0.0, 1.0)]
)
def test_shares(p, replaced, drawn):
    ids = marked_text(100_000)
    (batch,) = iterate_masked_blocks(ids, masking(p, replaced, drawn), batch_size=1, segment_length=len(ids), seed=3)
    inputs = batch.inputs[0].numpy()
    at = batch.at.numpy()
    assert torch.equal(batch.targets, torch.from_numpy(ids.astype(np.int64))[batch.at])
    untouched = np.setdiff1d(np.arange(len(ids)), at)
    assert (inputs[untouched] == ids[untouched]).all(), "nothing else is changed"
    assert not np.isin(ids[at], EOS).any(), "marks are not predicted"
    words = int((~np.isin(ids, EOS)).sum())
    assert within(len(at), words, p)
    after, before = inputs[at], ids[at]
    assert not np.isin(after, EOS).any(), "marks are not drawn"
    right_by_chance = 1 / (WORDS - 1)  # a random token is now and then the right one
    redrawn = (after != MASK) & (after != before)
    for count, share in (
        ((after == MASK).sum(), replaced),
        (redrawn.sum(), drawn * (1 - right_by_chance)),
        ((after == before).sum(), 1 - replaced - drawn + drawn * right_by_chance),
    ):
        assert within(int(count), len(at), share)
    if drawn:
        counts = np.bincount(after[redrawn], minlength=WORDS)[1:]
        expected = redrawn.sum() / (WORDS - 1)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < (WORDS - 2) + 6 * math.sqrt(2 * (WORDS - 2)), "random tokens are drawn alike"


def test_masks_of_an_evaluation_depend_on_seed_and_position_only():
    ids = marked_text(1003)

    def read(seed=0, size=1003, **shape):
        inputs = []
        targets = []
        for batch in iterate_masked_blocks(ids[:size], masking(), seed=seed, **shape):
            mask = torch.ones_like(batch.inputs) if batch.attention_mask is None else batch.attention_mask
            assert batch.read == int(mask.sum())
            inputs += batch.inputs[mask != 0].tolist()
            targets += batch.targets.tolist()
        return inputs, targets

    expected = read(batch_size=4, segment_length=16)
    assert len(expected[0]) == 1003
    for batch_size, segment_length in ((1, 1003), (7, 16), (3, 50), (1, 1)):
        assert read(batch_size=batch_size, segment_length=segment_length) == expected
    assert read(batch_size=4, segment_length=16, seed=1) != expected
    assert read(batch_size=4, segment_length=16, size=400)[0] == expected[0][:400], (
        "the beginning of a text is masked alike"
    )


@pytest.mark.parametrize("shuffled", [True, False])
def test_training_batches_are_pure_functions(shuffled):
    ids = marked_text(1003)

    def batches(seed):
        sizes = {"batch_size": 4, "segment_length": 16}
        streams = Streams(ids, TrainConfig(**sizes), EOS)
        plain = Blocks(ids, shuffle=True, seed=7, start_id=EOS, **sizes) if shuffled else streams
        return MaskedBatches(plain, masking(seed=seed))

    def content(batch):
        return batch.inputs.flatten().tolist(), batch.at.tolist()

    fresh = batches(2)
    positions = [(epoch, index) for epoch in range(3) for index in range(fresh.batches_per_epoch)]
    forwards = [content(fresh.batch(*position)) for position in positions]
    again = batches(2)
    assert [content(again.batch(*position)) for position in reversed(positions)] == forwards[::-1]
    assert len({str(masked) for _, masked in forwards}) == len(positions), (
        "every batch of every epoch has its own masks"
    )
    assert content(batches(3).batch(0, 0)) != forwards[0]
    read = [fresh.batch(0, index).read for index in range(fresh.batches_per_epoch)]
    assert read == fresh.tokens_of_batches(0)
