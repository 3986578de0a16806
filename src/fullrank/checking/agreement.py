"""Agreement of two ways to compute the same, of any model: padding, other lengths, repetition, cache, files."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullrank.checking.compare import (
    Pair,
    compare_pairs,
    divide_by_size,
    in_both_precisions,
    is_same,
    largest,
    rounding,
    tolerance,
)
from fullrank.checking.copies import mode
from fullrank.checking.layers import find_layer_of_length
from fullrank.checking.paths import (
    IMPLEMENTATIONS,
    CannotRun,
    CodePath,
    Step,
    find_implementation,
    open_cache,
    open_decoder,
    running,
    split_positions,
)
from fullrank.checking.report import Finding, bounded, inapplicable
from fullrank.checking.shown import show_prefix
from fullrank.checking.subject import ROWS, SIDES, Subject, padding_masks

# -- padding ----------------------------------------------------------------------------------------------------------


@in_both_precisions
def padding(subject: Subject) -> Finding:
    """A text in a padded batch has the logits that it has alone, whatever stands in the padding."""
    if subject.mask_form is None or not subject.reads_tokens:
        return inapplicable(subject.without_mask)
    ids, masks, pairs = subject.ids, subject.masks(), list[Pair]()
    part = " of the target on" if subject.translates else " on"
    with torch.no_grad(), mode(subject.model, training=False):
        for side, mask in masks.items():
            real = mask.bool()
            alone = [subject.one_row(row).logits(ids[row][real[row]][None])[0] for row in range(ROWS)]
            for texts in (ids, torch.where(real, ids, subject.change(ids))):
                batch = subject.logits(texts, mask, **subject.positions_of(mask))
                for row in range(ROWS):
                    pairs.append((f"text {row}, {SIDES[side].replace(' on', part)}", batch[row][real[row]], alone[row]))
        if subject.translates:
            pairs += pair_sources(subject)
            looked_at = (
                "sentences of unequal lengths in one batch, source and target padded on either side, beside each alone"
            )
            return compare_pairs(subject, looked_at, pairs)
    looked_at = f"texts of unequal lengths in one batch, {', '.join(SIDES[side] for side in masks)}, beside each alone"
    remark = "" if "left" in masks else "not on the left, where such a model has to be told positions by position_ids"
    return compare_pairs(subject, looked_at, pairs, remark)


def pair_sources(subject: Subject) -> list[Pair]:
    """Logits with padded sources in a batch, beside those of each source alone."""
    pairs, sources = list[Pair](), subject.fixed["input_ids"]
    other = (sources + 1) % subject.model.encoder.config.vocab_size
    for side, padded in pad_sources(subject).items():
        real = padded.fixed["attention_mask"].bool()
        for texts in (sources, torch.where(real, sources, other)):
            fixed = {"input_ids": texts, "attention_mask": padded.fixed["attention_mask"]}
            batch = replace(subject, fixed=fixed).logits(subject.ids)
            for row in range(ROWS):
                alone = replace(subject, fixed={"input_ids": texts[row][real[row]].expand(ROWS, -1)})
                expected = alone.logits(subject.ids[row : row + 1])[0]
                pairs.append((f"text {row}, padding of the source on the {side}", batch[row], expected))
    return pairs


def pad_sources(subject: Subject) -> dict[str, Subject]:
    """A translation model with sources of unequal lengths, by the side of the padding."""
    sources = subject.fixed["input_ids"]
    masks = padding_masks(sources)
    return {side: replace(subject, fixed={"input_ids": sources, "attention_mask": masks[side]}) for side in masks}


# -- lengths and documents ---------------------------------------------------------------------------------------------


@in_both_precisions
def prefixes(subject: Subject) -> Finding:
    """Logits of the first tokens of a text, read alone, are those in the whole text: of powers of two, and other lengths."""
    model, ids, pairs, wrong = subject.model, subject.ids, list[Pair](), list[int]()
    with torch.no_grad(), mode(model, training=False):
        whole = subject.logits(ids)
        if not (subject.fixed or ids.is_cuda) and subject.reads_tokens:
            more = subject.tokens(ROWS, 2 * subject.even + 3 - subject.length, 21)
            with contextlib.suppress(Exception):  # it may be longer than the model can read
                whole = subject.logits(torch.cat((ids, more), 1))
                ids = torch.cat((ids, more), 1)
        if bool((whole == whole[:1]).all()):
            return inapplicable("no token changes any logits at all, so there is nothing that could leak")
        size = ids.shape[1]
        powers = {1 << i for i in range(1, size.bit_length())}
        lengths = sorted((powers | {1, 3, subject.length // 2, subject.length, size - 1}) - {size})
        for rows, end in [*itertools.product((ROWS, 1), lengths), (1, size)]:
            logits = subject.logits(ids[:rows, :end].contiguous())
            pairs.append((f"{rows} row{'s' * (rows > 1)} of {end} tokens", logits, whole[:rows, :end]))
            if compare_pairs(subject, "", pairs[-1:]).verdict == "fails":
                wrong.append(end)
        looked_at = (
            f"logits of the first {', '.join(map(str, lengths))} tokens, beside those of the whole text of {size}"
        )
        finding = compare_pairs(subject, looked_at, pairs)
        if finding.verdict == "passes":
            return finding
        layers = tuple[str, ...]()
        with contextlib.suppress(Exception):
            layers = (find_layer_of_length(model, subject.logits, ids, min(wrong)),)
    leaks = f"{finding.remark.removeprefix('worst: ')} have other logits where {size} tokens are read"
    shown = show_prefix(subject, size, min(wrong))
    return replace(finding, path="texts of other lengths", leaks=leaks, reproduction=shown, layers=layers)


def packing(subject: Subject) -> Finding:
    """Two documents in one row: the second one's logits do not depend on the first one."""
    half, places = subject.length // 2, torch.arange(subject.length, device=subject.ids.device)[None]
    if not subject.reads_tokens:
        return inapplicable("vectors are not packed")
    options = split_positions(subject)
    text = subject.ids[:1]
    other = subject.change(text, places < half)

    def measure(path: CodePath, **more: Tensor) -> float:
        """How far another first document moves the second."""
        with running(subject, path) as run:
            before = run(text, **options, **more)
            if bool(before.isnan().any()):
                raise FloatingPointError("logits are NaN")
            divide = divide_by_size(before)
            return largest(divide(run(other, **options, **more))[:, half:], divide(before)[:, half:])

    own = find_implementation(subject.model)
    attending = ["", *(one for one in IMPLEMENTATIONS if own and one != own)]
    moved: dict[str, float] = {}
    for attention, training in itertools.product(attending, (False, True)):
        path = CodePath("", training, attention=attention)
        with contextlib.suppress(Exception):
            moved[path.describe(subject)] = measure(path)
    limit, remark = tolerance(subject.dtype), ""
    apart = [words for words, off in moved.items() if off <= limit]
    if not apart:
        return inapplicable("position_ids that begin again do not separate documents in this model")
    worst = max(moved, key=lambda words: (math.isnan(moved[words]), moved[words]))
    looked_at = "logits of a second document after all tokens of the first in its row were changed; position_ids"
    if not moved[worst] <= limit:
        remark = f"{worst}: the second document sees the first"
    elif subject.mask_form is not None:
        with contextlib.suppress(Exception):
            if measure(CodePath(), **{subject.mask_name: torch.ones_like(places)}) > limit:
                remark = f"not kept apart where {subject.mask_name} is given, too, even one of ones: give none"
    finding = bounded(looked_at, moved[worst], limit, rounding(subject.dtype), remark=remark)
    return replace(finding, path=worst, leaks=remark if finding.verdict == "fails" else "")


