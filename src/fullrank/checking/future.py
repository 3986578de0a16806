"""Does a token see what comes after it? By perturbation, and by gradient."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.finding import Check, Finding, inapplicable, judged, largest, rounding, tolerance
from fullrank.checking.naming import ITSELF, Watch, leaking_layers, tensors_in
from fullrank.checking.subject import Subject, mode

_MOST = 24  # positions looked at


def places(length: int, most: int = _MOST) -> list[int]:
    """Positions from 1 on, all of them or `most` that are spread evenly, the first and the last among them."""
    if length - 1 <= most:
        return list(range(1, length))
    return sorted({1 + round(i * (length - 2) / (most - 1)) for i in range(most)})


def masks_of(subject: Subject) -> dict[str, Tensor]:
    """Attention masks (B, N) by the side of the padding: the models that count positions themselves are padded on both."""
    rows, length = subject.ids.shape
    sides = {"right": torch.ones(rows, length, dtype=torch.int64, device=subject.ids.device)}
    sides["right"][1, -(length // 3) :] = 0
    sides["right"][2, -(length // 2) :] = 0
    if subject.ours:
        sides["left"] = sides["right"].flip(1)
    return sides


def by_perturbation(subject: Subject, *, training: bool, padded: bool = False) -> Finding:
    """A token is changed; no logits before it may change."""
    when = "training" if training else "evaluation"
    looked_at = f"logits before a changed token, {{}}; {when} mode" + (", dropout seeded" if training else "")
    masks: dict[str, Tensor | None] = dict(masks_of(subject)) if padded else {"": None}
    if padded and not subject.takes_mask:
        return inapplicable("forward takes no attention_mask")
    worst: tuple[float, float, str, Tensor, int, Tensor | None] | None = None
    moves, size, chosen = 0.0, 1.0, places(subject.length)
    for side, mask in masks.items():
        ids = subject.ids
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()

        def run(read: Tensor, mask: Tensor | None = mask) -> Tensor:
            with torch.no_grad(), mode(subject.model, training=training):
                return subject.logits(read, mask)

        before = run(ids)
        again = largest(run(ids), before)
        size = max(1.0, float(before[real].abs().max()))
        limit = tolerance(subject.dtype) * size
        if not again <= limit:
            return Finding(
                "fails", looked_at.format("many positions"), again, limit, rounding(subject.dtype),
                "two passes over the same tokens differ, although random numbers begin at the same seed",
            )  # fmt: skip
        for place in chosen:
            for other in _changed(subject, place):
                after = run(other)
                kept = real[:, :place]
                off = largest(after[:, :place][kept], before[:, :place][kept])
                moves = max(moves, largest(after[:, place:], before[:, place:]))
                if worst is None or off / size > worst[0] or off != off:
                    worst = (off / size, size, f", padding on the {side}" if side else "", other, place, mask)
    assert worst is not None
    if moves == 0.0:
        return inapplicable("no token changes any logits at all, so there is nothing that could leak")
    share, size, side, other, place, mask = worst
    limit = tolerance(subject.dtype)
    remark = ""
    layers: tuple[str, ...] = ()
    if not share <= limit:

        def rerun(read: Tensor) -> Tensor:
            with torch.no_grad(), mode(subject.model, training=training):
                out = subject.logits(read, mask)
            return out if mask is None else out * mask[..., None]

        layers = leaking_layers(subject.model, rerun, subject.ids, other, place, limit * size)
        remark = f"token {place} (from 0) is seen before it{side}{_on_purpose(subject)}"
    if len(chosen) < subject.length - 1:
        where = f"{len(chosen)} positions of {subject.length}"
    else:
        where = f"each of {subject.length} positions"
    return judged(looked_at.format(where), share, limit, rounding(subject.dtype), remark=remark, layers=layers)


def _on_purpose(subject: Subject) -> str:
    """What the configuration says of a leak."""
    return f"; {subject.sees_future} leaves the mask out" if subject.sees_future else ""


def _changed(subject: Subject, place: int) -> list[Tensor]:
    """The ids with another token at `place`: any other one, and padding."""
    rows = torch.arange(len(subject.ids), device=subject.ids.device)
    first, second = subject.ids.clone(), subject.ids.clone()
    step = 1 + (rows * 7 + place) % (subject.vocab_size - 1)
    first[:, place] = (first[:, place] + step) % subject.vocab_size
    if subject.padding_id is not None:
        second[:, place] = subject.padding_id
    return [first] if torch.equal(second, subject.ids) else [first, second]


def by_gradient(subject: Subject, *, training: bool) -> Finding:
    """Logits at n must have no gradient from embeddings after n."""
    when = "training" if training else "evaluation"
    if not subject.embeddings:
        return inapplicable("no module was found that turns input_ids into vectors")
    chosen = places(subject.length, 12)
    chosen = sorted({0, *(place - 1 for place in chosen)})
    leaves: list[Tensor] = []

    def leaf(module: Any, args: Any, out: Tensor) -> Tensor | None:
        if args and args[0].shape != subject.ids.shape:
            return None  # a table that the source of a translation shares
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    watch = Watch(subject.ids.shape)
    with ExitStack() as stack:
        stack.enter_context(mode(subject.model, training=training))
        stack.enter_context(torch.enable_grad())
        for name in subject.embeddings:
            stack.callback(subject.model.get_submodule(name).register_forward_hook(leaf).remove)
        stack.enter_context(watch.on(subject.model))
        logits = subject.logits(subject.ids)
        if not logits.requires_grad:
            return inapplicable("no gradient reaches the logits")
        cotangent = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        cotangent = cotangent.to(logits)
        later, own = 0.0, 0.0
        worst = chosen[0]
        for place in chosen:
            found = torch.autograd.grad(
                logits[:, place], leaves, cotangent[:, place], retain_graph=True, allow_unused=True
            )
            given = [gradient for gradient in found if gradient is not None]
            after = max(
                (float(g[:, place + 1 :].abs().max()) for g in given if place + 1 < subject.length), default=0.0
            )
            own = max(own, max((float(g.abs().max()) for g in given), default=0.0))
            if after > later or after != after:
                later, worst = after, place
        if own == 0.0:
            return inapplicable("no gradient reaches the embeddings")
        limit, remark = tolerance(subject.dtype), ""
        layers: tuple[str, ...] = ()
        if not later / own <= limit:
            again = (logits[:, worst] * cotangent[:, worst]).sum()
            layers = (_first_by_gradient(watch, leaves, again, worst, own * limit),)
            remark = f"logits of token {worst} (from 0) depend on later embeddings{_on_purpose(subject)}"
    looked_at = f"gradient of the logits at {len(chosen)} positions with respect to later embeddings; {when} mode"
    reason = f"{rounding(subject.dtype)}: the largest gradient"
    return judged(looked_at, later / own, limit, reason, remark=remark, layers=layers)


def _first_by_gradient(watch: Watch, leaves: list[Tensor], later: Tensor, place: int, least: float) -> str:
    """The first module through whose output up to `place` the gradient of `later` comes from embeddings after it.

    later: a sum of logits at `place`.
    """
    for name, call in watch.order:
        for out in tensors_in(watch.outputs[name, call]):
            if not out.requires_grad or any(out is leaf for leaf in leaves):
                continue
            (gradient,) = torch.autograd.grad(later, out, retain_graph=True, allow_unused=True)
            if gradient is None:
                continue
            gradient = gradient.contiguous()
            kept = torch.zeros_like(gradient)
            into, given = watch.before(kept, place + 1), watch.before(gradient, place + 1)
            if into is None or given is None:
                continue
            into.copy_(given)
            found = torch.autograd.grad(out, leaves, kept, retain_graph=True, allow_unused=True)
            if any(g is not None and float(g[:, place + 1 :].abs().max()) > least for g in found):
                return name
    return ITSELF


def future(subject: Subject) -> list[Check]:
    """All of them, not yet run."""
    return [
        ("future, by perturbation, evaluation", lambda: by_perturbation(subject, training=False)),
        ("future, by perturbation, training", lambda: by_perturbation(subject, training=True)),
        ("future, by perturbation, with padding", lambda: by_perturbation(subject, training=False, padded=True)),
        ("future, by gradient, evaluation", lambda: by_gradient(subject, training=False)),
        ("future, by gradient, training", lambda: by_gradient(subject, training=True)),
    ]
