"""Batches of sentence pairs: filled to a limit of tokens, sorted by length, every pair once an epoch."""

import numpy as np
import pytest
import torch

from fullrank.config.run import DataConfig
from fullrank.data import prepare
from fullrank.data.padded_batches import PairBatches, pair_batch


def lengths(seed, count):
    draw = np.random.default_rng(seed)
    return [(int(m), int(max(0, m + draw.integers(-3, 4)))) for m in draw.integers(0, 25, size=count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    for split, count in (("train", 500), ("valid", 40), ("test", 1)):
        rows = lengths(3, count)
        for side, suffix in enumerate(("de", "en")):
            words = [f"{suffix}{i % 7}" for i in range(30)]
            lines = [" ".join(words[: row[side]]) + "\n" for row in rows]
            (folder / f"{split}.{suffix}").write_text("".join(lines), encoding="utf-8")
    files = {"train": "train", "valid": "valid", "test": "test", "source": "de", "target": "en"}
    files |= {"dir": str(folder), "cache": str(folder / "cache")}
    return prepare(DataConfig(name="parallel", tokens="word", vocabulary="separate", **files))


def test_a_batch_holds_its_pairs_padded_with_the_end_of_sentence(corpus):
    pairs = corpus.pairs("valid")
    chosen = np.array([3, 0, 7, int(np.argmin(pairs.source.lengths))])
    batch = pair_batch(pairs, chosen)
    assert batch.inputs.shape == batch.targets.shape == (4, int(pairs.target.lengths[chosen].max()) + 1)
    assert batch.source_ids.shape == (4, int(pairs.source.lengths[chosen].max()) + 1)
    assert {t.dtype for t in (batch.source_ids, batch.inputs, batch.targets)} == {torch.int64}
    eos = 0
    for row, i in enumerate(chosen.tolist()):
        source, target = pairs.source[i].tolist(), pairs.target[i].tolist()
        padding = batch.source_ids.shape[1] - len(source) - 1
        assert batch.source_ids[row].tolist() == [*source, eos] + [eos] * padding
        assert batch.source_mask[row].tolist() == [True] * (len(source) + 1) + [False] * padding
        unused = batch.targets.shape[1] - len(target) - 1
        assert batch.inputs[row, : len(target) + 1].tolist() == [eos, *target]
        assert batch.targets[row].tolist() == [*target, eos] + [eos] * unused
        assert batch.weights[row].tolist() == [1.0] * (len(target) + 1) + [0.0] * unused
        # in the padding, inputs and targets are the end of sentence
        assert batch.inputs[row, len(target) + 1 :].tolist() == [eos] * unused
    assert batch.tokens == int((pairs.target.lengths[chosen] + 1).sum())
    assert batch.to("cpu").targets.tolist() == batch.targets.tolist()
    single = pair_batch(pairs, np.array([5]))
    assert single.source_mask is None
    assert single.weights is None
    assert single.tokens == len(pairs.target[5]) + 1


@pytest.mark.parametrize("limit", [30, 128, 100_000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_pair_once_an_epoch_and_no_batch_beyond_the_limit(corpus, limit, shuffle):
    pairs = corpus.pairs("train")
    batches = PairBatches(pairs, batch_tokens=limit, seed=5, shuffle=shuffle)
    for epoch in (0, 1, 7):
        seen = []
        tokens = 0
        for index in range(batches.batches_per_epoch):
            chosen = batches.pairs_of_batches(epoch)[index]
            batch = batches.batch(epoch, index)
            seen += chosen.tolist()
            assert batch.source_ids.numel() <= limit
            assert batch.targets.numel() <= limit
            assert torch.equal(batch.targets, pair_batch(pairs, chosen).targets)
            tokens += batch.tokens
            assert batches.tokens_of_batches(epoch)[index] == batch.tokens
        assert sorted(seen) == list(range(len(pairs)))
        assert len(batches.tokens_of_batches(epoch)) == batches.batches_per_epoch
        assert tokens == int((pairs.target.lengths + 1).sum())
    assert limit < 100_000 or batches.batches_per_epoch == 1


def test_a_batch_depends_on_seed_epoch_and_index_alone(corpus):
    pairs = corpus.pairs("train")
    batches = PairBatches(pairs, batch_tokens=128, seed=5)
    same = PairBatches(pairs, batch_tokens=128, seed=5)
    positions = [(0, 3), (4, 0), (1, batches.batches_per_epoch - 1), (0, 0)]
    first = [batches.pairs_of_batches(position[0])[position[1]].tolist() for position in positions]
    assert [same.pairs_of_batches(position[0])[position[1]].tolist() for position in reversed(positions)] == first[::-1]
    of_another_seed = PairBatches(pairs, batch_tokens=128, seed=6)
    count = batches.batches_per_epoch
    assert of_another_seed.batches_per_epoch == count

    def epoch_of(batches, epoch):
        return [tuple(batches.pairs_of_batches(epoch)[i].tolist()) for i in range(count)]

    assert epoch_of(batches, 0) != epoch_of(batches, 1)
    assert epoch_of(batches, 0) != epoch_of(of_another_seed, 0)
    # not only the order of the batches differs: other pairs are together
    assert {frozenset(b) for b in epoch_of(batches, 0)} != {frozenset(b) for b in epoch_of(batches, 1)}

    unshuffled = PairBatches(pairs, batch_tokens=128, seed=5, shuffle=False)
    assert epoch_of(unshuffled, 0) == epoch_of(unshuffled, 3)
