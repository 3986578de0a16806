"""The code paths by which people run a model: mode, padding, implementation of attention, precision, cache, packing."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullrank.checking.copies import AsModule, duplicate, list_arguments, mode, move_copy, stand_in
from fullrank.checking.subject import ROWS, SIDES, Subject, take_turns
from fullrank.core.errors import one_line
from fullrank.forward import cache_argument, logits_in

NO_MODES = "a function in which no module was found has no modes: training was not tried; give the module"
SCALED, CACHE, PACKED, COMPILED = "parameters scaled", "after a cache", "packed documents", "compiled"
TRAINED, AUTOCAST, SEEDS = "after training on random tokens", "under autocast", "gradients on, other seeds"
TYPES: dict[str, torch.dtype] = {
    "in bfloat16": torch.bfloat16,
    "in float16": torch.float16,
    "in float32": torch.float32,
    AUTOCAST: torch.bfloat16,
}
RARE = (COMPILED, *TYPES)  # which a quick check leaves out
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
GAIN = 1000.0  # of each scaled matrix: scores of attention are then a million, more than a mask of -1e4
MODES = (("", False), (", training", True))


class CannotRun(Exception):
    """The model does not offer this path; the words say why."""


@dataclass(frozen=True)
class CodePath:
    """How a model is run. name: its words in the name of a check; how: what is special about it.

    padding: the side of the padding, or a mask of ones. attention: an implementation of attention of a model of Hugging
    Face. seed: of the random numbers.
    """

    name: str = "evaluation"
    training: bool = False
    padding: str = ""
    attention: str = ""
    how: str = ""
    seed: int = 1

    def describe(self, subject: Subject) -> str:
        """The path in words, the implementation of attention first: "sdpa, training, padding on the right"."""
        attention = self.attention or find_implementation(subject.model)
        padding = SIDES[self.padding] if self.padding else ""
        words = (attention, "training" if self.training else "", padding, self.how)
        return ", ".join(word for word in words if word) or "evaluation"

    @property
    def is_one_row(self) -> bool:
        return self.how.startswith("one row")

    @property
    def dtype(self) -> torch.dtype | None:
        return TYPES.get(self.how)


def list_paths(subject: Subject, *, quick: bool) -> list[CodePath]:
    """All that may apply to a model; the quick ones need a second or two."""
    names = {"right": "with padding", "left": "with padding on the left", "ones": f"with {SIDES['ones']}"}
    sides = {side: names[side] for side in (subject.masks() if subject.mask_form is not None else ("right",))}
    paths = [CodePath(), CodePath("training", training=True)]
    for (side, padded), (more, training) in itertools.product(sides.items(), MODES):
        paths.append(CodePath(padded + more, training, side))
    own = find_implementation(subject.model)
    for name in IMPLEMENTATIONS if own else ():
        if name == own or (quick and name == "flex_attention"):
            continue
        paths.append(CodePath(name, attention=name))
        if has_implementation(subject.model, name):
            paths.append(CodePath(f"{name}, training", True, attention=name))
            paths += [CodePath(f"{name}, {padded}", False, side, name) for side, padded in sides.items()]
    one_row = f"one row of {subject.even} tokens"
    paths += [CodePath(one_row + more, training, how=one_row) for more, training in MODES]
    special = [SCALED, CACHE, *(() if subject.ours else (PACKED,)), *(() if quick else RARE)]
    return [*paths, *(CodePath(how, how=how) for how in special), CodePath(f"training, {SEEDS}", True, how=SEEDS)]


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
    """Runs a model along a path: ids (B, N) to logits (B, N, V), 0 at padding, divided by the size of other logits.

    Rows take turns with the padding of three rows; random numbers begin at the same seed in each call. model: what runs, for
    those who look inside. divide: by which size; None: as they are.
    """

    def __init__(self, subject: Subject, path: CodePath, model: Any) -> None:
        self.path, self.model = path, getattr(model, "_orig_mod", model)
        self.subject, self.read = subject, choose_reader(subject, model, path)
        self.runs = model
        self.mask = subject.masks()[path.padding] if path.padding else None
        self.divide: Callable[[Tensor], Tensor] | None = None

    def __call__(self, ids: Tensor, **options: Any) -> Tensor:
        mask = None if self.mask is None else take_turns(self.mask, len(ids))
        options |= {} if mask is None else self.subject.positions_of(mask)
        has_gradients = torch.set_grad_enabled(self.path.how == SEEDS)
        with has_gradients, mode(self.runs, training=self.path.training, seed=self.path.seed):
            logits = self.read(ids.contiguous(), mask, **options).detach()  # one layout is compiled once
        if mask is not None:
            logits = logits.masked_fill(~mask.bool()[..., None], 0.0)
        return logits if self.divide is None else self.divide(logits)


@contextmanager
def running(subject: Subject, path: CodePath) -> Iterator[Run]:
    """A run of the model along the path; CannotRun where the model does not offer it."""
    model = subject.model
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if path.training and not subject.has_modes:
            raise CannotRun(NO_MODES)
        if path.padding and subject.mask_form is None:
            raise CannotRun(subject.without_mask)
        if path.attention:
            stack.enter_context(attend_by(model, path.attention))
            if path.attention == "flex_attention":  # the same masks, without a compiler
                stack.enter_context(torch.compiler.set_stance("force_eager"))
        elif path.how == COMPILED:
            stack.enter_context(torch.compiler.set_stance("default"))
            torch.compiler.reset()
            stack.callback(torch.compiler.reset)
            model = compile_copy(model)
        elif path.how == AUTOCAST:
            model = move_copy(subject.own)
            stack.enter_context(torch.autocast(subject.ids.device.type, path.dtype))
        elif path.dtype is not None:
            model = move_copy(subject.own).to(path.dtype)
        elif path.how == SCALED:
            model = scale_copy(model)
        yield Run(subject, path, model)


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


def choose_reader(subject: Subject, model: Any, path: CodePath) -> Callable[..., Tensor]:
    """Logits of ids and a mask along what is special about a path."""
    if path.how == CACHE:
        step = open_cache(subject, model)
        return lambda ids, mask: read_pieces(ids, [0, subject.length // 2, subject.length], step)
    documents = split_positions(subject) if path.how == PACKED else {}
    if documents or path.is_one_row:

        def read_rows(ids: Tensor, mask: Tensor | None) -> Tensor:  # one by one: documents are packed into a row
            return torch.cat([subject.logits(row[None], model=model, **documents) for row in ids])

        return read_rows
    return lambda ids, mask, **options: subject.logits(ids, mask, model=model, **options)


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

    def read(ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        cache, seen = (None, 0) if state is None else state
        options: dict[str, Any] = {name: cache, "use_cache": True}
        if subject.first_position is not None:  # as `generate` gives them
            places = torch.arange(seen, seen + ids.shape[1], device=ids.device) + subject.first_position
            options["position_ids"] = places.expand(len(ids), -1)
        out = subject.call(ids, model=model, **options)
        return subject.select(logits_in(out)), (getattr(out, name), seen + ids.shape[1])

    return read


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
    decoder, cache = state
    if hasattr(cache, "reorder"):  # of ours
        return decoder, cache.reorder(order)
    if hasattr(state[0], "reorder_cache"):  # of Hugging Face
        state[0].reorder_cache(order)
        return state
    return None
