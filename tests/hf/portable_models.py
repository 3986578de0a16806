"""Our models beside those that the portable code makes of their configuration and tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fullrank.hf.portable.configuration_fullrank import FullRankConfig
from fullrank.hf.portable.modeling_fullrank import FullRankForCausalLM

EXACT = 1e-10  # of outputs in double precision, relative to the greatest


def portable(model: Any, kind: type[Any] = FullRankForCausalLM, **config: Any) -> Any:
    """The same model in portable code, in its precision and mode."""
    made = kind(FullRankConfig(fullrank=model.config.to_dict(), **config)).to(next(model.parameters()).dtype)
    made.model.load_state_dict(model.state_dict())
    return made.train(model.training)


def check_close(given: Tensor, expected: Tensor, tolerance: float = EXACT, what: str = "") -> None:
    assert given.shape == expected.shape, what
    worst = float((given - expected).detach().abs().max())
    assert worst <= tolerance * max(1.0, float(expected.detach().abs().max())), f"{what}: differs by {worst:.2e}"


def check_gradients(given: nn.Module, expected: nn.Module) -> None:
    """Every parameter of two models of ours has the same gradient."""
    found, wanted = dict(given.named_parameters()), dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        other = found[name].grad
        if parameter.grad is None:
            assert other is None or not other.any(), name
            continue
        assert other is not None, name
        check_close(other, parameter.grad, what=name)
    assert any(p.grad is not None and bool(p.grad.any()) for p in wanted.values())


def shifted_loss(model: Any, ids: Tensor, memory: Any = None) -> Tensor:
    """Mean nll of each token of ids (B, N) given those before it, by our own `nll`."""
    nll: Tensor = model.nll(ids, torch.roll(ids, -1, 1), memory).per_token[:, :-1].mean()
    return nll
