"""English prose from the running Python: language reference, docstrings and comments of the standard library.

Needs no download. One document per help topic and per module, split by a hash of the document's name, so that a module
stays in its split from one Python version to the next. The text itself differs between versions (and between builds that
strip documentation): results are comparable only with the same content hash, which is recorded.
Left out: tests, idlelib, lib2to3, the character tables of codecs (no prose), and lines that repeat across documents.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import platform
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fullrank.core.errors import InputError

SPLITS = ("train", "valid", "test")
_FEWEST_WORDS = 200_000  # an unstripped Python has about 550,000
_SKIPPED = {
    "__pycache__", "_bundled", "dist-packages", "idle_test", "idlelib", "lib-dynload", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests",
}  # fmt: skip
_PLATFORM = ("_sysconfigdata", "sitecustomize", "usercustomize", "_distutils_system_mod")  # written by distributors
_LETTER = re.compile(r"[^\W\d_]")
_ITEM = re.compile(r"(?:[-*+•]|\(?\d+[.)]|>>>|\.\.\.)(?:\s|$)")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z(\"'`*])")
_NO_PROSE = re.compile(r"!|\s*(?:-\*-|type:|noqa|pragma:|pylint:|fmt:|mypy:|vi:|vim:)")
_TABLE = re.compile(rb"^(?:decoding_table|decoding_map)\b", re.MULTILINE)  # codecs: a comment for each character
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
_LONG = 6  # words from which an identical line counts as boilerplate rather than as a phrase


def modules() -> list[tuple[str, Path]]:
    """(dotted name, source file) of every module of the standard library but tests, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED.isdisjoint(parts) and not parts[-1].startswith(_PLATFORM) and not parts[0].startswith("config-"):
            found.append((".".join(parts), path))
    return sorted(found)


def topics() -> dict[str, str]:
    """The language reference as `help()` shows it; empty where the distribution left it out."""
    try:
        from pydoc_data.topics import topics as found
    except ImportError:
        return {}
    return dict(found)


def compiled_docstrings(name: str) -> list[str]:
    """Docstrings of a module that is part of the interpreter, of its functions and classes, and of their methods."""
    texts: dict[str, None] = {}

    def add(item: object) -> None:
        text = getattr(item, "__doc__", None)
        if isinstance(text, str) and text:
            texts.setdefault(text)

    module = importlib.import_module(name)
    add(module)
    for _, member in sorted(vars(module).items()):
        if inspect.isclass(member):
            add(member)
            for _, inner in sorted(vars(member).items()):
                if inspect.isroutine(inner) or inspect.isdatadescriptor(inner):
                    add(inner)
        elif inspect.isroutine(member):
            add(member)
    return list(texts)


