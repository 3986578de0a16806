"""Two ways to compute the same: padding, cache, memory, files, and repetition."""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.finding import Check, Finding, inapplicable, judged, largest, rounding, tolerance
from fullrank.checking.future import masks_of
from fullrank.checking.subject import Subject, accepted, call, logits_in, mode


def close(subject: Subject, looked_at: str, pairs: list[tuple[str, Tensor, Tensor]], remark: str = "") -> Finding:
    """Passes where every given tensor equals the expected one, up to rounding; the worst is named."""
    worst, name = 0.0, ""
    for described, given, expected in pairs:
        if given.shape != expected.shape:
            given_shape, wanted = tuple(given.shape), tuple(expected.shape)
            return judged(looked_at, float("nan"), 0.0, "", remark=f"{described}: {given_shape} instead of {wanted}")
        share = largest(given, expected) / max(1.0, float(expected.abs().nan_to_num(0, 0, 0).max()))
        if not share <= worst:
            worst, name = share, described
        if worst != worst:
            break
    limit = tolerance(subject.rounds)
    remark = remark if worst <= limit else f"worst: {name}"
    return judged(looked_at, worst, limit, _reason(subject), remark=remark)


def _reason(subject: Subject) -> str:
    why = "" if subject.rounds == subject.dtype else "; a model that is not ours may compute parts so in float64, too"
    return rounding(subject.rounds) + why


def padding(subject: Subject) -> Finding:
    """A text in a padded batch has the logits that it has alone, whatever stands in the padding."""
    if not subject.takes_mask:
        return inapplicable("forward takes no attention_mask")
    pairs, sides = [], masks_of(subject)
    with torch.no_grad(), mode(subject.model, training=False):
        for side, mask in sides.items():
            seen = mask.bool()
            other = torch.where(seen, subject.ids, (subject.ids + 1) % subject.vocab_size)
            for ids in (subject.ids, other):
                batch = subject.logits(ids, mask)
                for row in range(len(ids)):
                    alone = subject.logits(ids[row][seen[row]][None])[0]
                    pairs.append((f"text {row}, padding on the {side}", batch[row][seen[row]], alone))
    looked_at = f"texts of unequal lengths in one batch, padding on the {' and on the '.join(sides)}, beside each alone"
    remark = "" if "left" in sides else "not on the left, where such a model has to be told positions by position_ids"
    return close(subject, looked_at, pairs, remark)


def determinism(subject: Subject) -> Finding:
    """In evaluation the same tokens give the same logits, no random number is drawn, nothing in the model changes."""
    looked_at = "two passes from different seeds; the state of the random numbers and of the model after them"
    model = subject.model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad(), mode(model, training=False):
        before = torch.get_rng_state()
        first = subject.logits(subject.ids)
        drew = not torch.equal(before, torch.get_rng_state())
        torch.manual_seed(99)
        second = subject.logits(subject.ids)
        changed = [n for n, tensor in model.state_dict().items() if n in state and not same(tensor, state[n])]
    off = largest(second, first)
    faults = (["random numbers are drawn"] if drew else []) + ([f"{changed[0]} is changed"] if changed else [])
    if faults and off == 0.0:
        return Finding("fails", looked_at, off, 0.0, "the same computation", "; ".join(faults))
    return judged(looked_at, off, 0.0, "the same computation twice", remark="; ".join(faults))


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


# -- a cache ----------------------------------------------------------------------------------------------------------


