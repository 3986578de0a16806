"""The code paths by which people run a model: mode, padding, implementation of attention, precision, cache, packing."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fullrank.checking.subject import ROWS, Subject, accepted, duplicate, mode, move
from fullrank.core.errors import one_line
from fullrank.models import cache_argument, logits_in

TRAINED = "after training on random tokens"
NO_MODES = "a function in which no module was found has no modes: training was not tried; give the module"
ONE_ROW = "one row of {} tokens"
RARE = ("static cache", "compiled", "in bfloat16")  # which a quick check leaves out
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
GAIN = 1000.0  # of each scaled matrix: scores of attention are then a million, more than a mask of -1e4


class Run(Protocol):
    """Ids (B, N) to logits (B, N, V). model: what runs, for those who look inside."""

    model: Any

    def __call__(self, ids: Tensor, **options: Any) -> Tensor: ...


class CannotRun(Exception):
    """The model does not offer this path; the words say why."""


@dataclass(frozen=True)
class CodePath:
    """How a model is run. name: its words in the name of a check; how: what is special about it.

    padding: the side of the padding. attention: an implementation of attention of a model of Hugging Face.
    """

    name: str
    training: bool = False
    padding: str = ""
    attention: str = ""
    how: str = ""

    def words(self, subject: Subject) -> str:
        """The path in words, the implementation of attention first: "sdpa, training, padding on the right"."""
        attention = self.attention or _implementation(subject.model)
        parts = [
            attention,
            "training" if self.training else "",
            f"padding on the {self.padding}" if self.padding else "",
        ]
        return ", ".join(part for part in (*parts, self.how) if part) or "evaluation"


def code_paths(subject: Subject, *, quick: bool) -> list[CodePath]:
    """All that may apply to a model; the quick ones need a second or two."""
    sides = subject.masks() if subject.takes_mask else ("right",)
    own = _implementation(subject.model)
    found = [CodePath("evaluation"), CodePath("training", training=True)]
    for side, training in itertools.product(sides, (False, True)):
        found.append(CodePath(f"{_padded(side)}{', training' * training}", padding=side, training=training))
    for name in IMPLEMENTATIONS if own else ():
        if name == own or (quick and name == "flex_attention"):
            continue
        found.append(CodePath(name, attention=name))
        if _has(subject.model, name):
            found.append(CodePath(f"{name}, training", attention=name, training=True))
            found += [CodePath(f"{name}, {_padded(side)}", attention=name, padding=side) for side in sides]
    one_row = ONE_ROW.format(subject.even)
    found += [CodePath(f"{one_row}{', training' * training}", training, how=one_row) for training in (False, True)]
    special = [
        "parameters scaled",
        "after a cache",
        *(() if subject.ours else ("packed documents",)),
        *(() if quick else RARE),
    ]
    return found + [
        CodePath(how, how=how) for how in special if how != "static cache" or subject.kind == "hugging_face"
    ]


def _padded(side: str) -> str:
    return "with padding" if side == "right" else f"with padding on the {side}"


def _implementation(model: Any) -> str:
    """The implementation of attention that a model of Hugging Face, or one that switches alike, uses now; else empty."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) and hasattr(model, "set_attn_implementation") else ""