def determinism(subject: Subject) -> Finding:
    """In evaluation the same tokens give the same logits, no random number is drawn, nothing in the model changes."""
    looked_at = "two passes from different seeds; the state of the random numbers and of the model after them"
    model, faults = subject.model, list[str]()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad(), mode(model, training=False):
        before = torch.get_rng_state()
        first = subject.logits(subject.ids)
        if not torch.equal(before, torch.get_rng_state()):
            faults.append("random numbers are drawn")
        torch.manual_seed(99)
        difference = largest(subject.logits(subject.ids), first)
        now = model.state_dict()
        changed = [name for name in state if name in now and not is_same(now[name], state[name])]
    faults += [f"{name} is changed" for name in changed[:1]]
    finding = bounded(looked_at, difference, 0.0, "the same computation twice", remark="; ".join(faults))
    return replace(finding, verdict="fails") if faults else finding


# -- cache ------------------------------------------------------------------------------------------------------------

_BEAMS = [0, 0, 1, 1, 2, 2], [1, 0, 3, 3, 5, 4], [0, 2, 2, 4]  # two a text, other ones of them, unequal groups


def read_pieces(ids: Tensor, bounds: list[int], step: Step) -> Tensor:
    """Logits of a text that is read piece by piece, each after the state that the one before left."""
    parts, state = [], None
    for start, end in itertools.pairwise(bounds):
        logits, state = step(ids[:, start:end], state)
        parts.append(logits)
    return torch.cat(parts, dim=1)


