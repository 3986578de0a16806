"""Typed sections of a configuration: frozen dataclasses that read, check and write themselves.

The annotation of a field says what may stand there; `key` gives its default and its description. Dictionaries in Python,
YAML and exported models are all read this way::

    @dataclass(frozen=True, kw_only=True)
    class DropoutConfig(Section):
        KEY = "model.dropout"
        residual: Share = key(0.0, "dropout on what a layer adds to the residual stream")

    DropoutConfig.from_dict({"residual": 2})  # ConfigError: model.dropout.residual: at least 0 and below 1, given 2
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, cast, get_args, get_origin

from . import registry
from .errors import ConfigError, translate_name

Value = TypeVar("Value")
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_UNIONS = (types.UnionType, typing.Union)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Allowed:
    """A condition on a value beside its type, in words and as a test."""

    words: str
    test: Callable[[Any], bool]


# Sizes are below 2^31, the most that a dimension of a tensor may reasonably be; counts and seeds below 2^63.
# Layers are modules, which take time and memory each before there is a tensor.
SIZES = 2**31
COUNTS = 2**63
Size = Annotated[int, Allowed(f"a positive whole number below {SIZES:,}", lambda n: 0 < n < SIZES)]
SizeOrZero = Annotated[int, Allowed(f"0 or a positive whole number below {SIZES:,}", lambda n: 0 <= n < SIZES)]
Layers = Annotated[int, Allowed("a positive whole number up to 10,000", lambda n: 0 < n <= 10_000)]
Count = Annotated[int, Allowed("a positive whole number below 2^63", lambda n: 0 < n < COUNTS)]
CountOrZero = Annotated[int, Allowed("0 or a positive whole number below 2^63", lambda n: 0 <= n < COUNTS)]
Positive = Annotated[float, Allowed("a positive number", lambda x: x > 0)]
PositiveOrZero = Annotated[float, Allowed("0 or a positive number", lambda x: x >= 0)]
Probability = Annotated[float, Allowed("a probability from 0 to 1", lambda x: 0 <= x <= 1)]
Rate = Annotated[float, Allowed("a probability below 1", lambda x: 0 <= x < 1)]
Share = Annotated[float, Allowed("at least 0 and below 1", lambda x: 0 <= x < 1)]
Fraction = Annotated[float, Allowed("between 0 and 1", lambda x: 0 < x < 1)]

# A stage by name, or `{name: ..., option: value}` where it has options.
Stage = str | dict[str, Any]


def stage_name(stage: Stage) -> str:
    """Return the name of a stage, empty where a mapping has none."""
    return stage if isinstance(stage, str) else str(stage.get("name", ""))


def stage_options(stage: Stage) -> dict[str, Any]:
    """Return the options of a stage, without its name."""
    if isinstance(stage, str):
        return {}
    return {name: value for name, value in stage.items() if name != "name"}


class Slot:
    """The stages that a key can name: `Slot("mix", "none", "average", random=RandomMixingOptions)`.

    Built-in names, and the dataclasses of the options of those that have some, are known without importing torch. Other
    names are looked up in the slot of the registry, and have the options of the nested `Config` of what is registered
    there.
    """

    def __init__(self, name: str, *plain: str, **with_options: type) -> None:
        self.name = name
        self.built_in: dict[str, type | None] = {**dict.fromkeys(plain), **with_options}

    def read(self, stage: Stage, key: str) -> Stage:
        """Read a stage and convert its options; raise ConfigError for a stage or an option that does not exist."""
        name = stage_name(stage)
        options = stage_options(stage)
        if name in self.built_in:
            config = self.built_in[name]
        else:
            stage_class = registry.lookup(self.name, name, key, self.built_in)
            config = getattr(stage_class, "Config", None)
        if not options:
            return stage
        if config is None:
            raise ConfigError(f"{key}: '{name}' takes no options, given {sorted(options)}")
        try:
            converted = config(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError(*(f"{key}: {line}" for line in str(error).splitlines())) from error
        return {"name": name, **{option: getattr(converted, option) for option in options}}


class Parts(Slot):
    """Any number of stages of a slot that only users fill: `{NAME: {OPTION: VALUE}}`."""

    def read(self, parts: Any, key: str) -> Any:
        """Read the options of each part by its name, and convert them."""
        return {
            name: stage_options(super(Parts, self).read({"name": name, **options}, f"{key}.{name}"))
            for name, options in parts.items()
        }


class Need(NamedTuple):
    """What a field goes with, where it is given (or has the value `only`): a value of another key.

    sign: `=` one of `values`, `!=` none of them, empty: any value but null, 0 and false.
    """

    only: str
    key: str
    sign: str
    values: str

    def holds(self, value: Any) -> bool:
        """Return whether the other key may have this value."""
        if not self.sign:
            return bool(value)
        is_listed = _word(value) in self.values.split("|")
        return is_listed == (self.sign == "=")

    def describe(self, name: str) -> str:
        """Describe the need for the schema and for errors; `name` is the key, or a property in words."""
        setting = f"{name}: {self.values.replace('|', ' or ')}" if self.sign else name
        return f"{'not' if self.sign == '!=' else 'goes'} with `{setting}`"


def _read_needs(needs: str | Mapping[str, str]) -> Iterator[Need]:
    by_value = {"": needs} if isinstance(needs, str) else needs
    for only, texts in by_value.items():
        for text in texts.split(", "):
            if match := re.fullmatch(r"([\w.]+)(?:(!?=)(.+))?", text):
                yield Need(only, match[1], match[2] or "", match[3] or "")


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return stage_name(value)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def key(default: Value, description: str, needs: str | Mapping[str, str] = "") -> Value:
    """Declare a key of a section as a dataclass field.

    Args:
        default: value where the key is not given. A list or a mapping is copied for each section.
        description: meaning of the key, in a few words for the schema.
        needs: settings that the key goes with. `"order=contiguous"` is a key beside it or below, `"model.position=relative"`
            one of another section. `a=b|c` allows two values, `a!=b` all but one, `a` all but null, 0 and false. A comma
            joins several. A mapping has them by value of this key: `{"strided": "stride"}`.

    Returns:
        The field, which a type checker takes for its default.
    """
    metadata = {"description": description, "needs": [*_read_needs(needs)]}
    if isinstance(default, list | dict):
        return cast(Value, field(default_factory=default.copy, metadata=metadata))
    return field(default=default, metadata=metadata)


class _Unfit(Exception):
    """A value does not fit a type."""


def describe_type(hint: Any) -> str:
    """Describe the values that a type allows."""
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        conditions = [mark.words for mark in args[1:] if isinstance(mark, Allowed)]
        return " and ".join(conditions) or describe_type(args[0])
    if origin in _UNIONS:
        return " or ".join(describe_type(choice) for choice in args if choice is not types.NoneType)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is list:
        return f"a list, each {describe_type(args[0])}"
    if origin is dict:
        return "a mapping" + (f" with the keys {describe_type(args[0])}" if get_origin(args[0]) is Literal else "")
    return _WORDS.get(hint, "a section of keys")


def read_value(hint: Any, value: Any, key: str) -> Any:
    """Convert a value to the type of its key.

    Args:
        hint: type of the key, with its conditions.
        value: anything from Python, YAML or a command line: text may stand for a number.
        key: full name of the key, for errors.

    Raises:
        ConfigError: the type does not allow the value. The error names the key, what is allowed and what was given.
    """
    try:
        return _convert(hint, value, key)
    except _Unfit:
        raise ConfigError(f"{key}: {describe_type(hint)}, given {value!r}") from None


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Convert `value` to the type `hint`; raise _Unfit, or ConfigError where more can be said."""
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        value = _convert(args[0], value, key)
        for mark in args[1:]:
            if isinstance(mark, Slot):
                value = mark.read(value, key)
            elif not mark.test(value):
                raise _Unfit
        return value
    if hint is Any or (origin is Literal and value in args):
        return value
    if origin in _UNIONS:
        if value is None and types.NoneType in args:
            return None
        for choice in args:
            with contextlib.suppress(_Unfit):
                return _convert(choice, value, key)
    elif origin is list:
        if isinstance(value, list | tuple):
            return [_convert(args[0], item, key) for item in value]
    elif origin is dict:
        if isinstance(value, Mapping):
            return {
                _convert(args[0], name, key): read_value(args[1], item, _join(key, str(name)))
                for name, item in value.items()
            }
    elif origin is None and section_in(hint):
        return value if isinstance(value, hint) else hint.from_dict(value, key)
    elif hint in _WORDS:
        return _convert_scalar(hint, value)
    raise _Unfit


