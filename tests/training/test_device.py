from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from training_toy import Toy

from fullrank.config.run import TrainConfig
from fullrank.core.errors import InputError, RunError
from fullrank.training import choose_device, compile_blocks, prepare_machine, seed_everything
from fullrank.training.device import explaining
from fullrank.training.randomness import undisturbed


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(())),
            float(torch.randn(()))]  # fmt: skip


def test_a_seed_is_all_that_decides() -> None:
    seed_everything(3)
    first = draw()
    seed_everything(4)
    assert draw() != first
    seed_everything(3)
    assert draw() == first


def test_what_is_drawn_inside_is_not_missed_outside() -> None:
    seed_everything(3)
    draw()
    with undisturbed(torch.device("cpu")):
        inside = draw()
    assert draw() == inside


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(InputError, match=r"train.device: 'gpu' is not a device; give auto, cpu, cuda"):
        choose_device("gpu")
    with pytest.raises(InputError, match=r"'meta' is not supported"):
        choose_device("meta")
    with pytest.raises(InputError, match=r"'cuda:99' is given, but this machine has \d+ CUDA devices"):
        choose_device("cuda:99")


def test_threads_are_set() -> None:
    prepare_machine(TrainConfig(steps=1, threads=2, device="cpu"))
    assert torch.get_num_threads() == 2


def test_blocks_are_compiled_where_the_model_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    model = Toy()
    assert compile_blocks(model) == 1
    assert compiled == [model]
    model.compile_targets = lambda: [model.inner, model.norm]  # type: ignore[assignment]
    assert compile_blocks(model) == 2
    assert compiled[1:] == [model.inner, model.norm]


def test_failures_of_the_machine_name_the_keys_to_change() -> None:
    def fail(error: Exception) -> None:
        with explaining(TrainConfig(steps=1, compile=True)):
            raise error

    with pytest.raises(
        RunError, match=r"lower train.batch_size \(now 20\) and raise train.gradient_accumulation_steps"
    ):
        fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    broken = type("Broken", (Exception,), {"__module__": "torch._inductor.exc"})
    with pytest.raises(RunError, match=r"set train.compile=false; no compiler"):
        fail(broken("no compiler"))
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())
