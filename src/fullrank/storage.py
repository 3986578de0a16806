"""Saving and loading a model: safetensors and its configuration, no pickle."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fullrank.config.finetune import finetunes
from fullrank.config.load import read_yaml
from fullrank.core.config import ModelConfig
from fullrank.core.errors import InputError, RunError
from fullrank.core.model import Model
from fullrank.files import no_room, out_of_memory, read_json, remove_leftovers
from fullrank.seal import PLAIN, DamagedError, check_run, read_record, seal_file

WEIGHTS, CONFIG = "model.safetensors", "config.yaml"
HUGGING_FACE, PREFIX = "config.json", "model."  # in folders of Hugging Face: the configuration, the prefix of tensors


# -- saving and loading -----------------------------------------------------------------------------------------------


def load(kind: type[Model], path: Path, checkpoint: str, change: Callable[[ModelConfig], ModelConfig]) -> Model:
    """The model of class `kind` saved in `path`, its configuration changed by `change`, in evaluation mode."""
    file, config = find(path, checkpoint)
    config = change(config)
    tensors = read(file)
    # a subclass is saved as the class of ours that it stands on
    check_kind(tensors, next(base.__name__ for base in kind.__mro__ if base.__name__ in _KINDS), path)
    with torch.device("meta"):
        model: Model = kind(config)
    assign(model, tensors, file)
    if (path / CONFIG).is_file():  # of a run, or of a model alone
        model.trained_length = (read_yaml(path / CONFIG).get("train") or {}).get("segment_length")
    return model.eval()


def save(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    """Write `model.safetensors` and `config.yaml` into `folder`; each file appears whole or not at all."""
    import yaml

    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"model": config.to_dict()}, sort_keys=False)
        remove_leftovers(folder, "saving")
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".saving.{os.getpid()}.") as temporary:
            # bytes first in a folder of their own, then one rename each: a kill in between leaves the old files whole
            save_file(
                {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, Path(temporary) / WEIGHTS
            )
            (Path(temporary) / CONFIG).write_text(text, encoding="utf-8")
            for name in (WEIGHTS, CONFIG):
                os.replace(Path(temporary) / name, folder / name)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{folder}: cannot be saved ({_reason(folder, error)}); what was there before is unchanged"
        ) from error


def _reason(folder: Path, error: Exception) -> str:
    if no_room(error):
        return f"no space left on the disk, {shutil.disk_usage(folder).free >> 20} MiB free"
    return str(error)


def find(path: Path, checkpoint: str) -> tuple[Path, ModelConfig]:
    """The weights file and the model configuration of a saved model or of a run folder's `checkpoint` (`best`, `last`).

    Folders that `fullrank export` wrote, or `save_pretrained` of one of our classes of Hugging Face, are saved models too.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; give a run folder or a folder written by model.save")
    if not (path / CONFIG).is_file() and (path / HUGGING_FACE).is_file():
        return _of_hugging_face(path)
    if not (path / CONFIG).is_file():
        raise InputError(f"{path}: holds no {CONFIG}; give a run folder or a folder written by model.save")
    raw = read_yaml(path / CONFIG)
    if finetunes(raw):
        raise InputError(
            f"{path}: a run of fine-tuning on {raw['data']['name']}, whose model is one of Hugging Face's and not of ours: "
            f"{path / 'model'}, see fullrank.load_injected, `fullrank finetune {path}` and `fullrank report {path}`"
        )
    config = ModelConfig.from_dict(raw.get("model") or {})
    of_run, in_run = path / "checkpoints" / checkpoint / WEIGHTS, (path / "run.json").is_file()
    if not in_run and (path / WEIGHTS).is_file():
        return path / WEIGHTS, config
    if of_run.is_file():
        if in_run and not (of_run.parent / CONFIG).is_file():  # else `model.save` wrote it, and it has a configuration
            check_run(path, checkpoint)
        return of_run, config
    there = sorted(folder.name for folder in (path / "checkpoints").glob("[!.]*") if (folder / WEIGHTS).is_file())
    named = [name for name in there if not name.startswith("step-")]
    hint = f"it has {', '.join(named)}" if named else "has the run saved a checkpoint yet?"
    hint += "; `fullrank average` makes one that is called average" if checkpoint == "average" and named else ""
    raise InputError(f"{path}: holds no weights ({WEIGHTS}, or checkpoints/{checkpoint}/{WEIGHTS}); {hint}")


