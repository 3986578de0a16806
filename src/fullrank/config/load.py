"""YAML and `key=value` in, a checked configuration of a run out, and back.

Every fault is found in one pass and named with its full key; an unknown key suggests the nearest known one. A recipe is a table
of a paper as one YAML file: a base, rows that differ from it, scales, and the paper's figures.

    table: Mixhead, Table 1, Vanilla Transformer
    base:    {model: {...}, data: {...}, train: {...}, eval: {...}}
    scales:  {paper: {...}, small: {...}, tiny: {...}}          # laid on the base
    rows:
      plain: {paper: {parameters: 156M, valid: 30.75, test: 29.78}}
      b:     {set: {model.attention.mix: position_wise}, paper: {...}}

`base`, a scale and a row's `set` may use dotted keys. `seeds`, of the recipe or of a row, are the paper's: a number N (1 to N)
or a list, which `reproduce` trains at paper scale. A row may have `scales` of its own, laid on last. `extends: NAME` (a
shipped recipe, or a file beside this one) takes that recipe's base and scales, on which this recipe's are laid; rows are
always its own. `imports` names modules that register what rows use; one that is not there is left out. A plain YAML of
`model data train eval` is a recipe with one row.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from fullrank.config.finetune import FinetuneConfig, TextFinetuneConfig
from fullrank.config.run import RunConfig
from fullrank.core.errors import ConfigError, InputError, suggest
from fullrank.core.section import Count, CountOrZero, Section, hints_of, key
from fullrank.files import format_yaml, parse_yaml, read_text
from fullrank.plugins import import_plugin

Settings = dict[str, Any]
Seeds = Count | list[CountOrZero]  # 1 to N, or those of a list
Scale = Literal["paper", "small", "tiny"]
SCALES: tuple[Scale, ...] = get_args(Scale)


@dataclass(frozen=True, kw_only=True)
class Row(Section):
    """One row of a recipe."""

    set: Settings | None = key(None, "settings that differ from the base")
    scales: dict[Scale, Settings | None] | None = key(None, "settings by scale, laid on last")
    paper: Settings | None = key(None, "the paper's figures")
    seeds: Seeds | None = key(None, "the paper's seeds of this row: how many, or which")

    def list_stated(self) -> Settings:
        """Return the keys of the row that are not null."""
        return {name: value for name, value in self.to_dict().items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """One table. `base` and `scales` hold what an extended recipe brought, too; a single configuration has no rows."""

    name: str = key("", "that of the file")
    table: str = key("", "the table, in the paper's words")
    paper: str = key("", "the paper")
    extends: str | None = key(None, "a recipe, or a file beside this one, whose base and scales are this one's, too")
    base: Settings = key({}, "settings of all rows")
    scales: dict[Scale, Settings | None] = key({}, "settings by scale, laid on the base")
    rows: dict[str, Row] = key({}, "rows by name")
    notes: str = key("", "what the paper leaves open")
    seeds: Seeds | None = key(None, "the paper's seeds of every row: how many, or which")
    imports: list[str] = key([], "modules that register stages and parts which rows use")

    def seeds_of(self, row: str) -> list[int] | None:
        """Return the paper's seeds of a row; None where neither the row nor the recipe states any."""
        seeds = self.rows[row].seeds or self.seeds
        return list(range(1, seeds + 1)) if isinstance(seeds, int) else seeds


Config = TypeVar("Config", bound=RunConfig | FinetuneConfig, covariant=True)


@dataclass(frozen=True)
class Resolved(Generic[Config]):
    """A checked configuration and where it came from."""

    config: Config
    recipe: str
    row: str | None = None
    scale: str | None = None
    paper: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None  # as they were given


