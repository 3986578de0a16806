"""YAML and `key=value` in, a checked `RunConfig` out, and back.

Every fault is found in one pass and named with its full key; an unknown key suggests the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import yaml

from fullrank.config.finetune import TASKS, FinetuneConfig, finetunes
from fullrank.config.run import RunConfig
from fullrank.core.config import ModelConfig
from fullrank.core.errors import ConfigError, InputError

Config = TypeVar("Config")


class _UniqueKeys(yaml.SafeLoader):
    """YAML without silent surprises: a key given twice is an error, and `1e-3` is a number."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *base`; the keys it brings may be replaced
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


# YAML 1.1 takes 1e-3 for a word; people, and YAML 1.2, take it for a number
_UniqueKeys.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, origin: str) -> Any:
    """YAML text as plain objects; InputError names `origin` and the place of a syntax error."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a day 30 of February, endless digits
        raise InputError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file (an empty file is an empty mapping)."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    raw = parse_yaml(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise InputError(
            f"{path}: a configuration is a mapping with sections {', '.join(_sections(RunConfig))}, not a {type(raw).__name__}"
        )
    return raw


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: mappings merge key by key, anything else replaces."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def set_dotted(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of `raw` with `a.b.c` set; a bare stage name on the way becomes `{name: ...}`."""
    head, _, rest = key.partition(".")
    copy = dict(raw)
    if not rest:
        copy[head] = value
        return copy
    inner = copy.get(head)
    if isinstance(inner, str):
        inner = {"name": inner}
    copy[head] = set_dotted(dict(inner) if isinstance(inner, Mapping) else {}, rest, value)
    return copy


def _is_dotted(key: Any) -> bool:
    return isinstance(key, str) and "." in key


_ENDS = ("steps", "epochs", "tokens")  # of training: exactly one of them counts