def _of_hugging_face(path: Path) -> tuple[Path, ModelConfig]:
    content = read_json(path / HUGGING_FACE)
    kind, section = content.get("model_type"), content.get("fullrank")
    if kind != "fullrank" or not isinstance(section, dict):
        raise InputError(
            f"{path}: a Hugging Face model of type '{kind}', not one of ours (model_type 'fullrank'); load it with transformers"
        )
    if not (path / WEIGHTS).is_file():
        sharded = "; it is in pieces, save it in one (max_shard_size)" if list(path.glob("*.index.json")) else ""
        raise InputError(f"{path}: holds no weights ({WEIGHTS}){sharded}")
    return path / WEIGHTS, ModelConfig.from_dict(section)


def is_export(path: Path) -> bool:
    """True for a folder of Hugging Face that holds a model of ours."""
    try:
        return not (path / CONFIG).is_file() and bool(_of_hugging_face(path))
    except InputError:
        return False


def saved_kind(path: Path, checkpoint: str = "best") -> str:
    """The class of the model in a folder, by the names of its tensors; "LanguageModel" for a damaged file, about which loading
    says more."""
    file, _ = find(path, checkpoint)
    try:
        with safe_open(file, framework="pt") as tensors:
            return kind_of(tensors.keys())
    except (SafetensorError, OSError):
        return "LanguageModel"


def read(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; InputError if it is damaged.

    Each in memory of its own: inside the file they begin at any byte, and products of such tensors take other kernels and
    differ in the last bit from those of the model that was saved.
    """
    try:
        _verify(file)
        # in a folder of Hugging Face names begin with `model.`, which none of ours does
        tensors = {name.removeprefix(PREFIX): tensor.clone() for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError, ValueError) as error:
        if out_of_memory(error):
            raise
        raise InputError(
            f"{file}: damaged or not a safetensors file ({error}); take another checkpoint or train again"
        ) from error
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    for name, tensor in floating.items():
        if not tensor.isfinite().all():
            raise InputError(f"{file}: '{name}' holds NaN or infinite numbers; take another checkpoint or train again")
    if len(dtypes := {tensor.dtype for tensor in floating.values()}) > 1:
        raise InputError(f"{file}: its tensors are of several types ({', '.join(sorted(map(str, dtypes)))})")
    return tensors


# how the models of ours are told apart, by the names of their tensors
_KINDS = {
    "LanguageModel": "a language model",
    "Translator": "a translation model",
    "MaskedLanguageModel": "a masked language model",
}


def check_kind(tensors: Mapping[str, torch.Tensor], wanted: str, path: str | Path) -> None:
    """InputError unless the tensors saved in `path` are those of the class `wanted`; it names the class that they are of."""
    found = kind_of(tensors)
    if found != wanted:
        raise InputError(f"{path}: holds {_KINDS[found]}, not {_KINDS[wanted]}; load it with {found}.load")


def kind_of(names: Iterable[str]) -> str:
    """The class of ours whose tensors are called `names`."""
    parts = {name.removeprefix(PREFIX).partition(".")[0] for name in names}
    if "encoder" not in parts:
        return "LanguageModel"
    return "Translator" if "decoder" in parts else "MaskedLanguageModel"


def _verify(file: Path) -> None:
    """Compare `file` with the checksum in the record beside it, if a run wrote one; ValueError if it differs."""
    if not (file.parent / PLAIN).is_file():
        return
    try:
        expected = read_record(file.parent).files.get(file.name)
    except DamagedError as damage:
        raise ValueError(str(damage)) from damage
    if seal_file(file) != expected:
        raise ValueError("it does not match its checksum")


def assign(model: nn.Module, tensors: dict[str, torch.Tensor], origin: Path) -> None:
    """Load `tensors` into `model`; InputError names what does not fit."""
    own: dict[str, Any] = model.state_dict()
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if wrong:
        name = sorted(wrong)[0]
        hint = " (is this another vocabulary? see model.vocab_size)" if "embedding" in name or "output" in name else ""
        raise InputError(
            f"{origin}: '{name}' is {tuple(tensors[name].shape)}, the model's is {tuple(own[name].shape)}{hint}"
        )
    if missing or unknown:
        raise InputError(
            f"{origin}: does not fit the configuration beside it; missing {missing[:3]}, unknown {unknown[:3]}"
        )
    model.load_state_dict(tensors, assign=True)  # takes the saved dtype too