def parse(name: str, raw: Mapping[str, Any], folder: Path | None = None, below: tuple[str, ...] = ()) -> Recipe:
    """Parse the YAML mapping of a recipe; a mapping without `rows` is a plain configuration.

    Args:
        name: that of the recipe.
        raw: content of its YAML file.
        folder: where a file that it extends is looked for; None for a shipped recipe.
        below: recipes that were extended on the way here.

    Returns:
        The recipe, with what it takes from the one that it extends.

    Raises:
        InputError: it names no row, extends itself, or extends a recipe that cannot be read.
        ConfigError: with every fault of its keys.
    """
    if "rows" not in raw:
        return Recipe(name=name, table=name, base=merge({}, raw))
    values = {key: value for key, value in raw.items() if value is not None}
    if isinstance(raw["rows"], Mapping):
        values["rows"] = {str(row): {} if content is None else content for row, content in raw["rows"].items()}
    try:
        recipe = Recipe.from_dict({"table": name, **values, "name": name})
    except ConfigError as error:
        raise ConfigError(*(f"{name}: {line}" for line in error.problems)) from error
    if not recipe.rows:
        raise InputError(f"{name}: `rows` names no row; name one, or leave `rows` out for a single configuration")
    if recipe.extends is None:
        return recipe
    is_beside = recipe.extends.endswith((".yaml", ".yml"))
    where = str(folder / recipe.extends) if folder and is_beside else recipe.extends
    if where in below:
        raise InputError(f"{name}: `extends` goes round in a circle: {' -> '.join((*below, where))}")
    try:
        parent = load(where, (*below, where))
    except InputError as error:
        raise InputError(f"{name}: extends: {recipe.extends}: {error}") from error
    scales: dict[Scale, Settings | None] = {
        scale: lay(parent.scales.get(scale), recipe.scales.get(scale))
        for scale in SCALES
        if scale in parent.scales or scale in recipe.scales
    }
    return replace(
        recipe,
        paper=recipe.paper or parent.paper,
        seeds=recipe.seeds or parent.seeds,
        base=lay(parent.base, recipe.base),
        scales=scales,
    )


_SHIPPED = Path(__file__).parents[1] / "recipes"


def list_shipped() -> list[str]:
    """List the names of the recipes that come with the package, such as `mixhead/table1-vanilla`."""
    return sorted(file.relative_to(_SHIPPED).with_suffix("").as_posix() for file in _SHIPPED.glob("*/*.yaml"))


@dataclass(frozen=True)
class Figure:
    """A figure of a paper: rows of its tables and the measurement made on them. texts: segments that are read; None: all."""

    title: str
    rows: Mapping[str, Sequence[str]]
    measurement: str
    texts: int | None = None


def read_figures() -> dict[str, Figure]:
    """Read the figures and tables of measurements by name (`mixhead/figure3`)."""
    return {name: Figure(**content) for name, content in _read_shipped_yaml("figures").items()}


def tables(name: str) -> dict[str, Sequence[str]]:
    """Find the recipes of a paper's table, and their rows.

    It is one recipe, or those of the table's parts (`mixhead/table1`, and `mixhead/table4-long`).
    Of a figure the rows are those that it measures. A single configuration has no rows.
    """
    figures = read_figures()
    if name in figures:
        return dict(figures[name].rows)
    names = [name]
    if not Path(name).exists() and re.search(r"/table\d+$", name):
        names = [recipe for recipe in list_shipped() if recipe == name or recipe.startswith(f"{name}-")] or names
    return {recipe: list(load(recipe).rows) for recipe in names}


