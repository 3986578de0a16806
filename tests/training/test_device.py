from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fullrank.config.training import TrainConfig
from fullrank.core import draws
from fullrank.core.errors import InputError, RunError
from fullrank.training import choose_device, seed_everything
from fullrank.training.device import (
    explain_failures,
)
from fullrank.training.randomness import begin_draws, drawing, end_draws


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


def test_a_pass_draws_what_it_draws_whatever_came_before() -> None:
    begin_draws(3, 1)
    first = draw()
    begin_draws(3, 2)
    assert draw() != first
    begin_draws(3, 1)
    assert draw() == first
    end_draws()


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(InputError, match=r"train.device: 'gpu' is not a device; give auto, cpu, cuda"):
        choose_device("gpu")
    with pytest.raises(InputError, match=r"'meta' is not supported"):
        choose_device("meta")
    with pytest.raises(InputError, match=r"'cuda:99' is given, but this machine has \d+ CUDA devices"):
        choose_device("cuda:99")


def test_failures_of_the_machine_name_the_keys_to_change() -> None:
    def fail(error: Exception) -> None:
        with explain_failures(TrainConfig(steps=1, compile=True)):
            raise error

    with pytest.raises(
        RunError, match=r"lower train.batch_size \(now 20\) and raise train.gradient_accumulation_steps"
    ):
        fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    with (
        pytest.raises(RunError, match=r"lower train.batch_size .*, or lower train.segment_length"),
        explain_failures(TrainConfig(steps=1)),
    ):
        torch.empty(1 << 52)  # more than any machine has
    broken = type("Broken", (Exception,), {"__module__": "torch._inductor.exc"})
    with pytest.raises(RunError, match=r"set train.compile=false; no compiler"):
        fail(broken("no compiler"))
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())


@pytest.mark.parametrize("kind", ["everything", "causal", "bool", "float", "grouped"])
def test_attention_whose_weights_are_dropped_by_place_is_that_of_torch(kind: str) -> None:
    """At a rate so small that nothing is dropped, PyTorch's own attention; at 0.5 a row drops alike whoever reads it."""
    torch.manual_seed(0)
    heads = 2 if kind == "grouped" else 4
    query, key, value = (torch.randn(4, h, n, 6, dtype=torch.float64) for h, n in ((4, 5), (heads, 5), (heads, 5)))
    mask = torch.rand(4, 1, 5, 5) < 0.7
    mask[..., 0] = True
    options: dict[str, Any] = {
        "causal": {"is_causal": True},
        "bool": {"attn_mask": mask},
        "float": {"attn_mask": torch.randn(5, 5, dtype=torch.float64), "scale": 0.3},
        "grouped": {"enable_gqa": True},
    }.get(kind, {})
    attend = torch.nn.functional.scaled_dot_product_attention
    with drawing(nn.Linear(1, 1)):
        close = attend(query, key, value, dropout_p=1e-12, **options)
    torch.testing.assert_close(close, attend(query, key, value, **options), rtol=1e-10, atol=1e-10)

    def dropped(first: int, end: int) -> torch.Tensor:
        begin_draws(7, 3)
        assert draws.current is not None
        draws.current.first, draws.current.rows = first, end - first
        own = {name: x[first:end] if isinstance(x, torch.Tensor) and x.dim() == 4 else x for name, x in options.items()}
        with drawing(nn.Linear(1, 1)):
            out: torch.Tensor = attend(*(x[first:end] for x in (query, key, value)), dropout_p=0.5, **own)
        end_draws()
        return out

    whole = dropped(0, 4)
    assert not torch.allclose(whole, close)
    torch.testing.assert_close(whole, torch.cat((dropped(0, 1), dropped(1, 4))), rtol=1e-12, atol=1e-12)
