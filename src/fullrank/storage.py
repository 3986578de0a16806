"""Saving and loading a model: safetensors and its configuration, no pickle."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fullrank.config.load import finetunes, is_of_task, read_yaml
from fullrank.core.config import ModelConfig
from fullrank.core.errors import InputError, RunError
from fullrank.core.model import Model
from fullrank.files import format_yaml, no_room, out_of_memory, read_json
from fullrank.forward import load_tensors
from fullrank.seal import PLAIN, DamagedError, check_run, read_record, seal_file

WEIGHTS = "model.safetensors"
CONFIG = "config.yaml"
# in folders of Hugging Face: the configuration, the prefix of tensors
HUGGING_FACE = "config.json"
PREFIX = "model."

_KINDS = {
    "LanguageModel": "a language model",
    "Translator": "a translation model",
    "MaskedLanguageModel": "a masked language model",
}


def load(cls: type[Model], path: Path, checkpoint: str) -> Model:
    """Load the model of a class saved in `path`, in evaluation mode.

    Args:
        cls: LanguageModel, MaskedLanguageModel or Translator, or a subclass of one.
        path: a saved model, or a run folder.
        checkpoint: of a run: `best`, `last`, or `average`.

    Returns:
        The model, with the saved dtype.

    Raises:
        InputError: there is no such model, it is damaged, or it is one of another class.
    """
    file, config = find(path, checkpoint)
    tensors = read(file)
    kind = kind_of(tensors)
    # a subclass is saved under the name of its base class
    expected = next(base.__name__ for base in cls.__mro__ if base.__name__ in _KINDS)
    if kind != expected:
        raise InputError(f"{path}: holds {_KINDS[kind]}, not {_KINDS[expected]}; load it with {kind}.load")
    with torch.device("meta"):
        model = cls(config)
    load_tensors(model, tensors, file, assign=True)  # takes the saved dtype too
    if (path / CONFIG).is_file():
        model.trained_length = (read_yaml(path / CONFIG).get("train") or {}).get("segment_length")
    return model.eval()


def save(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    """Write `model.safetensors` and `config.yaml`; each file appears whole or not at all.

    Args:
        model: the model whose weights are written.
        config: section `model` of the configuration.
        folder: made if it is not there.

    Raises:
        RunError: the folder cannot be written to; what was there is unchanged.
    """
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    text = format_yaml({"model": config.to_dict()})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving.") as temporary:
            # both are written first and then renamed: a process that is killed meanwhile leaves the old files complete
            save_file(tensors, Path(temporary) / WEIGHTS)
            (Path(temporary) / CONFIG).write_text(text, encoding="utf-8")
            for name in (WEIGHTS, CONFIG):
                os.replace(Path(temporary) / name, folder / name)
    except (OSError, SafetensorError) as error:
        reason = "no space left on the disk" if no_room(error) else error
        raise RunError(f"{folder}: cannot be saved ({reason}); what was there before is unchanged") from error


def find(path: Path, checkpoint: str) -> tuple[Path, ModelConfig]:
    """Find the weights file and the model configuration of a saved model or of a run folder's `checkpoint` (`best`, `last`).

    Folders that `fullrank export` wrote, or `save_pretrained` of one of our classes of Hugging Face, are saved models too.
    Raises InputError for a folder without a model of ours, and for a run that was changed.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; give a run folder or a folder written by model.save")
    if not (path / CONFIG).is_file():
        if (path / HUGGING_FACE).is_file():
            return _find_exported(path)
        raise InputError(f"{path}: holds no {CONFIG}; give a run folder or a folder written by model.save")
    settings = read_yaml(path / CONFIG)
    if finetunes(settings):
        raise InputError(
            f"{path}: a run of fine-tuning, whose model is one of Hugging Face's: {path / 'model'}, see fullrank.load_injected"
        )
    config = ModelConfig.from_dict(settings.get("model") or {})
    is_run = (path / "run.json").is_file()
    file = path / WEIGHTS
    if is_run or not file.is_file():
        file = path / "checkpoints" / checkpoint / WEIGHTS
    if not file.is_file():
        names = sorted(file.parent.name for file in path.glob(f"checkpoints/[!.]*/{WEIGHTS}"))
        raise InputError(
            f"{path}: holds no weights ({file.relative_to(path)}); it has the checkpoints {', '.join(names) or 'none yet'}"
            "; `fullrank average` makes one that is called average"
        )
    if is_run and not (file.parent / CONFIG).is_file():  # else `model.save` wrote it, with its configuration
        check_run(path, checkpoint)
    return file, config


def _find_exported(path: Path) -> tuple[Path, ModelConfig]:
    content = read_json(path / HUGGING_FACE)
    if content.get("model_type") != "fullrank" or not isinstance(content.get("fullrank"), dict):
        raise InputError(
            f"{path}: a Hugging Face model of type '{content.get('model_type')}', not one of ours (model_type 'fullrank'); "
            "load it with transformers"
        )
    if not (path / WEIGHTS).is_file():
        raise InputError(f"{path}: holds no weights ({WEIGHTS}, in one piece: max_shard_size)")
    return path / WEIGHTS, ModelConfig.from_dict(content["fullrank"])


def is_export(path: Path) -> bool:
    """Return whether a folder is one of Hugging Face that holds a model of ours."""
    try:
        return not (path / CONFIG).is_file() and bool(_find_exported(path))
    except InputError:
        return False


def read_saved_kind(path: Path, checkpoint: str = "best") -> str:
    """Find the class of the model in a folder, by the names of its tensors.

    It is "LanguageModel" where loading will refuse the file, and "CausalModel" in a run of fine-tuning on a text
    (`hf.causal`).
    """
    settings = read_yaml(path / CONFIG) if (path / CONFIG).is_file() else {}
    if finetunes(settings) and not is_of_task(settings):
        return "CausalModel"
    file, _ = find(path, checkpoint)
    try:
        with safe_open(file, framework="pt") as tensors:
            return kind_of(tensors.keys())
    except (SafetensorError, OSError):
        return "LanguageModel"


def kind_of(names: Iterable[str]) -> str:
    """Find the class of ours whose tensors are called `names`."""
    parts = {name.removeprefix(PREFIX).partition(".")[0] for name in names}
    if "encoder" not in parts:
        return "LanguageModel"
    return "Translator" if "decoder" in parts else "MaskedLanguageModel"


def read(file: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file; InputError if it is damaged.

    Each is copied. In the file a tensor may begin at any byte, for which PyTorch chooses other kernels, so that products would
    differ in the last bit from those of the saved model.
    """
    try:
        sealed = (file.parent / PLAIN).is_file()  # by a run
        if sealed and seal_file(file) != read_record(file.parent).files.get(file.name):
            raise DamagedError(file, "it does not match its checksum")
        # in a folder of Hugging Face names begin with `model.`, which none of ours does
        return {name.removeprefix(PREFIX): tensor.clone() for name, tensor in load_file(file).items()}
    except (SafetensorError, DamagedError, OSError) as error:
        if out_of_memory(error):
            raise
        raise InputError(
            f"{file}: damaged or not a safetensors file ({error}); take another checkpoint or train again"
        ) from error