def select_rows(
    recipes: Mapping[str, Sequence[str]], rows: Sequence[str] | None = None, *, of_paper: bool = False
) -> dict[str, list[str]]:
    """Select rows of recipes; a recipe of which no row is left is left out, a single configuration stays.

    Args:
        recipes: the rows of each recipe.
        rows: those that are selected; None for all.
        of_paper: select only those of which the paper has figures.

    Returns:
        The selected rows of each recipe.

    Raises:
        InputError: `rows` is empty or names a row that none of the recipes has, or no row is left.
    """
    recipe_names = ", ".join(recipes)
    row_names = list(dict.fromkeys(row for names in recipes.values() for row in names))
    if rows is not None and not rows:
        raise InputError(f"--rows: names no row; {recipe_names} has {', '.join(row_names)}")
    if unknown := [row for row in rows or () if row not in row_names]:
        raise InputError(f"--rows: {recipe_names} has no row '{unknown[0]}'; {suggest(unknown[0], row_names)}")
    chosen = {}
    for name, rows_of_recipe in recipes.items():
        names = [row for row in dict.fromkeys(rows or rows_of_recipe) if row in rows_of_recipe]
        if of_paper:
            names = [row for row in names if load(name).rows[row].paper]
        if names or not rows_of_recipe:
            chosen[name] = names
    if not chosen:
        raise InputError(
            f"--paper-rows: the paper has figures of no such row; leave it out, or choose others of {recipe_names}"
        )
    return chosen


def load(name: str, below: tuple[str, ...] = ()) -> Recipe:
    """Load a shipped recipe by name, or a YAML file by path; a run folder gives the configuration saved in it.

    A name without its folder is enough where one recipe has it (`mixers` for `best/mixers`).
    Raises InputError for a name of none or of several, and for a file that is no configuration.
    """
    path = Path(name)
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise InputError(
                f"{name}: a folder without config.yaml is not a run; give a run folder, a YAML file or a recipe"
            )
        path = path / "config.yaml"
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise InputError(f"{name}: no such file")
        return parse(name, read_yaml(path), path.parent, below)
    shipped = list_shipped()
    if name not in shipped:
        # of a paper (`mixhead`), or of all papers that have a table of this name (`table2`)
        part = re.compile(rf"{re.escape(name)}/|[^/]*/{re.escape(name)}(-|$)")
        several = [other for other in shipped if part.match(other)]
        if len(several) == 1 and several[0].endswith(f"/{name}"):
            return load(several[0], below)
        if several:
            raise InputError(f"'{name}' stands for several recipes; choose one of {', '.join(several)}")
        if figure := read_figures().get(name):
            rows = ", ".join(figure.rows)
            raise InputError(f"{name} measures trained rows of {rows}; use `fullrank reproduce {name}`")
        near = suggest(name, [*shipped, *read_figures()])
        near = near if near.startswith("did you mean") else "`fullrank recipes list` names them"
        raise InputError(f"'{name}' is neither a file nor a shipped recipe; {near}")
    return parse(name, _read_shipped_yaml(name), None, below)


