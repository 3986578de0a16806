"""How the figures of docs/results are made: the plan of trainings, the ledger, verdicts, pages, census."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from fullrank.core.errors import InputError

RESEARCH = Path(__file__).parent
RESULTS = RESEARCH.parent / "docs" / "results"
LEDGER = RESULTS / "ledger.csv"
T = TypeVar("T")


def build(cls: type[T], content: dict[str, Any], where: str) -> T:
    """Build a dataclass from a mapping of a YAML file. Raises InputError for unknown keys and missing ones."""
    try:
        return cls(**content)
    except TypeError as error:
        keys = ", ".join(field.name for field in fields(cls))  # type: ignore[arg-type]
        raise InputError(f"{where}: {error}; keys are {keys}; given {content}") from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object a line. A file that is missing has none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]
