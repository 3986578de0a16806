"""Code of an exported folder: core and our classes for Hugging Face, copied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from typing import get_args

from fullrank.core.config import ModelConfig, stage_name
from fullrank.core.errors import InputError
from fullrank.core.section import ByKind, Parts, Section, Slot, hints_of

# our modules of `hf` that every export holds, by the names that Hugging Face uses for such files
CLASSES = {"configuration": "configuration_fullrank", "cache": "cache_fullrank", "classes": "modeling_fullrank"}


def code_files(config: ModelConfig) -> dict[str, str]:
    """All code files of an export by name. The files of `core` are copied as they are.

    Raises InputError for a stage of one's own, whose code is not ours to copy.
    """
    for key, name in _list_own_stages(config, "model"):
        raise InputError(
            f"{key}: '{name}' is a stage of your own, which an export does not hold; read the run itself: "
            "fr.LanguageModel.load, or a verb with --import"
        )
    files = {name: text for name, text in _sources("fullrank.core") if name != "__init__.py"}
    # Hugging Face copies the files that a file imports, and those that they import; registered stages have to be imported
    names = [name.removesuffix(".py") for name in sorted(files)]
    footer = "\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:  # every file of this folder\n"
    footer += "".join(f"    from .{name} import __name__ as _{name}\n" for name in names)
    for name, text in _sources("fullrank.hf"):
        if exported := CLASSES.get(name.removesuffix(".py")):
            files[f"{exported}.py"] = _use_relative_imports(text) + ("" if name == "cache.py" else footer)
    return files


def _sources(package: str) -> Iterator[tuple[str, str]]:
    for file in resources.files(package).iterdir():
        if file.name.endswith(".py"):
            yield file.name, file.read_text(encoding="utf-8")


def _use_relative_imports(text: str) -> str:
    """Code with imports of `fullrank` as imports of files in the same folder."""
    for name, exported in CLASSES.items():
        text = re.sub(rf"\bfrom fullrank\.hf\.{name} import", f"from .{exported} import", text)
    return re.sub(r"\bfrom fullrank\.core\.(\w+) import", r"from .\1 import", text)


def _list_own_stages(section: Section, key: str) -> Iterator[tuple[str, str]]:
    """(key, name) of every stage of a configuration that is not built in."""
    if isinstance(section, ByKind) and section.kind not in [member.kind for member in section.MEMBERS]:
        yield f"{key}.kind", section.kind
    for name, hint in hints_of(type(section)).items():
        value = getattr(section, name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Section):
                yield from _list_own_stages(inner, f"{key}.{name}")
        for slot in get_args(hint):
            if isinstance(slot, Slot):
                stages = list(value) if isinstance(slot, Parts) else [stage_name(value)]
                yield from ((f"{key}.{name}", stage) for stage in stages if stage not in slot.built_in)
