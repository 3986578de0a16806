"""The ways in which people call a model, in one table: length, rows, precision, mode, mask, gradients, cache, packing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.copies import WithoutDropout, build_without_chance, duplicate, find_dtype, mode, move_copy
from fullrank.checking.layers import Reading
from fullrank.checking.report import allow
from fullrank.checking.subject import Subject, fit_rows
from fullrank.core.errors import one_line
from fullrank.forward import cache_argument, find_cache, logits_in, read_arguments, stand_in

NOTHING_MOVES = "no token changes any logits at all, so there is nothing that could leak"
NO_MODES = "a function in which no module was found has no modes: training was not tried; give the module"
FLEX = "flex_attention"  # a second to import
IMPLEMENTATIONS = ("eager", "sdpa", FLEX)
GAIN = 1000.0  # of each scaled matrix: attention scores of a million then exceed a mask of -1e4
MASKED = {"right": "with padding", "left": "with padding on the left", "ones": "with a mask of ones"}
SEEDS = tuple(range(2, 12))  # of a training step: a branch that one text in four takes is met by 19 of 20 models
TYPES = (torch.float32, torch.bfloat16, torch.float16)
RARE = True  # rare calls are part of a check that is not quick


class CannotRun(Exception):
    """The model does not offer this call; the message says why."""


@dataclass(frozen=True)
class Call:
    """One way to call a model: a row of the table.

    Attributes:
        name: stands in the report.
        training: the model is in training mode.
        length: tokens of a text; 0: as many as the subject reads.
        one_row: each text is read by itself.
        special: texts are of special and of repeated tokens.
        dtype: of the parameters; None: that of the check.
        autocast: the dtype of matrix products under `torch.autocast`; None: no autocast.
        mask: the side of the padding, or "ones"; empty: no mask is given.
        attention: an implementation of attention of Hugging Face; empty: the model's own.
        cache: a text is read in two pieces, and the second one is looked at.
        packed: a text is two documents, whose positions begin again.
        scaled: matrices make their inputs about `GAIN` times larger.
        compiled: the model runs under `torch.compile`.
        gradients: they are recorded, and the check is repeated with other seeds.
        seed: of the random numbers.
        is_certain: dropout is off in every mode.
        rare: left out of a quick check.
    """

    name: str
    training: bool = False
    length: int = 0
    one_row: bool = False
    special: bool = False
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    mask: str = ""
    attention: str = ""
    cache: bool = False
    packed: bool = False
    scaled: bool = False
    compiled: bool = False
    gradients: bool = False
    seed: int = 1
    is_certain: bool = False
    rare: bool = False

    def in_training(self) -> Call:
        return replace(self, training=True, name=f"{self.name}, training")

    @property
    def is_plain(self) -> bool:
        """True for the two calls that every model has to offer: evaluation and training, without anything else."""
        return self.name in ("evaluation", "training")

    @property
    def most_cuts(self) -> int:
        """Most positions tried as the first changed token: all in a plain call, few where rows are read one by one."""
        if self.is_plain:
            return 10_000
        return 5 if self.one_row else 12


PLAIN = (Call("evaluation"), Call("training", training=True))
CERTAIN = tuple(replace(call, is_certain=True) for call in PLAIN)


def list_calls(subject: Subject, *, quick: bool) -> list[Call]:
    """Build the table of calls for a model; with `quick` those that need a second or two."""
    even = subject.even
    masks = MASKED if subject.mask_form is not None else {"right": MASKED["right"]}
    both_modes = [Call(name, mask=mask) for mask, name in masks.items()]
    both_modes.append(Call(f"one row of {even} tokens", one_row=True, length=even))
    both_modes += [Call(f"rows of {length} tokens", length=length) for length in subject.lengths[1:]]
    if subject.mask_form is not None:
        both_modes.append(Call("one row with a mask of ones", one_row=True, length=even, mask="ones"))
    if not subject.has_example:
        both_modes.append(Call("one row", one_row=True))
    if subject.reads_tokens:
        both_modes.append(Call("special and repeated tokens", special=True))
    model_dtype = find_dtype(subject.original) if subject.dtype == torch.float64 else None
    for dtype in TYPES:
        name = f"in {str(dtype).removeprefix('torch.')}"
        both_modes.append(Call(name, dtype=dtype, rare=dtype != model_dtype))
    both_modes.append(Call("under autocast", autocast=torch.bfloat16, rare=True))
    both_modes.append(Call("under autocast, float16", autocast=torch.float16, rare=True))
    calls = list(PLAIN)
    for call in both_modes:
        calls += [call, call.in_training()]
    calls += list_implementations(subject, masks)
    calls.append(Call("parameters scaled", scaled=True))
    calls.append(Call("after a cache", cache=True))
    # loops over positions take long to compile
    calls.append(Call("compiled", compiled=True, length=min(13, subject.length), rare=True))
    calls.append(Call("training, gradients on, other seeds", training=True, gradients=True))
    return [call for call in calls if not call.rare or (RARE and not quick)]


def list_implementations(subject: Subject, masks: dict[str, str]) -> list[Call]:
    """List calls by the implementations of attention that a model of Hugging Face does not use now.

    Any model that switches them as these do counts as one.
    """
    current = getattr(getattr(subject.model, "config", None), "_attn_implementation", None)
    calls = []
    if not isinstance(current, str) or not hasattr(subject.model, "set_attn_implementation"):
        return []
    for name in IMPLEMENTATIONS:
        if name != current:
            call = Call(name, attention=name, rare=name == FLEX)
            calls.append(call)
            with suppress(CannotRun):
                attend_by(subject.model, name)
                calls.append(call.in_training())
                calls += [replace(call, name=f"{name}, {masks[mask]}", mask=mask) for mask in masks]
    return calls


def attend_by(model: Any, name: str) -> Any:
    """Copy a model, with attention computed by the implementation of that name; CannotRun where the model has none."""
    copied = duplicate(model)
    try:
        copied.set_attn_implementation(name)
    except Exception as error:
        raise CannotRun(f"it has no {name}: {one_line(error, 160)}") from error
    return copied


@dataclass(frozen=True)
class Run:
    """A model run by a call: it takes ids (B, N), and gives logits (B, N, V), 0 at padding.

    Rows take turns with the padding of three rows. Random numbers begin at the same seed in each call.
    """

    subject: Subject
    call: Call

    @property
    def dtype(self) -> torch.dtype:
        return self.call.dtype or self.call.autocast or self.subject.dtype

    @property
    def past(self) -> int:
        """Tokens that go into a cache before those whose logits are given."""
        return self.subject.length // 2 if self.call.cache else 0

    def allow(self) -> tuple[float, str]:
        """Return the largest error that rounding may cause, and the reason in words."""
        limit, reason = allow(self.dtype)
        if self.call.scaled:
            return 10 * limit, f"ten times {reason}: it grows with the parameters"
        return limit, reason

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Run the block in the mode of the call, with all that is in force while the model runs."""
        call = self.call
        with ExitStack() as stack:
            stack.enter_context(mode(self.subject.model, training=call.training, seed=call.seed))
            stack.enter_context(torch.set_grad_enabled(call.gradients))
            if call.is_certain:
                stack.enter_context(WithoutDropout())
            if call.attention == FLEX:  # the same masks, without a compiler
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if call.compiled:
                stack.enter_context(torch.compiler.set_stance("default"))
            if call.autocast is not None:
                stack.enter_context(torch.autocast(self.subject.ids.device.type, call.autocast))
            yield

    def read(self, ids: Tensor) -> Reading:
        """Compute the logits of texts, so that they can be read again."""
        compute = partial(self, ids)
        return Reading(compute(), compute, past=self.past)

    def __call__(self, ids: Tensor) -> Tensor:
        with self.prepared():
            if self.call.cache:
                step = CacheStep(self.subject)
                _, state = step(ids[:, : self.past], None)
                return step(ids[:, self.past :], state)[0]
            return torch.cat([self.read_rows(rows) for rows in ids.split(1 if self.call.one_row else len(ids))])

    def read_rows(self, ids: Tensor) -> Tensor:
        subject = self.subject
        options = {}
        mask = subject.masks()[self.call.mask] if self.call.mask else None
        is_padded = mask is not None and not bool(mask.all())
        if (is_padded or self.call.packed) and subject.first_position is not None:  # the model does not count them
            tokens = torch.ones_like(ids[:1]) if mask is None else mask
            positions = (tokens.cumsum(1) - 1).clamp_min(0)
            if self.call.packed:
                half = subject.length // 2
                positions = positions - half * (positions >= half)
            options["position_ids"] = positions + subject.first_position
        logits = subject.logits(ids, mask, **options).detach()
        if mask is None:
            return logits
        hidden = fit_rows(mask, len(ids), subject.dtype) == 0
        return logits.masked_fill(hidden[..., None], 0.0)


