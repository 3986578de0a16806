"""Which layer leaks: outputs of modules are watched, and put back to what they were, one module at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[str, int]  # a module's name, and which of its calls
ITSELF = "the model's own forward"
_MOST = 16  # layers that are named


@torch.no_grad()  # some modules give a parameter out as it is
def leaking_layers(
    model: nn.Module, run: Callable[[Tensor], Tensor], clean: Tensor, changed: Tensor, place: int, least: float
) -> tuple[str, ...]:
    """The modules in which tokens from `place` on reach earlier outputs of `run`; clean, changed (B, N) differ at `place`.

    A module is one of them if its output before `place` differs, it is the first to differ, and putting back what it gave on
    the clean tokens changes the leak (a later layer that leaks too may make it larger): what is looked up and not used is
    nobody's fault. Then the next one is looked for with the first put right. `least`: differences of outputs that count.
    """
    seen = Watch(clean.shape)
    with seen.on(model):
        expected = run(clean)[:, :place]
    known = dict(seen.outputs)
    put_back: dict[Place, Any] = {}
    found: list[str] = []

    def leak(more: Mapping[Place, Any]) -> tuple[Watch, float]:
        watch = Watch(clean.shape, more, place)
        with watch.on(model):
            out = run(changed)[:, :place]
        off = (out - expected).abs()
        return watch, float(off.sum()) if float(off.max()) > least else 0.0

    while len(found) < _MOST:
        watch, size = leak(put_back)
        if size == 0.0:
            break
        for where in watch.order:
            if where in put_back or not _differs(watch.outputs[where], known.get(where), place, seen):
                continue
            if abs(leak({**put_back, where: known[where]})[1] - size) > 1e-6 * size:
                put_back[where] = known[where]
                found.append(where[0])
                break
        else:
            break
    return tuple(dict.fromkeys(found)) or (ITSELF,)


class Watch:
    """Outputs of all modules in one call, in the order in which they end; some of them put back before `place`.

    shape: (B, N) of the ids.
    """

    def __init__(self, shape: torch.Size, put_back: Mapping[Place, Any] | None = None, place: int = 0) -> None:
        self.rows, self.length = shape
        self.put_back, self.place = put_back or {}, place
        self.outputs: dict[Place, Any] = {}
        self._calls: dict[str, int] = {}

    @property
    def order(self) -> list[Place]:
        return list(self.outputs)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        handles = [
            module.register_forward_hook(self._hook(name), with_kwargs=False)
            for name, module in model.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def seen(module: nn.Module, args: Any, out: Any) -> Any:
            where = (name, self._calls.get(name, 0))
            self._calls[name] = where[1] + 1
            if where in self.put_back:
                out = _mapped(out, self.put_back[where], self._before)
                self.outputs[where] = out
                return out
            self.outputs[where] = out
            return None

        return seen

    def _before(self, given: Tensor, kept: Tensor) -> Tensor:
        """`given` with what `kept` has before `place`."""
        if given.shape != kept.shape or self.before(given, self.place) is None:
            return given
        out = given.clone(memory_format=torch.contiguous_format)
        part, expected = self.before(out, self.place), self.before(kept, self.place)
        assert part is not None
        assert expected is not None
        part.copy_(expected)
        return out

    def before(self, tensor: Tensor, place: int) -> Tensor | None:
        """What stands before `place`; all of a tensor without positions, as every position may read it.

        None where that cannot be said: attention weights have two dimensions of that size.
        """
        if not tensor.is_floating_point():
            return None
        found = [i for i, size in enumerate(tensor.shape) if size == self.length]
        if len(found) > 1:
            return None
        if found:
            return tensor.narrow(found[0], 0, place)
        if tensor.dim() > 1 and tensor.shape[0] == self.rows * self.length:  # (B N, ..)
            return tensor.reshape(self.rows, self.length, -1)[:, :place]
        return tensor


def tensors_in(out: Any) -> list[Tensor]:
    """All tensors of what a module returned."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, Mapping):
        return [tensor for value in out.values() for tensor in tensors_in(value)]
    if isinstance(out, tuple | list):
        return [tensor for value in out for tensor in tensors_in(value)]
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return [t for field in dataclasses.fields(out) for t in tensors_in(getattr(out, field.name, None))]
    return []


def _differs(given: Any, known: Any, place: int, watch: Watch) -> bool:
    if known is None:
        return False
    pairs = zip(tensors_in(given), tensors_in(known), strict=False)
    for a, b in pairs:
        if a.shape != b.shape:
            continue
        before = watch.before(a, place)
        if before is None:
            continue
        expected = watch.before(b, place)
        assert expected is not None
        off, size = (before - expected).abs(), expected.abs()
        if off.numel() and float(off.max()) > 100 * torch.finfo(a.dtype).eps * max(float(size.max()), 1e-30):
            return True
    return False


def _mapped(out: Any, other: Any, change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """`out` with every tensor changed by the one that stands in the same place of `other`."""
    if isinstance(out, Tensor):
        return change(out, other)
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*(_mapped(a, b, change) for a, b in zip(out, other, strict=True)))
    if isinstance(out, tuple | list):
        return type(out)(_mapped(a, b, change) for a, b in zip(out, other, strict=True))
    if isinstance(out, Mapping):  # also an output of Hugging Face
        values = {key: _mapped(value, other[key], change) for key, value in out.items()}
        return type(out)(**values) if all(isinstance(key, str) for key in values) else values
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        values = {
            f.name: _mapped(getattr(out, f.name), getattr(other, f.name), change) for f in dataclasses.fields(out)
        }
        return dataclasses.replace(out, **values)
    return out
