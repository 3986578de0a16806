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


def _mapping(name: str, key: str, value: Any, holds: str) -> dict[Any, Any]:
    """`value` if it is a mapping (or nothing: then an empty one); InputError says what belongs there."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{name}: {key} is a mapping of {holds}, given {value!r}")
    return dict(value)


def parse(name: str, raw: Mapping[str, Any]) -> Recipe:
    """A recipe from its YAML mapping; a mapping without `rows` is a plain configuration."""
    if "rows" not in raw:
        return Recipe(name, name, "", undotted(raw), {}, {})
    if unknown := set(raw) - _KEYS:
        raise ConfigError(
            *(f"{name}: unknown key '{key}' of a recipe; {suggest(key, _KEYS)}" for key in sorted(map(str, unknown)))
        )
    base = _mapping(name, "`base`", raw.get("base"), "settings")
    rows = {
        str(row): _mapping(name, f"row '{row}'", value, "`set` and `paper`")
        for row, value in _mapping(name, "`rows`", raw["rows"], "row names").items()
    }
    if not rows:
        raise InputError(f"{name}: `rows` names no row; name one, or leave `rows` out for a single configuration")
    for row, value in rows.items():
        if unknown := set(value) - {"set", "paper"}:
            found = sorted(map(str, unknown))
            raise ConfigError(f"{name}: row '{row}' holds {found}; a row has `set` and `paper`")
        for key in ("set", "paper"):
            _mapping(name, f"`{key}` of row '{row}'", value.get(key), "settings" if key == "set" else "figures")
    scales = _mapping(name, "`scales`", raw.get("scales"), "settings by scale")
    if unknown := set(scales) - set(SCALES):
        raise ConfigError(f"{name}: unknown scale {sorted(map(str, unknown))}; scales are {', '.join(SCALES)}")
    scales = {scale: _mapping(name, f"scale '{scale}'", value, "settings") for scale, value in scales.items()}
    table, paper, notes = (str(raw.get(key) or other) for key, other in (("table", name), ("paper", ""), ("notes", "")))
    return Recipe(name, table, paper, base, scales, rows, notes)


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