def prepare_run(subject: Subject, call: Call) -> Run:
    """Prepare the model for a call; CannotRun where it does not offer it."""
    if call.training and not subject.has_modes:
        raise CannotRun(NO_MODES)
    if call.mask and subject.mask_form is None:
        raise CannotRun(subject.without_mask)
    if call.cache and subject.has_state:
        raise CannotRun("a recurrent state is read token by token, as its maker says (_is_stateful)")
    if call.length:
        subject = subject.with_length(call.length)
    if call.special:
        subject = subject.with_special_tokens()
    if call.compiled or call.attention:  # a compiler may not see which words are selected
        subject = replace(subject, selects=False)
    model = subject.model
    if call.is_certain and call.training and subject.ours:  # our kernels drop out weights themselves
        model = build_without_chance(model)
    if call.attention:
        model = attend_by(model, call.attention)
    if call.autocast or call.dtype:
        model = move_copy(subject.original)
    if call.dtype is not None:
        model = model.to(call.dtype)
    if call.scaled:
        model = scale_copy(model)
    if call.compiled:
        torch.compiler.reset()
        model = torch.compile(model, backend="aot_eager")
    return Run(replace(subject, model=model), call)


def scale_copy(model: Any) -> Any:
    """Make a copy whose matrices make their inputs about `GAIN` times larger: a mask that is a finite number is overcome."""
    copied = duplicate(model)
    tables = {parameter for m in copied.modules() if isinstance(m, nn.Embedding) for parameter in m.parameters()}
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.is_floating_point() and parameter.dim() >= 2 and parameter not in tables:
                parameter.mul_(GAIN / float(parameter.norm() / parameter.shape[0] ** 0.5 + 1e-9))
    return copied


Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def read_pieces(ids: Tensor, bounds: Sequence[int], step: Step) -> tuple[list[Tensor], Any]:
    """Read the pieces of a text, each after the state that the one before left.

    Args:
        ids: the texts.
        bounds: positions where pieces begin and end.
        step: reads a piece after a state.

    Returns:
        Logits of the pieces, and the last state.
    """
    pieces = []
    state = None
    for start, end in itertools.pairwise(bounds):
        logits, state = step(ids[:, start:end], state)
        pieces.append(logits)
    return pieces, state