@functools.cache
def _read_shipped_yaml(name: str) -> Any:
    return parse_yaml((_SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"), name)


def resolve_any(
    name: str, row: str | None = None, scale: str | None = None, overrides: Iterable[str] = ()
) -> Resolved[RunConfig | FinetuneConfig]:
    """Resolve the configuration of a run of any task; `config.task` tells what the run does.

    Args:
        name: a recipe, a YAML file, or a run folder.
        row: a row of the recipe; None for the only or first one.
        scale: one of the recipe's scales; None for the largest that it has.
        overrides: `key=value` texts laid on it.

    Returns:
        The checked configuration, and where it is from.

    Raises:
        InputError: there is no such file, recipe, row or scale.
        ConfigError: with every fault of the settings.
    """
    resolved = _read_settings(name, row, scale, overrides)
    return replace(resolved, config=build_any(resolved.config))


def resolve(
    name: str, row: str | None = None, scale: str | None = None, overrides: Iterable[str] = ()
) -> Resolved[RunConfig]:
    """Resolve the configuration of a run that trains a model of ours.

    Args:
        name: a recipe, a YAML file, or a run folder.
        row: a row of the recipe; None for the only or first one.
        scale: one of the recipe's scales; None for the largest that it has.
        overrides: `key=value` texts laid on it.

    Returns:
        The checked configuration, and where it is from.

    Raises:
        InputError: there is no such file, recipe, row or scale, or it is a recipe of fine-tuning.
        ConfigError: with every fault of the settings.
    """
    resolved = _read_settings(name, row, scale, overrides)
    return replace(resolved, config=build(resolved.config))


def resolve_arms(
    model: str, text: Path, overrides: Iterable[str] = (), *, plain: bool = True
) -> list[Resolved[RunConfig | FinetuneConfig]]:
    """Resolve the runs in which a pretrained model is fine-tuned on a text: with what is injected, and without it.

    They differ in `model.attention`, `model.layers` and the penalties on it.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        text: file of the training text.
        overrides: `key=value` texts of settings.
        plain: resolve the run without anything injected, too.

    Returns:
        The checked configurations, that of the plain run first.

    Raises:
        InputError: `model` is a file.
        ConfigError: with every fault of the settings.
    """
    if Path(model).is_file():
        raise InputError(
            f"--text: goes with a model, a folder or a name on the Hugging Face hub, given the file {model}; a configuration "
            "states its text as data.train"
        )
    raw: Settings = {"model": {"pretrained": model}, "data": {"name": "text", "train": str(text)}}
    raw = apply_overrides(raw, overrides)
    config = build_any(raw)
    assert isinstance(config, TextFinetuneConfig)
    stem = re.sub(r"[^\w.-]+", "-", f"{Path(model).name}-{text.stem}")
    recipe = f"finetune-{stem}"
    graft = config.model.attention
    if graft.at_rest:
        return [Resolved(config, recipe, "plain", settings=raw)]
    words = [word for word in map(str, (graft.mix, graft.normalize)) if word not in ("none", "softmax")]
    if graft.cross_head:
        words.append(f"beta{graft.cross_head:g}")
    arms: list[Resolved[RunConfig | FinetuneConfig]] = [Resolved(config, recipe, "-".join(words), settings=raw)]
    if plain:
        without = merge(raw, {"model": {"layers": None}, "train": {"orthogonality": 0.0, "overlap": 0.0}})
        del without["model"]["attention"]
        arms.insert(0, Resolved(build_any(without), recipe, "plain", settings=without))
    return arms


def is_finetuning(name: str, scale: str | None = None, overrides: Iterable[str] = ()) -> bool:
    """Return whether a configuration, or a table of such, is one of fine-tuning; nothing else of it is checked.

    Args:
        name: a recipe, a YAML file, or a run folder.
        scale: one of the recipe's scales; None for the largest that it has.
        overrides: `key=value` texts laid on it.

    Returns:
        Whether it is; of a table, its first row is looked at.

    Raises:
        InputError: there is no such file, recipe or scale.
    """
    return finetunes(_read_settings(name, None, scale, overrides).config)


def _read_settings(name: str, row: str | None, scale: Any, overrides: Iterable[str]) -> Resolved[Any]:
    """Read the settings of one row at one scale, unchecked: the file, then scale, row and overrides laid on it."""
    recipe = load(name)
    for module in recipe.imports:
        with contextlib.suppress(ModuleNotFoundError):  # a row that needs it then says what is missing
            import_plugin(module)
    layers: list[Settings | None] = [recipe.base]
    paper = None
    if recipe.rows:
        row = row or next(iter(recipe.rows))
        if row not in recipe.rows:
            raise InputError(f"{name} has no row '{row}'; {suggest(row, recipe.rows, list_all=True)}")
        scale = scale or next((s for s in SCALES if s in recipe.scales), "paper")
        if recipe.scales and scale not in recipe.scales:
            raise InputError(f"{name} has no scale '{scale}'; scales: {', '.join(recipe.scales)}")
        content = recipe.rows[row]
        paper = content.paper
        layers += [recipe.scales.get(scale), content.set, (content.scales or {}).get(scale)]
    elif row is not None or scale is not None:
        missing = f"scale '{scale}'" if row is None else f"row '{row}'"
        raise InputError(f"{name} is a single configuration; it has no {missing}")
    settings = apply_overrides(lay(*layers), overrides)
    return Resolved(settings, name, row, scale, paper, settings)


# -- settings as mappings: read, laid on each other, checked ------------------------------------------------------------


def is_of_task(raw: Mapping[str, Any]) -> bool:
    """Return whether plain settings (dotted keys resolved) describe fine-tuning on a task, GLUE or SQuAD, by `data.name`."""
    data = raw.get("data")
    return isinstance(data, Mapping) and str(data.get("name", "")).startswith(("glue", "squad"))


def finetunes(raw: Mapping[str, Any]) -> bool:
    """Return whether plain settings describe a run of fine-tuning, on a task or on a text."""
    model = raw.get("model")
    return is_of_task(raw) or (isinstance(model, Mapping) and "pretrained" in model)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; InputError for a file that holds none, or cannot be read."""
    raw = parse_yaml(read_text(path), str(path))
    if not raw:
        raise InputError(f"{path} is empty: it states no key, such as data.train or train.steps")
    if not isinstance(raw, dict):
        raise InputError(
            f"{path}: a configuration is a mapping with sections {', '.join(hints_of(RunConfig))}, not a {type(raw).__name__}"
        )
    return raw


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `over` on `base`: mappings merge key by key, a dotted key replaces the one inside, anything else replaces."""
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        if isinstance(name, str) and "." in name:
            merged = _set_dotted(merged, name, value)
        elif isinstance(value, Mapping):
            merged[name] = merge(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged


def _set_dotted(raw: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Copy `raw` with `a.b.c` set; a bare stage name on the way becomes `{name: ...}`."""
    head, _, inner_key = key.partition(".")
    if not inner_key:
        return {**raw, head: value}
    inner = raw.get(head)
    stage = {"name": inner} if isinstance(inner, str) else inner
    return {**raw, head: _set_dotted(stage if isinstance(stage, Mapping) else {}, inner_key, value)}


_ENDS = ("steps", "epochs", "tokens")  # of training: exactly one of them counts


def lay(*layers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge layers one by one; a new end of training replaces the old one instead of adding to it."""
    merged: dict[str, Any] = {}
    for layer in filter(None, layers):
        train = merge({}, layer).get("train")
        states_end = isinstance(train, Mapping) and any(end in train for end in _ENDS)
        if states_end and isinstance(merged.get("train"), dict):
            merged["train"] = {key: value for key, value in merged["train"].items() if key not in _ENDS}
        merged = merge(merged, layer)
    return merged


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Lay `key=value` texts on `raw`; values are read as YAML (`true`, `1e-3`, `[0.9, 0.98]`), no value is null.

    Raises InputError for a text of another form.
    """
    over: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"'{text}' is not of the form key=value, for example train.steps=1000")
        over[key.strip()] = parse_yaml(value, f"the value of {key}") if value else None
    return lay(raw, over)


def build_any(raw: Mapping[str, Any]) -> RunConfig | FinetuneConfig:
    """Build the checked configuration of a run of any task; ConfigError lists every fault."""
    if is_of_task(raw):
        return FinetuneConfig.from_dict(raw)
    return (TextFinetuneConfig if finetunes(raw) else RunConfig).from_dict(raw)


def build(raw: Mapping[str, Any]) -> RunConfig:
    """Build the checked configuration of a run that trains a model of ours; InputError for one of fine-tuning."""
    config = build_any(raw)
    if isinstance(config, FinetuneConfig):
        raise InputError(
            f"data.name: {config.data.name} is a task on which a pretrained encoder is fine-tuned; use `fullrank finetune`"
        )
    if isinstance(config, TextFinetuneConfig):
        raise InputError(f"model.pretrained: {config.model.pretrained} is fine-tuned; use `fullrank finetune`")
    return config


def to_yaml(config: Section) -> str:
    """Write a configuration as YAML, every value stated, in the order of the schema."""
    return format_yaml(config.to_dict(), default_flow_style=None, width=100)


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys, so that two runs are compared as two flat dictionaries."""
    flat: dict[str, Any] = {}
    for name, value in raw.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