def _has(model: Any, name: str) -> bool:
    try:
        with attention(model, name):
            return True
    except CannotRun:
        return False


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Inside, the model computes attention by the implementation of that name; CannotRun where it has none."""
    configs = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}.values()
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


@contextmanager
def running(subject: Subject, path: CodePath) -> Iterator[Run]:
    """A function that runs the model along the path: ids (B, N) to logits (B, N, V), 0 at padding.

    Rows take turns with the padding of three rows; random numbers begin at the same seed in each call. CannotRun where the
    model does not offer the path.
    """
    model = subject.model
    mask = subject.masks()[path.padding] if path.padding else None
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if path.training and not subject.has_modes:
            raise CannotRun(NO_MODES)
        if path.padding and not subject.takes_mask:
            raise CannotRun(subject.without_mask)
        if path.attention:
            stack.enter_context(attention(model, path.attention))
            if path.attention == "flex_attention":  # the same masks, without a compiler
                stack.enter_context(torch.compiler.set_stance("force_eager"))
        elif path.how == "compiled":
            stack.enter_context(torch.compiler.set_stance("default"))
            torch.compiler.reset()
            stack.callback(torch.compiler.reset)
            model = torch.compile(model, backend="aot_eager")
        elif path.how == "in bfloat16":
            model = duplicate(subject.own)
            move(model)
            model = model.bfloat16()
        elif path.how == "parameters scaled":
            model = duplicate(subject.model)
            _scale(model)
        read = _reader(subject, model, path.how)

        def read_rows(ids: Tensor, **options: Any) -> Tensor:
            turns = torch.arange(len(ids), device=ids.device) % ROWS
            rows = None if mask is None else mask[turns]
            positions = {} if rows is None else subject.positions_of(rows)
            with torch.no_grad(), mode(model, training=path.training):
                out = read(ids.contiguous(), rows, **positions, **options)  # one layout is compiled once
            return out if rows is None else out.masked_fill(~rows.bool()[..., None], 0.0)

        run = cast(Run, read_rows)
        run.model = getattr(model, "_orig_mod", model)
        yield run


def _reader(subject: Subject, model: Any, how: str) -> Callable[..., Tensor]:
    """Logits of ids along what is special about a path."""
    if how == "packed documents" or how.startswith("one row"):
        options = {}
        if how == "packed documents":
            if not subject.takes_positions:
                raise CannotRun("forward takes no position_ids that could begin again at a document")
            starts = torch.arange(subject.length, device=subject.ids.device)
            positions = torch.where(starts < subject.length // 2, starts, starts - subject.length // 2)[None]
            options = {"position_ids": positions + (subject.first_position or 0)}

        def alone(ids: Tensor, mask: Tensor | None) -> Tensor:  # by itself: a row is what documents are packed into
            return torch.cat([subject.logits(row[None], model=model, **options) for row in ids])

        return alone
    if how in ("after a cache", "static cache"):
        half = subject.length // 2
        read = cached(subject, model, static=how == "static cache")

        def pieces(ids: Tensor, mask: Tensor | None) -> Tensor:
            first, state = read(ids[:, :half], None)
            second, _ = read(ids[:, half:], state)
            return torch.cat((first, second), dim=1)

        return pieces
    return lambda ids, mask, **options: subject.logits(ids, mask, model=model, **options)


Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def cached(subject: Subject, model: Any, *, static: bool = False, pieces: bool = True) -> Step:
    """Reads tokens after a cache: read(ids, cache or None) gives logits and the next cache.

    pieces: of several tokens, which a model with a recurrent state may not read after its first ones.
    Raises CannotRun where the model has no cache, or no static one.
    """
    if subject.sees_future:
        raise CannotRun(f"{subject.sees_future}: a token that sees later ones cannot be read before them")
    if pieces and getattr(model, "_is_stateful", False):
        raise CannotRun("a recurrent state is read token by token, as its maker says (_is_stateful)")
    if subject.kind == "fullrank" and model.config.memory_start == "zeros":
        raise CannotRun("model.memory_start is zeros, which stand before the text; a cache begins with nothing")
    if subject.step is not None:
        if static:
            raise CannotRun("step knows one cache, its own")
        return subject.step
    if subject.ours:
        if static:
            raise CannotRun("a model of fullrank has one cache, which grows")
        decoder = model.decoder_of_sources() if subject.translates else None

        def ours(ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
            reader = model if decoder is None else decoder
            if cache is None:
                cache = reader.new_cache()
                if decoder is not None and len(ids) != ROWS:
                    cache = cache.reorder(torch.arange(len(ids), device=ids.device) % ROWS)
            out = reader(ids, cache=cache, attention_mask=None)
            return out.logits, out.cache

        return ours
    name = cache_argument(accepted(model))
    if not name:
        raise CannotRun("forward takes no past_key_values with use_cache, and no step=... was given")
    if getattr(subject.call(subject.ids[:, :1], model=model, use_cache=True), name, None) is None:
        raise CannotRun(f"the model returns no {name}")

    def new_cache() -> Any:
        if not static:
            return None
        offered = subject.kind == "hugging_face" and getattr(model, "_can_compile_fullgraph", False)
        if not offered or getattr(model, "_is_stateful", False) or subject.sequence:
            raise CannotRun("its maker offers no static cache (_can_compile_fullgraph)")
        config = model.config.get_text_config(decoder=True)
        return sys.modules["transformers"].StaticCache(config=config, max_cache_len=subject.length + 9)

    def step(ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        cache, seen = (new_cache(), 0) if state is None else state
        options: dict[str, Any] = {name: cache}
        if subject.first_position is not None:  # as `generate` gives them
            places = torch.arange(seen, seen + ids.shape[1], device=ids.device) + subject.first_position
            options["position_ids"] = places.expand(len(ids), -1)
        out = subject.call(ids, model=model, use_cache=True, **options)
        return subject.turned(logits_in(out)), (getattr(out, name), seen + ids.shape[1])

    return step


def _scale(model: nn.Module) -> None:
    """Matrices grow until each makes its input about `GAIN` times larger: a mask that is a finite number is overcome."""
    with torch.no_grad():
        for module in model.modules():
            for parameter in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
                if parameter.is_floating_point() and parameter.dim() >= 2:
                    parameter.mul_(GAIN / float(parameter.norm() / parameter.shape[0] ** 0.5 + 1e-9))
