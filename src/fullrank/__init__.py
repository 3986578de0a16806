"""fullrank: transformer language models without their bottlenecks.

    import fullrank as fr
    config = fr.ModelConfig(vocab_size=10_000, attention=fr.AttentionConfig(mix="position_wise"))
    model = fr.LanguageModel(config)

Names are imported when first used, so that `import fullrank` costs nothing.
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from fullrank.core import engine as _engine

__version__ = "0.1.0"

_NAMES = re.findall(r"^from (\S+) import (\w+)", Path(__file__).with_suffix(".pyi").read_text("utf-8"), re.MULTILINE)
_HOMES = {name: module for module, name in _NAMES}

__all__ = ["__version__", *_HOMES]


def _generate(*arguments: Any, **options: Any) -> Any:
    from fullrank import decoding

    return decoding.generate(*arguments, **options)


def _import_kernels() -> None:
    if "fullrank.kernels" not in sys.modules:
        importlib.import_module("fullrank.kernels")


# a compiler calls it while it traces: it cannot trace an import (`fullrank.kernels.vocabulary.mark_constant`)
_import_kernels.__dict__["_dynamo_marked_constant"] = True


def _load_kernels() -> Any:
    _import_kernels()
    return sys.modules["fullrank.kernels"]


_engine.load = _load_kernels
_engine.load_storage = partial(importlib.import_module, "fullrank.storage")
_engine.generate = _generate


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fullrank' has no attribute '{name}'")
    if home == "fullrank":  # a package
        return importlib.import_module(f"fullrank.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
