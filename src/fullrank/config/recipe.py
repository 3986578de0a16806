"""Recipes: a table of a paper as one YAML file - a base, rows that differ from it, scales, and the paper's figures.

    table: Mixhead, Table 1, Vanilla Transformer
    base:    {model: {...}, data: {...}, train: {...}, eval: {...}}
    scales:  {paper: {...}, small: {...}, tiny: {...}}          # laid on the base
    rows:
      plain: {paper: {parameters: 156M, valid: 30.75, test: 29.78}}
      b:     {set: {model.attention.mix: position_wise}, paper: {...}}

`base`, a scale and a row's `set` may use dotted keys. A row may have `scales` of its own, laid on last. `extends: NAME` (a
shipped recipe, or a file beside this one) takes that recipe's base and scales, on which this recipe's are laid; rows are
always its own. A plain YAML of `model data train eval` is a recipe with one row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar

from fullrank.config.finetune import FinetuneConfig, finetunes
from fullrank.config.load import apply_overrides, build, build_any, build_finetune, lay, parse_yaml, read_yaml, undotted
from fullrank.config.run import RunConfig
from fullrank.core.errors import ConfigError, InputError, suggest

SCALES = ("paper", "small", "tiny")


@dataclass(frozen=True)
class Recipe:
    """One table. `rows` maps a row's name to `{set: {...}, scales: {...}, paper: {...}}`.

    `base` and `scales` hold what an extended recipe brought, too; `notes` say what the paper leaves open.
    """

    name: str
    table: str
    paper: str
    base: Mapping[str, Any]
    scales: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, Mapping[str, Any]]
    notes: str = ""


Config = TypeVar("Config", bound=RunConfig | FinetuneConfig, covariant=True)


@dataclass(frozen=True)
class Resolved(Generic[Config]):
    """A checked configuration and where it came from."""

    config: Config
    recipe: str
    row: str | None = None
    scale: str | None = None
    paper: Mapping[str, Any] | None = None


_KEYS = {"table", "paper", "extends", "base", "scales", "rows", "notes"}
_ROW = {"set": "settings", "scales": "settings by scale", "paper": "figures"}


def _mapping(name: str, key: str, value: Any, holds: str) -> dict[Any, Any]:
    """`value` if it is a mapping (or nothing: then an empty one); InputError says what belongs there."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{name}: {key} is a mapping of {holds}, given {value!r}")
    return dict(value)


def _scales(name: str, key: str, value: Any) -> dict[str, dict[Any, Any]]:
    """The mapping `scales` of a recipe or a row, checked."""
    scales = _mapping(name, key, value, "settings by scale")
    if unknown := set(scales) - set(SCALES):
        raise ConfigError(f"{name}: unknown scale {sorted(map(str, unknown))}; scales are {', '.join(SCALES)}")
    return {scale: _mapping(name, f"scale '{scale}'", settings, "settings") for scale, settings in scales.items()}


def _row(name: str, row: str, value: Any) -> dict[Any, Any]:
    """One row, checked."""
    found = _mapping(name, f"row '{row}'", value, "`set`, `scales` and `paper`")
    if unknown := set(found) - set(_ROW):
        raise ConfigError(
            f"{name}: row '{row}' holds {sorted(map(str, unknown))}; a row has `set`, `scales` and `paper`"
        )
    for key, holds in _ROW.items():
        _mapping(name, f"`{key}` of row '{row}'", found.get(key), holds)
    _scales(name, f"`scales` of row '{row}'", found.get("scales"))
    return found


def _extended(name: str, parent: Any, folder: Path | None, below: tuple[str, ...]) -> Recipe:
    """The recipe that `name` extends; one that is a file is beside it, in `folder`."""
    if not isinstance(parent, str):
        raise InputError(f"{name}: `extends` names a recipe or a YAML file, given {parent!r}")
    is_file = parent.endswith((".yaml", ".yml"))
    where = str(folder / parent) if is_file and folder is not None else parent
    if where in below:
        raise InputError(f"{name}: `extends` goes round in a circle: {' -> '.join((*below, where))}")
    try:
        recipe = _load(where, below)
    except InputError as error:
        raise InputError(f"{name}: `extends: {parent}`: {error}") from error
    if not recipe.rows:
        raise InputError(
            f"{name}: `extends: {parent}`: a single configuration; only a recipe with `rows` can be extended"
        )
    return recipe