def _convert_scalar(hint: type, value: Any) -> Any:
    if hint is bool and isinstance(value, bool | int | str) and str(value).lower() in _BOOLEANS:
        return _BOOLEANS[str(value).lower()]
    if hint is str and isinstance(value, str | os.PathLike | int | float) and not isinstance(value, bool):
        return str(value)
    if hint not in (int, float) or isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _Unfit
    try:
        number = hint(value)
    except (ValueError, OverflowError):
        raise _Unfit from None
    is_rounded = isinstance(value, float) and number != value
    if is_rounded or (hint is float and not math.isfinite(number)):
        raise _Unfit
    return number


def section_in(hint: Any) -> type[Section] | None:
    """Find the class of the section that a field holds, also where it may be null; None if it holds a value."""
    if get_origin(hint) in _UNIONS:
        return next(filter(None, map(section_in, get_args(hint))), None)
    return hint if isinstance(hint, type) and issubclass(hint, Section) else None


@functools.cache
def hints_of(cls: type[Section]) -> dict[str, Any]:
    """Return the type of each key of a section, by name."""
    types_by_name = typing.get_type_hints(cls, include_extras=True)
    return {option.name: types_by_name[option.name] for option in fields(cls)}


class _Sections(type):
    """Metaclass of sections: a call names the keys that the section lacks, and `kind` chooses the member that it makes."""

    def __call__(cls: Any, *values: Any, **keys: Any) -> Any:
        if values:
            raise TypeError(f"{cls.__name__}: keys by name (or `from_dict` of a mapping), given {values[0]!r}")
        return cls.from_dict(keys)


