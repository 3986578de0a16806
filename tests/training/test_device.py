import random

import numpy as np
import pytest
import torch

from fullrank.config.run import TrainConfig
from fullrank.core.errors import RunError
from fullrank.training.device import begin_draws, end_draws, explain_failures


def draw():
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(())),
            float(torch.randn(()))]  # fmt: skip


def test_a_pass_draws_what_it_draws_whatever_came_before():
    begin_draws(3, 1)
    first = draw()
    begin_draws(3, 2)
    assert draw() != first
    begin_draws(3, 1)
    assert draw() == first
    end_draws()


def test_failures_of_the_machine_name_the_keys_to_change():
    def fail(error):
        with explain_failures(TrainConfig(steps=1, compile=True)):
            raise error

    with pytest.raises(
        RunError, match=r"lower train.batch_size \(now 20\) and raise train.gradient_accumulation_steps"
    ):
        fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())
