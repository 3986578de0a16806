"""Small files that appear whole or not at all, JSON that is what it was, and YAML without surprises."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fullrank.core.errors import InputError, RunError, one_line
from fullrank.core.section import read_value

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that of libyaml is ten times as fast
# the end of the name of what is being written: the process, a draw of letters
_TEMPORARY = re.compile(r"\.(\d+)(\.\w{8})?$")
_HALVES = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(f"{_HALVES.pattern}|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all but tab and the ends of lines


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove `.NAME.PID` and `.NAME.PID.LETTERS` in `folder`: a process that was killed was writing them, not a live one."""
    for path in folder.glob(f".{name}.*"):
        match = _TEMPORARY.search(path.name)
        if match is None or is_alive(int(match[1])):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True


def silent(text: str) -> None:
    """A remark that nobody hears: `--quiet`."""


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step; RunError if that fails, and then an older file is untouched."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` in one step; RunError if that fails, and then an older file is untouched."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, glob.escape(path.name))
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        reason = "no space left on the disk" if no_room(error) else error.strerror
        raise RunError(f"{path}: cannot be written ({reason}); what was there before is unchanged") from error


def write_own(path: Path, text: str, mark: str, what: str) -> None:
    """Write a file that begins with `mark`, as `write_text` does; InputError where another file of that name is.

    what: stands in the error, `a report`.
    """
    if path.is_file() and path.stat().st_size and not path.read_bytes().startswith(mark.encode()):
        raise InputError(
            f"{path}: exists and is not {what} of fullrank, so it is left alone; give another --out, or move it"
        )
    write_text(path, text)


def as_json(content: Any) -> str:
    """`content` as indented JSON that every reader takes: a number that is not finite becomes null, see also `mended`."""
    return mended(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON in one step; a number that is not finite becomes null."""
    write_text(path, as_json(content) + "\n")


def read_text(path: Path) -> str:
    """The text of a file that a user gives, see `text_of`; InputError if it cannot be read."""
    return text_of(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def text_of(data: bytes, name: str, offset: int = 0, *, line: int = 0, hint: str = "") -> str:
    """The text of UTF-8 bytes from `offset` of a file or stream, with its byte-order mark off and `with_newlines`.

    Raises InputError with the first byte that is not UTF-8, and with the number of the `line` where it is known.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"line {line:,} has the byte" if line else "byte"
        raise InputError(
            f"{name} is not UTF-8 text: {where} 0x{data[error.start]:02x} at offset {offset + error.start:,} (convert the "
            f"file to UTF-8, for instance with `iconv -f latin1 -t utf-8`{hint})"
        ) from None
    return with_newlines(text if offset else text.removeprefix("\ufeff"))


def with_newlines(text: str) -> str:
    """`text` with a newline for each line end. A carriage return, alone or before a newline, is a line end; U+2028 is none.

    Lines of a text are split at newlines, never by `splitlines`.
    """
    return text.replace("\r\n", "\n").replace("\r", "\n")


def mended(content: Any) -> Any:
    """Text with U+FFFD for every half of a surrogate pair, which no file can hold; also within lists and mappings."""
    if isinstance(content, str):
        return _HALVES.sub("\N{REPLACEMENT CHARACTER}", content)
    if isinstance(content, Mapping):
        return {mended(key): mended(value) for key, value in content.items()}
    if isinstance(content, list):
        return [mended(value) for value in content]
    return content


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def visible(text: str) -> str:
    """`text` with control characters and half surrogates written out: a name must not send commands to the terminal."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def python_command(words: Iterable[str]) -> list[str]:
    """The command line of `python WORDS` in a process of its own, which imports nothing from the working directory (-P)."""
    return [sys.executable, "-P", *words]


def usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def out_of_memory(error: BaseException) -> bool:
    """True for the errors by which Python, the system, PyTorch on a CPU, PyTorch on a GPU and safetensors say so."""
    if isinstance(error, MemoryError):
        return True
    words = ("can't allocate memory", "cannot allocate memory", "out of memory", "(os error 12)")
    return any(word in str(error).lower() for word in words)


def no_room(error: BaseException) -> bool:
    """True for the errors by which the system, safetensors and tokenizers say that the disk, or one's share of it, is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    message = str(error).rstrip(")")
    return message.endswith(("(os error 28", "(os error 122"))


def parse_json(text: str | bytes) -> Any:
    """A JSON value; a number that is not finite, which JSON does not have, is null. ValueError if it is damaged."""
    return json.loads(text, parse_constant=lambda constant: None)


def convert_to_record(kind: Any, text: str | bytes, where: object) -> Any:
    """JSON as the type `kind` has it, a TypedDict or `dict[str, Any]` (see `core.section`).

    Keys that a TypedDict does not have stay. InputError names `where`, the key, what is allowed there and what was given.
    """
    try:
        return read_value(kind, parse_json(text), "")
    except ValueError as error:
        reason = one_line(error).removeprefix(": ")
        raise InputError(f"{where}: damaged ({reason})") from None


def read_json(path: Path, kind: Any = dict[str, Any]) -> Any:
    """The content of a JSON file as the type `kind` has it; InputError names file and key (`convert_to_record`)."""
    return convert_to_record(kind, _read_bytes(path), path)


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps({**content, "sha256": digest(content)}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_checked(path: Path) -> dict[str, Any]:
    """The content that `write_checked` wrote; ValueError if it was changed since."""
    content: dict[str, Any] = read_json(path)
    if content.pop("sha256", None) != digest(content):
        raise ValueError("it does not match its checksum")
    return content


# YAML


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
