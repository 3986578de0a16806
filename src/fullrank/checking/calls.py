"""The ways in which people call a model, in one table: length, rows, precision, mode, mask, gradients, cache, packing."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.copies import AsModule, duplicate, find_dtype, list_arguments, mode, stand_in
from fullrank.checking.subject import ROWS, Subject, take_turns
from fullrank.core.errors import one_line
from fullrank.forward import cache_argument, logits_in

NO_MODES = "a function in which no module was found has no modes: training was not tried; give the module"
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
GAIN = 1000.0  # of each scaled matrix: scores of attention are then a million, more than a mask of -1e4
MASKED = {"right": "with padding", "left": "with padding on the left", "ones": "with a mask of ones"}
SEEDS = tuple(range(2, 12))  # of a training step: a branch that one text in four takes is met by 19 of 20 models
FEW, SOME, ALL = 3, 6, 10_000  # positions from which on tokens are changed
TRAINING = ", training"
RARE = True  # rare calls are part of a check that is not quick


class CannotRun(Exception):
    """The model does not offer this call; the words say why."""


@dataclass(frozen=True)
class Call:
    """One way to call a model: a row of the table, whose name stands in the report.

    length: tokens of a text, 0 for those of the subject. rows: texts in a batch, 3 or 1. tokens: random ones, or special and
    repeated ones. dtype: of the parameters, where it is another one than that of the check; autocast: that of products.
    mask: the side of the padding, or ones. attention: an implementation of attention of Hugging Face. cache, packed, scaled,
    compiled: a text in two pieces, two documents in a row, larger parameters, compiled code. gradients: they are wanted.
    seed: of the random numbers. cuts: positions from which on tokens are changed, at most. rare: not in a quick check.
    """

    name: str
    training: bool = False
    length: int = 0
    rows: int = ROWS
    tokens: str = ""
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
    cuts: int = ALL
    rare: bool = False

    @property
    def is_plain(self) -> bool:
        """Evaluation or training as everybody does it, which every model has to offer."""
        return self == Call(self.name, self.training)

    def in_training(self) -> Call:
        return replace(self, training=True, name=f"{self.name}{TRAINING}")

    def choose_texts(self, subject: Subject) -> Subject:
        """The subject with the texts of this call."""
        if self.compiled:
            subject = subject.shorten(13)  # loops over positions take long to compile
        if self.length:
            subject = subject.with_length(self.length)
        return subject.with_special_tokens() if self.tokens else subject


def list_calls(subject: Subject, *, quick: bool) -> list[Call]:
    """The table of calls for a model; the quick ones need a second or two."""
    even, half = subject.even, (torch.bfloat16, torch.float16)
    given = find_dtype(subject.own) if subject.dtype == torch.float64 else None
    masks = MASKED if subject.mask_form is not None else {"right": MASKED["right"]}
    both_modes = [
        *(Call(name, mask=mask) for mask, name in masks.items()),
        Call(f"one row of {even} tokens", rows=1, length=even, cuts=SOME),
        Call(f"rows of {even} tokens", length=even, cuts=FEW),
    ]
    if subject.mask_form is not None:
        both_modes.append(Call("one row with a mask of ones", rows=1, length=even, mask="ones", cuts=FEW))
    if not subject.has_example:
        both_modes.append(Call("one row", rows=1, cuts=FEW))
    if 2 * even <= subject.long_ids.shape[1]:
        both_modes.append(Call(f"rows of {2 * even} tokens", length=2 * even, cuts=FEW))
    if subject.reads_tokens:
        both_modes.append(Call("special and repeated tokens", tokens="special", cuts=FEW))
    for dtype in TYPES:
        cuts = SOME if dtype in half else FEW
        both_modes.append(Call(f"in {name_type(dtype)}", dtype=dtype, cuts=cuts, rare=dtype != given))
    both_modes.append(Call("under autocast", autocast=torch.bfloat16, cuts=SOME, rare=True))
    calls = [Call("evaluation"), Call("training", training=True)]
    calls += [one for call in both_modes for one in (call, call.in_training())]
    calls += list_implementations(subject, masks, quick=quick)
    calls += [Call("parameters scaled", scaled=True), Call("after a cache", cache=True)]
    if not subject.ours:
        calls.append(Call("packed documents", packed=True))
    calls.append(Call("compiled", compiled=True, rare=True))
    calls.append(Call("training, gradients on, other seeds", training=True, gradients=True))
    return [call for call in calls if not call.rare or (RARE and not quick)]


def list_implementations(subject: Subject, masks: dict[str, str], *, quick: bool) -> list[Call]:
    """Calls by the implementations of attention that a model of Hugging Face does not use by itself."""
    own = find_implementation(subject.model)
    calls = []
    for name in IMPLEMENTATIONS if own else ():
        if name == own or (quick and name == "flex_attention"):
            continue
        call = Call(name, attention=name)
        calls.append(call)
        if has_implementation(subject.model, name):
            calls.append(call.in_training())
            calls += [replace(call, name=f"{name}, {words}", mask=mask) for mask, words in masks.items()]
    return calls


def name_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe_call(subject: Subject, call: Call) -> str:
    """The name of the call behind the implementation of attention that it uses."""
    own = "" if call.attention else find_implementation(subject.model)
    return ", ".join(word for word in (own, call.name) if word and (not own or word != "evaluation"))


def find_implementation(model: Any) -> str:
    """The implementation of attention that a model of Hugging Face, or one that switches alike, uses now; else empty."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) and hasattr(model, "set_attn_implementation") else ""


