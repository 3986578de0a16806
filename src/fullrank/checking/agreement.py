"""Agreement of two ways to compute the same, of any model: padding, repetition, cache, files."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.layers import first_of_length
from fullrank.checking.paths import IMPLEMENTATIONS, CannotRun, CodePath, cached, running
from fullrank.checking.report import Finding, bounded, inapplicable, largest, rounding, same, sized, tolerance
from fullrank.checking.shown import prefix_shown
from fullrank.checking.subject import ROWS, Subject, accepted, mode

Pair = tuple[str, Tensor, Tensor]  # a description, what was computed, what is expected


def close(subject: Subject, looked_at: str, pairs: list[Pair], remark: str = "") -> Finding:
    """Passes where every tensor equals the expected one, up to rounding; the worst is named."""
    worst, name = 0.0, ""
    for described, values, expected in pairs:
        if values.shape != expected.shape:
            shapes = f"{tuple(values.shape)} instead of {tuple(expected.shape)}"
            return bounded(looked_at, float("nan"), 0.0, "", remark=f"{described}: {shapes}")
        size = sized(expected)
        share = largest(size(values), size(expected))
        if not share <= worst:
            worst, name = share, described
        if worst != worst:
            break
    limit = tolerance(subject.rounds)
    reason = rounding(subject.rounds)
    if subject.rounds != subject.dtype:
        reason += "; a model that is not ours may compute parts so in float64, too"
    return bounded(looked_at, worst, limit, reason, remark=remark if worst <= limit else f"worst: {name}")


def segments(bounds: list[int], read: Callable[[Any, int, int], tuple[Tensor, Any]], state: Any) -> Tensor:
    """Logits of a text read piece by piece: `read(state, start, end)` gives logits and the next state."""
    parts = []
    for start, end in itertools.pairwise(bounds):
        logits, state = read(state, start, end)
        parts.append(logits)
    return torch.cat(parts, dim=1)


def in_single(check: Callable[[Subject], Finding]) -> Callable[[Subject], Finding]:
    """The check in fp32, where the model cannot compute in fp64 what it needs: a softmax in fp32 turns masks into NaN."""

    @functools.wraps(check)
    def checked(subject: Subject) -> Finding:
        try:
            finding = check(subject)
            if finding.difference is None or finding.difference == finding.difference or subject.single is None:
                return finding
        except Exception:
            if subject.single is None or subject.ours:
                raise
        return check(subject.single)

    return checked


# -- padding, repetition ----------------------------------------------------------------------------------------------


@in_single
def padding(subject: Subject) -> Finding:
    """A text in a padded batch has the logits that it has alone, whatever stands in the padding."""
    if not subject.takes_mask or subject.ids.is_floating_point():
        return inapplicable(subject.without_mask)
    model, ids, masks, pairs = subject.model, subject.ids, subject.masks(), list[Pair]()
    part = " of the target" if subject.translates else ""
    with torch.no_grad(), mode(model, training=False):
        alone = {}
        for side, mask in masks.items():
            real, positions = mask.bool(), subject.positions_of(mask)
            for row in range(ROWS):
                one = replace(subject, fixed=_row(subject.fixed, row))
                if subject.translates:
                    one = replace(one, model=model.with_sources(model.sources[row : row + 1]))
                alone[row] = one.logits(ids[row][real[row]][None])[0]
            for read in (ids, torch.where(real, ids, subject.readable((ids + 1) % subject.vocab_size))):
                batch = subject.logits(read, mask, **positions)
                for row in range(ROWS):
                    pairs.append((f"text {row}, padding{part} on the {side}", batch[row][real[row]], alone[row]))
        for side, padded in (model.padded_sources() if subject.translates else {}).items():
            real = padded.mask.bool()
            other = (padded.sources + 1) % model.encoder.config.vocab_size
            for sources in (padded.sources, torch.where(real, padded.sources, other)):
                batch = padded.with_sources(sources, padded.mask)(ids).logits
                for row in range(ROWS):
                    one = padded.with_sources(sources[row][real[row]][None])
                    expected = one(ids[row : row + 1]).logits[0]
                    pairs.append((f"text {row}, padding of the source on the {side}", batch[row], expected))
    if subject.translates:
        sides = "source and target padded on either side"
        return close(subject, f"sentences of unequal lengths in one batch, {sides}, beside each alone", pairs)
    looked_at = f"texts of unequal lengths in one batch, padding on the {' and on the '.join(masks)}, beside each alone"
    remark = "" if "left" in masks else "not on the left, where such a model has to be told positions by position_ids"
    return close(subject, looked_at, pairs, remark)


def prefixes(subject: Subject) -> Finding:
    """Logits of the first tokens of a text, read alone, are those in the whole text: of powers of two, and other lengths."""
    found = _prefixes(subject)
    if found.verdict == "fails" and subject.single:
        other = _prefixes(subject.single)
        return replace(other, remark=DOUBLE_ONLY) if other.verdict == "passes" and found.difference else found
    return found


def _prefixes(subject: Subject) -> Finding:
    model, ids, longer = subject.model, subject.ids, None
    with torch.no_grad(), mode(model, training=False):
        if not (subject.fixed or ids.is_cuda or ids.is_floating_point()):
            longer = torch.cat((ids, subject.tokens(ROWS, 2 * subject.even + 3 - subject.length, 21)), 1)
        try:
            whole = subject.logits(ids if longer is None else longer)
            ids = ids if longer is None else longer
        except Exception:  # longer than it can read
            whole = subject.logits(ids)
        if bool((whole == whole[:1]).all()):
            return inapplicable("no token changes any logits at all, so there is nothing that could leak")
        size = ids.shape[1]
        powers = {1 << i for i in range(1, size.bit_length())}
        lengths = sorted({*powers, 1, 3, subject.length // 2, subject.length, size} - {size} | {size - 1})
        pairs, failed = list[Pair](), dict[int, Finding]()
        for rows, end in itertools.chain(itertools.product((ROWS, 1), lengths), ((1, size),)):
            given = ids[:rows, :end].contiguous()
            of = "1 row" if rows == 1 else f"{rows} rows"
            pairs.append((f"{of} of {end} tokens", subject.logits(given), whole[:rows, :end]))
            if (finding := close(subject, "", pairs[-1:])).verdict == "fails":
                failed.setdefault(end, finding)
    looked_at = f"logits of the first {', '.join(map(str, lengths))} tokens, beside those of the whole text of {size}"
    found = close(subject, looked_at, pairs)
    if found.verdict == "passes":
        return found
    leaks = f"{found.remark.removeprefix('worst: ')} have other logits where {size} tokens are read"
    shown, layers = prefix_shown(subject, size, end := min(failed)), tuple[str, ...]()
    with contextlib.suppress(Exception), mode(model, training=False):
        layers = (first_of_length(model, subject.logits, ids, end),)
    return replace(found, path="texts of other lengths", leaks=leaks, reproduction=shown, layers=layers)


DOUBLE_ONLY = "in float64 alone some kernel errs, as attention of torch does with a mask in float32"
_DOCUMENTS = ("document_ids", "doc_ids", "segment_ids", "sequence_ids", "seq_idx")  # arguments that separate documents


def packing(subject: Subject) -> Finding:
    """Two documents in one row: the second one's logits do not depend on the first one."""
    half, places = subject.length // 2, torch.arange(subject.length, device=subject.ids.device)[None]
    name = next((one for one in _DOCUMENTS if one in accepted(subject.model)), "")
    if subject.ids.is_floating_point() or not (name or subject.takes_positions):
        return inapplicable("forward takes neither documents nor positions of tokens")
    options = (
        {name: (places >= half).long()}
        if name
        else {"position_ids": places - half * (places >= half) + (subject.first_position or 0)}
    )
    base = subject.ids[:1]
    other = torch.where(places < half, (base + 1) % subject.vocab_size, base)
    moved: dict[str, float] = {}
    own = CodePath("").words(subject)
    for attending, training in itertools.product({own: "", **dict.fromkeys(IMPLEMENTATIONS, "")}, (False, True)):
        path = CodePath("", training, attention="" if attending == own else attending)
        if path.attention and own == "evaluation":
            continue
        try:
            with running(subject, path) as run:
                before, after = run(base, **options), run(other, **options)
        except Exception:
            continue
        if bool(before.isnan().any()):
            continue
        size = sized(before)
        moved[path.words(subject)] = largest(size(after)[:, half:], size(before)[:, half:])
    limit = tolerance(subject.dtype)
    apart = [path for path, off in moved.items() if off <= limit]
    if not name and not apart:
        return inapplicable("position_ids that begin again do not separate documents in this model")
    masked = ""
    if apart and subject.takes_mask:
        with contextlib.suppress(Exception), running(subject, CodePath("")) as run:
            options[subject.mask_name] = torch.ones_like(places)
            before, after = run(base, **options), run(other, **options)
            size = sized(before)
            if largest(size(after)[:, half:], size(before)[:, half:]) > limit:
                masked = f"not kept apart where {subject.mask_name} is given, too, even one of ones: give none"
    worst = max(moved, key=lambda path: (moved[path] != moved[path], moved[path]))
    remark = f"{worst}: the second document sees the first" if not moved[worst] <= limit else ""
    looked_at = (
        f"logits of a second document after all tokens of the first in its row were changed; {name or 'position_ids'}"
    )
    found = bounded(looked_at, moved[worst], limit, rounding(subject.dtype), remark=remark or masked)
    return replace(found, path=worst, leaks=remark)


