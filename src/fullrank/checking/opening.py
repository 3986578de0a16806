"""From what a user passes to a subject of the check: any module or function, its inputs, a copy in double precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullrank.checking.copies import AsModule, find_dtype, list_arguments, mode, move_copy
from fullrank.checking.subject import LENGTHS, ROWS, SEED, WORDS, Subject, random_ids
from fullrank.core.decoder import LanguageModel
from fullrank.core.errors import InputError, one_line
from fullrank.core.translator import Translator

DOUBLE_UP_TO = 50_000_000  # parameters; larger models are checked in fp32
_SEQUENCES = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_SOURCES_SEED = 15
_SHORTER = (31, 17, 7)  # tokens, for a model that does not say how few it reads


def subject_of(
    model: Any,
    vocab_size: int | None = None,
    length: int | None = None,
    inputs: Any = None,
    sequence: str | None = None,
    step: Callable[..., tuple[Tensor, Any]] | None = None,
) -> Subject:
    """`model` ready to be checked; it is left as it is.

    vocab_size: where the model does not say it. length: tokens of a text, by default a suitable one. inputs, sequence, step:
    of `check`. Raises InputError where the model gives no logits (B, N, V), and where time seems to come first.
    """
    model = as_module(model)
    subject = describe(model, vocab_size)
    if inputs is None:
        subject = add_texts(subject, sequence, length)
    elif length is None:
        subject = add_example(subject, inputs, sequence)
    else:
        raise InputError(f"length: {length}, but the example inputs have a length of their own; give one of the two")
    prepared = prepare_shorter(replace(subject, step=step), can_shorten=length is None and inputs is None)
    if prepared.kind == "module" and reads_time_first(prepared):
        raise InputError(
            f"{sequence or 'the model'}: rows see each other, positions of a row do not: time seems to come first; check a "
            "function that reads (B, N), such as lambda ids: model(ids.mT).transpose(0, 1)"
        )
    return prepared


def prepare_shorter(subject: Subject, can_shorten: bool) -> Subject:
    """`prepare` with shorter texts where it fails: the model may have a longest text, of which it says nothing."""
    try:
        return prepare(subject)
    except InputError:
        for size in _SHORTER if can_shorten else ():
            if size < subject.length:
                fixed = {name: value[:, : size - 2] for name, value in subject.fixed.items()}
                with contextlib.suppress(InputError):
                    return prepare(replace(subject.first(size), fixed=fixed))
        raise


def as_module(model: Any) -> nn.Module:
    model = getattr(model, "_orig_mod", model)  # a compiled module: its own code is what hooks see
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise InputError(f"model: a torch module or a function of token ids, given {type(model).__name__}")
        model = AsModule(model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("a model on the meta device has no numbers to check; build it on the cpu")
    return model


def describe(model: Any, vocab_size: int | None) -> Subject:
    """What a model is, before it has texts."""
    kind: Literal["fullrank", "translator", "hugging_face", "module"] = "module"
    if isinstance(model, LanguageModel | Translator):
        kind = "translator" if isinstance(model, Translator) else "fullrank"
    elif hasattr(model, "save_pretrained") and hasattr(model, "get_input_embeddings"):
        kind = "hugging_face"
    if vocab_size is None:
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        said = getattr(text_config(model), "vocab_size", None)
        vocab_size = said if isinstance(said, int) else next(iter(sizes), 0)
    elif vocab_size < 2:
        raise InputError(f"vocab_size: {vocab_size}; a check changes tokens and needs two or more")
    return Subject(model, model, kind, vocab_size, torch.float64, torch.zeros(ROWS, 0, dtype=torch.int64))


def text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def add_texts(subject: Subject, sequence: str | None, length: int | None) -> Subject:
    """With random tokens; a model of two sequences gets random sources, too."""
    model, vocab_size = subject.own, subject.vocab_size
    if vocab_size < 2:
        name = type(model).__name__
        raise InputError(f"{name} does not say how many token ids it knows; give vocab_size")
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    subject = replace(subject, ids=subject.ids.to(device))
    longest: Any = model.max_length if subject.ours else getattr(text_config(model), "max_position_embeddings", None)
    size = choose_length(tensors, longest if isinstance(longest, int) and longest > 0 else None, length, vocab_size)
    ids = subject.tokens(ROWS, size, SEED)
    if subject.kind == "module":
        ids[-1, -max(1, size // 4) :] = 0
        return replace(subject, ids=ids, padding_id=0)
    two = subject.translates or getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not two:
        return replace(subject, ids=ids, sequence=sequence or "")
    source_size, source_words = max(1, size - 2), vocab_size
    if subject.translates:
        source_size, source_words = min(source_size, model.max_source_length or size), model.encoder.config.vocab_size
    sources = subject.replace_padding(random_ids(ROWS, source_size, source_words, _SOURCES_SEED).to(device))
    return replace(subject, ids=ids, fixed={"input_ids": sources}, sequence=sequence or "decoder_input_ids")


def choose_length(tensors: list[Tensor], longest: int | None, length: int | None, vocab_size: int) -> int:
    """Tokens of a text: by default a prime that no size of the model equals, so that positions are recognised by it."""
    allowed = [size for size in LENGTHS if longest is None or size <= longest]
    if not allowed:
        raise InputError(f"the model reads at most {longest} tokens; a check needs 3")
    if length is None:
        sizes = {size for tensor in tensors for size in tensor.shape}
        short = [size for size in allowed if size <= 37 or vocab_size <= 2 * WORDS]  # logits of many words take long
        return next((size for size in short if size not in sizes), allowed[0])
    if length < 3 or (longest is not None and length > longest):
        limit = "" if longest is None else f" to {longest}"
        raise InputError(f"length: {length} tokens, but this model can be checked with 3{limit}")
    return length


def add_example(subject: Subject, inputs: Any, sequence: str | None) -> Subject:
    """With the example inputs of a user: rows of the sequence among them, and the rest."""
    example = name_inputs(subject.own, inputs)
    tensors = [name for name, value in example.items() if isinstance(value, Tensor) and value.dim() >= 2]
    name = sequence or next((one for one in (*_SEQUENCES, *tensors) if one in tensors), "")
    if name not in tensors:
        raise InputError(
            f"sequence: {name or 'none'}; the input along which the check looks is one of the tensors (B, N) or (B, N, E) "
            f"in inputs: {', '.join(tensors) or 'there is none'}"
        )
    ids: Tensor = example.pop(name)
    if ids.shape[1] < 3:
        raise InputError(f"inputs: {name} has {ids.shape[1]} positions; a check needs 3 or more")
    if not ids.is_floating_point() and subject.vocab_size < 2:
        raise InputError(f"{type(subject.own).__name__} does not say how many token ids it knows; give vocab_size")
    device = next((tensor.device for tensor in (*subject.own.parameters(), *subject.own.buffers())), ids.device)
    rows = torch.arange(ROWS) % len(ids)
    for other, value in example.items():
        if isinstance(value, Tensor):
            example[other] = (value[rows] if value.dim() and len(value) == len(ids) else value).to(device)
    subject = replace(subject, ids=ids[rows].to(device), fixed=example, sequence=name, has_example=True)
    return replace(subject, vocab_size=max(2, subject.vocab_size))


def name_inputs(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Example inputs by the name of the argument."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    if not isinstance(inputs, tuple | list):
        raise InputError(f"inputs: a dict of tensors by argument, a tuple or a tensor, given {type(inputs).__name__}")
    names = list(list_arguments(model))
    if len(inputs) > len(names):
        raise InputError(f"inputs: {len(inputs)} of them, but forward takes {len(names)}; give a dict by name")
    return dict(zip(names, inputs, strict=False))


def prepare(subject: Subject) -> Subject:
    """With a moved copy in double precision, or as the model was given where that fails.

    Some constants are fp32 for good, and some implementations of experts lack double precision: a plain one is tried then.
    """
    own = subject.own
    attempts = ["double", "double, plain experts"] if subject.parameters <= DOUBLE_UP_TO else []
    for attempt in [*attempts, "as given"]:
        model = move_copy(own)
        try:
            if "experts" in attempt:
                model.set_experts_implementation("eager")
            model = model.double() if "double" in attempt else model
            with torch.no_grad(), mode(model, training=False):
                logits = subject.all_logits(subject.ids, model=model)
        except InputError:
            raise
        except Exception as error:
            if attempt != "as given":
                continue
            raise InputError(
                f"{type(own).__name__}: model({describe_inputs(subject)}) raised {type(error).__name__}: {one_line(error)}; "
                "a model that needs other inputs is checked with inputs={...}, examples by argument"
            ) from error
        if attempt == "as given" or not bool(logits.isnan().any()):
            break
    if logits.dim() != 3 or logits.shape[:2] != subject.ids.shape[:2]:
        shape = (*subject.ids.shape[:2], "V")
        raise InputError(f"{type(own).__name__}: logits must be (B, N, V) = {shape}, given {tuple(logits.shape)}")
    dtype = find_dtype(own)
    is_wide = "double" in attempt or logits.dtype.itemsize < dtype.itemsize
    return replace(subject, model=model, dtype=logits.dtype if is_wide else dtype)


def describe_inputs(subject: Subject) -> str:
    inputs = {subject.sequence or "input_ids": subject.ids, **subject.fixed}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return ", ".join(f"{name} {tuple(one.shape)} {str(one.dtype)[6:]}" for name, one in tensors.items())


def reads_time_first(subject: Subject) -> bool:
    """Rows of ids depend on each other, and positions of a row do not."""
    ids, everywhere = subject.ids, torch.ones(subject.ids.shape[:2], dtype=torch.bool, device=subject.ids.device)
    first_position, first_row = everywhere.clone(), everywhere.clone()
    first_position[:, 1:] = False
    first_row[1:] = False
    try:
        with torch.no_grad(), mode(subject.model, training=False):
            logits = subject.logits(ids)
            by_position = subject.logits(subject.change(ids, first_position)) - logits
            by_row = subject.logits(subject.change(ids, first_row)) - logits
    except Exception:  # what fails here fails in a check, which says so
        return False
    return bool(by_row[1:].abs().max() > 1e-4) and not bool(by_position[:, 1:].nan_to_num().abs().max() > 1e-7)
