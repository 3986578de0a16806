"""Batches of encoded examples: every example once an epoch, padded on the right, grouped by length."""

import numpy as np
import pytest

from fullrank.config.finetune import FinetuneTrainConfig
from fullrank.data.padded_batches import Encoded, ExampleBatches, batches_by_length


def encoded(count, seed=0):
    """Rows of random lengths, each of which can be told by its first id: row i begins with i + 10."""
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
def test_every_example_comes_once_an_epoch_and_in_another_order(count, size, grouped):
    batches = ExampleBatches(encoded(count), FinetuneTrainConfig(batch_size=size, seed=3, group_by_length=grouped))
    orders = []
    for epoch in (0, 1):
        order = [batches.batch(epoch, i).indices.tolist() for i in range(batches.batches_per_epoch)]
        assert sorted(i for indices in order for i in indices) == list(range(count))
        assert sum(len(indices) == size for indices in order) >= batches.batches_per_epoch - 1
        orders.append(order)
    if count > 20:
        assert orders[0] != orders[1]


def test_a_batch_is_a_function_of_seed_epoch_and_index():
    def make(seed):
        return ExampleBatches(encoded(300), FinetuneTrainConfig(batch_size=8, seed=seed))

    fresh, used = make(1), make(1)
    used.batch(4, 2)
    used.batch(0, 9)
    assert used.batch(2, 5).indices.tolist() == fresh.batch(2, 5).indices.tolist()
    assert make(2).batch(2, 5).indices.tolist() != fresh.batch(2, 5).indices.tolist()


def test_grouping_spares_padding_and_keeps_chance():
    examples = encoded(2000)

    def padded(grouped):
        batches = ExampleBatches(examples, FinetuneTrainConfig(batch_size=16, group_by_length=grouped))
        epoch = [batches.batch(0, i) for i in range(batches.batches_per_epoch)]
        assert batches.tokens_of_batches(0) == [batch.read for batch in epoch]
        return 1 - sum(batch.read for batch in epoch) / sum(batch.inputs["input_ids"].numel() for batch in epoch)

    assert padded(True) < 0.1 < 0.3 < padded(False)
    configs = [FinetuneTrainConfig(batch_size=16, seed=seed) for seed in range(20)]
    first = [ExampleBatches(examples, options).batch(0, 0).indices.tolist() for options in configs]
    assert len({tuple(indices) for indices in first}) == 20  # not the longest ones, whatever the seed


def test_evaluation_reads_every_example_once():
    lengths = encoded(57).lengths.tolist()
    parts = list(batches_by_length(lengths, 8))
    assert sorted(i for part in parts for i in part) == list(range(57))
    assert [len(part) for part in parts] == [8] * 7 + [1]
    assert [lengths[i] for part in parts for i in part] == sorted(lengths, reverse=True)
