"""The layer that leaks: the first module whose output at earlier positions depends on later tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

MOST_LAYERS = 16  # that are named
OWN_FORWARD = "the model's own forward"
Call = tuple[str, int]  # a module's name, and which of its calls
Shape = tuple[int, int, int]  # rows and positions of the ids, and positions before them in a cache
NOTHING: Mapping[Call, Tensor] = {}


@torch.no_grad()  # some modules give a parameter out as it is
def leaking_layers(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    clean: Tensor,
    changed: Tensor,
    position: int,
    least: float,
    past: int = 0,
) -> tuple[str, ...]:
    """Modules in which tokens from `position` on reach earlier outputs of `run`; clean, changed (B, N) differ at `position`.

    A module is one of them if its output before `position` differs, it is the first to differ, and putting back its output
    on the clean tokens changes the leak (a later layer that leaks too may make it larger): an output that is not used is
    nobody's fault. Then the next one is looked for with the first put right. `least`: differences of outputs that count.
    past: tokens in a cache before them.
    """
    known, expected = observe(model, lambda: run(clean), clean)
    put_back: dict[Call, Tensor] = {}

    def leak(put_back: Mapping[Call, Tensor]) -> tuple[dict[Call, Tensor], float]:
        outputs, logits = observe(model, lambda: run(changed), clean, put_back, position, past)
        off = (logits - expected)[:, :position].abs()
        return outputs, float(off.sum()) if float(off.max()) > least else 0.0

    while len(put_back) < MOST_LAYERS:
        outputs, size = leak(put_back)
        if size == 0.0:
            break
        for called, output in outputs.items():
            fresh = called not in put_back and called in known
            if not fresh or not _differs(output, known[called], (*clean.shape[:2], past), position):
                continue
            if abs(leak({**put_back, called: known[called]})[1] - size) > 1e-6 * size:
                put_back[called] = known[called]
                break
        else:
            break
    return tuple(dict.fromkeys(name for name, _ in put_back)) or (OWN_FORWARD,)


def first_by_gradient(
    outputs: Mapping[Call, Tensor], leaves: list[Tensor], later: Tensor, shape: Shape, position: int, least: float
) -> str:
    """The first module through whose output before `position` the gradient of `later` comes from embeddings after it."""
    for (name, _), output in outputs.items():
        if not output.requires_grad or any(output is leaf for leaf in leaves):
            continue
        (gradient,) = torch.autograd.grad(later, output, retain_graph=True, allow_unused=True)
        if gradient is None:
            continue
        gradient = gradient.contiguous()
        kept = torch.zeros_like(gradient)
        into, earlier = _earlier(kept, shape, position), _earlier(gradient, shape, position)
        if into is None or earlier is None:
            continue
        into.copy_(earlier)
        gradients = torch.autograd.grad(output, leaves, kept, retain_graph=True, allow_unused=True)
        if any(g is not None and float(g[:, position:].abs().max()) > least for g in gradients):
            return name
    return OWN_FORWARD


def observe(model: nn.Module, run: Callable[[], Tensor], ids: Tensor, put_back: Mapping[Call, Tensor] = NOTHING,
             position: int = 0, past: int = 0) -> tuple[dict[Call, Tensor], Tensor]:  # fmt: skip
    """Run and give the outputs of all modules by call, in the order in which they end, and the logits.

    Outputs are tensors, or the first ones of tuples. Those of the calls in `put_back` are replaced by it before `position`.
    """
    outputs: dict[Call, Tensor] = {}
    calls: Counter[str] = Counter()

    def hook(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def seen(module: nn.Module, args: Any, out: Any) -> Any:
            called = (name, calls[name])
            calls[name] += 1
            output = out[0] if isinstance(out, tuple | list) and out else out
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            outputs[called] = output
            if called not in put_back or put_back[called].shape != output.shape:
                return None
            outputs[called] = output.clone(memory_format=torch.contiguous_format)
            into, kept = (
                _earlier(tensor, (*ids.shape[:2], past), position) for tensor in (outputs[called], put_back[called])
            )
            assert into is not None
            assert kept is not None
            into.copy_(kept)
            if output is out:
                return outputs[called]
            parts = (outputs[called], *out[1:])
            return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)

        return seen

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_hook(hook(name)).remove)
        return outputs, run()


def _earlier(tensor: Tensor, shape: Shape, position: int) -> Tensor | None:
    """View of what stands before `position`; all of a tensor without positions, as every position may read it.

    None where that cannot be said: attention weights have two dimensions of that size. shape: (B, N) of the ids.
    """
    rows, length, past = shape
    dims = [i for i, size in enumerate(tensor.shape) if size == length]
    if len(dims) > 1:
        return None
    if dims:
        return tensor.narrow(dims[0], 0, position)
    if past and (dims := [i for i, size in enumerate(tensor.shape) if size == past + length]):
        return tensor.narrow(dims[0], 0, past + position) if len(dims) == 1 else None
    if tensor.dim() > 2 and tensor.shape[0] in (1, rows) and tensor.shape[1] > length:  # a text padded to whole blocks
        return tensor[:, :position]
    if tensor.dim() > 1 and tensor.shape[0] == rows * length:  # (B N, ..)
        return tensor.reshape(rows, length, -1)[:, :position]
    return tensor


def _differs(output: Tensor, known: Tensor, shape: Shape, position: int) -> bool:
    """Outputs before `position` differ by more than rounding."""
    before, expected = _earlier(output, shape, position), _earlier(known, shape, position)
    if before is None or expected is None or before.shape != expected.shape or before.numel() == 0:
        return False
    size = max(float(expected.abs().max()), 1e-30)
    rounds = torch.finfo(output.dtype).eps * (100 if output.dtype.itemsize > 2 else 2)
    return float((before - expected).abs().max()) > rounds * size
