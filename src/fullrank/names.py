"""The kind of model that a name stands for. Nothing heavy is imported: a wrong name is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fullrank.config.load import list_shipped
from fullrank.core.errors import InputError
from fullrank.seal import is_run

Kind = Literal["configuration", "run", "saved model", "Hugging Face model", "Python function"]


def model_kind(name: str) -> Kind:
    """Find the kind of model that a name stands for; see `open_model`. A recipe or a YAML file is a configuration.

    Raises InputError for a folder without a model, and for a path that does not exist.
    """
    if name.startswith("python:"):
        return "Python function"
    if name.startswith("hf:"):
        return "Hugging Face model"
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _folder_kind(folder)
    if folder.suffix == ".py":
        raise InputError(f"{name}: Python code; name the function that makes the model, as python:{folder.stem}:make")
    papers = {recipe.partition("/")[0] for recipe in list_shipped()}
    parts = Path(name).parts
    if folder.suffix in (".yaml", ".yml") or folder.is_file() or (parts and parts[0] in papers):
        return "configuration"
    if name.startswith((".", "/", "~")) or not 1 <= len(parts) <= 2 or Path(parts[0]).is_dir():
        raise InputError(f"{name}: no such folder, file or recipe")  # nor could it be a name on the hub
    return "Hugging Face model"


def _folder_kind(folder: Path) -> Kind:
    if is_run(folder):
        return "run"
    if (folder / "config.yaml").is_file():
        return "saved model" if (folder / "model.safetensors").is_file() else "configuration"
    if any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return "Hugging Face model"
    if is_run(folder.parent.parent):
        raise InputError(f"{folder}: a checkpoint; give {folder.parent.parent} with --checkpoint {folder.name}")
    raise InputError(
        f"{folder}: no model there; give a recipe, a YAML file, a run folder, a folder written by model.save or "
        "save_pretrained, or a model's name on the Hugging Face hub"
    )