@dataclass(frozen=True, kw_only=True)
class Section(metaclass=_Sections):
    """A section of a configuration. `KEY` is where it stands, as in `model.dropout`.

    A field left at None may be resolved from the others (`_resolve`), so that a saved configuration states every value.
    Raises ConfigError with all faults: of every field by its type, and of fields that do not go together (`_faults`).
    """

    KEY: ClassVar[str] = ""
    MEMBERS: ClassVar[list[Any]] = []  # the built-in kinds of a section whose type `kind` decides
    DECIDED_BY: ClassVar[Mapping[str, str]] = {}  # properties that keys need -> the keys that decide them

    def __init_subclass__(cls, **options: Any) -> None:
        if cls.KEY:
            _SECTIONS.append(cls)

    def __post_init__(self) -> None:
        lines: list[str] = []
        faulty: list[str] = []
        prefix = self._prefix()
        for option in fields(self):
            name = option.name
            hint = hints_of(type(self))[name]
            try:
                value = read_value(hint, getattr(self, name), prefix + name)
            except ConfigError as error:
                lines += error.problems
                faulty.append(prefix + name + ("." if section_in(hint) else ""))
                value = default_of(option)
            object.__setattr__(self, name, value)
        self._resolve()
        # a faulty value has been replaced by its default, so that further faults of its key mean nothing
        for line in (*self._unmet_needs(), *self._faults()):
            if not any(path in line for path in faulty):
                lines.append(line)
        if lines:
            raise ConfigError(*dict.fromkeys(lines))

    def _prefix(self) -> str:
        return f"{self.KEY}." if self.KEY else ""

    def _set(self, name: str, value: Any) -> None:
        """Resolve a field; only while the section is made."""
        object.__setattr__(self, name, value)

    def _fill(self, **values: Any) -> None:
        """Resolve those fields that are None."""
        for name, value in values.items():
            if getattr(self, name) is None:
                self._set(name, value)

    def _resolve(self) -> None:
        """Set what is left at None from other fields."""

    def _faults(self) -> Iterator[str]:
        """Yield a line for each fault of fields that do not go together, beside those that `needs` states."""
        return iter(())

    def _unmet_needs(self) -> Iterator[str]:
        """Yield a line for each unmet need of fields, here and in the sections inside, of other keys of this section."""
        prefix = self._prefix()
        faulty: set[str] = set()  # keys that are to be left out: what else they need does not matter
        for path, value, need in _needs_in(self, prefix):
            is_full_name = need.key == "task" or need.key.startswith(_ROOTS)
            target = need.key if is_full_name else _join(path.rpartition(".")[0], need.key)
            name = target.removeprefix(prefix)
            first = name.partition(".")[0]
            is_inside = path.removeprefix(prefix).partition(".")[0] == first  # a section inside looks at it
            if is_inside or path in faulty or not target.startswith(prefix):
                continue
            try:
                other_value = operator.attrgetter(name)(self)
            except AttributeError:  # a section of another task, which has no such key
                continue
            if not need.holds(other_value):
                faulty |= {path} if need.sign else set()
                yield f"{path}: {_describe_unmet(need, target, value, other_value, self.DECIDED_BY.get(name))}"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], key: str | None = None) -> Self:
        """Build a section from a mapping that may hold further ones; raise ConfigError with every fault and its full key."""
        key = cls.KEY if key is None else key
        if not isinstance(raw, Mapping):
            known = sorted(keys_of(cls))
            listed = f" ({', '.join(known)})" if len(known) <= _MOST_LISTED else ""
            raise ConfigError(f"{key or 'a configuration'}: a section of keys{listed}, given {raw!r}")
        member: type[Self] = cls
        if issubclass(cls, ByKind):
            member = cls.member(raw, key)
            raw = {name: value for name, value in raw.items() if not member.says_nothing(name, value)}
        values = {name: value for name, value in raw.items() if name in hints_of(member)}
        lines = [_describe_unknown(member, key, name, value) for name, value in raw.items() if name not in values]
        try:
            section: Self = type.__call__(member, **values)
        except ConfigError as error:
            lines += [line.replace(cls.KEY, key) if cls.KEY else _join(key, line) for line in error.problems]
        if lines:
            raise ConfigError(*dict.fromkeys(lines))
        return section

    def to_dict(self) -> dict[str, Any]:
        """Return all keys as plain values, mappings and lists, from which `from_dict` builds the section again."""
        return dataclasses.asdict(self)