def signature() -> str:
    """A sha256 over everything the text is made from, and over the Python version."""
    digest = hashlib.sha256(f"{platform.python_implementation()} {sys.version} {sys.builtin_module_names}".encode())
    for name, text in sorted(topics().items()):
        digest.update(f"\0{name}\0{hashlib.sha256(text.encode()).hexdigest()}".encode())
    for name, path in modules():
        digest.update(f"\0{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def split_of(document: str) -> str:
    """train, valid or test (about 90, 5 and 5 of 100 documents), from the name alone."""
    percent = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") % 100
    return "train" if percent < 90 else "valid" if percent < 95 else "test"


def _comments(source: bytes) -> Iterator[tuple[int, str]]:
    """(line, text) of comments; whole-line comments that follow each other are one text."""
    block: list[str] = []
    start, last, column = 0, -2, -1
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type != tokenize.COMMENT or _NO_PROSE.match(token.string[1:]):
            continue
        line, at = token.start
        alone = not token.line[:at].strip()
        if not (alone and line == last + 1 and at == column):
            if block:
                yield start, "\n".join(block)
            block, start = [], line
        block.append(token.string.lstrip("#").rstrip())
        last, column = line, at if alone else -1
    if block:
        yield start, "\n".join(block)


def _docstrings(source: bytes) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a module, its classes and its functions."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, text
        for inner in _BLOCKS:  # expressions hold no docstrings: not looking into them is three times faster
            waiting.extend(getattr(node, inner, ()))


def sentences(text: str) -> Iterator[str]:
    """Paragraphs unwrapped and cut after sentences; list items and examples stay lines; lines without a letter go."""
    paragraph: list[str] = []
    indent = 0
    hanging = example = False  # the paragraph is a list item of one line so far; the last line was an example

    def flush() -> Iterator[str]:
        for sentence in _SENTENCE.split(" ".join(paragraph)):
            if _LETTER.search(sentence):
                yield sentence
        paragraph.clear()

    for line in inspect.cleandoc(text).split("\n"):
        words = line.split()
        here = len(line) - len(line.lstrip())
        item = _ITEM.match(line.lstrip())
        goes_on = here > indent if hanging else here == indent
        if not words or not goes_on or item or example or not _LETTER.search(line):
            yield from flush()
        example = bool(item) and words[0] in (">>>", "...")
        indent, hanging = here, bool(item) and not example
        paragraph.extend(words)
    yield from flush()


def module_lines(source: bytes) -> list[str]:
    """Docstrings and comments of one source file, in the order in which they stand there; none of a codec's table."""
    if _TABLE.search(source):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old sources hold invalid escapes
        try:
            texts = sorted([*_docstrings(source), *_comments(source)])
        except (SyntaxError, ValueError, tokenize.TokenError):  # a template, or text for another Python
            return []
    return [line for _, text in texts for line in sentences(text)]


def documents() -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of every document: topics, then modules of the interpreter, then modules with a source file."""
    for name, text in sorted(topics().items()):
        yield f"topics/{name}", list(sentences(text))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecated module warns on import
        for name in sorted(sys.builtin_module_names):
            yield name, [line for text in compiled_docstrings(name) for line in sentences(text)]
    for name, path in modules():
        yield name, module_lines(path.read_bytes())


def without_repeats(found: Iterable[tuple[str, list[str]]]) -> Iterator[tuple[str, list[str], int]]:
    """(name, lines, lines dropped): a line of six or more words stays only in the first document that has it."""
    seen: dict[str, str] = {}
    for name, lines in found:
        kept = []
        for line in lines:
            key = line.casefold()
            if len(line.split()) < _LONG or seen.setdefault(key, name) == name:
                kept.append(line)
        yield name, kept, len(lines) - len(kept)


def write(folder: Path) -> Mapping[str, object]:
    """Write `train.txt`, `valid.txt`, `test.txt` into `folder`: a sentence a line, an empty line after each document.

    Returns what to record: Python version, content hash, documents per split, repeated lines dropped.
    Raises InputError where the distribution of Python ships (almost) no documentation.
    """
    digest = hashlib.sha256()
    counts = dict.fromkeys(SPLITS, 0)
    dropped = words = 0
    files = {split: (folder / f"{split}.txt").open("w", encoding="utf-8", newline="\n") for split in SPLITS}
    try:
        for name, lines, repeats in without_repeats(documents()):
            dropped += repeats
            if not lines:
                continue
            text = "".join(f"{line}\n" for line in lines) + "\n"
            words += len(text.split())
            split = split_of(name)
            counts[split] += 1
            digest.update(f"{split}\0{name}\0{text}".encode())
            files[split].write(text)
    finally:
        for file in files.values():
            file.close()
    if words < _FEWEST_WORDS or not all(counts.values()):
        raise InputError(
            f"data.name: 'builtin' reads the documentation of the running Python, and {sys.executable} (Python "
            f"{platform.python_version()}) ships almost none ({words:,} words in {len(topics())} help topics and "
            f"{len(modules())} modules): the distribution stripped it. "
            "Use another Python, or data.name=text with data.train=FILE"
        )
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "content_sha256": digest.hexdigest(),
        "documents": counts,
        "repeated_lines_dropped": dropped,
        "help_topics": len(topics()),
    }