def parse(name: str, raw: Mapping[str, Any], folder: Path | None = None, below: tuple[str, ...] = ()) -> Recipe:
    """A recipe from its YAML mapping; a mapping without `rows` is a plain configuration.

    `folder` is where files that it extends are looked for, `below` the recipes that extend this one.
    """
    if "rows" not in raw:
        if "extends" in raw:
            raise InputError(f"{name}: `extends` belongs to a recipe; name its `rows`")
        return Recipe(name, name, "", undotted(raw), {}, {})
    if unknown := set(raw) - _KEYS:
        raise ConfigError(
            *(f"{name}: unknown key '{key}' of a recipe; {suggest(key, _KEYS)}" for key in sorted(map(str, unknown)))
        )
    base = _mapping(name, "`base`", raw.get("base"), "settings")
    given = _mapping(name, "`rows`", raw["rows"], "row names")
    rows = {str(row): _row(name, str(row), value) for row, value in given.items()}
    if not rows:
        raise InputError(f"{name}: `rows` names no row; name one, or leave `rows` out for a single configuration")
    scales = _scales(name, "`scales`", raw.get("scales"))
    paper = str(raw.get("paper") or "")
    if raw.get("extends") is not None:
        parent = _extended(name, raw["extends"], folder, (*below, name))
        base = lay(undotted(parent.base), base)
        scales = {
            scale: lay(undotted(parent.scales.get(scale, {})), scales.get(scale, {}))
            for scale in SCALES
            if scale in parent.scales or scale in scales
        }
        paper = paper or parent.paper
    table, notes = (str(raw.get(key) or other) for key, other in (("table", name), ("notes", "")))
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
    return _load(name, ())


def _load(name: str, below: tuple[str, ...]) -> Recipe:
    path = Path(name)
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise InputError(
                f"{name}: a folder without config.yaml is not a run; give a run folder, a YAML file or a recipe"
            )
        return parse(name, read_yaml(path / "config.yaml"), path, below)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise InputError(f"{name}: no such file")
        return parse(name, read_yaml(path), path.parent, below)
    known = shipped()
    if name not in known:
        raise InputError(f"'{name}' is neither a file nor a shipped recipe; {suggest(name, known)}")
    return parse(name, _shipped_yaml(name), None, below)


@functools.cache
def _shipped_yaml(name: str) -> Any:
    folder, _, leaf = name.partition("/")
    text = (resources.files("fullrank") / "recipes" / folder / f"{leaf}.yaml").read_text(encoding="utf-8")
    return parse_yaml(text, name)


@dataclass(frozen=True)
class _Settings:
    """The settings of one row at one scale, not checked yet."""

    raw: dict[str, Any]
    row: str | None = None
    scale: str | None = None
    paper: Mapping[str, Any] | None = None


def resolve_run(
    name: str, overrides: Iterable[str] = (), row: str | None = None, scale: str | None = None
) -> Resolved[RunConfig | FinetuneConfig]:
    """The checked configuration of a run of any task: a recipe's row at one scale, a YAML file, or a run folder's.

    By default the only or first row, at `paper` scale. `config.task` tells what the run does.
    """
    found = _settings(name, row, scale, overrides)
    return Resolved(build_any(found.raw), name, found.row, found.scale, found.paper)


def resolve(
    name: str, row: str | None = None, scale: str | None = None, overrides: Iterable[str] = ()
) -> Resolved[RunConfig]:
    """The same of a run that trains a model of ours; InputError for a recipe of fine-tuning."""
    found = _settings(name, row, scale, overrides)
    return Resolved(build(found.raw), name, found.row, found.scale, found.paper)


def resolve_finetune(
    name: str, row: str | None = None, scale: str | None = None, overrides: Iterable[str] = ()
) -> Resolved[FinetuneConfig]:
    """The same of a run of fine-tuning; InputError for any other."""
    found = _settings(name, row, scale, overrides)
    return Resolved(build_finetune(found.raw), name, found.row, found.scale, found.paper)


def resolve_any(
    name: str, row: str | None = None, scale: str | None = None, overrides: Iterable[str] = ()
) -> Resolved[RunConfig | FinetuneConfig]:
    """`resolve_run` with its arguments in another order."""
    return resolve_run(name, overrides, row, scale)


def is_finetuning(name: str, row: str | None = None, scale: str | None = None, overrides: Iterable[str] = ()) -> bool:
    """Whether a configuration is one of fine-tuning, by `data.name`; nothing else of it is checked."""
    return finetunes(_settings(name, row, scale, overrides).raw)


def _settings(name: str, row: str | None, scale: str | None, overrides: Iterable[str]) -> _Settings:
    recipe = load(name)
    raw = undotted(recipe.base)
    if not recipe.rows:
        if row is not None:
            raise InputError(f"{name} is a single configuration; it has no row '{row}'")
        if scale is not None:
            raise InputError(f"{name} is a single configuration; it has no scale '{scale}'")
        return _Settings(apply_overrides(raw, overrides))
    row = row or next(iter(recipe.rows))
    if row not in recipe.rows:
        raise InputError(f"{name} has no row '{row}'; {suggest(row, recipe.rows)} (rows: {', '.join(recipe.rows)})")
    scale = scale or next((s for s in SCALES if s in recipe.scales), "paper")
    if recipe.scales and scale not in recipe.scales:
        raise InputError(f"{name} has no scale '{scale}'; scales: {', '.join(recipe.scales)}")
    raw = lay(raw, recipe.scales.get(scale) or {})
    chosen = recipe.rows[row]
    raw = lay(raw, chosen.get("set") or {})
    raw = lay(raw, (chosen.get("scales") or {}).get(scale) or {})
    return _Settings(apply_overrides(raw, overrides), row, scale, chosen.get("paper"))