_SECTIONS: list[type[Section]] = []  # those with a place of their own, whose keys an unknown key may mean
_LEAST_SIMILARITY = 0.55  # of a key that an unknown one may mean
_MOST_LISTED = 12  # keys of a section
_ROOTS = ("model.", "data.", "train.", "eval.")


def default_of(option: dataclasses.Field[Any]) -> Any:
    """Return the value of a key that is not given."""
    return option.default if option.default_factory is dataclasses.MISSING else option.default_factory()


def _needs_in(section: Section, prefix: str) -> Iterator[tuple[str, Any, Need]]:
    for option in fields(section):
        value = getattr(section, option.name)
        path = prefix + option.name
        for need in option.metadata.get("needs", ()):
            is_given = value is not None and value != default_of(option)
            if need.only == _word(value) if need.only else is_given:
                yield path, value, need
        if isinstance(value, Section):
            yield from _needs_in(value, f"{path}.")
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, Section):
                    yield from _needs_in(item, item._prefix())


def _describe_unmet(need: Need, target: str, value: Any, other: Any, decided_by: str | None) -> str:
    shown = "this section" if isinstance(value, Section) else repr(value)
    if not need.sign:
        return f"{need.describe(target)}, given {shown}; set {target}"
    name = target if decided_by is None else target.rpartition(".")[2].replace("_", " ")
    return f"{need.describe(name)}, given {shown} with '{_word(other)}'; leave it out or change {decided_by or target}"


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def keys_of(cls: type[Section]) -> dict[str, Any]:
    """Return every key of a section, of all its kinds, with its type."""
    keys: dict[str, Any] = {}
    for kind in (cls, *cls.MEMBERS):
        keys = hints_of(kind) | keys
    return keys