def decoding(subject: Subject) -> Finding:
    """Token by token, or in pieces, with a cache, as in one pass."""
    if subject.sees_future:
        return inapplicable(f"{subject.sees_future}: a token that sees later ones cannot be read before them")
    model, takes = subject.model, accepted(subject.model)
    if subject.kind == "fullrank" and model.config.memory_start == "zeros":  # type: ignore[union-attr]
        return inapplicable("model.memory_start is zeros, which stand before the text; a cache begins with nothing")
    step: Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Any]]
    if subject.kind == "fullrank" and "cache" in takes:

        def step(ids: Tensor, cache: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
            out = model(ids, cache=model.new_cache() if cache is None else cache, attention_mask=mask)  # type: ignore[operator]
            return out.logits, out.cache

    elif "past_key_values" in takes and "use_cache" in takes:

        def step(ids: Tensor, cache: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
            out = model(ids, past_key_values=cache, use_cache=True)
            return out.logits, out.past_key_values

    else:
        return inapplicable("forward takes neither a cache nor past_key_values with use_cache")
    length = subject.length
    cuts = [list(range(length + 1)), [0, length // 2, length], [0, 1, length - 2, length]]
    masks: list[tuple[str, Tensor | None]] = [("", None)]
    if subject.kind == "fullrank":
        masks += [(f", padding on the {side}", mask) for side, mask in masks_of(subject).items()]
    pairs = []
    with torch.no_grad(), mode(model, training=False):
        for side, mask in masks:
            expected = subject.logits(subject.ids, mask)
            for bounds in cuts:
                cache, parts = None, []
                for start, end in itertools.pairwise(bounds):
                    new = None if mask is None else mask[:, start:end]
                    logits, cache = step(subject.ids[:, start:end], cache, new)
                    if cache is None:
                        return inapplicable("the model returns no past_key_values")
                    parts.append(logits)
                seen = slice(None) if mask is None else mask.bool()
                given = torch.cat(parts, dim=1)
                how = "token by token" if len(bounds) > length else f"in {len(bounds) - 1} pieces"
                pairs.append((how + side, given[seen], expected[seen]))
    return close(subject, "logits with the cache, token by token and in pieces, beside one pass", pairs)


# -- a memory ---------------------------------------------------------------------------------------------------------


def memory(subject: Subject) -> Finding:
    """A text in segments, each after the memory of those before, as in one pass."""
    model: Any = subject.model
    if "memory" not in accepted(model):
        return inapplicable("forward takes no memory")
    if subject.sees_future:
        return inapplicable(
            f"{subject.sees_future}: tokens see their whole segment, so that it matters where segments end"
        )
    if subject.kind == "fullrank" and not model.memory_length:
        return inapplicable("model.memory_length is 0: this model has no memory")
    if subject.kind != "fullrank" or not hasattr(model, "remembers"):
        return inapplicable("only a model with `remembers` can be told to remember a whole text")
    length, pairs = subject.length, []

    def segments(bounds: list[int], cached: bool) -> Tensor:
        after, parts = None, []
        for start, end in itertools.pairwise(bounds):
            with torch.set_grad_enabled(not cached):
                out = model(subject.ids[:, start:end], after)
            after = out.memory
            parts.append(out.logits.detach())
        return torch.cat(parts, dim=1)

    cuts = [[0, length // 3, 2 * length // 3, length], [0, 1, length - 2, length]]
    own, windowed = model.memory_length, model.same_length
    with mode(model, training=False):
        with torch.no_grad(), model.remembers(0):
            expected = model(subject.ids).logits
        # without memory first: then it begins empty, and every token before it is seen
        with model.remembers(0), model.remembers(length):
            for bounds, cached in itertools.product(cuts, (True, False)):
                pairs.append(
                    (f"cut at {bounds[1:-1]}" + (", keys cached" if cached else ""), segments(bounds, cached), expected)
                )
        if windowed:  # each token sees `own` tokens, wherever segments end
            short = min(own, length // 2)
            with model.remembers(0), model.remembers(short, same_length=True):
                with torch.no_grad():
                    expected = model(subject.ids).logits
                for bounds, cached in itertools.product(cuts, (True, False)):
                    pairs.append((f"same_length, cut at {bounds[1:-1]}", segments(bounds, cached), expected))
    looked_at = "logits of three segments, the memory as long as the text, beside one pass; with and without gradients"
    return close(subject, looked_at, pairs)


# -- files ------------------------------------------------------------------------------------------------------------


def saving(subject: Subject) -> Finding:
    """Saved into a temporary folder and loaded again, the model gives the same numbers."""
    model: Any = subject.model
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loaded: nn.Module
        if subject.kind == "fullrank":
            model.save(folder)
            loaded = type(model).load(folder)
        elif subject.kind == "hugging_face" and hasattr(type(model), "from_pretrained"):
            said = getattr(getattr(sys.modules.get("transformers"), "utils", None), "logging", None)
            if said is not None and said.is_progress_bar_enabled():
                said.disable_progress_bar()
                stack.callback(said.enable_progress_bar)
            model.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype)
        else:
            return inapplicable("it has no save and load of its own")
        loaded = loaded.to(subject.ids.device).eval()
        with torch.no_grad(), mode(model, training=False):
            expected = subject.logits(subject.ids)
            given = call(loaded, subject.ids)
    before, after = model.state_dict(), loaded.state_dict()
    looked_at = "parameters and buffers, bit for bit, and logits of the loaded model"
    reason = "the same numbers, computed the same way"
    if lost := sorted(set(before) ^ set(after)):
        return judged(looked_at, float("nan"), 0.0, reason, remark=f"other parameters: {', '.join(lost[:3])}")
    for name, tensor in before.items():
        if not same(after[name], tensor):
            off = largest(after[name].double(), tensor.double()) if after[name].shape == tensor.shape else float("nan")
            return judged(looked_at, off, 0.0, reason, remark=f"{name} is changed")
    if subject.kind == "fullrank":
        return judged(looked_at, largest(given, expected), 0.0, reason)
    return close(subject, looked_at, [("logits", given, expected)])


# -- probabilities ----------------------------------------------------------------------------------------------------


def probabilities(subject: Subject) -> Finding:
    """Probabilities of the vocabulary layer sum to one, and its nll is that of its log-probabilities."""
    model: Any = subject.model
    if subject.kind != "fullrank":
        return inapplicable("its logits go through a softmax, after which anything sums to one")
    epsilon = float(model.config.output.epsilon)
    with torch.no_grad(), mode(model, training=False):
        hidden = model.hidden(subject.ids).hidden
        log_prob = model.output.log_prob(hidden)
        targets = subject.tokens(len(subject.ids), subject.length, 6)
        nll = model.nll(subject.ids, targets).per_token
        logits = logits_in(model(subject.ids))
    total = (log_prob.double().logsumexp(-1).exp() - 1).abs().max()
    picked = log_prob.gather(-1, targets[..., None])[..., 0]
    normalised = largest(torch.log_softmax(logits, -1), torch.log_softmax(log_prob, -1))
    off = max(float(total), largest(nll, -picked), normalised)
    limit = tolerance(subject.dtype) * max(1.0, float(log_prob.abs().max())) + subject.vocab_size * epsilon
    reason = rounding(subject.dtype) + (f", and V epsilon with model.output.epsilon {epsilon:g}" if epsilon else "")
    looked_at = (
        "sums of exp(log_prob) over the vocabulary; nll beside the log_prob of the target, logits beside log_prob"
    )
    return judged(looked_at, off, limit, reason)


def agreements(subject: Subject) -> list[Check]:
    """All of them, not yet run."""
    return [
        ("padding changes nothing", lambda: padding(subject)),
        ("incremental decoding = one pass", lambda: decoding(subject)),
        ("memory in segments = one pass", lambda: memory(subject)),
        ("evaluation is deterministic", lambda: determinism(subject)),
        ("saved and loaded: same numbers", lambda: saving(subject)),
        ("probabilities sum to one", lambda: probabilities(subject)),
    ]
