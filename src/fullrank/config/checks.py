"""What the dataclasses of the configuration have in common: checks that collect every fault, and strictness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar

from fullrank.config import registry
from fullrank.errors import ConfigError, suggest

# A stage by name, or `{name: ..., option: value}` where its class declares a nested `Config` dataclass of options.
Stage = str | dict[str, Any]
Probability = float

SIZES = 2**31  # sizes are below this: what a tensor's dimension may reasonably be
COUNTS = 2**63  # and counts and seeds below this
THREADS = 1024


def stage_name(stage: Stage) -> str:
    """The name of a stage given as a bare word or as `{name: ..., ...}`."""
    return stage if isinstance(stage, str) else str(stage.get("name", ""))


def stage_options(stage: Stage) -> dict[str, Any]:
    """The options of a stage given as `{name: ..., ...}`; a bare word has none."""
    return {} if isinstance(stage, str) else {key: value for key, value in stage.items() if key != "name"}


def check_stage(problems: list[str], slot: str, stage: Stage, key: str) -> None:
    try:
        found = registry.lookup(slot, stage_name(stage), key)
    except ConfigError as error:
        problems.extend(error.problems)
        return
    options = stage_options(stage)
    if options:
        config = getattr(found, "Config", None)
        if config is None:
            problems.append(f"{key}: '{stage_name(stage)}' takes no options, given {sorted(options)}")
            return
        known = [option.name for option in fields(config)]
        if unknown := sorted(set(options) - set(known)):
            problems.extend(f"{key}: '{stage_name(stage)}' has no option '{o}'; {suggest(o, known)}" for o in unknown)
            return
        try:
            config(**options)
        except (TypeError, ValueError) as error:
            problems.append(f"{key}: {error}")


def raise_problems(problems: list[str]) -> None:
    if problems:
        raise ConfigError(*problems)


def check_numbers(
    problems: list[str],
    config: object,
    section: str,
    keys: Iterable[str],
    *,
    zero: bool = False,
    below: float = math.inf,
) -> None:
    """A line for every key that is not above 0 (from 0 on with `zero`) and not below `below`; NaN is neither."""
    for key in keys:
        value = getattr(config, key)
        if value is None:
            continue
        if not (value > 0 or (zero and value == 0)):
            problems.append(f"{section}.{key}: {'zero or more' if zero else 'a positive number'}, given {value}")
        elif not value < below:
            limit = "a finite number" if below == math.inf else f"below {below:,}"
            problems.append(f"{section}.{key}: {limit}, given {value}")


class Strict:
    """Read by pydantic: an unknown key is an error, a number may stand for a string."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "coerce_numbers_to_str": True}