def iterate_keys(cls: type[Section], section: str = "") -> Iterator[str]:
    """Yield the full names of all keys of a class of sections that stands at `section`, and of the sections inside it."""
    for name, hint in keys_of(cls).items():
        yield _join(section, name)
        if inner := section_in(hint):
            yield from iterate_keys(inner, _join(section, name))


def _describe_unknown(cls: Any, key: str, name: Any, value: Any) -> str:
    """Describe a key that a section at `key` lacks: name the kinds that have it, or the nearest key, here or elsewhere."""
    path = _join(key, str(name))
    if not isinstance(name, str):
        return f"{path}: keys should be strings, given {name!r}"
    if kinds := [f"`{key}.kind: {member.kind}`" for member in cls.MEMBERS if name in hints_of(member)]:
        shown = f"given {value!r} with '{cls.kind}'"
        return f"{path}: goes with {' or '.join(sorted(kinds))}, {shown}; leave it out or change {key}.kind"
    if any(section.KEY == cls.KEY and name in hints_of(section) for section in _SECTIONS):
        return f"{path}: a key of another task, given {value!r}; leave it out"
    keys = [*iterate_keys(cls, key)]
    if cls.KEY:
        keys += [_join(section.KEY, leaf) for section in _SECTIONS for leaf in hints_of(section)]
    leaves = {other: other.rpartition(".")[2] for other in keys if other != path}
    name = translate_name(name.lower(), leaves.values())

    def compare(name: str, other: str) -> float:
        return difflib.SequenceMatcher(None, name, other).ratio()

    scores = {other: compare(name, leaf) for other, leaf in leaves.items()}
    nearest = max(scores, key=lambda other: scores[other] + compare(path, other))
    known_keys = sorted(keys_of(cls))
    if scores[nearest] >= _LEAST_SIMILARITY or len(known_keys) > _MOST_LISTED:
        return f"unknown key '{path}'; did you mean '{nearest}'?"
    return f"unknown key '{path}'; known here: {', '.join(known_keys)}"


@dataclass(frozen=True, kw_only=True)
class ByKind(Section):
    """A section whose type `kind` decides: each kind is a subclass with its own keys.

        AttentionConfig(kind="multilinear", rank=40)     # a MultiLinearConfig

    Keys of other kinds may be given too, if they are null, off or at their default.
    A kind that a user registers in the slot `SLOT` has the keys of its nested `Config`, a subclass of the section, or else
    those that all kinds have.
    """

    SLOT: ClassVar[str]
    kind: str = ""

    def __init_subclass__(cls, built_in: bool = False) -> None:
        super().__init_subclass__()
        if ByKind in cls.__bases__:
            cls.MEMBERS = []
        elif built_in:
            cls.MEMBERS.append(cls)

    @classmethod
    def says_nothing(cls, name: str, value: Any) -> bool:
        """Return whether the key is null, or one of other kinds that is off or has its default."""
        if value is None:
            return True
        defaults = {option.name: default_of(option) for kind in cls.MEMBERS for option in fields(kind)}
        is_foreign = name in defaults and name not in hints_of(cls)
        return is_foreign and value in (False, [], defaults[name])

    @classmethod
    def member(cls, raw: Mapping[str, Any], key: str) -> type[Any]:
        """Find the subclass that `raw` describes; raise ConfigError for an unknown kind."""
        kind = raw.get("kind") or cls.kind
        for built_in in cls.MEMBERS:
            if built_in.kind == kind:
                return built_in
        built_in_kinds = [member.kind for member in cls.MEMBERS]
        stage = registry.lookup(cls.SLOT, str(kind), f"{key}.kind", built_in_kinds)
        config = getattr(stage, "Config", None)
        return config if config is not None and issubclass(config, cls) else cls
