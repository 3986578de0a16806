"""Code of an exported folder: core and our classes for Hugging Face, copied, and stages that were registered elsewhere."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import fullrank
from fullrank.core import registry
from fullrank.core.config import ModelConfig, stage_name
from fullrank.core.errors import InputError
from fullrank.core.section import ByKind, Section, Slot, hints_of

# our modules of `hf` that every export holds, by the names that Hugging Face uses for such files
CLASSES = {"configuration": "configuration_fullrank", "cache": "cache_fullrank", "classes": "modeling_fullrank"}
_PUBLIC = "public_fullrank"  # what `import fullrank as fr` means in the code of a stage
_ALLOWED = {"torch", "transformers", "safetensors", *sys.stdlib_module_names}  # packages that a reader of an export has
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef)


def code_files(config: ModelConfig) -> dict[str, str]:
    """All code files of an export by name. The files of `core` are copied as they are.

    A stage that the configuration names and that was registered outside of `core` gets a file of its own: its class (or
    function) with everything at the top level of its source file that it uses.
    Raises InputError for a stage without source code, or whose code needs more than torch, Python and `fullrank.core`.
    """
    files = {name: text for name, text in _sources("fullrank.core") if name != "__init__.py"}
    stages = {
        re.sub(r"\W", "_", f"stage_{slot}_{name}"): _stage(key, slot, name)
        for key, slot, name in _stages_elsewhere(config, "model")
    }
    files |= {f"{stage}.py": text for stage, text in stages.items()}
    if any(f"from .{_PUBLIC} " in text or f"import {_PUBLIC} " in text for text in stages.values()):
        homes = {name: home for name, home in fullrank._HOMES.items() if home.startswith("fullrank.core.")}
        homes["register"] = "fullrank.core.registry"
        files[f"{_PUBLIC}.py"] = "".join(
            f"from .{home.rpartition('.')[2]} import {name} as {name}\n" for name, home in homes.items()
        )
    names = sorted(name.removesuffix(".py") for name in files)
    # Hugging Face copies the files that a file imports, and those that they import; registered stages have to be imported
    mentioned = "".join(f"    from .{name} import __name__ as _{name}\n" for name in names if name not in stages)
    footer = f"\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:  # every file of this folder\n{mentioned}"
    footer += "".join(f"from .{name} import __name__ as _{name}\n" for name in sorted(stages))
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


def _stage(key: str, slot: str, name: str) -> str:
    """A file that defines and registers one stage."""
    item, where = registry.lookup(slot, name), f"{key}: '{name}'"
    if not isinstance(item, type | types.FunctionType) or "<lambda>" in item.__qualname__:
        raise InputError(f"{where} is no class or function with a name ({item!r}) and cannot be exported; define one")
    if item.__module__.partition(".")[0] == "torch":
        code = f"from {item.__module__} import {item.__qualname__}\n"
    else:
        try:
            source = Path(inspect.getsourcefile(item) or "").read_text(encoding="utf-8")
        except (TypeError, OSError) as error:
            raise InputError(
                f"{where}: {item.__qualname__} was registered without a source file (typed at a prompt?) and cannot be "
                "exported; put it into a file and import that"
            ) from error
        code = _definition(source, item.__qualname__, where)
    code += f"\n\nfrom .registry import register as _register\n\n_register({slot!r}, {name!r})({item.__name__})\n"
    return f'"""The {slot} stage `{name}` of this model."""\n\nfrom __future__ import annotations\n\n{code}'


def _definition(source: str, qualname: str, where: str) -> str:
    """A class or function, after the statements at the top level of its file that it uses."""
    tree, lines = ast.parse(source), source.splitlines()
    top_level: dict[str, ast.stmt] = {}
    for statement in tree.body:
        defined = {statement.name} if isinstance(statement, _DEFINITIONS) else _defined(statement)
        top_level |= dict.fromkeys(defined, statement)
    node: Any = tree
    for part in qualname.replace("<locals>.", "").split("."):
        node = [inner for inner in ast.walk(node) if isinstance(inner, _DEFINITIONS) and inner.name == part][-1]
    needed: list[ast.stmt] = [node]
    for statement in needed:  # grows while it is read
        _check_imports(statement, where)
        if isinstance(statement, _DEFINITIONS):  # it is registered anew
            statement.decorator_list = [made for made in statement.decorator_list if not _registers(made)]
        read = {inner.id for inner in ast.walk(statement) if isinstance(inner, ast.Name)}
        for name in read - _defined(statement) - vars(builtins).keys() - {"__class__", "__name__"}:
            if name not in top_level:
                raise InputError(
                    f"{where}: its code uses '{name}', which is not defined at the top level of its file, and cannot be "
                    "exported; define it there"
                )
            if top_level[name] not in needed:
                needed.append(top_level[name])
    needed.sort(key=lambda statement: (statement is node, statement.lineno))
    return _relative("\n".join(_text(statement, lines) for statement in needed))


def _defined(node: ast.AST) -> set[str]:
    """Names that a piece of code defines, at any depth."""
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
        elif isinstance(inner, ast.arg):
            names.add(inner.arg)
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in inner.names}
        elif isinstance(inner, (*_DEFINITIONS, ast.ExceptHandler)) and inner.name:
            names.add(inner.name)
    return names


def _registers(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).rpartition(".")[2] == "register"


def _check_imports(statement: ast.stmt, where: str) -> None:
    """InputError for an import of what a reader of the export may not have."""
    for node in ast.walk(statement):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        for module in modules:
            ours = module in ("fullrank", "fullrank.config") or module.startswith("fullrank.core")
            if not ours and module.partition(".")[0] not in _ALLOWED:
                raise InputError(
                    f"{where}: its code imports {module}, which a reader of the export may not have; it may import torch, "
                    "Python's own modules and fullrank.core"
                )


def _text(statement: ast.stmt, lines: list[str]) -> str:
    text = textwrap.dedent("\n".join(lines[statement.lineno - 1 : statement.end_lineno]))
    if not isinstance(statement, _DEFINITIONS):
        return text
    return "\n".join(["\n", *(f"@{ast.unparse(decorator)}" for decorator in statement.decorator_list), text])
