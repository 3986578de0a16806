"""Functions of a user's own modules, by name: `MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fullrank.core.errors import InputError, one_line


def import_function(name: str, prefix: str = "") -> Any:
    """Import the attribute that `MODULE:NAME` names; modules are found in the working directory, too.

    prefix: stands before the name in errors. Raises InputError where there is no such module or attribute.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"{prefix}{name}: MODULE:FUNCTION is needed, as in my_model:make for make in my_model.py")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        raise InputError(f"{prefix}{name}: no such function ({type(error).__name__}: {one_line(error)})") from error


imported_plugins: list[str] = []  # modules of users, in their order: commands that go on from here import them, too


def import_plugin(name: str) -> None:
    """Import a module that registers stages, parts, measurements or corpora."""
    import_module(name)
    imported_plugins[:] = [*dict.fromkeys((*imported_plugins, name))]


def import_module(name: str) -> ModuleType:
    """Import a module that is installed, or in the working directory."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)
