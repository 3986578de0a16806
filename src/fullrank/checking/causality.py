"""Search for attention to later tokens, by perturbation, by gradient and at the last position, and for the layer that leaks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.report import Finding, bounded, inapplicable, largest, rounding, same, tolerance
from fullrank.checking.subject import Subject, call, duplicate, mode

_MOST_POSITIONS, _OF_LARGE = 24, 8  # where a token is changed; of a model with more than _MOST_PARAMETERS
_MOST_LAYERS = 16  # that are named
OWN_FORWARD = "the model's own forward"


def positions(length: int, most: int = _MOST_POSITIONS) -> list[int]:
    """Positions from 1 on, all of them or `most` that are spread evenly, the first and the last among them."""
    if length - 1 <= most:
        return list(range(1, length))
    return sorted({1 + round(i * (length - 2) / (most - 1)) for i in range(most)})


def _on_purpose(subject: Subject) -> str:
    return f"; {subject.sees_future} leaves the mask out" if subject.sees_future else ""


# -- by perturbation --------------------------------------------------------------------------------------------------


def by_perturbation(subject: Subject, *, training: bool, padded: bool = False) -> Finding:
    """A token is changed; no logits before it may change."""
    if padded and not subject.takes_mask:
        return inapplicable("forward takes no attention_mask")
    chosen = positions(subject.length, _OF_LARGE if subject.parameters > _MOST_PARAMETERS else _MOST_POSITIONS)
    every = len(chosen) == subject.length - 1
    where = f"each of {subject.length} positions" if every else f"{len(chosen)} positions of {subject.length}"
    when = "training mode, dropout seeded" if training else "evaluation mode"
    looked_at = f"logits before a changed token, {where}; {when}"
    limit, reason = tolerance(subject.dtype), rounding(subject.dtype)
    worst, remark, layers, moves = -1.0, "", tuple[str, ...](), 0.0
    masks: Mapping[str, Tensor | None] = subject.masks() if padded else {"": None}
    for side, mask in masks.items():

        def logits(ids: Tensor, mask: Tensor | None = mask) -> Tensor:  # 0 at padding
            with torch.no_grad(), mode(subject.model, training=training):
                out = call(subject.model, ids, mask)
            return out if mask is None else out.masked_fill(~mask.bool()[..., None], 0.0)

        before = logits(subject.ids)
        size = max(1.0, float(before.abs().max()))
        again = largest(logits(subject.ids), before)
        if not again <= limit * size:
            looked_at = f"logits before a changed token, many positions; {when}"
            remark = "two passes over the same tokens differ, although random numbers begin at the same seed"
            return Finding("fails", looked_at, again, limit * size, reason, remark)
        leak: tuple[Tensor, int] | None = None
        for position in chosen:
            for changed in _with_another_token(subject, position):
                after = logits(changed)
                share = largest(after[:, :position], before[:, :position]) / size
                moves = max(moves, largest(after[:, position:], before[:, position:]))
                if share > worst or share != share:
                    worst, leak = share, (changed, position)
        if leak is not None and not worst <= limit:
            on_side = f", padding on the {side}" if side else ""
            remark = f"token {leak[1]} (from 0) is seen before it{on_side}{_on_purpose(subject)}"
            layers = leaking_layers(subject.model, logits, subject.ids, *leak, limit * size)
    if moves == 0.0:
        return inapplicable("no token changes any logits at all, so there is nothing that could leak")
    return bounded(looked_at, worst, limit, reason, remark=remark, layers=layers)


def _with_another_token(subject: Subject, position: int) -> list[Tensor]:
    """The ids with another token at `position`: any other one, and padding."""
    rows = torch.arange(len(subject.ids), device=subject.ids.device)
    other, padding = subject.ids.clone(), subject.ids.clone()
    step = 1 + (rows * 7 + position) % (subject.vocab_size - 1)
    other[:, position] = (other[:, position] + step) % subject.vocab_size
    if subject.padding_id is not None:
        padding[:, position] = subject.padding_id
    return [other] if torch.equal(padding, subject.ids) else [other, padding]


# -- by gradient ------------------------------------------------------------------------------------------------------


def by_gradient(subject: Subject, *, training: bool) -> Finding:
    """Logits at n must have no gradient from embeddings after n."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: tuple[Any, ...], out: Any) -> Tensor | None:
        """Make the output of a module that reads the ids a leaf. Parameters are frozen: what depends on a leaf is none."""
        reads_ids = bool(args) and isinstance(args[0], Tensor) and same(args[0], subject.ids)
        vectors = isinstance(out, Tensor) and out.is_floating_point() and out.shape[:-1] == subject.ids.shape
        if not reads_ids or not vectors or out.requires_grad:
            return None
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    chosen = sorted({0, *(position - 1 for position in positions(subject.length, 12))})
    with ExitStack() as stack:
        stack.enter_context(mode(subject.model, training=training))
        stack.enter_context(torch.enable_grad())
        for parameter in subject.model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
        for name, module in subject.model.named_modules():
            if name:
                stack.callback(module.register_forward_hook(cut).remove)
        outputs, logits = _observe(subject.model, lambda: call(subject.model, subject.ids), subject.ids)
        if not leaves:
            return inapplicable("no module was found that turns input_ids into vectors")
        if not logits.requires_grad:
            return inapplicable("no gradient reaches the logits")
        generator = torch.Generator().manual_seed(3)
        cotangent = torch.randn(logits.shape, dtype=torch.float64, generator=generator).to(logits)
        later, own, worst = 0.0, 0.0, chosen[0]
        for position in chosen:
            gradients = torch.autograd.grad(
                logits[:, position], leaves, cotangent[:, position], retain_graph=True, allow_unused=True
            )
            parts = [gradient.abs() for gradient in gradients if gradient is not None]
            own = max([own, *(float(part.max()) for part in parts)])
            beyond = [part[:, position + 1 :] for part in parts if position + 1 < subject.length]
            after = max((float(part.max()) for part in beyond), default=0.0)
            if after > later or after != after:
                later, worst = after, position
        if own == 0.0:
            return inapplicable("no gradient reaches the embeddings")
        limit, remark, layers = tolerance(subject.dtype), "", tuple[str, ...]()
        if not later / own <= limit:
            at_worst = (logits[:, worst] * cotangent[:, worst]).sum()
            layers = (_first_by_gradient(outputs, leaves, at_worst, subject.ids.shape, worst + 1, own * limit),)
            remark = f"logits of token {worst} (from 0) depend on later embeddings{_on_purpose(subject)}"
    when = "training" if training else "evaluation"
    looked_at = f"gradient of the logits at {len(chosen)} positions with respect to later embeddings; {when} mode"
    reason = f"{rounding(subject.dtype)}: the largest gradient"
    return bounded(looked_at, later / own, limit, reason, remark=remark, layers=layers)


