"""Learning rates against their equations, the values worked out by hand."""

import math

import pytest
import torch

from fullrank.config.run import TrainConfig
from fullrank.core.errors import ConfigError
from fullrank.training.optimizer import make_schedule


def rates(steps, total=110, **options):
    schedule = make_schedule(TrainConfig(steps=total, **options), total)
    return [schedule.rate(step) for step in steps]


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "inverse_sqrt", "plateau", "cosine_restarts"])
def test_every_schedule_warms_up_linearly(name):
    warm_up = rates([1, 5, 10], schedule=name, learning_rate=1.0, warmup_steps=10, warmup_from=0.2)
    assert warm_up == pytest.approx([0.28, 0.6, 1.0])


HALF = 0.4 * math.sqrt(0.5)
LOW = {"min_learning_rate": 0.2, "warmup_steps": 10}
RATES = [
    ("constant", {}, {1: 1.0, 50: 1.0, 110: 1.0}),
    ("linear", LOW, {10: 1.0, 60: 0.6, 110: 0.2, 111: 0.2}),
    ("cosine", LOW, {10: 1.0, 35: 0.6 + HALF, 60: 0.6, 85: 0.6 - HALF, 110: 0.2, 150: 0.2}),
    ("cosine", LOW | {"decay_steps": 60}, {10: 1.0, 35: 0.6, 60: 0.2, 61: 0.2, 110: 0.2}),
    ("inverse_sqrt", {"warmup_steps": 16}, {16: 1.0, 64: 0.5, 256: 0.25}),
    ("inverse_sqrt", {}, {1: 1.0, 4: 0.5}),
    ("inverse_sqrt", {"min_learning_rate": 0.05}, {10_000: 0.05}),
]


@pytest.mark.parametrize(("name", "options", "expected"), RATES)
def test_rates_are_those_of_the_equation(name, options, expected):
    measured = rates(list(expected), schedule=name, learning_rate=1.0, **options)
    assert measured == pytest.approx(list(expected.values()))


def test_cosine_restarts():
    """Periods of 4 steps after a warm-up of 2."""
    options = {"schedule": "cosine_restarts", "learning_rate": 1.0, "min_learning_rate": 0.2}
    options |= {"warmup_steps": 2, "period": 4}
    wave = [0.6 + 0.4 * math.cos(math.pi * k / 4) for k in (1, 2, 3, 4)]
    assert rates(list(range(1, 11)), **options) == pytest.approx([0.5, 1.0, *wave, *wave])
    assert rates([4 * 10**9 + 4], **options) == pytest.approx([0.6])


@pytest.mark.parametrize(("period", "warmup", "least"), [(16, 16, 0.0), (16, 5, 0.1), (16, 0, 0.1), (3, 3, 0.0)])
def test_cosine_wave_is_the_loop_of_the_released_code(period, warmup, least):
    """Skip Cross-head: in the warm-up the rate is set after an update, then `CosineAnnealingLR` steps from there."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, period, least)
    expected = []
    for step in range(1, 5 * period):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step <= warmup:
            optimizer.param_groups[0]["lr"] = 0.7 * step / warmup
        scheduler.step()
    options = {"schedule": "cosine_wave", "learning_rate": 0.7, "min_learning_rate": least, "period": period}
    wave = rates(list(range(1, 5 * period)), warmup_steps=warmup, **options)
    assert wave == pytest.approx(expected, abs=1e-12)
    assert wave[0] == 0.7
    assert wave[2 * period] == pytest.approx(0.7)
    assert wave[period] == wave[3 * period] == least
    with pytest.raises(ConfigError, match=f"at most train.period {period} with cosine_wave"):
        rates([1], warmup_steps=period + 1, **options)


@pytest.mark.parametrize(
    ("patience", "least", "expected"),
    [
        (0, 0.0, [8, 8, 8, 4, 4, 2, 1, 1, 0.5]),
        (0, 3.0, [8, 8, 8, 4, 4, 3, 3, 3, 3]),
        (1, 0.0, [8, 8, 8, 8, 8, 8, 4, 4, 4]),
        (2, 0.0, [8, 8, 8, 8, 8, 8, 8, 8, 8]),
    ],
)
def test_plateau_divides_when_the_best_is_not_improved_on(patience, least, expected):
    options = TrainConfig(
        steps=9, schedule="plateau", learning_rate=8.0, min_learning_rate=least, plateau_factor=2.0,
        plateau_patience=patience,
    )  # fmt: skip
    schedule = make_schedule(options, 9)
    measured = [schedule.rate(1)]
    for nll in [5.0, 4.0, 4.0, 3.0, 3.5, 3.2, 2.9, 2.9]:  # better, better, no, better, no, no, better, no
        schedule.observe(nll)
        measured.append(schedule.rate(1))
    assert measured == expected


def test_inverse_sqrt_is_fairseqs_an_update_later():
    """fairseq's schedule of `u` updates made: its update t has the rate of t - 1, the first one `warmup-init-lr`."""
    high = 5e-4
    start = 1e-7
    warmup = 4000

    def fairseq(u):
        return start + u * (high - start) / warmup if u < warmup else high * math.sqrt(warmup) * u**-0.5

    steps = [1, 2, 1999, 3999, 4000, 4001, 16_000, 50_000]
    measured = rates(steps, schedule="inverse_sqrt", learning_rate=high, warmup_steps=warmup, warmup_from=start)
    assert measured == pytest.approx([fairseq(t) for t in steps], rel=1e-12)


def test_the_rate_while_weights_are_averaged_and_the_rate_of_the_embedding():
    options = TrainConfig(
        steps=100, schedule="cosine", learning_rate=1.0, min_learning_rate=0.2, averaging="swa", swa_start=0.8,
        swa_learning_rate=0.05,
    )  # fmt: skip
    schedule = make_schedule(options, 100)
    scaled = [schedule.scale_rate(step) for step in (50, 80, 81, 100)]
    assert scaled == pytest.approx([0.6, 0.2764, 0.05, 0.05], abs=1e-4)
    assert schedule.scale_rate(50, peak=3.0) == pytest.approx(0.2 + (3.0 - 0.2) / 2)  # from 3 to the same least rate
    assert schedule.scale_rate(81, peak=3.0) == pytest.approx(0.05)
    plateau = make_schedule(TrainConfig(steps=9, schedule="plateau", learning_rate=1.0), 9)
    for nll in (3.0, 3.0):
        plateau.observe(nll)
    assert [plateau.scale_rate(5), plateau.scale_rate(5, peak=3.0)] == [0.5, 1.5]