def lay(raw: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` (nested or dotted keys) laid on `raw`; a new end of training replaces the old one instead of adding to it."""
    merged = dict(raw)
    for key, value in over.items():
        merged = set_dotted(merged, key, value) if _is_dotted(key) else merge(merged, {key: value})
    train = undotted(over).get("train")
    given = [end for end in _ENDS if isinstance(train, Mapping) and end in train]
    if given and isinstance(merged.get("train"), dict):
        merged["train"] = {k: v for k, v in merged["train"].items() if k not in _ENDS or k in given}
    return merged


def undotted(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    nested: dict[str, Any] = {}
    for key, value in raw.items():
        nested = set_dotted(nested, key, value) if _is_dotted(key) else merge(nested, {key: value})
    return nested


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`raw` with `key=value` texts applied; values are read as YAML (`true`, `1e-3`, `[0.9, 0.98]`)."""
    over: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"'{text}' is not of the form key=value, for example train.steps=1000")
        over[key.strip()] = parse_yaml(value, f"the value of {key}") if value else None
    return lay(raw, over)


def known_keys(cls: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration class, leaves and sections."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name
        if inner := _section(hints[field.name]):
            yield from known_keys(inner, f"{prefix}{field.name}.")


def _unknown(key: str, root: type) -> str:
    """An unknown key, with the key that was probably meant: the same word elsewhere, or a similar one."""
    known = list(known_keys(root, "model." if root is ModelConfig else ""))
    by_leaf: dict[str, str] = {}
    for other in known:
        by_leaf.setdefault(other.rpartition(".")[2], other)
    leaf = key.rpartition(".")[2]
    around = [other for other in known if not key.startswith(f"{other}.")]
    near = difflib.get_close_matches(key, around, n=1, cutoff=0.8) or [
        by_leaf[word] for word in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    ]
    if near:
        return f"unknown key '{key}'; did you mean '{near[0]}'?"
    section = key.rpartition(".")[0]
    here = sorted(other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section)
    return f"unknown key '{key}'; known here: {', '.join(here)}"


def _describe(error: Mapping[str, Any], root: type, prefix: str) -> list[str]:
    """One pydantic error as lines of ours."""
    where = [str(part) for part in error["loc"]]
    inner = error.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        own = next((word for word in ("encoder", "decoder") if word in where), None)
        if own is None:
            return list(inner.problems)
        section = (
            f"model.{own}.{'cross' if 'cross' in where else 'attention'}"  # such a section does not know where it is
        )
        return [problem.replace("model.attention", section) for problem in inner.problems]
    # a union adds the name of the alternative that failed to the location; keys are what the user wrote
    words = [w for w in where if not w.startswith(("dict[", "list[", "function-")) and w not in ("str", "int", "float")]
    key = prefix + ".".join(words)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return [_unknown(key, root)]
    if error["type"] == "dataclass_type":
        return [f"{key}: a section of keys, given {error['input']!r}"]
    message = error["msg"]
    message = message[0].lower() + message[1:]
    return [f"{key}: {message.removeprefix('value error, ')}, given {error['input']!r}"]


def _sections(cls: type) -> dict[str, type]:
    """The keys of a configuration class that hold another configuration class."""
    hints = get_type_hints(cls)
    return {f.name: inner for f in dataclasses.fields(cls) if (inner := _section(hints[f.name]))}


def _section(hint: Any) -> type | None:
    """The configuration class that a field holds, also where it may be null; None if it holds a value."""
    alternatives = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((cls for cls in alternatives if isinstance(cls, type) and dataclasses.is_dataclass(cls)), None)


def _no_booleans(cls: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """`true` in the place of a number becomes a word, which is refused: pydantic would read it as 1."""
    hints, inner = get_type_hints(cls), _sections(cls)
    plain = dict(raw)
    for key, value in raw.items():
        if key in inner and isinstance(value, Mapping):
            plain[key] = _no_booleans(inner[key], value)
        elif isinstance(value, bool) and {int, float} & {hints.get(key), *get_args(hints.get(key))}:
            plain[key] = str(value).lower()
    return plain


def _innermost(cls: type, raw: Mapping[str, Any], place: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys that lead to the innermost section of `raw` that holds `place`; () if none does."""
    inner = _sections(cls)
    if not place or place[0] not in inner or place[0] not in raw:
        return ()
    section = raw[place[0]]
    deeper = _innermost(inner[place[0]], section, place[1:]) if isinstance(section, dict) else ()
    return (place[0], *deeper)


def _without(raw: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """`raw` without the section at `path`; () leaves it as it is."""
    if len(path) < 2:
        return {key: value for key, value in raw.items() if (key,) != path}
    return {**raw, path[0]: _without(raw[path[0]], path[1:])}


@functools.cache
def _adapter(cls: type) -> Any:
    """Making one takes longer than all its checks."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _validated(cls: type[Config], raw: Mapping[str, Any], prefix: str = "") -> Config:
    """A faulty section keeps pydantic from checking the one around it, so that is checked again without it.

    What is said then of the section that was left out is said of its defaults, and means nothing.
    """
    from pydantic import ValidationError

    lines: list[str] = []
    left_out: list[str] = []
    rest, before = _no_booleans(cls, raw), None
    while rest != before:
        try:
            config: Config = _adapter(cast(Any, cls)).validate_python(rest)
            break
        except ValidationError as error:
            found = [line for fault in error.errors() for line in _describe(fault, cls, prefix)]
            lines += [line for line in found if not any(section in line for section in left_out)]
            before = rest
            for fault in error.errors():
                path = _innermost(cls, rest, fault["loc"])
                rest = _without(rest, path)
                left_out += [f"{prefix}{'.'.join(path)}."] if path else []
    if lines:
        raise ConfigError(*dict.fromkeys(lines)) from None
    return config


def build(raw: Mapping[str, Any]) -> RunConfig:
    """A checked configuration of a run that trains a model of ours; ConfigError lists every fault.

    InputError for one of fine-tuning.
    """
    if finetunes(raw):
        raise InputError(
            f"data.name: {raw['data']['name']} is a task on which a pretrained encoder is fine-tuned; use `fullrank finetune`"
        )
    return _validated(RunConfig, raw)


def build_finetune(raw: Mapping[str, Any]) -> FinetuneConfig:
    """A checked configuration of fine-tuning; InputError for one of another kind."""
    name = undotted(raw).get("data", {}).get("name") if isinstance(raw.get("data"), Mapping) else None
    if not finetunes(raw):
        raise InputError(
            f"data.name: fine-tuning is on a task of GLUE or on SQuAD, as in data.name=glue/cola; given {name!r}; "
            "`fullrank train` trains on texts"
        )
    return _validated(FinetuneConfig, raw)


def build_model(raw: Mapping[str, Any]) -> ModelConfig:
    """A checked `model` section."""
    return _validated(ModelConfig, raw, "model.")


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain objects that YAML and JSON can hold."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def to_yaml(config: Any) -> str:
    """A configuration as YAML, every value stated, in the order of the schema."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys: what differs between two runs is then a comparison of two flat dictionaries."""
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def json_schema() -> dict[str, Any]:
    """The JSON schema of a run's YAML, for editors; names of registered stages appear as enumerations."""
    slots = {
        "AttentionConfig": {"kind": "attend", "score": "score", "normalize": "normalize", "mix": "mix"},
        "InputConfig": {"kind": "input"},
        "OutputConfig": {"kind": "output"},
        "ModelConfig": {"position": "position", "hidden_act": "activation", "initializer": "initializer"},
        "TrainConfig": {"optimizer": "optimizer", "schedule": "schedule"},
    }
    return _schema(RunConfig, slots, "fullrank run configuration")


def finetune_schema() -> dict[str, Any]:
    """The same of a run of fine-tuning; its tasks are an enumeration, too."""
    slots = {
        "GraftConfig": {"normalize": "normalize", "mix": "mix"},
        "FinetuneTrainConfig": {"optimizer": "optimizer", "schedule": "schedule"},
    }
    schema = _schema(FinetuneConfig, slots, "fullrank fine-tuning configuration")
    schema["$defs"]["TaskDataConfig"]["properties"]["name"]["enum"] = list(TASKS)
    return schema


def _schema(root: type, slots: Mapping[str, Mapping[str, str]], title: str) -> dict[str, Any]:
    """`slots`: for each class the keys that hold a stage, and its slot."""
    from pydantic import TypeAdapter

    from fullrank.core import registry

    schema = TypeAdapter(root).json_schema()
    for cls, keys in slots.items():
        properties = schema["$defs"][cls]["properties"]
        for key, slot in keys.items():
            for choice in properties[key].get("anyOf", [properties[key]]):
                if choice.get("type") == "string":
                    choice["enum"] = registry.names(slot)
    schema["title"] = title
    return schema