def _row(fixed: Any, row: int) -> dict[str, Any]:
    """The fixed inputs of one row."""
    cut = {}
    for name, value in fixed.items():
        batched = isinstance(value, Tensor) and value.dim() and len(value) == ROWS
        cut[name] = value[row : row + 1].expand(ROWS, *value.shape[1:]) if batched else value
    return cut


def determinism(subject: Subject) -> Finding:
    """In evaluation the same tokens give the same logits, no random number is drawn, nothing in the model changes."""
    looked_at = "two passes from different seeds; the state of the random numbers and of the model after them"
    model = subject.model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad(), mode(model, training=False):
        before = torch.get_rng_state()
        first = subject.logits(subject.ids)
        faults = [] if torch.equal(before, torch.get_rng_state()) else ["random numbers are drawn"]
        torch.manual_seed(99)
        second = subject.logits(subject.ids)
        changed = [n for n, tensor in model.state_dict().items() if n in state and not same(tensor, state[n])]
    faults += [f"{name} is changed" for name in changed[:1]]
    off = largest(second, first)
    if faults and off == 0.0:
        return Finding("fails", looked_at, off, 0.0, "the same computation", "; ".join(faults))
    return bounded(looked_at, off, 0.0, "the same computation twice", remark="; ".join(faults))


