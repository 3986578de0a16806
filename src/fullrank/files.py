"""Files that appear whole or not at all, JSON that is what it was, YAML without surprises, and texts read in pieces."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import yaml

from fullrank.core.errors import InputError, RunError, one_line

logger = logging.getLogger(__name__)

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that of libyaml is ten times as fast
_HALVES = re.compile("[\ud800-\udfff]")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step; RunError if that fails, and then an older file is untouched."""
    write_bytes(path, text.encode("utf-8"))


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` in one step; RunError if that fails, and then an older file is untouched."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(content)
        sync(fresh)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        if error.errno == errno.ENAMETOOLONG:  # of a name that the user chose
            raise
        reason = "no space left on the disk" if no_room(error) else error.strerror
        raise RunError(f"{path}: cannot be written ({reason}); what was there before is unchanged") from error


def write_own(path: Path, text: str, mark: str, kind: str) -> None:
    """Write a file that begins with a mark, as `write_text` does, unless another file of that name is there.

    Args:
        path: the file.
        text: its content.
        mark: how it begins.
        kind: what it is, for the error: `a report`.

    Raises:
        InputError: there is a file, not an empty one, that begins otherwise.
        RunError: the file cannot be written.
    """
    if path.is_file() and path.stat().st_size and not path.read_bytes().startswith(mark.encode()):
        raise InputError(
            f"{path}: exists and is not {kind} of fullrank, so it is left alone; give another --out, or move it"
        )
    write_text(path, text)


def as_json(content: Any) -> str:
    """Format `content` as indented JSON that every reader takes: a number that is not finite becomes null; see `mended`."""
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
    """Read the text of a file that a user gives, see `text_of`; InputError if it cannot be read."""
    return text_of(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def text_of(data: bytes | bytearray, name: str, offset: int = 0, *, line: int = 0, hint: str = "") -> str:
    """Decode UTF-8, take off its byte-order mark, and end lines by `with_newlines`.

    Args:
        data: the bytes.
        name: what they are, for the error.
        offset: their place in the file or stream; a byte-order mark is taken off at 0 only.
        line: number of the line, from 1; 0 if unknown.
        hint: a further way to mend it, for the error.

    Returns:
        The text.

    Raises:
        InputError: with the first byte that is not UTF-8, and with the number of the line where it is known.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"line {line:,} has the byte" if line else "byte"
        encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin1"
        raise InputError(
            f"{name} is not UTF-8 text: {where} 0x{data[error.start]:02x} at offset {offset + error.start:,} (convert the "
            f"file to UTF-8, for instance with `iconv -f {encoding} -t utf-8`{hint})"
        ) from None
    return with_newlines(text if offset else text.removeprefix("\ufeff"))


def with_newlines(text: str) -> str:
    """Replace each line end by a newline: a carriage return, alone or before a newline, is a line end; U+2028 is none.

    Lines of a text are split at newlines, never by `splitlines`.
    """
    return text.replace("\r\n", "\n").replace("\r", "\n")


def mended(content: Any) -> Any:
    """Replace every half of a surrogate pair, which no file can hold, by U+FFFD; also within lists and mappings."""
    if isinstance(content, str):
        return _HALVES.sub("\N{REPLACEMENT CHARACTER}", content)
    if isinstance(content, Mapping):
        return {mended(key): mended(value) for key, value in content.items()}
    if isinstance(content, list):
        return [mended(value) for value in content]
    return content


def sha256_of(path: Path) -> str:
    """Compute the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def python_command(words: Iterable[str]) -> list[str]:
    """Build the command line of `python WORDS` in a process of its own.

    It imports nothing from the working directory (-P).
    """
    return [sys.executable, "-P", *words]


def usable_cores() -> list[int]:
    """List the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def is_distributed() -> bool:
    """Return whether this is one of several processes, as torchrun starts them."""
    return read_variable("WORLD_SIZE", 1) > 1


def is_main_process() -> bool:
    """Return whether this is the first of several processes, also before and after they form a group, or the only one."""
    return not is_distributed() or read_variable("RANK", 0) == 0


def read_variable(name: str, default: int) -> int:
    """Read a number from the environment."""
    return int(os.environ.get(name, default))


def out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that memory ran out.

    It may be of Python, the system, PyTorch on a CPU, PyTorch on a GPU, or safetensors.
    """
    if isinstance(error, MemoryError):
        return True
    words = ("can't allocate memory", "cannot allocate memory", "out of memory", "(os error 12)")
    return any(word in str(error).lower() for word in words)


def no_room(error: BaseException) -> bool:
    """Return whether the error means that the disk, or the user's share of it, is full.

    It may be of the system, safetensors, or tokenizers.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    message = str(error).rstrip(")")
    return message.endswith(("(os error 28", "(os error 122"))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; a number that is not finite, which JSON does not have, is null. ValueError if it is damaged."""
    return json.loads(text, parse_constant=lambda constant: None)


def parse_mapping(text: str | bytes, where: object) -> dict[str, Any]:
    """Parse a JSON object; InputError names `where` it stands and what is wrong with it."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise InputError(f"{where}: damaged ({one_line(error)})") from None
    if not isinstance(content, dict):
        raise InputError(f"{where}: damaged (an object of JSON is needed, given {type(content).__name__})")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; InputError if it is no object or cannot be read."""
    return parse_mapping(_read_bytes(path), path)


def digest(content: Any) -> str:
    """Compute the sha256 of plain values, as JSON has them; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values as JSON with their sha256, which `read_checked` compares."""
    text = json.dumps({**content, "sha256": digest(content)}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_checked(path: Path) -> dict[str, Any]:
    """Read the content that `write_checked` wrote; ValueError if it was changed since."""
    content = read_json(path)
    if content.pop("sha256", None) != digest(content):
        raise ValueError("it does not match its checksum")
    return content


# YAML


class _UniqueKeys(SafeLoader):
    """YAML without silent surprises: a key given twice is an error, and `1e-3` is a number."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = []
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *base`; the keys it brings may be replaced
            continue
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
        seen.append(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_UniqueKeys` would read as numbers."""


# YAML 1.1 takes 1e-3 for a word; people, and YAML 1.2, take it for a number
for _kind in (_UniqueKeys, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, origin: str) -> Any:
    """Parse YAML as plain objects; InputError names `origin` and the place of a syntax error."""
    try:
        return yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a day 30 of February, endless digits
        raise InputError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error


def format_yaml(value: Any, **options: Any) -> str:
    """Format plain objects as YAML that `parse_yaml` reads back, keys in their order; options: those of `yaml.dump`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options)


# -- text in pieces, processes, and folders of the cache ---------------------------------------------------------------

Entries = dict[str, Any]  # of a JSON document, or of a part of one
Item = TypeVar("Item")
Result = TypeVar("Result")
_PIECE = 1 << 20
_LONGEST_LINE = 16 << 20  # a longer line is cut
_PARENT_DIED = 1  # PR_SET_PDEATHSIG of prctl(2)


def open_text(path: Path, key: str) -> BufferedReader:
    """Open a file for reading; InputError if it is missing, a folder or empty."""
    if not path.is_file():
        problem = "a folder or a device, no file" if path.exists() else "no such file"
        raise InputError(f"{key}: {problem}: {path}")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be read ({error.strerror})") from error
    if path.stat().st_size == 0:
        file.close()
        raise InputError(f"{key}: {path} is empty")
    return file


def file_digest(path: Path, key: str) -> str:
    """Compute the sha256 of a file; errors as in `open_text`."""
    with open_text(path, key) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lines(path: Path, key: str, start: int = 0, end: int | None = None) -> Iterator[str]:
    """Yield the lines of a text file, without their ends.

    Only a newline ends a line: a carriage return becomes white space, so that line k of one file stays the translation of
    line k of another.

    Args:
        path: the file.
        key: configuration key that names it, for errors.
        start: offset of the first byte.
        end: offset after the last byte; None for the end of the file.

    Yields:
        One line after another.

    Raises:
        InputError: the file is missing, a folder, empty, or not UTF-8.
    """
    offset = start
    with open_text(path, key) as file:
        file.seek(start)
        for number, line in enumerate(file, start=1):
            if end is not None and offset >= end:
                break
            text = text_of(line, f"{key}: {path}", offset, line=0 if start else number)
            offset += len(line)
            yield text.removesuffix("\n").replace("\n", " ")


def count_lines(path: Path, key: str) -> int:
    """Count the lines of a file; one without an end at the end of the file counts."""
    count = 0
    last_block = b""
    with open_text(path, key) as file:
        while block := file.read(_PIECE):
            last_block = block
            count += block.count(b"\n")
    return count + (not last_block.endswith(b"\n"))


@dataclass(frozen=True)
class Section:
    """A file, or the bytes [start, end) of it."""

    path: Path
    start: int = 0
    end: int | None = None

    @property
    def size(self) -> int:
        """Bytes of it."""
        end = self.path.stat().st_size if self.end is None else self.end
        return end - self.start


class Piece(NamedTuple):
    """About a megabyte of a text. `size`: its bytes in the file.

    `begins`: it begins at the beginning of a line. `open_end`: it is the end of its section, and no newline ends it.
    """

    text: str
    size: int
    begins: bool
    open_end: bool


def read_pieces(section: Section, *, exact: bool, key: str = "data.train") -> Iterator[Piece]:
    """Yield the text of a section in pieces.

    A piece ends after a newline that no token spans, or in a very long line before a space.

    Args:
        section: the text.
        exact: accept any bytes; those that are not UTF-8 become lone surrogates ("surrogateescape"). Otherwise the text is as
            `text_of` gives it, and a section that begins or ends inside a character is moved to the next one.
        key: configuration key that names the file, for errors.

    Yields:
        Pieces of about a megabyte.

    Raises:
        InputError: the file is missing, a folder, or empty, becomes shorter, or is not UTF-8 and `exact` is False.
    """
    with open_text(section.path, key) as file:
        start = section.start
        end = section.start + section.size
        if not exact:
            start = _find_character(file, start)
            end = _find_character(file, end)
        file.seek(start)
        begins = True
        while start < end:
            data = bytearray(file.read(min(_PIECE, end - start)))
            if not data:
                raise InputError(f"{key}: {section.path} became shorter while it was read")
            while not _ends_between_words(data, file) and start + len(data) < end and len(data) < _LONGEST_LINE:
                data += file.readline(min(_LONGEST_LINE, end - start - len(data)))
            if start + len(data) < end and not data.endswith(b"\n"):
                data = data[: _find_cut(data)]
                file.seek(start + len(data))
            if exact:
                text = data.decode("utf-8", "surrogateescape")
            else:
                text = text_of(data, f"{key}: {section.path}", start, hint=", or use data.tokens=byte")
            start += len(data)
            yield Piece(text, len(data), begins, start >= end and not text.endswith("\n"))
            begins = text.endswith("\n")


def _ends_between_words(data: bytearray, file: BufferedReader) -> bool:
    """Return whether data ends with a newline that no token of tokenizers like those of GPT-2 and Llama 3 spans.

    Either a word follows the newline, which has no white space before it, or one space and a word follow.
    """
    if not data.endswith(b"\n"):
        return False
    before = data[-8:].removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "ignore")
    following = file.peek(8)[:8].decode("utf-8", "ignore")
    if following.startswith(" "):
        return len(following) > 1 and not following[1].isspace()
    return not following[:1].isspace() and not before[-1:].isspace()


def _find_character(file: BufferedReader, offset: int) -> int:
    """Find the offset at which the next character begins: at most three bytes further on."""
    file.seek(offset)
    while (byte := file.read(1)) and _continues(byte[0]):
        offset += 1
    return offset


def _continues(byte: int) -> bool:
    """Return whether a byte is the second, third or fourth of a UTF-8 character."""
    return byte & 0xC0 == 0x80


def _find_cut(data: bytearray) -> int:
    """Find the end of a piece of a very long line: before its last space, else between characters."""
    cut = data.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(data) - 1
    while cut > 1 and _continues(data[cut]):
        cut -= 1
    return cut


def cut_files(
    paths: Sequence[Path], shares: Sequence[float], key: str, *, unit: str = "lines", most: int | None = None
) -> list[list[Section]]:
    """Cut the lines or bytes of files, in order, into consecutive parts.

    Args:
        paths: the files.
        shares: of each part in the total; the first part has what the others leave, the others one line or byte at least.
        key: configuration key that names the files, for errors.
        unit: what is counted and cut, `lines` or `bytes`.
        most: the most of them in a part after the first; None: no limit.

    Returns:
        The sections of each part.

    Raises:
        InputError: there are too few for every part to have one, or a file is missing, a folder, or empty.
    """
    by_lines = unit == "lines"
    counts = [count_lines(path, key) if by_lines else path.stat().st_size for path in paths]
    total = sum(counts)
    sizes = [max(1, min(int(total * share), most or total)) for share in shares[1:]]
    if total <= sum(sizes):
        raise InputError(
            f"{key}: {', '.join(map(str, paths))}: {total} {unit} are too few to cut {len(shares)} splits from; "
            "give files for data.valid and data.test"
        )
    borders = [0, *itertools.accumulate(sizes, initial=total - sum(sizes))]
    sections: list[list[Section]] = [[] for _ in shares]
    offset = 0  # lines or bytes of the files before
    for path, count in zip(paths, counts, strict=True):
        for part, (low, high) in zip(sections, itertools.pairwise(borders), strict=True):
            start = max(low - offset, 0)
            end = min(high - offset, count)
            if start < end:
                if by_lines:
                    start = _find_line(path, start)
                    end = _find_line(path, end)
                part.append(Section(path, start, end))
        offset += count
    return sections


def _find_line(path: Path, number: int) -> int:
    """Find the byte offset at which line `number` of a file begins, counted from 0."""
    with path.open("rb") as file:
        return sum(map(len, itertools.islice(file, number)))


# work on the pieces of a text: in a process for each core, with a progress bar

_work: Callable[[Any], Any]  # of a forked process, which shares the memory of its parent, such as a vocabulary


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of `size` items, of which the last may have fewer (`itertools.batched` of Python 3.12)."""
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch


def map_in_processes(
    work: Callable[[Item], Result], items: Iterable[Item], size: int = 1, *, alone: bool = False
) -> Generator[Result, None, None]:
    """Yield `work` of each item, in order, by a process for each core. Few items are under way at a time.

    This process works alone where there is one core, where one group of `size` items is all, and where processes cannot be
    forked safely.

    Args:
        work: what is done with an item.
        items: read as they are needed.
        size: items that a process gets at once.
        alone: use this process only.

    Yields:
        The results.

    Raises:
        RunError: a process was killed.
    """
    cores = len(usable_cores()) if sys.platform == "linux" and not alone else 1
    groups = batched(items, size)
    first_groups = list(itertools.islice(groups, 2))
    groups = itertools.chain(first_groups, groups)
    if cores < 2 or len(first_groups) < 2:
        yield from map(work, itertools.chain.from_iterable(groups))
        return
    waiting = deque[Future[list[Result]]]()
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(cores, fork, initializer=_start_worker, initargs=(work,)) as pool:
            for group in groups:
                with warnings.catch_warnings():  # of threads of PyTorch, which the new processes do not use
                    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                    waiting.append(pool.submit(_run_work, group))
                if len(waiting) > 2 * cores:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RunError(
            "a process that was making token ids was killed (by the system, for want of memory?); on fewer cores (taskset) "
            "the same command needs less memory"
        ) from error


def _start_worker(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)  # not to outlive that process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of that library do not come along


def _run_work(group: list[Any]) -> list[Any]:
    return [_work(item) for item in group]


def show_progress(pieces: Iterable[Piece], description: str, total: int) -> Iterator[Piece]:
    """Yield pieces of a text, with a bar where stderr is a terminal and remarks are logged.

    Args:
        pieces: the text.
        description: what is done with it, in words.
        total: its bytes.

    Yields:
        The pieces, one by one.
    """
    if not (logger.isEnabledFor(logging.INFO) and sys.stderr.isatty()):
        yield from pieces
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(description, total=total)
        for piece in pieces:
            yield piece
            bar.update(task, advance=piece.size, refresh=True)


# folders


def check_folder(folder: Path, contents: str) -> Path:
    """Return the folder of `data.dir`; InputError if it is none. `contents`: the files that it should hold."""
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.exists() else f"no such folder: {folder}"
        raise InputError(f"data.dir: {problem}; give the folder that holds {contents}")
    return folder


def cache_root(cache: str | None) -> Path:
    """Return the folder `data.cache`, else $FULLRANK_CACHE, else ~/.cache/fullrank."""
    root = cache or os.environ.get("FULLRANK_CACHE") or "~/.cache/fullrank"
    return Path(root).expanduser()


@contextmanager
def create_folder(final: Path) -> Iterator[Path]:
    """Run the block with a folder to fill, which gets the name `final` at the end.

    If another process was first, its folder stays. Raises RunError if the disk is full, InputError if the cache cannot be
    written.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".new-", dir=final.parent, ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary) / final.name
            folder.mkdir()
            yield folder
            with contextlib.suppress(FileExistsError):
                if not final.exists():
                    folder.rename(final)
    except OSError as error:
        remedy = "set data.cache (or FULLRANK_CACHE) to a folder"
        if no_room(error):
            message = f"no space left on the disk of {final.parent}; free some, or {remedy} on another disk"
            raise RunError(message) from error
        message = f"data.cache: cannot write to {final.parent} ({error.strerror}); {remedy} of yours"
        raise InputError(message) from error
