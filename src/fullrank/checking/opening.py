"""From what a user passes to a subject of the check: any module or function, its inputs, a copy in double precision."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fullrank.checking.subject import (
    LENGTHS,
    ROWS,
    SEED,
    FixedSources,
    Subject,
    duplicate,
    mode,
    move,
    random_ids,
)
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError, one_line
from fullrank.core.translator import Translator


class AsModule(nn.Module):
    """A function from token ids to logits, with the modules that it calls: its copy calls copies of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        for name, held in _find_modules(function):
            if all(held is not known for known in self.modules()):
                while hasattr(self, name):
                    name += "_"
                self.add_module(name, held)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> AsModule:
        return AsModule(_copied(self.function, memo))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """All that a function reaches, by name: its closure, its defaults, the globals that it names, parts of an object."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield name, cell.cell_contents
        codes = [value.__code__, *(one for one in value.__code__.co_consts if isinstance(one, types.CodeType))]
        for name in dict.fromkeys(name for code in codes for name in code.co_names if name in value.__globals__):
            yield name, value.__globals__[name]
        yield from (("given", one) for one in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
    elif isinstance(value, functools.partial):
        yield from (("given", one) for one in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield from (("owner", value.__self__), ("function", value.__func__))
    elif isinstance(value, list | tuple | dict):
        yield from (("given", one) for one in (value.values() if isinstance(value, dict) else value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | nn.Module | Tensor):
        yield from list(vars(value).items())


def _find_modules(value: Any, depth: int = 4) -> Iterator[tuple[str, nn.Module]]:
    """Modules inside `value`, by name."""
    for name, part in _parts(value) if depth else ():
        if isinstance(part, nn.Module):
            yield name.replace(".", "_"), part
        else:
            yield from _find_modules(part, depth - 1)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """`value` with copies of its modules, and of all that holds them: Python copies no function, and not every object."""
    if id(value) in memo or isinstance(value, nn.Module):
        return memo[id(value)] if id(value) in memo else copy.deepcopy(value, memo)
    if not any(_find_modules(value)):
        return value
    if isinstance(value, types.FunctionType):
        scope, cells = dict(value.__globals__), tuple(types.CellType() for _ in value.__closure__ or ())
        made = memo[id(value)] = types.FunctionType(value.__code__, scope, value.__name__, None, cells)
        made.__defaults__, made.__kwdefaults__ = (
            _copied(one, memo) for one in (value.__defaults__, value.__kwdefaults__)
        )
        made.__dict__.update(value.__dict__)
        for name, part in _parts(value):
            if name in value.__code__.co_freevars:
                cells[value.__code__.co_freevars.index(name)].cell_contents = _copied(part, memo)
            elif scope.get(name) is part:
                scope[name] = _copied(part, memo)
        return made
    if isinstance(value, functools.partial):
        given = {name: _copied(part, memo) for name, part in value.keywords.items()}
        return functools.partial(_copied(value.func, memo), *(_copied(part, memo) for part in value.args), **given)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _copied(value.__self__, memo))
    if isinstance(value, dict):
        return {name: _copied(part, memo) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(part, memo) for part in value)
    made = memo[id(value)] = copy.copy(value)
    made.__dict__.update({name: _copied(part, memo) for name, part in vars(value).items()})
    return made


def subject_of(
    model: Any,
    vocab_size: int | None = None,
    length: int | None = None,
    inputs: Any = None,
    sequence: str | None = None,
    step: Callable[..., tuple[Tensor, Any]] | None = None,
) -> Subject:
    """`model` ready to be checked; it is left as it is. A Translator gets sources first, by `fixed_sources`.

    vocab_size: where the model does not say it; length: tokens of a text, by default a suitable one. inputs, sequence, step:
    of `check`. Raises InputError where the model gives no logits (B, N, V).
    """
    model = getattr(model, "_orig_mod", model)  # a compiled module: its own code is what hooks see
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise InputError(f"model: a torch module or a function of token ids, given {type(model).__name__}")
        model = AsModule(model)
    _refuse_meta(model)
    config: Any = getattr(model, "config", None)  # of a model that is not ours: nothing is known of it
    kind: Literal["fullrank", "translator", "hugging_face", "module"] = "module"
    if isinstance(model, FixedSources):
        kind = "translator"
    elif isinstance(model, LanguageModel):
        kind = "fullrank"
    elif hasattr(model, "save_pretrained") and hasattr(model, "get_input_embeddings"):
        kind = "hugging_face"
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True) if kind == "hugging_face" else config.get_text_config()
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    if inputs is None and kind == "hugging_face" and getattr(model.config, "is_encoder_decoder", False):
        sequence = sequence or "decoder_input_ids"
    fixed = dict[str, Any]()
    example: Tensor | None = None
    if inputs is not None:
        sequence, example, fixed = _example(model, inputs, sequence)
    continuous = example is not None and example.is_floating_point()
    if vocab_size is None and not continuous:
        vocab_size = _vocab_size(model, config)
    vocab_size = vocab_size or 2
    if vocab_size < 2:
        raise InputError(f"vocab_size: {vocab_size}; a check changes tokens and needs two or more")
    if example is None:
        ids = random_ids(ROWS, _text_length(model, config, kind, length, tensors), vocab_size, SEED).to(device)
        if sequence == "decoder_input_ids":
            fixed = {"input_ids": random_ids(ROWS, ids.shape[1] - 2, vocab_size, 15).to(device)}
    else:
        if length is not None:
            raise InputError(
                f"length: {length}, but the example inputs have a length of their own; give one of the two"
            )
        turns = torch.arange(ROWS) % len(example)
        ids = example[turns].to(device)
        fixed = {name: _in_turn(value, len(example), turns, device) for name, value in fixed.items()}
    padding_id = 0 if kind == "module" and example is None else None  # the others are told by a mask only
    if padding_id is not None:
        ids[-1, -max(1, ids.shape[1] // 4) :] = padding_id
    made = Subject(model, model, kind, vocab_size, torch.float64, ids, padding_id, fixed, sequence or "", step, inputs)
    if example is None:
        made = replace(
            made, ids=made.readable(ids), fixed={name: made.readable(value) for name, value in fixed.items()}
        )
    try:
        moved = _moved(made)
        if kind != "module" or not _time_first(moved):
            return moved
        if example is None and step is None:
            return replace(moved, time_first=True)
        raise InputError(
            f"{sequence or 'the model'}: rows see each other, positions of a row do not: time seems to come first; check a "
            "function that reads (B, N), such as lambda ids: model(ids.mT).transpose(0, 1)"
        )
    except InputError as error:  # perhaps it has a longest text, of which it says nothing
        for size in (31, 17, 7):
            if size >= ids.shape[1] or length is not None or example is not None:
                continue
            short = made.ids[:, :size].contiguous()
            sources = {name: value[:, : size - 2] for name, value in made.fixed.items()}
            with contextlib.suppress(InputError):
                return _moved(replace(made, ids=short, fixed=sources))
        raise error


def _time_first(subject: Subject) -> bool:
    """Rows of ids depend on each other, and positions of a row do not."""
    ids, size = subject.ids, subject.length
    other = -ids if ids.is_floating_point() else (ids + 1) % subject.vocab_size

    def reach(*at: Any) -> Tensor:
        """(3, N): where the logits are others than those of `ids` when ids[at] is changed."""
        changed = ids.clone()
        changed[at] = other[at]
        return ~torch.isclose(subject.logits(changed), before, 1e-4, 1e-7, equal_nan=True).all(2)

    with torch.no_grad(), mode(subject.model, training=False), contextlib.suppress(Exception):
        before = subject.logits(ids)
        if any(bool(reach(slice(None), at).index_fill(1, torch.tensor(at), False).any()) for at in (0, size // 2)):
            return False
        return any(bool(reach(row).index_fill(0, torch.tensor(row), False).any()) for row in range(ROWS))
    return False


def _vocab_size(model: nn.Module, config: Any) -> int:
    vocab_size = getattr(config, "vocab_size", None)
    if isinstance(vocab_size, int):
        return vocab_size
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if not sizes:
        raise InputError(f"{type(model).__name__} does not say how many token ids it knows; give vocab_size")
    return sizes[0]


def _text_length(model: Any, config: Any, kind: str, length: int | None, tensors: list[Tensor]) -> int:
    known = kind in ("fullrank", "translator")
    longest: Any = model.max_length if known else getattr(config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else None
    if length is None:
        taken = {size for tensor in tensors for size in tensor.shape}
        return _length(taken, longest, f"the model reads at most {longest} tokens; a check needs 3")
    if length < 3 or (longest is not None and length > longest):
        limit = "" if longest is None else f" to {longest}"
        raise InputError(f"length: {length} tokens, but this model can be checked with 3{limit}")
    return length


_SEQUENCES = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


def _example(model: nn.Module, inputs: Any, sequence: str | None) -> tuple[str, Tensor, dict[str, Any]]:
    """Name and value of the sequence in the example inputs of a user, and the other ones."""
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, tuple | list):
        names = list(inspect.signature(getattr(model, "function", model.forward)).parameters)
        if len(inputs) > len(names):
            raise InputError(f"inputs: {len(inputs)} of them, but forward takes {len(names)}; give a dict by name")
        inputs = dict(zip(names, inputs, strict=False))
    if not isinstance(inputs, Mapping):
        raise InputError(f"inputs: a dict of tensors by argument, a tuple or a tensor, given {type(inputs).__name__}")
    tensors = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() >= 2]
    name = sequence or next((one for one in _SEQUENCES if one in tensors), tensors[0] if tensors else "")
    if name not in tensors:
        raise InputError(
            f"sequence: {name or 'none'}; the input along which the check looks is one of the tensors (B, N) or (B, N, E) "
            f"in inputs: {', '.join(tensors) or 'there is none'}"
        )
    if inputs[name].shape[1] < 3:
        raise InputError(f"inputs: {name} has {inputs[name].shape[1]} positions; a check needs 3 or more")
    return name, inputs[name], {one: value for one, value in inputs.items() if one != name}


def _in_turn(value: Any, rows: int, turns: Tensor, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value[turns] if value.dim() and len(value) == rows else value).to(device)


def _refuse_meta(model: nn.Module) -> None:
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("a model on the meta device has no numbers to check; build it on the cpu")


def _length(taken: set[Any], longest: int | None, too_short: str) -> int:
    """A length that no other size of the model equals, so that positions are recognised by it."""
    allowed = [length for length in LENGTHS if longest is None or length <= longest]
    if not allowed:
        raise InputError(too_short)
    return next((length for length in allowed if length not in taken), allowed[0])


DOUBLE_UP_TO = 50_000_000  # parameters; larger models are checked in fp32


def _moved(subject: Subject) -> Subject:
    """With a copy, its parameters away from their start, in double precision, or as it was written where that fails."""
    model, ids = subject.own, subject.ids
    doubles = (True, False) if subject.parameters <= DOUBLE_UP_TO else (False,)
    for double, plain_experts in itertools.product(doubles, (False, True)):
        if plain_experts and not (double and hasattr(model, "set_experts_implementation")):
            continue
        moved = duplicate(model)
        move(moved)
        own = next((p.dtype for p in moved.parameters() if p.is_floating_point()), torch.float32)
        try:
            if plain_experts:  # the other implementations of experts lack double precision
                cast(Any, moved).set_experts_implementation("eager")
            moved = (moved.double() if double else moved).eval()
            with torch.no_grad(), mode(moved, training=False):
                logits = subject.logits(ids, model=moved)
            if double and bool(logits.isnan().any()):
                continue
            break
        except InputError:
            raise
        except Exception as error:  # in double precision: some constants are fp32 for good
            if not double:
                given = ", ".join(
                    f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
                    for name, value in {subject.sequence or "input_ids": ids, **subject.fixed}.items()
                    if isinstance(value, Tensor)
                )
                raise InputError(
                    f"{type(model).__name__}: model({given}) raised {type(error).__name__}: {one_line(error)}; a model that "
                    "needs other inputs is checked with inputs={...}, examples by argument"
                ) from error
    if logits.dim() != 3 or logits.shape[:2] != ids.shape[:2]:
        raise InputError(
            f"{type(model).__name__}: logits must be (B, N, V) = {(*ids.shape[:2], 'V')}, given {tuple(logits.shape)}"
        )
    dtype = logits.dtype if double or logits.dtype.itemsize < own.itemsize else own
    return replace(subject, model=moved, dtype=dtype)


def fixed_sources(translator: Translator, length: int | None) -> FixedSources:
    """`translator` with three random sentences, of another length than the `length` tokens of the targets."""
    _refuse_meta(translator)
    longest, vocab_size = translator.max_source_length, translator.encoder.config.vocab_size
    assert vocab_size is not None
    taken = {length, *(size for parameter in translator.parameters() for size in parameter.shape)}
    too_short = f"the model reads sentences of at most {longest} tokens; a check needs {LENGTHS[-1]}"
    sources = random_ids(ROWS, _length(taken, longest, too_short), vocab_size, 15)
    return FixedSources(translator, sources.to(next(translator.parameters()).device))
