"""Injected stages saved alone, as an adapter, or with the whole model, and loaded without losing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fullrank import __version__
from fullrank.core.errors import InputError, one_line
from fullrank.files import read_json, write_bytes, write_json
from fullrank.hf.inject import (
    LOADED_BY,
    STORED,
    arguments_of,
    inject,
    injected_modules,
    injected_parts,
    remove,
    settings_of,
)
from fullrank.hf.prune import keep_heads
from fullrank.storage import Source, check_adapter

# arguments of `from_pretrained` that say where a model lies
_WHERE = ("cache_dir", "revision", "token", "subfolder", "local_files_only", "trust_remote_code")
CONFIG, TENSORS = "fullrank_config.json", "fullrank.safetensors"


class _Adapter(TypedDict):
    """The content of fullrank_config.json."""

    architecture: str
    base_model: str | None
    mix: str | dict[str, Any]
    normalize: str | dict[str, Any]
    cross_head: float
    layers: list[Any] | None
    output: NotRequired[str | dict[str, Any] | None]


def save_adapter(model: Any, folder: str | Path) -> None:
    """Write the injected stages, and nothing else of the model: `fullrank_config.json` and `fullrank.safetensors`.

    Raises InputError if nothing was injected.
    """
    settings, folder = settings_of(model), Path(folder)
    if any(hasattr(module, "original_module") for module in model.modules()):
        raise InputError(
            f"{type(model).__name__}: wrapped by PEFT, whose own save_pretrained keeps the injected stages"
        )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(model).items()}
    write_bytes(folder / TENSORS, save(tensors, metadata={"format": "pt"}))
    base = getattr(model, "name_or_path", "") or None
    if base is not None and Path(base).is_dir():
        base = str(Path(base).resolve())
    about = {"fullrank": __version__, "architecture": type(model).__name__, "base_model": base}
    write_json(folder / CONFIG, {**about, **settings})


def load_adapter(model: Any, folder: str | Path) -> Any:
    """Inject the stages that `save_adapter` wrote, with their parameters; returns the same model.

    A model that was injected into already, in the same way, gets the parameters. Raises InputError if the folder holds no
    adapter, if it is damaged, and if it does not fit the model.
    """
    folder = Path(folder)
    settings, tensors = arguments_of(_read_config(folder)), _read_tensors(folder)
    fresh = not injected_parts(model)
    own_settings = settings if fresh else settings_of(model)
    if settings["query"] == "given" and not any(part.projection for part in injected_modules(model).values()):
        own_settings = {**own_settings, "query": "given"}  # in other words
    if fresh:
        inject(model, **settings)
    elif own_settings != settings:
        raise InputError(f"{folder}: was saved with {settings}, but the model was injected with {own_settings}")
    own = _tensors(model)
    other_shape = {name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape}
    for names, verb in (
        (own.keys() - tensors.keys(), "lacks"),
        (tensors.keys() - own.keys(), "has, and the model has not,"),
        (other_shape, "has in another shape"),
    ):
        if names:
            if fresh:
                remove(model)
            listed = ", ".join(sorted(names)[:3])
            raise InputError(f"{folder}: does not fit this {type(model).__name__}: it {verb} {listed}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    vars(model)[STORED] = True
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the injected stages by their names in the model; not copies."""
    return {
        f"{prefix}.{name}": tensor
        for prefix, stages in injected_parts(model).items()
        for name, tensor in stages.state_dict(keep_vars=True).items()
    }


