"""Recipes: a table of a paper as one YAML file - a base, rows that differ from it, scales, and the paper's figures.

    table: Mixhead, Table 1, Vanilla Transformer
    base:    {model: {...}, data: {...}, train: {...}, eval: {...}}
    scales:  {paper: {...}, small: {...}, tiny: {...}}          # laid on the base
    rows:
      plain: {paper: {parameters: 156M, valid: 30.75, test: 29.78}}
      b:     {set: {model.attention.mix: position_wise}, paper: {...}}

`base`, a scale and a row's `set` may use dotted keys. A plain YAML of `model data train eval` is a recipe with one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fullrank.config.load import apply_overrides, build, lay, parse_yaml, read_yaml, undotted
from fullrank.config.schema import RunConfig
from fullrank.errors import ConfigError, InputError, suggest

SCALES = ("paper", "small", "tiny")


@dataclass(frozen=True)
class Recipe:
    """One table. `rows` maps a row's name to `{set: {...}, paper: {...}}`; `notes` say what the paper leaves open."""

    name: str
    table: str
    paper: str
    base: Mapping[str, Any]
    scales: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, Mapping[str, Any]]
    notes: str = ""


@dataclass(frozen=True)
class Resolved:
    """A checked configuration and where it came from."""

    config: RunConfig
    recipe: str
    row: str | None = None
    scale: str | None = None
    paper: Mapping[str, Any] | None = None


_KEYS = {"table", "paper", "base", "scales", "rows", "notes"}


def parse(name: str, raw: Mapping[str, Any]) -> Recipe:
    """A recipe from its YAML mapping; a mapping without `rows` is a plain configuration."""
    if "rows" not in raw:
        return Recipe(name, name, "", undotted(raw), {}, {})
    if unknown := set(raw) - _KEYS:
        raise ConfigError(
            *(f"{name}: unknown key '{key}' of a recipe; {suggest(key, _KEYS)}" for key in sorted(unknown))
        )
    rows = {row: dict(value or {}) for row, value in raw["rows"].items()}
    for row, value in rows.items():
        if unknown := set(value) - {"set", "paper"}:
            raise ConfigError(f"{name}: row '{row}' holds {sorted(unknown)}; a row has `set` and `paper`")
    scales = raw.get("scales") or {}
    if unknown := set(scales) - set(SCALES):
        raise ConfigError(f"{name}: unknown scale {sorted(unknown)}; scales are {', '.join(SCALES)}")
    return Recipe(
        name, raw.get("table", name), raw.get("paper", ""), raw.get("base") or {}, scales, rows, raw.get("notes", "")
    )


def shipped() -> list[str]:
    """Names of the recipes that come with the package, such as `mixhead/table1-vanilla`."""
    root = resources.files("fullrank") / "recipes"
    return sorted(
        f"{folder.name}/{file.name.removesuffix('.yaml')}"
        for folder in root.iterdir()
        if folder.is_dir() and folder.name != "base"
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    )


def load(name: str) -> Recipe:
    """A shipped recipe by name, or a YAML file by path; a run folder gives the configuration saved in it."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise InputError(
                f"{name}: a folder without config.yaml is not a run; give a run folder, a YAML file or a recipe"
            )
        return parse(name, read_yaml(path / "config.yaml"))
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise InputError(f"{name}: no such file")
        return parse(name, read_yaml(path))
    known = shipped()
    if name not in known:
        raise InputError(f"'{name}' is neither a file nor a shipped recipe; {suggest(name, known)}")
    folder, _, leaf = name.partition("/")
    text = (resources.files("fullrank") / "recipes" / folder / f"{leaf}.yaml").read_text(encoding="utf-8")
    return parse(name, parse_yaml(text, name))


def resolve(name: str, row: str | None = None, scale: str | None = None, overrides: Iterable[str] = ()) -> Resolved:
    """The checked configuration of one row at one scale (default: the only or first row, at `paper` scale)."""
    recipe = load(name)
    raw = undotted(recipe.base)
    if not recipe.rows:
        if row is not None:
            raise InputError(f"{name} is a single configuration; it has no row '{row}'")
        if scale is not None:
            raise InputError(f"{name} is a single configuration; it has no scale '{scale}'")
        return Resolved(build(apply_overrides(raw, overrides)), name)
    row = row or next(iter(recipe.rows))
    if row not in recipe.rows:
        raise InputError(f"{name} has no row '{row}'; {suggest(row, recipe.rows)} (rows: {', '.join(recipe.rows)})")
    scale = scale or next((s for s in SCALES if s in recipe.scales), "paper")
    if recipe.scales and scale not in recipe.scales:
        raise InputError(f"{name} has no scale '{scale}'; scales: {', '.join(recipe.scales)}")
    raw = lay(raw, recipe.scales.get(scale) or {})
    raw = lay(raw, recipe.rows[row].get("set") or {})
    return Resolved(build(apply_overrides(raw, overrides)), name, row, scale, recipe.rows[row].get("paper"))
