"""The JSON schema of a configuration, for editors, from the types and descriptions of its sections."""

from __future__ import annotations

import dataclasses
import inspect
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fullrank.config.finetune import TASKS, FinetuneConfig, TextFinetuneConfig
from fullrank.config.run import RunConfig
from fullrank.core import registry
from fullrank.core.section import ByKind, Section, Slot, default_of, hints_of, keys_of, section_in

_SCALARS = {int: "integer", float: "number", bool: "boolean", str: "string", types.NoneType: "null"}


def json_schema() -> dict[str, Any]:
    """Build the schema of a run that trains a model of ours; names of registered stages appear as enumerations."""
    definitions: dict[str, Any] = {}
    section = _section(RunConfig, definitions)
    schema = {"$defs": dict(sorted(definitions.items())), **section, "title": "fullrank run configuration"}
    schema["$defs"]["PhaseConfig"]["required"] = ["name"]
    return schema


def finetune_schema() -> dict[str, Any]:
    """Build the schema of a run of fine-tuning.

    It is one on a task, whose names are an enumeration, too, or one of a causal model on a text.
    """
    definitions: dict[str, Any] = {}
    either = [_value(config, definitions) for config in (FinetuneConfig, TextFinetuneConfig)]
    definitions["TaskDataConfig"]["properties"]["name"]["enum"] = list(TASKS)
    definitions["PhaseConfig"]["required"] = ["name"]
    return {"$defs": dict(sorted(definitions.items())), "anyOf": either, "title": "fullrank fine-tuning configuration"}


def _section(cls: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    """Build the schema of a section; the sections inside it are added to `definitions`.

    A section that `kind` decides about has the keys of all kinds.
    """
    fields = {field.name: field for kind in (*cls.MEMBERS, cls) for field in dataclasses.fields(kind)}
    properties = {}
    for name, hint in keys_of(cls).items():
        field = fields[name]
        default = default_of(field)
        content = _value(hint, definitions)
        if name not in hints_of(cls):  # null where the kind has no such key
            content = {"anyOf": [*content.get("anyOf", [content]), {"type": "null"}]}
        if issubclass(cls, ByKind) and name == "kind":
            content["enum"] = registry.names(cls.SLOT)
        if section_in(hint) is None:
            content["title"] = name.replace("_", " ").title()
        if not isinstance(default, Section):
            content["default"] = default
        properties[name] = content | {"description": _describe(field)}
    return {
        "type": "object", "title": cls.__name__, "description": inspect.getdoc(cls), "properties": properties,
        "additionalProperties": False,
    }  # fmt: skip


def _describe(field: dataclasses.Field[Any]) -> str:
    """Describe a key, and what it goes with."""
    words = [field.metadata["description"]]
    for need in field.metadata["needs"]:
        value = f"'{need.only}' " if need.only else ""
        words.append(value + need.describe(need.key))
    return "; ".join(words)


def _value(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Build the schema of the values that a type allows."""
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        slots = [mark for mark in args[1:] if isinstance(mark, Slot)]
        content = _value(args[0], definitions)
        for choice in content.get("anyOf", [content]):
            if slots and choice.get("type") == "string":
                choice["enum"] = registry.names(slots[0].name)
        return content
    if origin in (types.UnionType, Union):
        return {"anyOf": [_value(other, definitions) for other in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is list:
        return {"items": _value(args[0], definitions), "type": "array"}
    if origin is dict:
        return {"additionalProperties": True, "type": "object"}
    if issubclass(hint, Section):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}
            definitions[hint.__name__] = _section(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    return {"type": _SCALARS[hint]}