# -- cache ------------------------------------------------------------------------------------------------------------

_BEAMS = [0, 0, 1, 1, 2, 2], [1, 0, 3, 3, 5, 4], [0, 2, 2, 4]  # two a text, other ones of them, unequal groups


@in_single
def decoding(subject: Subject) -> Finding:
    """Token by token, in pieces, with a static cache, after padding and as beams, each as in one pass."""
    if subject.core.kind == "fullrank" and subject.core.model.memory_length:
        subject = subject.core  # the cache of Hugging Face is its memory, which forgets
    subject = subject.stepping
    ids, length, model = subject.ids, subject.length, subject.model
    half, names, pairs = length // 2, list[str](), list[Pair]()
    step_by_step = list(range(length + 1))
    with torch.no_grad(), mode(model, training=False):
        expected = subject.logits(ids)
        for static, pieces in itertools.product((False, True), repeat=2):
            how = ("in pieces" if pieces else "token by token") + (", static cache" if static else "")
            try:
                read = cached(subject, model, static=static, pieces=pieces)
            except CannotRun as reason:
                if not static and not pieces:
                    return inapplicable(str(reason))
                continue
            names.append(how)

            def step(cache: Any, start: int, end: int, read: Any = read) -> tuple[Tensor, Any]:
                return read(ids[:, start:end], cache)

            for bounds in ([0, half, length], [0, 1, length - 2, length]) if pieces else (step_by_step,):
                try:
                    pairs.append((how, segments(bounds, step, None), expected))
                except Exception:
                    if not static:
                        raise
                    names.remove(how)  # most models have none
                    break
        if subject.ours:
            pairs += _ours(subject, names)
        elif subject.kind == "hugging_face":
            pairs += _reordered(subject, names, expected)
    finding = close(subject, f"logits with the cache, {', '.join(names)}, beside one pass", pairs)
    config = model.config.decoder if subject.translates else None
    if finding.verdict == "fails" and config is not None and config.released_decoding:
        why = "model.decoder.released_decoding: true leaves heads unmixed while a translation is written"
        return replace(finding, remark=f"{finding.remark}; {why}")
    return finding


def _reordered(subject: Subject, names: list[str], expected: Tensor) -> list[Pair]:
    """Rows of a cache of Hugging Face in another order, as beam search leaves them."""
    read, half = cached(subject, subject.model, pieces=False), subject.length // 2
    order = torch.tensor([1, 2, 0], device=subject.ids.device)
    if subject.fixed or getattr(subject.model, "_is_stateful", False):
        return []
    _, state = read(subject.ids[:, :half], None)
    if not hasattr(state[0], "reorder_cache"):
        return []
    state[0].reorder_cache(order)
    logits, _ = read(subject.ids[order, half : half + 1], state)
    names.append("as beams")
    return [("beams", logits[:, 0], expected[order, half])]