# -- the layer that leaks ---------------------------------------------------------------------------------------------

Call = tuple[str, int]  # a module's name, and which of its calls
NOTHING: Mapping[Call, Tensor] = {}


@torch.no_grad()  # some modules give a parameter out as it is
def leaking_layers(
    model: nn.Module, run: Callable[[Tensor], Tensor], clean: Tensor, changed: Tensor, position: int, least: float
) -> tuple[str, ...]:
    """Modules in which tokens from `position` on reach earlier outputs of `run`; clean, changed (B, N) differ at `position`.

    A module is one of them if its output before `position` differs, it is the first to differ, and putting back its output
    on the clean tokens changes the leak (a later layer that leaks too may make it larger): an output that is not used is
    nobody's fault. Then the next one is looked for with the first put right. `least`: differences of outputs that count.
    """
    known, expected = _observe(model, lambda: run(clean), clean)
    put_back: dict[Call, Tensor] = {}

    def leak(put_back: Mapping[Call, Tensor]) -> tuple[dict[Call, Tensor], float]:
        outputs, logits = _observe(model, lambda: run(changed), clean, put_back, position)
        off = (logits - expected)[:, :position].abs()
        return outputs, float(off.sum()) if float(off.max()) > least else 0.0

    while len(put_back) < _MOST_LAYERS:
        outputs, size = leak(put_back)
        if size == 0.0:
            break
        for called, output in outputs.items():
            fresh = called not in put_back and called in known
            if not fresh or not _differs(output, known[called], clean.shape, position):
                continue
            if abs(leak({**put_back, called: known[called]})[1] - size) > 1e-6 * size:
                put_back[called] = known[called]
                break
        else:
            break
    return tuple(dict.fromkeys(name for name, _ in put_back)) or (OWN_FORWARD,)


def _first_by_gradient(
    outputs: Mapping[Call, Tensor], leaves: list[Tensor], later: Tensor, shape: torch.Size, position: int, least: float
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


def _observe(model: nn.Module, run: Callable[[], Tensor], ids: Tensor, put_back: Mapping[Call, Tensor] = NOTHING,
             position: int = 0) -> tuple[dict[Call, Tensor], Tensor]:  # fmt: skip
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
            into, kept = (_earlier(tensor, ids.shape, position) for tensor in (outputs[called], put_back[called]))
            assert into is not None
            assert kept is not None
            into.copy_(kept)
            return outputs[called] if output is out else type(out)((outputs[called], *out[1:]))

        return seen

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_hook(hook(name)).remove)
        return outputs, run()


def _earlier(tensor: Tensor, shape: torch.Size, position: int) -> Tensor | None:
    """View of what stands before `position`; all of a tensor without positions, as every position may read it.

    None where that cannot be said: attention weights have two dimensions of that size. shape: (B, N) of the ids.
    """
    rows, length = shape
    dims = [i for i, size in enumerate(tensor.shape) if size == length]
    if len(dims) > 1:
        return None
    if dims:
        return tensor.narrow(dims[0], 0, position)
    if tensor.dim() > 1 and tensor.shape[0] == rows * length:  # (B N, ..)
        return tensor.reshape(rows, length, -1)[:, :position]
    return tensor


