"""Code of an exported folder: core and our classes for Hugging Face, copied, and stages that were registered elsewhere."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import get_args

import fullrank
from fullrank.core import registry
from fullrank.core.config import ModelConfig, stage_name
from fullrank.core.errors import InputError
from fullrank.core.section import ByKind, Section, Slot, hints_of

# our modules of `hf` that every export holds, by the names that Hugging Face uses for such files
CLASSES = {"configuration": "configuration_fullrank", "cache": "cache_fullrank", "classes": "modeling_fullrank"}
_PUBLIC = "public_fullrank"  # what `import fullrank as fr` means in the code of a stage
_ALLOWED = {"torch", "transformers", "safetensors", *sys.stdlib_module_names}  # packages that a reader of an export has


def code_files(config: ModelConfig) -> dict[str, str]:
    """All code files of an export by name. The files of `core` are copied as they are.

    A file that registers a stage of the configuration, outside of `core`, is copied as `stage_*.py`.
    Raises InputError for a stage without such a file, or whose file imports more than torch, Python and `fullrank.core`.
    """
    files = {name: text for name, text in _sources("fullrank.core") if name != "__init__.py"}
    stages = dict(_read_stage(key, slot, name) for key, slot, name in _stages_elsewhere(config, "model"))
    files |= stages
    if any(_PUBLIC in text for text in stages.values()):
        homes = {name: home for name, home in fullrank._HOMES.items() if home.startswith("fullrank.core.")}
        homes["register"] = "fullrank.core.registry"
        files[f"{_PUBLIC}.py"] = "".join(
            f"from .{home.rpartition('.')[2]} import {name} as {name}\n" for name, home in homes.items()
        )
    # Hugging Face copies the files that a file imports, and those that they import; registered stages have to be imported
    mentions = {
        name: f"from .{name.removesuffix('.py')} import __name__ as _{name.removesuffix('.py')}\n"
        for name in sorted(files)
    }
    footer = "\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:  # every file of this folder\n"
    footer += "".join(f"    {line}" for name, line in mentions.items() if name not in stages)
    footer += "".join(line for name, line in mentions.items() if name in stages)
    for name, text in _sources("fullrank.hf"):
        if exported := CLASSES.get(name.removesuffix(".py")):
            files[f"{exported}.py"] = _relative(text) + ("" if name == "cache.py" else footer)
    return files


def _sources(package: str) -> Iterator[tuple[str, str]]:
    for file in resources.files(package).iterdir():
        if file.name.endswith(".py"):
            yield file.name, file.read_text(encoding="utf-8")


def _relative(text: str) -> str:
    """Code with imports of `fullrank` as imports of files in the same folder."""
    for name, exported in CLASSES.items():
        text = re.sub(rf"\bfrom fullrank\.hf\.{name} import", f"from .{exported} import", text)
    text = re.sub(r"\bfrom fullrank\.core\.(\w+) import", r"from .\1 import", text)
    text = re.sub(r"\bfrom fullrank\.core import", "from . import", text)
    text = re.sub(r"\bfrom fullrank(\.config)? import", f"from .{_PUBLIC} import", text)
    return re.sub(
        r"(?m)\bimport fullrank( as (\w+))?$", lambda m: f"from . import {_PUBLIC} as {m[2] or 'fullrank'}", text
    )


# -- stages that were registered elsewhere -------------------------------------------------------------------------------


def _stages_elsewhere(section: Section, key: str) -> Iterator[tuple[str, str, str]]:
    """(key, slot, name) of every stage of a configuration that is not built in."""
    if isinstance(section, ByKind) and section.kind not in [member.kind for member in section.MEMBERS]:
        yield f"{key}.kind", section.SLOT, section.kind
    for name, hint in hints_of(type(section)).items():
        value = getattr(section, name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Section):
                yield from _stages_elsewhere(inner, f"{key}.{name}")
        for slot in get_args(hint):
            if isinstance(slot, Slot) and stage_name(value) not in slot.built_in:
                yield f"{key}.{name}", slot.name, stage_name(value)


def _read_stage(key: str, slot: str, name: str) -> tuple[str, str]:
    """Name and text of the file that registers a stage."""
    item, where = registry.lookup(slot, name), f"{key}: '{name}'"
    try:
        path = Path(inspect.getsourcefile(item) or "")
        source = path.read_text(encoding="utf-8")
    except (TypeError, OSError) as error:
        raise InputError(
            f"{where}: {item!r} was registered without a source file (typed at a prompt?) and cannot be exported; put it into "
            "a file and import that"
        ) from error
    for module in _list_imports(ast.parse(source)):
        ours = module in ("fullrank", "fullrank.config") or module.startswith("fullrank.core")
        if not ours and module.partition(".")[0] not in _ALLOWED:
            raise InputError(
                f"{where}: {path} imports {module}, which a reader of the export may not have; it may import torch, "
                "Python's own modules and fullrank.core"
            )
    stem = re.sub(r"\W", "_", path.stem)
    return f"stage_{stem}.py", _relative(source)


def _list_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