@in_both_precisions
def decoding(subject: Subject) -> Finding:
    """Token by token, in pieces, with a static cache, after padding and as beams, each as in one pass."""
    if subject.core.kind == "fullrank" and subject.core.model.memory_length:
        subject = subject.core  # the cache of Hugging Face is its memory, which forgets
    ids, length, names, pairs = subject.ids, subject.length, list[str](), list[Pair]()
    cuts = {True: ([0, length // 2, length], [0, 1, length - 2, length]), False: (list(range(length + 1)),)}
    with torch.no_grad(), mode(subject.model, training=False):
        expected = subject.logits(ids)
        for static, pieces in itertools.product((False, True), repeat=2):
            how = ("in pieces" if pieces else "token by token") + ", static cache" * static
            try:
                step = open_cache(subject, subject.model, static=static, pieces=pieces)
                pairs += [(how, read_pieces(ids, bounds, step), expected) for bounds in cuts[pieces]]
                names.append(how)
            except CannotRun as reason:
                if not static and not pieces:
                    return inapplicable(str(reason))
            except Exception:
                if not static:  # which most models have not
                    raise
        if subject.ours:
            pairs += pair_padded(subject)
            names += ["after padding", "as beams"]
        elif subject.kind == "hugging_face":
            pairs += pair_reordered(subject, expected, names)
    finding = compare_pairs(subject, f"logits with the cache, {', '.join(names)}, beside one pass", pairs)
    config = subject.model.config.decoder if subject.translates else None
    if finding.verdict == "fails" and config is not None and config.released_decoding:
        why = "model.decoder.released_decoding: true leaves heads unmixed while a translation is written"
        return replace(finding, remark=f"{finding.remark}; {why}")
    return finding


def pair_reordered(subject: Subject, expected: Tensor, names: list[str]) -> list[Pair]:
    """Rows of a cache of Hugging Face in another order, as beam search leaves them."""
    step, half = open_cache(subject, subject.model, pieces=False), subject.length // 2
    order = torch.tensor([1, 2, 0], device=subject.ids.device)
    _, state = step(subject.ids[:, :half], None)
    if subject.fixed or subject.has_state or not hasattr(state[0], "reorder_cache"):
        return []
    state[0].reorder_cache(order)
    logits, _ = step(subject.ids[order, half : half + 1], state)
    names.append("as beams")
    return [("beams", logits[:, 0], expected[order, half])]


def pair_padded(subject: Subject) -> list[Pair]:
    """Of our models: padding of either side, of a source too, and beams."""
    cases: list[tuple[str, Subject, Tensor | None]] = [("", subject, None)]
    if subject.translates:
        cases += [(f", padding of the source on the {side}", one, None) for side, one in pad_sources(subject).items()]
    else:
        cases += [(f", {SIDES[side]}", subject, mask) for side, mask in subject.masks().items()]
    pairs, length = list[Pair](), subject.length
    for side, one, mask in cases:
        decoder = open_decoder(one, one.model)
        if mask is None:
            pairs += [(f"beams{side}", *pair) for pair in pair_beams(one, decoder)]
        if not side:
            continue
        real = slice(None) if mask is None else mask.bool()
        expected = one.logits(one.ids, mask)
        for how, bounds in (("token by token", list(range(length + 1))), ("in pieces", [0, length // 2, length])):

            def step(ids: Tensor, state: Any, mask: Tensor | None = mask, decoder: Any = decoder) -> tuple[Tensor, Any]:
                start, cache = (0, decoder.new_cache()) if state is None else state
                end = start + ids.shape[1]
                new = None if mask is None else mask[:, start:end]
                out = decoder(ids, cache=cache, attention_mask=new)
                return out.logits, (end, out.cache)

            pairs.append((how + side, read_pieces(one.ids, bounds, step)[real], expected[real]))
    return pairs


def pair_beams(subject: Subject, decoder: Any) -> list[tuple[Tensor, Tensor]]:
    """Last logits of each beam, beside those of its text read whole."""
    ids, pairs = subject.ids, []
    texts, origin = ids[:, :1], torch.arange(len(ids), device=ids.device)
    out = decoder(texts, cache=decoder.new_cache(), attention_mask=None)
    for step, rows in enumerate(_BEAMS):
        index = torch.tensor(rows, device=ids.device)
        new = ids.flatten()[step * 5 : step * 5 + len(index), None]
        texts, origin = torch.cat((texts[index], new), 1), origin[index]
        out = decoder(new, cache=out.cache.reorder(index), attention_mask=None)
        whole = replace(subject, fixed={name: value[origin] for name, value in subject.fixed.items()})
        pairs.append((out.logits[:, -1], whole.logits(texts)[:, -1]))
    return pairs


# -- files ------------------------------------------------------------------------------------------------------------


def saving(subject: Subject) -> Finding:
    """Saved into a temporary folder and loaded again, the model gives the same numbers."""
    model = subject.model
    with tempfile.TemporaryDirectory() as folder:
        if subject.ours:
            model.save(Path(folder))
            loaded = type(model).load(Path(folder))
        elif subject.kind == "hugging_face" and hasattr(type(model), "from_pretrained"):
            loaded = reload(subject, Path(folder))
        else:
            return inapplicable("it has no save and load of its own")
    loaded = loaded.to(subject.ids.device).eval()
    with torch.no_grad(), mode(model, training=False):
        expected = subject.logits(subject.ids)
        logits = subject.logits(subject.ids, model=loaded)
    looked_at = "parameters and buffers, bit for bit, and logits of the loaded model"
    reason = "the same numbers, computed the same way"
    before, after = model.state_dict(), loaded.state_dict()
    if lost := sorted(set(before) ^ set(after)):
        return bounded(looked_at, math.nan, 0.0, reason, remark=f"other parameters: {', '.join(lost[:3])}")
    for name, tensor in before.items():
        if not is_same(after[name], tensor):
            same_shape = after[name].shape == tensor.shape
            off = largest(after[name].double(), tensor.double()) if same_shape else math.nan
            return bounded(looked_at, off, 0.0, reason, remark=f"{name} is changed")
    if subject.ours:
        return bounded(looked_at, largest(logits, expected), 0.0, reason)
    return compare_pairs(subject, looked_at, [("logits", logits, expected)])


def reload(subject: Subject, folder: Path) -> Any:
    """A model of Hugging Face, saved and loaded."""
    model, load = subject.model, type(subject.model).from_pretrained
    if subject.injected:
        from fullrank.hf.load import load_injected as load
    with quiet_progress():
        copy.deepcopy(model).save_pretrained(folder)  # saving may write into its configuration
        loaded = load(folder, dtype=next(model.parameters()).dtype)
    if hasattr(loaded, "set_experts_implementation"):
        with contextlib.suppress(Exception):
            loaded.set_experts_implementation(model.config._experts_implementation)
    return loaded


@contextlib.contextmanager
def quiet_progress() -> Iterator[None]:
    """Inside, transformers shows no progress bar."""
    logging = sys.modules["transformers"].utils.logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