def _differs(output: Tensor, known: Tensor, shape: torch.Size, position: int) -> bool:
    """Outputs before `position` differ by more than rounding."""
    before, expected = _earlier(output, shape, position), _earlier(known, shape, position)
    if before is None or expected is None or before.shape != expected.shape or before.numel() == 0:
        return False
    size = max(float(expected.abs().max()), 1e-30)
    return float((before - expected).abs().max()) > 100 * torch.finfo(output.dtype).eps * size


# -- the last position ------------------------------------------------------------------------------------------------
#
# Only the last prediction of a segment has nothing after it that could be seen. A model that looks ahead finds its targets
# in its own input, at every position but the last: its perplexity there is far above its ordinary one. On random tokens no
# honest perplexity is below the size of the vocabulary.

_STEPS, _ROWS, _SEGMENTS = 200, 16, 512
_MOST_PARAMETERS = 1_000_000  # of a model that is trained for the check
# nats: what overfitting may cost at the position with most context, and what chance may gain
_GAP, _GAIN = 0.1, 0.02


def last_position(subject: Subject, segments: Tensor | None) -> Finding:
    """segments (S, N + 1) of a text that the model was trained for; None: random tokens, on which a copy is trained."""
    if segments is None:
        return on_random_tokens(subject)
    per_token = _nll(subject.own, segments, subject.ids.device)
    return _compared(per_token, f"{len(segments)} segments of {segments.shape[1] - 1} tokens of the text")


def on_random_tokens(subject: Subject) -> Finding:
    """A copy is trained on fresh random tokens, then measured on others: nothing can be learnt there but to look ahead."""
    if subject.parameters > _MOST_PARAMETERS:
        return inapplicable(
            f"needs a text (--text): a model of {subject.parameters:,} parameters is not trained on random tokens for it"
        )
    model: Any = duplicate(subject.own).float()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return inapplicable("no parameter of the model can be trained, and no text was given")
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    with mode(model, training=True, seed=2), torch.enable_grad():
        for step in range(_STEPS):
            tokens = subject.tokens(_ROWS, subject.length + 1, seed=1000 + step)
            ids, targets = tokens[:, :-1], tokens[:, 1:]
            if subject.kind == "fullrank":
                loss = model.loss(ids, targets)
            else:
                loss = nn.functional.cross_entropy(call(model, ids).float().flatten(0, 1), targets.flatten())
            if not loss.requires_grad:
                return inapplicable("its logits cannot be trained, and no text was given")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        segments = subject.tokens(_SEGMENTS, subject.length + 1, seed=7)
    per_token = _nll(model, segments, subject.ids.device)
    looked_at = (
        f"{_STEPS} steps on fresh random tokens, then {_SEGMENTS} other segments of {subject.length}: no honest perplexity is "
        f"below {subject.vocab_size}"
    )
    finding = _compared(per_token, looked_at)
    # a leak shows here before it is learnt well enough for a gap
    gain = math.log(subject.vocab_size) - float(per_token.mean())
    limit = max(_GAIN, 5 * float(per_token.mean(dim=1).std()) / len(per_token) ** 0.5)
    if finding.verdict == "passes" and not gain <= limit:
        reason = "nats below log V, which is the least of an honest model; 5 standard errors"
        return bounded(looked_at, gain, limit, reason, remark=finding.remark)
    return finding


def _nll(model: nn.Module, segments: Tensor, device: torch.device) -> Tensor:
    """(S, N) nats, float64."""
    parts = []
    with torch.no_grad(), mode(model, training=False):
        for part in segments.to(device).split(max(1, 2048 // segments.shape[1])):
            log_prob = torch.log_softmax(call(model, part[:, :-1]).double(), dim=-1)
            parts.append(-log_prob.gather(-1, part[:, 1:, None])[..., 0])
    return torch.cat(parts).cpu()


def _compared(per_token: Tensor, looked_at: str) -> Finding:
    last, ordinary = per_token[:, -1], per_token.mean(dim=1)
    gap = last - ordinary  # (S,): an honest model knows more at the last position than on average
    limit = max(_GAP, 5 * float(gap.std()) / len(gap) ** 0.5)
    why = "5 standard errors" if limit > _GAP else "more than overfitting makes it"
    remark = f"perplexity {_perplexity(last)} at the last position, ordinarily {_perplexity(ordinary)}"
    return bounded(looked_at, float(gap.mean()), limit, f"nats, the last position minus all; {why}", remark=remark)


def _perplexity(nll: Tensor) -> str:
    mean = float(nll.mean())
    return f"{math.exp(mean):,.2f}" if mean < 50 else f"exp({mean:,.0f})"
