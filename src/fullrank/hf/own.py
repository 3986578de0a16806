"""A model's own attention function: its weights without their values, and whether it is plain scaled dot product."""

from __future__ import annotations

import dis
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.attention.size import HeadSize
from fullrank.hf.finding import Eager

# what an attention function may read of its module and still be plain: the groups of heads, dropout, its kind
_HARMLESS = ("num_key_value_groups", "training", "config", "is_causal", "scaling", "layer_idx", "head_dim")


@dataclass(frozen=True)
class Own:
    """What `eager`, the model's own attention function, does.

    plain: softmax(s Q K^T + mask) and nothing else, so that our kernels compute the same.
    heads_first: its output is (B, H, N, D) and not (B, N, H, D).
    """

    eager: Eager
    plain: bool
    heads_first: bool


class _Still:
    """An attention module as its own attention function sees it, but without dropout. `p` is what it would have dropped."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._read, self.p, self.training = module, set[str](), 0.0, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        self._read.add(name)
        if isinstance(found, nn.Dropout):
            self.p = found.p
            return nn.Identity()
        return found

    def harmless(self) -> bool:
        """Whether nothing was read that may change the weights: no parameter, no buffer, no number of unknown use."""
        return all(name in _HARMLESS or isinstance(getattr(self._module, name), nn.Dropout) for name in self._read)


def weights_of(module: nn.Module, eager: Eager, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
               arguments: dict[str, Any]) -> tuple[Tensor, float]:  # fmt: skip
    """The weights (B, H, N, M) that a module's own attention function makes, before dropout; and its own rate of dropout.

    The function is called with values of no width, so that only weights are computed: whatever it does to scores is kept.
    """
    still = _Still(module)
    _, weights = eager(still, query, key, value[..., :0], mask, dropout=0.0, **arguments)
    return weights, still.p


def scores_of(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """The masked scores (B, H, N, M) of a plain attention function, -inf where nothing may be seen, as normalisers read them.

    A query that may see nothing sees everything: it is padding, and no weight becomes NaN.
    """
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is None:
        return scores
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    hidden = hidden & ~hidden.all(-1, keepdim=True)
    return (scores + torch.where(mask <= torch.finfo(mask.dtype).min / 2, 0, mask)).masked_fill(hidden, float("-inf"))


def examine(module: nn.Module, eager: Eager, size: HeadSize) -> Own:
    """What `eager` does, tried on small random heads of fixed numbers."""
    still = _Still(module)
    random = torch.Generator("cpu").manual_seed(0)
    groups = getattr(module, "num_key_value_groups", 1)
    heads = size.num_heads
    shapes = ((2, heads, 3, size.head_dim), *((2, heads // groups, 5, size.head_dim),) * 2)
    query, key, value = (3 * torch.randn(shape, generator=random, device="cpu") for shape in shapes)
    mask = torch.zeros(2, 1, 3, 5, device="cpu").index_fill(
        3, torch.tensor([4], device="cpu"), torch.finfo(torch.float32).min
    )
    try:
        with torch.no_grad(), torch.device("cpu"):
            out, weights = eager(still, query, key, value, mask, dropout=0.0, scaling=0.5)
    except Exception:  # it needs more than everybody's arguments, and so it is not plain
        return Own(eager, plain=False, heads_first=False)
    expected = torch.softmax(0.5 * query @ key.repeat_interleave(groups, 1).transpose(2, 3) + mask, -1)
    values = expected @ value.repeat_interleave(groups, 1)
    heads_first = out.shape == values.shape and torch.allclose(out, values, atol=1e-5)
    placed = heads_first or (
        out.shape == values.transpose(1, 2).shape and torch.allclose(out.transpose(1, 2), values, atol=1e-5)
    )
    plain = (
        placed
        and weights is not None
        and weights.shape == expected.shape
        and torch.allclose(weights, expected, atol=1e-6)
    )
    return Own(eager, plain and still.harmless() and not _reads_more(eager), heads_first)


def _reads_more(eager: Eager) -> bool:
    """Whether a function looks into its `**kwargs`."""
    code = inspect.unwrap(eager).__code__
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    return any(step.argval == name and step.opname.startswith("LOAD") for step in dis.get_instructions(code))
