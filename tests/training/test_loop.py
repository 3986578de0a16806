"""A step of the loop: its gradient, its lines and its end."""

import math
from dataclasses import dataclass

import pytest
import torch
from training_toy import LENGTH, STREAMS, Death, Even, Objective, Recorder, Toy, ToyBatches, at_call, die, train

from fullrank.config.run import PhaseConfig
from fullrank.core.errors import RunError
from fullrank.core.registry import register, unregister
from fullrank.training.checkpoint import load_weights
from fullrank.training.values import EvaluationResult, Loss
from run_files import read_metrics


@dataclass(frozen=True)
class Grouped:
    """Batches of several batches, for a loss over all their tokens at once."""

    size: int
    inner: ToyBatches

    @property
    def batches_per_epoch(self):
        return math.ceil(self.inner.batches_per_epoch / self.size)

    def batch(self, epoch, index):
        last = min((index + 1) * self.size, self.inner.batches_per_epoch)
        return [self.inner.batch(epoch, i) for i in range(index * self.size, last)]


def without_dropout(model):
    """Mean nll over all tokens of a batch, or of a list of batches, in double precision and with no carry."""
    model.double()
    model.dropout.p = 0.0

    def objective(batch, carry, position):
        parts = batch if isinstance(batch, list) else [batch]
        losses = [Objective(model)(part, {}, position) for part in parts]
        tokens = sum(loss.tokens for loss in losses)
        total = sum(loss.value * loss.tokens for loss in losses)
        return Loss(total / tokens, sum(float(loss.nll) for loss in losses), tokens)

    return objective


