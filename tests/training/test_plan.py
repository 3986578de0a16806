"""When training ends, and what is due when."""

from dataclasses import dataclass

import pytest
from training_toy import ToyBatches

from fullrank.config.run import EvalConfig, TrainConfig
from fullrank.training.values import Counters, make_plan


def plan(eval_options=None, batches=None, **options):
    options = {"batch_size": 3, "segment_length": 5} | options
    return make_plan(TrainConfig(**options), EvalConfig(**eval_options or {}), batches or ToyBatches(7))


def test_the_end_by_steps_epochs_and_tokens():
    assert plan(steps=9).total_steps == 9
    assert plan(epochs=2).total_steps == 14
    assert plan(epochs=0.5).total_steps == 4
    assert plan(epochs=0.001).total_steps == 1
    assert plan(tokens=100).total_steps == 8  # six batches of 15 tokens and one of 9 in each epoch
    by_tokens = plan(tokens=100)
    assert not by_tokens.is_finished(Counters(step=7, tokens=99))
    assert by_tokens.is_finished(Counters(step=7, tokens=100))
    assert plan(steps=9).is_finished(Counters(step=9, tokens=0))


@dataclass(frozen=True)
class Known(ToyBatches):
    """Seven batches of 20 to 80 tokens, in another order every epoch."""

    def tokens_of_batches(self, epoch):
        sizes = [20, 20, 30, 30, 30, 50, 80]
        return sizes[-(epoch % 7) :] + sizes[: -(epoch % 7)]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("tokens", [1, 21, 260, 521])
def test_a_budget_of_tokens_counts_the_steps_that_are_made(tokens, accumulation):
    batches = Known()
    counted = plan(tokens=tokens, batches=batches, gradient_accumulation_steps=accumulation, batch_tokens=80)
    seen = step = 0
    while not counted.is_finished(Counters(step=step, tokens=seen)):
        step += 1
        seen += sum(batches.tokens_of_batches(epoch)[index] for epoch, index in counted.batches_of(step))
    assert counted.total_steps == step


def test_evaluation_by_fractions_of_an_epoch():
    """At the first step at or after 2.1, 4.2, 6.3, ... steps; a tenth of an epoch of 10 steps is every step."""
    fractions = plan({"every_epochs": 0.3}, epochs=3)
    assert [step for step in range(1, 22) if fractions.evaluation_due(step)] == [3, 5, 7, 9, 11, 13, 15, 17, 19, 21]
    fractions = plan({"every_epochs": 0.1}, epochs=100, batches=ToyBatches(10))
    assert all(fractions.evaluation_due(step) for step in range(1, 1001))