def has_implementation(model: Any, name: str) -> bool:
    try:
        with attend_by(model, name):
            return True
    except CannotRun:
        return False


@contextmanager
def attend_by(model: Any, name: str) -> Iterator[None]:
    """Inside, the model computes attention by the implementation of that name; CannotRun where it has none."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values()
    before = [(one, one._attn_implementation) for one in configs if hasattr(one, "_attn_implementation")]
    try:
        try:
            model.set_attn_implementation(name)
        except Exception as error:
            raise CannotRun(f"it has no {name}: {one_line(error, 160)}") from error
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


# -- running -----------------------------------------------------------------------------------------------------------


class Run:
    """Runs a model by a call: ids (B, N) to logits (B, N, V), 0 at padding, divided by the size of other logits.

    Rows take turns with the padding of three rows; random numbers begin at the same seed in each call. model: what runs, for
    those who look inside. divide: by which size; None: as they are.
    """

    def __init__(self, subject: Subject, call: Call, model: Any) -> None:
        self.subject, self.call, self.runs = subject, call, model
        self.model = getattr(model, "_orig_mod", model)
        self.mask = subject.masks()[call.mask] if call.mask else None
        self.documents = split_positions(subject) if call.packed else {}
        self.step = open_cache(subject, model) if call.cache else None
        self.divide: Callable[[Tensor], Tensor] | None = None

    def __call__(self, ids: Tensor, **options: Any) -> Tensor:
        mask = None if self.mask is None else take_turns(self.mask, len(ids))
        if mask is not None:
            options |= self.subject.positions_of(mask)
        has_gradients = torch.set_grad_enabled(self.call.gradients)
        with has_gradients, mode(self.runs, training=self.call.training, seed=self.call.seed):
            logits = self.read(ids.contiguous(), mask, **options).detach()  # one layout is compiled once
        if mask is not None:
            logits = logits.masked_fill(~mask.bool()[..., None], 0.0)
        return logits if self.divide is None else self.divide(logits)

    def read(self, ids: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        if self.step is not None:
            return read_pieces(ids, [0, self.subject.length // 2, self.subject.length], self.step)
        if self.call.rows == 1 or self.documents:  # one by one: documents are packed into a row
            masks = [None] * len(ids) if mask is None else mask.split(1)
            options |= {"model": self.runs, **self.documents}
            rows = zip(ids.split(1), masks, strict=True)
            return torch.cat([self.subject.logits(row, row_mask, **options) for row, row_mask in rows])
        return self.subject.logits(ids, mask, model=self.runs, **options)


@contextmanager
def running(subject: Subject, call: Call) -> Iterator[Run]:
    """A run of the model by the call; CannotRun where the model does not offer it."""
    model = subject.model
    if call.training and not subject.has_modes:
        raise CannotRun(NO_MODES)
    if call.mask and subject.mask_form is None:
        raise CannotRun(subject.without_mask)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if call.attention:
            stack.enter_context(attend_by(model, call.attention))
            if call.attention == "flex_attention":  # the same masks, without a compiler
                stack.enter_context(torch.compiler.set_stance("force_eager"))
        if call.compiled:
            stack.enter_context(torch.compiler.set_stance("default"))
            torch.compiler.reset()
            stack.callback(torch.compiler.reset)
            model = compile_copy(model)
        if call.autocast is not None:
            model = subject.copy_model()
            stack.enter_context(torch.autocast(subject.ids.device.type, call.autocast))
        if call.dtype is not None:
            model = subject.copy_model().to(call.dtype)
        if call.scaled:
            model = scale_copy(model)
        yield Run(subject, call, model)


def compile_copy(model: Any) -> Any:
    if not isinstance(model, AsModule):
        return torch.compile(model, backend="aot_eager")
    copied = duplicate(model)
    copied.function = torch.compile(copied.function, backend="aot_eager")
    return copied


def scale_copy(model: Any) -> Any:
    """A copy whose matrices make their inputs about `GAIN` times larger: a mask that is a finite number is overcome."""
    copied = duplicate(model)
    tables = {parameter for m in copied.modules() if isinstance(m, nn.Embedding) for parameter in m.parameters()}
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.is_floating_point() and parameter.dim() >= 2 and parameter not in tables:
                parameter.mul_(GAIN / float(parameter.norm() / parameter.shape[0] ** 0.5 + 1e-9))
    return copied


def split_positions(subject: Subject) -> dict[str, Tensor]:
    """The option that tells positions of two documents in a row; CannotRun where there is none."""
    if subject.first_position is None:
        raise CannotRun("forward takes no position_ids that could begin again at a document")
    positions, half = torch.arange(subject.length, device=subject.ids.device)[None], subject.length // 2
    return {"position_ids": positions - half * (positions >= half) + subject.first_position}


# -- caches ------------------------------------------------------------------------------------------------------------

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def read_pieces(ids: Tensor, bounds: list[int], step: Step) -> Tensor:
    """Logits of a text that is read piece by piece, each after the state that the one before left."""
    parts, state = [], None
    for start, end in itertools.pairwise(bounds):
        logits, state = step(ids[:, start:end], state)
        parts.append(logits)
    return torch.cat(parts, dim=1)


def open_cache(subject: Subject, model: Any, *, pieces: bool = True) -> Step:
    """Reads tokens after a cache: read(ids, cache or None) gives logits and the next cache.

    pieces: of several tokens, which a model with a recurrent state may not read after its first ones.
    Raises CannotRun where the model has no cache.
    """
    if subject.sees_future:
        raise CannotRun(f"{subject.sees_future}: a token that sees later ones cannot be read before them")
    if pieces and subject.has_state:
        raise CannotRun("a recurrent state is read token by token, as its maker says (_is_stateful)")
    if subject.kind == "fullrank" and model.config.memory_start == "zeros":
        raise CannotRun("model.memory_start is zeros, which stand before the text; a cache begins with nothing")
    if subject.step is not None:
        return lambda ids, cache: step_module(subject, model, ids, cache)
    if subject.ours:
        return lambda ids, cache: step_own(subject, model, ids, cache)
    name = cache_argument(list_arguments(model))
    if not name:
        raise CannotRun("forward takes no past_key_values with use_cache, and no step=... was given")
    if getattr(subject.call(subject.ids[:, :1], model=model, use_cache=True), name, None) is None:
        raise CannotRun(f"the model returns no {name}")
    return lambda ids, state: step_hugging_face(subject, model, name, ids, state)


def step_hugging_face(subject: Subject, model: Any, name: str, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
    """A step of a model that takes and returns its cache by `name`. state: the cache, and the tokens in it."""
    cache, seen = (None, 0) if state is None else state
    options: dict[str, Any] = {name: cache, "use_cache": True}
    if subject.first_position is not None:  # as `generate` gives them
        places = torch.arange(seen, seen + ids.shape[1], device=ids.device) + subject.first_position
        options["position_ids"] = places.expand(len(ids), -1)
    out = subject.call(ids, model=model, **options)
    return subject.select(logits_in(out)), (getattr(out, name), seen + ids.shape[1])


def step_module(subject: Subject, model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """The step of a user, which reads a copy of the model in its place."""
    assert subject.step is not None
    with stand_in([subject.own], [model]):
        logits, cache = subject.step(ids, cache)
    return subject.select(logits), cache


def step_own(subject: Subject, model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """A step of a model of ours. cache: the decoder and its cache."""
    if cache is None:
        decoder = model.of_source(model.encode(subject.fixed["input_ids"])) if subject.translates else model
        cache = (decoder, decoder.new_cache())
        if subject.translates and len(ids) != ROWS:
            cache = (decoder, cache[1].reorder(torch.arange(len(ids), device=ids.device) % ROWS))
    out = cache[0](ids, cache=cache[1], attention_mask=None)
    return subject.select(out.logits), (cache[0], out.cache)


def reorder_cache(state: Any, order: Tensor) -> Any:
    """The state of a step after rows were chosen, as beam search does; None for a cache that cannot."""
    if not isinstance(state, tuple) or len(state) != 2:
        return None
    first, second = state
    if hasattr(second, "reorder"):  # of ours
        return first, second.reorder(order)
    if hasattr(first, "reorder_cache"):  # of Hugging Face
        first.reorder_cache(order)
        return state
    return None