class CacheStep:
    """Reader of tokens after a state, None at first: it gives logits and the next state.

    Raises CannotRun for a model without a cache.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.name = ""
        if subject.sees_future:
            raise CannotRun(f"{subject.sees_future}: a token that sees later ones cannot be read before them")
        if subject.kind == "fullrank" and subject.model.config.memory_start == "zeros":
            raise CannotRun("model.memory_start is zeros, which stand before the text; a cache begins with nothing")
        if subject.step is None and not subject.ours:
            arguments = read_arguments(subject.original)
            has_others = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
            self.name = cache_argument(arguments) or ("past_key_values" if has_others else "")
            if not self.name:
                raise CannotRun("forward takes no cache, and no step=... was given")
            if find_cache(subject.call(subject.ids[:, :1], use_cache=True), self.name) is None:
                raise CannotRun(f"the model returns no {self.name}")

    def __call__(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        subject = self.subject
        if subject.ours:
            cache, decoder = state or self.begin(len(ids))
            out = decoder(ids, cache=cache, attention_mask=None)
            return subject.select(out.logits), (out.cache, decoder)
        cache, seen = state or (None, 0)
        if subject.step is not None:
            with stand_in([subject.original], [subject.model]):
                logits, cache = subject.step(ids, cache)
            return subject.select(logits), (cache, seen)
        options: dict[str, Any] = {self.name: cache, "use_cache": True}
        if subject.first_position is not None:  # as `generate` gives them
            positions = torch.arange(seen, seen + ids.shape[1], device=ids.device) + subject.first_position
            options["position_ids"] = positions.expand(len(ids), -1)
        out = subject.call(ids, **options)
        return subject.select(logits_in(out)), (find_cache(out, self.name), seen + ids.shape[1])

    def begin(self, rows: int) -> tuple[Any, Any]:
        """Make an empty cache of a model of ours, and return it with the decoder."""
        decoder = self.subject.model
        if self.subject.kind == "translator":
            sources = fit_rows(self.subject.fixed["input_ids"], rows, self.subject.dtype)
            decoder = decoder.of_source(decoder.encode(sources))
        return decoder.new_cache(), decoder

    def reorder(self, state: Any, order: Tensor) -> Any:
        """Choose rows of the state, as beam search does; CannotRun for a cache that cannot."""
        cache, other = state
        if hasattr(cache, "reorder"):  # of ours
            return cache.reorder(order), other
        if hasattr(cache, "reorder_cache"):  # of Hugging Face
            cache.reorder_cache(order)
            return state
        if not hasattr(self.subject.model, "_reorder_cache"):
            raise CannotRun("its cache cannot choose rows")
        return self.subject.model._reorder_cache(cache, order), other
