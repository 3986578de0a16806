"""A model's own attention function: the weights it makes, and whether it is plain scaled dot product."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.core.errors import InputError
from fullrank.core.stage import HeadSize

Eager = Callable[..., Any]

# what everybody's attention function is given
_STANDARD = ("module", "query", "key", "value", "attention_mask", "scaling", "dropout")
# what a function may read of its module and still be plain
_HARMLESS = {"num_key_value_groups", "config", "is_causal", "scaling", "layer_idx", "head_dim"}


@dataclass(frozen=True)
class Own:
    """What `eager`, the model's own attention function, does.

    plain: its weights are softmax(s Q K^T + mask), so that our kernels compute the same where `extras` are not given.
    after: it does something to the output besides weighing values (Granite's sinks scale it), which belongs to the weights.
    extras: arguments beyond everybody's that it reads (a soft-cap, a position bias).
    """

    eager: Eager
    plain: bool
    after: bool
    extras: frozenset[str]


class _Still:
    """An attention module as its own attention function sees it, but never dropping. `p` is what it would have dropped."""

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
        return self._read <= _HARMLESS


def weights_of(module: nn.Module, own: Own, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
               arguments: dict[str, Any]) -> tuple[Tensor, float]:  # fmt: skip
    """The weights (B, H, N, M) that a module's own attention function makes, before dropout; and its own rate of dropout.

    The function is called with values of no width, so that only weights are computed: whatever it does to scores is kept.
    Where it does more after weighing, values are the identity, and the output is the weights.
    """
    still, keys = _Still(module), key.shape[2]
    if own.after:
        identity = torch.eye(keys, device=value.device, dtype=value.dtype).expand(*value.shape[:2], -1, -1)
        out, _ = own.eager(still, query, key, identity, mask, dropout=0.0, **arguments)
        return out.transpose(1, 2), still.p
    _, weights = own.eager(still, query, key, value[..., :0], mask, dropout=0.0, **arguments)
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
    nothing = hidden.all(-1, keepdim=True)
    return (scores + mask.masked_fill(hidden, 0)).masked_fill(hidden & ~nothing, float("-inf"))


def examine(module: nn.Module, eager: Eager, size: HeadSize) -> Own:
    """What `eager` does, tried on small random heads of fixed numbers.

    Raises InputError if it cannot be called as all others are, gives no weights, or output in another shape.
    """
    still, like = _Still(module), next(module.parameters(), torch.empty(0))
    groups, heads, device = getattr(module, "num_key_value_groups", 1), size.num_heads, like.device
    shapes = ((2, heads, 3, size.head_dim), *((2, heads // groups, 5, size.head_dim),) * 2)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        query, key, value = (3 * torch.randn(shape, device="cpu").to(device) for shape in shapes)
        mask = torch.zeros(2, 1, 3, 5, device=device)
        mask[..., 4] = torch.finfo(mask.dtype).min
        try:
            out, weights = eager(still, query, key, value, mask, dropout=0.0, scaling=0.5)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise InputError(
                f"{type(module).__name__}: its own (eager) attention function fails: {error}; choose others with `layers`"
            ) from error
        if weights is None or weights.shape != (2, heads, 3, 5) or out.shape != (2, 3, heads, size.head_dim):
            raise InputError(
                f"{type(module).__name__}: its own attention function gives no weights (B, H, N, M) to mix; "
                "this model cannot be injected into"
            )
        values = value.repeat_interleave(groups, 1)
        scores = 0.5 * query @ key.repeat_interleave(groups, 1).transpose(2, 3) + mask
        plain = torch.allclose(weights, torch.softmax(scores, -1), atol=1e-6) and still.harmless()
        after = not torch.allclose(out.transpose(1, 2), weights @ values, atol=1e-5)
    read, everything = _read_arguments(eager)
    return Own(eager, plain and not after and not everything, after, frozenset(read) - set(_STANDARD))


def _read_arguments(eager: Eager) -> tuple[set[str], bool]:
    """The arguments by name that a function reads, and whether it looks into its `**kwargs`."""
    code = inspect.unwrap(eager).__code__
    loaded = {name for step in dis.get_instructions(code) if step.opname.startswith("LOAD")
              for name in (step.argval if isinstance(step.argval, tuple) else (step.argval,))}  # fmt: skip
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    others = code.co_varnames[len(named) :][bool(code.co_flags & inspect.CO_VARARGS) :]
    keywords = bool(code.co_flags & inspect.CO_VARKEYWORDS) and others[0] in loaded
    return {name for name in named if name in loaded}, keywords