def load_injected(folder: str | Path, cls: Any = None, **from_pretrained_arguments: Any) -> Any:
    """Load a model with its injected stages or without pruned heads, from what `save_pretrained` wrote, or an adapter's folder.

    cls: the class to load, also one of the Auto classes; None: the one that was saved. Further arguments are those of
    `from_pretrained`. An adapter's folder names the model that it was made of, which is loaded first.
    Raises InputError if nothing had been injected or pruned, if a parameter of the stages is missing, and for a folder without
    model.
    """
    path = Path(folder)
    if (path / CONFIG).is_file():
        written = _read_config(path)
        if not written["base_model"]:
            raise InputError(
                f"{folder}: does not say which model it was made of; load that one, then fullrank.load_adapter(model, folder)"
            )
        base = Source.from_file(written["base_model"], path / CONFIG, "base_model").location
        check_adapter(Path(base))
        kind = _saved_class(written["architecture"]) if cls is None else cls
        return load_adapter(kind.from_pretrained(base, **from_pretrained_arguments), folder)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise InputError(
            f"{folder}: an adapter of PEFT; call fullrank.inject on its base model as in training, then "
            "peft.PeftModel.from_pretrained(model, folder)"
        )
    config = from_pretrained_arguments.pop("config", None)
    if config is None:
        where = {key: value for key, value in from_pretrained_arguments.items() if key in _WHERE}
        try:
            config = transformers.AutoConfig.from_pretrained(str(folder), **where)
        except OSError as error:
            raise InputError(f"{folder}: no model that transformers can find ({one_line(error, 120)})") from None
    settings = getattr(config, "fullrank", None)
    if settings is None and not hasattr(config, "fullrank_heads_by_layer"):
        raise InputError(f"{folder}: nothing was injected into this model; load it with from_pretrained")
    _forget_injection(config)  # `inject` will write the settings again
    inside = settings and arguments_of(settings)
    return _loaded(_class_of(cls, config), inside, str(folder), config, from_pretrained_arguments)


def _forget_injection(config: Any) -> None:
    """Take the settings out of a configuration and of all configurations inside it."""
    vars(config).pop("fullrank", None)
    if config._attn_implementation == LOADED_BY:
        config._attn_implementation_internal = None
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            _forget_injection(part)


def _loaded(kind: Any, settings: dict[str, Any] | None, name: str, config: Any, arguments: dict[str, Any]) -> Any:
    class Injecting(kind):
        def __init__(self, config: Any, *args: Any, **others: Any) -> None:
            super().__init__(config, *args, **others)
            if (counts := getattr(config, "fullrank_heads_by_layer", None)) is not None:
                keep_heads(self, [*map(range, counts)])
            if settings is not None:
                inject(self, **settings)

    # transformers knows classes by their names
    Injecting.__name__, Injecting.__qualname__, Injecting.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    returns_report = arguments.pop("output_loading_info", False)
    model, report = Injecting.from_pretrained(name, config=config, output_loading_info=True, **arguments)
    model.__class__ = kind
    vars(model)[STORED] = True
    if lost := sorted(key for key in report["missing_keys"] if ".fullrank." in f".{key}"):
        raise InputError(f"{name}: its configuration says what was injected, but it lacks {', '.join(lost[:3])}")
    for key, stages in injected_modules(model).items():
        module = model.get_submodule(key.removesuffix(".fullrank"))
        if not any(parameter.is_meta for parameter in module.parameters()):
            stages.own(module)  # now that its parameters have values
    return (model, report) if returns_report else model


def _saved_class(name: str) -> Any:
    """The model class of transformers called `name`; InputError if there is none."""
    known = getattr(transformers, name, None)
    if not (isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)):
        raise InputError(f"transformers has no class '{name}'; give the class to load, load_injected(folder, cls)")
    return known


def _class_of(cls: Any, config: Any) -> Any:
    """The class to load: `cls`, or of an Auto class the one for this configuration; None: the class that was saved."""
    if cls is not None and not hasattr(cls, "_model_mapping"):
        return cls
    saved = (config.architectures or [None])[0]
    known = None if cls is None else cls._model_mapping[type(config)]
    if known is None:
        known = _saved_class(saved or "")
    several = known if isinstance(known, tuple | list) else (known,)
    return next((kind for kind in several if kind.__name__ == saved), several[0])


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder}: holds no adapter ({CONFIG}); fullrank.save_adapter(model, folder) writes one")
    written: dict[str, Any] = read_json(folder / CONFIG, _Adapter)
    return written


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / TENSORS
    try:
        return dict(load(path.read_bytes()))
    except FileNotFoundError:
        raise InputError(f"{folder}: lacks {TENSORS}, the parameters of the adapter") from None
    except SafetensorError as error:
        raise InputError(f"{path}: damaged ({error})") from None
