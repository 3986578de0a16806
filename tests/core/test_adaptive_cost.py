"""What adaptive softmax computes, and what it never builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adaptive_equations import CASES, DOUBLE, Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Notes the largest tensor and the rows of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.dim() > 1:
                self.largest = max(self.largest, tensor.numel())
        if "mm" in str(func):
            self.products.append(tuple(out.shape))
        return out


def test_training_never_builds_what_a_full_softmax_would() -> None:
    """Each tail sees its own tokens only, and its logits exist a chunk at a time."""
    case = Case("fairseq", True, None, False, 2, (50, 100), 60_100, 8)
    embedding, output = (layer.float() for layer in case.layers())
    targets = torch.randint(100, (1, 600))
    targets[0, :200] += 30_000
    for smoothing, allowed in ((0.0, 600 * 60_100 // 3), (0.1, 600 * 60_100 // 3)):
        for value in (
            lambda h: output.nll(h, targets).sum(),
            lambda h, s=smoothing: output.loss(h, targets, None, s)[0],
        ):
            hidden = torch.randn(1, 600, 8, requires_grad=True)
            with Watch() as watch:
                value(hidden).backward()
            assert watch.largest < allowed
            if smoothing == 0:
                assert sum(shape[0] for shape in watch.products if shape[1:] == (60_000,)) in (200, 400)  # nll: twice
    embedding(targets)


def test_a_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question is a wait for a GPU; its backward pass asks none that the CPU's does not (`cross_entropy`)."""
    embedding, output = CASES[1].layers()
    hidden, targets = torch.randn(2, 9, 11, dtype=DOUBLE), torch.randint(31, (2, 9))
    asked: list[str] = []
    for name in [
        "tolist",
        "item",
        "nonzero",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "cpu",
        "numpy",
        "unique",
    ]:
        original = getattr(Tensor, name)

        def noted(self: Tensor, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            asked.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, noted)
    output.nll(hidden, targets)
    assert asked == ["tolist"]
    output.loss(hidden, targets, label_smoothing=0.1)
    assert asked == ["tolist", "tolist"]
    embedding(targets)
    output(hidden)
    assert asked == ["tolist", "tolist"]


def test_without_gradients_none_are_formed() -> None:
    _, output = CASES[1].layers()
    hidden, targets = torch.randn(1, 6, 11, dtype=DOUBLE), torch.randint(31, (1, 6))
    with torch.no_grad(), Watch() as watch:
        loss, _ = output.loss(hidden, targets)
        each = output.nll(hidden, targets)
    assert not loss.requires_grad
    assert not each.requires_grad
    assert abs(float(each.mean() - loss)) < 1e-12
    assert not any(shape == tuple(w.shape) for shape in watch.products for w in output.weights)