@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulation_is_the_big_batch(clip, tmp_path):
    """Seven batches an epoch by threes, the last shorter: steps of 3, 3 and 1 batches, weighted by tokens."""
    options = {"steps": 7, "optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": clip, "log_every_steps": 1}
    options |= {"objective": without_dropout, "eval_options": {"every_steps": 100}}
    small, result = train(tmp_path / "small", gradient_accumulation_steps=3, **options)
    big, expected = train(tmp_path / "big", batches=Grouped(3, ToyBatches()), **options)
    for (name, accumulated), at_once in zip(small.named_parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(accumulated, at_once, rtol=1e-12, atol=1e-12, msg=name)
    assert not torch.equal(small.inner.weight, Toy().double().inner.weight)
    assert result.tokens == expected.tokens
    assert read_metrics(tmp_path / "small", "train") == read_metrics(tmp_path / "big", "train")


def test_lines_are_means_over_tokens_since_the_line_before(tmp_path):
    seen = []

    def noting(model):
        def objective(batch, carry, position):
            loss = Objective(model)(batch, carry, position)
            seen.append((float(loss.nll), loss.tokens))
            return loss

        return objective

    _, result = train(tmp_path, steps=10, log_every_steps=4, schedule="linear", learning_rate=0.01, objective=noting)
    lines = read_metrics(tmp_path, "train")
    assert [line["step"] for line in lines] == [4, 8, 10]
    for line, (first, last) in zip(lines, [(0, 4), (4, 8), (8, 10)], strict=True):
        mean = sum(nll for nll, _ in seen[first:last]) / sum(tokens for _, tokens in seen[first:last])
        assert line["nll"] == pytest.approx(mean, rel=1e-7)
        assert line["ppl"] == pytest.approx(math.exp(mean), rel=1e-7)
        assert line["tokens"] == sum(tokens for _, tokens in seen[:last])
        assert line["lr"] == pytest.approx(0.01 * (1 - line["step"] / 10), abs=1e-12)
    assert [line["step"] for line in read_metrics(tmp_path, "valid")] == [5, 10]
    assert (result.step, result.tokens) == (10, sum(tokens for _, tokens in seen))
    assert result.ms_per_step["train"] > 0
    assert result.peak_memory_mib > 10


def test_the_carry_goes_from_batch_to_batch_and_is_empty_at_the_start_of_an_epoch(tmp_path):
    """A new phase begins with the carry of the phase before it."""
    counts = []

    def counting(model):
        def objective(batch, carry, position):
            counts.append(float(carry["count"]) if carry else None)
            loss = Objective(model)(batch, {}, position)
            return Loss(loss.value, loss.nll, loss.tokens, {"count": torch.tensor((counts[-1] or 0.0) + 1)})

        return objective

    phases = [PhaseConfig(name="a", steps=2), PhaseConfig(name="b", steps=3)]
    train(tmp_path, phases=phases, objective=counting, gradient_accumulation_steps=2)
    assert counts == [None, 1, 2, 3, 4, 5, 6, None, 1]


def test_bf16_computes_in_bf16_and_keeps_fp32_weights(tmp_path):
    types = set()

    def noting(model):
        def objective(batch, carry, position):
            types.add(model.inner(torch.zeros(1, 6)).dtype)
            return Objective(model)(batch, carry, position)

        return objective

    model, _ = train(tmp_path, steps=2, precision="bf16", objective=noting)
    assert types == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(value, tmp_path):
    def breaking(model):
        def objective(batch, carry, position):
            loss = Objective(model)(batch, carry, position)
            late = int(model.seen) > 11 * STREAMS * LENGTH
            return Loss(loss.value * value, loss.nll, loss.tokens) if late else loss

        return objective

    with pytest.raises(RunError) as failure:
        train(tmp_path, steps=20, objective=breaking, learning_rate=0.25)
    text = str(failure.value)
    assert "the loss at step 12 is not a finite number" in text
    assert "train.learning_rate (now 0.25)" in text
    assert "step-00000010" in text
    load_weights(Toy(), tmp_path / "checkpoints" / "last")


def test_patience_ends_training_and_the_best_is_kept(tmp_path):
    curve = iter([5.0, 3.0, 3.5, 3.0, 4.0, 1.0])
    _, result = train(tmp_path, steps=30, patience=3, evaluate=lambda model: EvaluationResult(next(curve), 1))
    assert (result.step, result.stopped_early) == (25, True)
    assert (result.best_step, result.best_nll) == (10, 3.0)
    links = {name: (tmp_path / "checkpoints" / name).readlink().name for name in ("last", "best")}
    assert links == {"last": "step-00000025", "best": "step-00000010"}
    _, again = train(tmp_path, steps=30, patience=3, evaluate=lambda model: EvaluationResult(0.0, 1))
    assert again.step == 25


BY_BLEU = {"every_steps": 5, "metric": "bleu"}


def following(nll, bleu):
    """The n-th evaluation of every 5 steps gives the n-th nll per token and the n-th BLEU."""

    def evaluate(model):
        number = int(model.seen) // (5 * STREAMS * LENGTH) - 1
        return EvaluationResult(10 * nll[number], 10, {"bleu": bleu[number], "chrf": 2 * bleu[number]})

    return evaluate


FALLING = [5.0, 4.0, 3.0, 2.0, 1.0]
BLEU = [10.0, 30.25, 30.25, 20.0, 25.0]


@pytest.mark.parametrize(("metric", "best", "value"), [("loss", 25, 1.0), ("bleu", 10, 30.25)])
def test_the_best_checkpoint_is_the_one_of_the_metric(metric, best, value, tmp_path):
    """The loss falls all the way; BLEU is highest, for the first time, at step 10."""
    recorder = Recorder()
    options = {"steps": 25, "batches": Even(), "evaluate": following(FALLING, BLEU), "observers": [recorder]}
    _, result = train(tmp_path, **options, eval_options=BY_BLEU | {"metric": metric})
    assert (result.best_step, result.best_metric) == (best, value)
    assert result.best_nll == FALLING[best // 5 - 1]
    links = {name: (tmp_path / "checkpoints" / name).readlink().name for name in ("last", "best")}
    assert links == {"last": "step-00000025", "best": f"step-{best:08d}"}
    lines = read_metrics(tmp_path)
    scores = [(line["step"], line["nll"], line["bleu"], line["chrf"]) for line in lines if line["split"] == "valid"]
    assert scores == [(5 * n, FALLING[n - 1], BLEU[n - 1], 2 * BLEU[n - 1]) for n in range(1, 6)]
    assert not any("bleu" in line for line in lines if line["split"] == "train")
    assert [line for line in recorder.lines if "split" in line] == lines


@pytest.mark.parametrize(
    ("metric", "rates"), [("loss", [0.8, 0.8, 0.8, 0.8, 0.8]), ("bleu", [0.8, 0.8, 0.8, 0.4, 0.2])]
)
def test_the_plateau_schedule_follows_the_metric(metric, rates, tmp_path):
    """Evaluations 3, 4 and 5 do not improve on the BLEU of the second; each halves the rate. The run is killed once."""
    options = {"steps": 25, "batches": Even(), "evaluate": following(FALLING, BLEU), "schedule": "plateau"}
    options |= {"learning_rate": 0.8, "log_every_steps": 5, "eval_options": BY_BLEU | {"metric": metric}}
    with pytest.raises(Death):
        train(tmp_path, **options, objective=at_call(18, die))
    train(tmp_path, **options)
    lines = read_metrics(tmp_path)
    assert [line["lr"] for line in lines if line["split"] == "train"] == rates


def test_the_rate_follows_the_tokens_of_an_update(tmp_path):
    """The last batch of an epoch has 9 targets instead of 15, and with two batches an update the last one is alone."""

    def rates_of(name, **changes):
        rates = []

        class Rates(torch.optim.SGD):
            def step(self, closure=None):
                rates.append(self.param_groups[0]["lr"])
                super().step(closure)

        register("optimizer", name)(lambda groups, options: Rates(groups, lr=options.learning_rate))
        try:
            train(tmp_path / name, optimizer=name, steps=8, batch_size=STREAMS, segment_length=LENGTH, **changes)
        finally:
            unregister("optimizer", name)
        return rates

    plain = {"learning_rate": 0.1, "rate_by_length": True}
    assert rates_of("test_rates", **plain) == pytest.approx([0.1] * 6 + [0.1 * 9 / 15, 0.1])
    assert rates_of("test_pairs", gradient_accumulation_steps=2, **plain) == pytest.approx(
        [0.1] * 3 + [0.1 * 9 / 30] + [0.1] * 3 + [0.1 * 9 / 30]
    )