def _ours(subject: Subject, names: list[str]) -> list[Pair]:
    """Padding of either side, of a source too, and beams."""
    pairs, model, ids = list[Pair](), subject.model, subject.ids
    if subject.translates:
        cases: list[Any] = [
            (f", padding of the source on the {side}", one, None) for side, one in model.padded_sources().items()
        ]
        cases.append(("", model, None))
    else:
        cases = [("", model, None)] + [
            (f", padding on the {side}", model, mask) for side, mask in subject.masks().items()
        ]
    for padded_side, one, mask in cases:
        decoder = one.decoder_of_sources() if subject.translates else one
        if padded_side:
            expected = one(ids, mask).logits if subject.translates else one(ids, attention_mask=mask).logits
            real = slice(None) if mask is None else mask.bool()

            def step(cache: Any, start: int, end: int, decoder: Any = decoder, mask: Any = mask) -> tuple[Tensor, Any]:
                new = None if mask is None else mask[:, start:end]
                out = decoder(ids[:, start:end], cache=cache, attention_mask=new)
                return out.logits, out.cache

            for bounds in (list(range(subject.length + 1)), [0, subject.length // 2, subject.length]):
                how = "token by token" if len(bounds) > subject.length else "in pieces"
                logits = segments(bounds, step, decoder.new_cache())
                pairs.append((how + padded_side, logits[real], expected[real]))
        if mask is None:
            pairs += [(f"beams{padded_side}", *pair) for pair in _as_beams(subject, one, decoder)]
    names += ["after padding", "as beams"]
    return pairs


def _as_beams(subject: Subject, model: Any, decoder: Any) -> list[tuple[Tensor, Tensor]]:
    """Last logits of each beam, beside those of its text read whole."""
    ids, pairs = subject.ids, []
    texts, origin = ids[:, :1], torch.arange(len(ids), device=ids.device)
    out = decoder(texts, cache=decoder.new_cache(), attention_mask=None)
    for step, rows in enumerate(_BEAMS):
        index = torch.tensor(rows, device=ids.device)
        new = ids.flatten()[step * 5 : step * 5 + len(index), None]
        texts, origin = torch.cat((texts[index], new), 1), origin[index]
        out = decoder(new, cache=out.cache.reorder(index), attention_mask=None)
        whole = model.with_sources(*model.rows(origin)) if subject.translates else model
        pairs.append((out.logits[:, -1], whole(texts).logits[:, -1]))
    return pairs


# -- files ------------------------------------------------------------------------------------------------------------


def saving(subject: Subject) -> Finding:
    """Saved into a temporary folder and loaded again, the model gives the same numbers."""
    model = subject.model
    owner = model.translator if subject.translates else model
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if subject.ours:
            owner.save(folder)
            loaded = type(owner).load(folder)
        elif subject.kind == "hugging_face" and hasattr(type(model), "from_pretrained"):
            logging = sys.modules["transformers"].utils.logging
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                stack.callback(logging.enable_progress_bar)
            saved = copy.deepcopy(model)  # saving may write into its configuration
            saved.save_pretrained(folder)
            load: Callable[..., Any] = type(model).from_pretrained
            if subject.injected:
                from fullrank.hf.saving import load_injected as load
            loaded = load(folder, dtype=next(model.parameters()).dtype)
            if hasattr(loaded, "set_experts_implementation"):
                with contextlib.suppress(Exception):
                    loaded.set_experts_implementation(model.config._experts_implementation)
        else:
            return inapplicable("it has no save and load of its own")
    loaded = loaded.to(subject.ids.device).eval()
    before, after = owner.state_dict(), loaded.state_dict()
    with torch.no_grad(), mode(model, training=False):
        expected = subject.logits(subject.ids)
        read = type(model)(loaded, model.sources) if subject.translates else loaded
        logits = subject.logits(subject.ids, model=read)
    looked_at = "parameters and buffers, bit for bit, and logits of the loaded model"
    reason = "the same numbers, computed the same way"
    if lost := sorted(set(before) ^ set(after)):
        return bounded(looked_at, float("nan"), 0.0, reason, remark=f"other parameters: {', '.join(lost[:3])}")
    for name, tensor in before.items():
        if not same(after[name], tensor):
            off = largest(after[name].double(), tensor.double()) if after[name].shape == tensor.shape else float("nan")
            return bounded(looked_at, off, 0.0, reason, remark=f"{name} is changed")
    if subject.ours:
        return bounded(looked_at, largest(logits, expected), 0.0, reason)
    return close(subject, looked_at, [("logits", logits, expected)])
