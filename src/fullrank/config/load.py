"""YAML and `key=value` in, a checked configuration of a run out, and back.

Every fault is found in one pass and named with its full key; an unknown key suggests the nearest known one.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fullrank.config.finetune import FinetuneConfig, TextFinetuneConfig, finetunes, is_of_task
from fullrank.config.run import RunConfig
from fullrank.core.errors import InputError
from fullrank.core.section import Section, hints_of
from fullrank.files import SafeLoader, read_text


class _UniqueKeys(SafeLoader):
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
        return yaml.load(text, _UniqueKeys)
    except RecursionError:
        raise InputError(f"{origin}: not valid YAML: brackets inside brackets without end") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a day 30 of February, endless digits
        raise InputError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; InputError for a file that holds nothing, or only comments."""
    raw = parse_yaml(read_text(path), str(path))
    if raw is None or raw == {}:
        raise InputError(f"{path} is empty: it states no key, such as data.train or train.steps")
    if not isinstance(raw, dict):
        raise InputError(
            f"{path}: a configuration is a mapping with sections {', '.join(hints_of(RunConfig))}, not a {type(raw).__name__}"
        )
    return raw


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: mappings merge key by key, a dotted key replaces the one inside, anything else replaces."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(key, str) and "." in key:
            merged = _set_dotted(merged, key, value)
        elif isinstance(value, Mapping):
            merged[key] = merge(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _set_dotted(raw: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of `raw` with `a.b.c` set; a bare stage name on the way becomes `{name: ...}`."""
    head, _, rest = key.partition(".")
    if not rest:
        return {**raw, head: value}
    inner = raw.get(head)
    stage = {"name": inner} if isinstance(inner, str) else inner
    return {**raw, head: _set_dotted(stage if isinstance(stage, Mapping) else {}, rest, value)}


_ENDS = ("steps", "epochs", "tokens")  # of training: exactly one of them counts


def lay(raw: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` merged into `raw`; a new end of training replaces the old one instead of adding to it."""
    merged, new = merge(raw, over), merge({}, over).get("train")
    ends = {end: new[end] for end in _ENDS if end in new} if isinstance(new, Mapping) else {}
    if not ends:
        return merged
    kept = {key: value for key, value in merged["train"].items() if key not in _ENDS}
    return {**merged, "train": kept | ends}


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`raw` with `key=value` texts laid on it; values are read as YAML (`true`, `1e-3`, `[0.9, 0.98]`)."""
    over: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"'{text}' is not of the form key=value, for example train.steps=1000")
        over[key.strip()] = parse_yaml(value, f"the value of {key}") if value else None
    return lay(raw, over)


def build_any(raw: Mapping[str, Any]) -> RunConfig | FinetuneConfig:
    """The checked configuration of a run of any task; ConfigError lists every fault."""
    if is_of_task(raw):
        return FinetuneConfig.from_dict(raw)
    return (TextFinetuneConfig if finetunes(raw) else RunConfig).from_dict(raw)


def build(raw: Mapping[str, Any]) -> RunConfig:
    """The checked configuration of a run that trains a model of ours; InputError for one of fine-tuning."""
    config = build_any(raw)
    if isinstance(config, FinetuneConfig):
        raise InputError(
            f"data.name: {config.data.name} is a task on which a pretrained encoder is fine-tuned; use `fullrank finetune`"
        )
    if isinstance(config, TextFinetuneConfig):
        raise InputError(f"model.pretrained: {config.model.pretrained} is fine-tuned; use `fullrank finetune`")
    return config


def to_yaml(config: Section) -> str:
    """A configuration as YAML, every value stated, in the order of the schema."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys: what differs between two runs is then a comparison of two flat dictionaries."""
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
