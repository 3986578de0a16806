"""English prose from the running Python: a corpus that needs no download.

It is the language reference, docstrings and comments of the standard library: one document per help topic and per module, split
by a hash of the document's name, so that a module stays in its split from one Python version to the next. The text itself
differs between versions (and between builds that strip documentation): results are comparable only with the same checksum of
the text, which is recorded. Left out: tests, idlelib, lib2to3, the character tables of codecs (no prose), and lines that repeat
across documents.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import os
import platform
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from fullrank.core.errors import InputError

_FEWEST_WORDS = 200_000  # an unstripped Python has about 550,000
_SKIPPED = {
    "__pycache__", "_bundled", "dist-packages", "idle_test", "idlelib", "lib-dynload", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests",
}  # fmt: skip
_PLATFORM = ("_sysconfigdata", "sitecustomize", "usercustomize", "_distutils_system_mod")  # written by distributors
_LETTER = re.compile(r"[^\W\d_]")
_ITEM = re.compile(r"(?:[-*+•]|\(?\d+[.)]|>>>|\.\.\.)(?:\s|$)")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z(\"'`*])")
_NO_PROSE = re.compile(r"#(?:!|\s*(?:-\*-|type:|noqa|pragma:|pylint:|fmt:|mypy:|vi:|vim:))")
_TABLE = re.compile(rb"^(?:decoding_table|decoding_map)\b", re.MULTILINE)  # codecs: a comment for each character
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
_LONG = 6  # words from which an identical line counts as boilerplate rather than as a phrase


# documents


def list_modules() -> list[tuple[str, Path]]:
    """List (dotted name, source file) of every module of the standard library but tests, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - _SKIPPED  # site-packages may hold far more files than the library
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            if path.stem not in _SKIPPED and not path.stem.startswith(_PLATFORM) and not parts[0].startswith("config-"):
                paths.append((".".join(parts), path))
    return sorted(paths)


def read_topics() -> dict[str, str]:
    """Read the language reference as `help()` shows it; empty where the distribution left it out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return dict(sorted(topics.items()))


def choose_split(document: str) -> str:
    """Choose train, valid or test (about 90, 5 and 5 of 100 documents) by the name alone."""
    percent = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") % 100
    return "train" if percent < 90 else "valid" if percent < 95 else "test"


def read_documents() -> Iterator[tuple[str, list[str]]]:
    """Yield (name, lines) of every document: topics, then modules of the interpreter, then modules with a source file."""
    for name, text in read_topics().items():
        yield f"topics/{name}", list(cut_sentences(text))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecated module warns on import
        for name in sorted(sys.builtin_module_names):
            texts = dict.fromkeys(_read_compiled(importlib.import_module(name)))
            yield name, [line for text in texts for line in cut_sentences(text)]
    for name, path in list_modules():
        yield name, read_module(path.read_bytes())


def _read_compiled(module: object) -> Iterator[str]:
    """Yield the docstrings of a module that is part of the interpreter, of its functions and classes, and of their methods."""
    items = [module]
    for _, member in sorted(vars(module).items()):
        if inspect.isclass(member):
            methods = [inner for _, inner in sorted(vars(member).items())]
            items += [member, *(m for m in methods if inspect.isroutine(m) or inspect.isdatadescriptor(m))]
        elif inspect.isroutine(member):
            items.append(member)
    for item in items:
        if isinstance(text := getattr(item, "__doc__", None), str) and text:
            yield text


def read_module(source: bytes) -> list[str]:
    """Read docstrings and comments of one source file, in the order in which they stand there; none of a codec's table."""
    if _TABLE.search(source):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old sources hold invalid escapes
        try:
            texts = sorted([*_read_docstrings(source), *_read_comments(source)])
        except (SyntaxError, ValueError, tokenize.TokenError):  # a template, or text for another Python
            return []
    return [line for _, text in texts for line in cut_sentences(text)]


def _read_docstrings(source: bytes) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings of a module, its classes and its functions."""
    waiting = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text
        for inner in _BLOCKS:  # expressions hold no docstrings: not looking into them is three times faster
            waiting.extend(getattr(node, inner, ()))


def _read_comments(source: bytes) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments; whole-line comments that follow each other in one column are one text."""
    blocks: list[tuple[int, list[str]]] = []
    following = None  # where a comment would go on with the last one
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type != tokenize.COMMENT or _NO_PROSE.match(token.string):
            continue
        line, column = token.start
        is_alone = not token.line[:column].strip()
        if not is_alone or token.start != following:
            blocks.append((line, []))
        blocks[-1][1].append(token.string.lstrip("#").rstrip())
        following = (line + 1, column) if is_alone else None
    return ((line, "\n".join(block)) for line, block in blocks)


# lines


def cut_sentences(text: str) -> Iterator[str]:
    """Unwrap paragraphs and cut them after sentences; list items and examples stay lines; lines without a letter go."""
    paragraphs: list[list[str]] = []
    indent = 0
    is_hanging = False  # the paragraph is a list item of one line so far
    is_example = False  # the last line was an example
    for line in inspect.cleandoc(text).split("\n"):
        words = line.split()
        line_indent = len(line) - len(line.lstrip())
        is_item = _ITEM.match(line.lstrip())
        goes_on = line_indent > indent if is_hanging else line_indent == indent
        if not paragraphs or not words or not goes_on or is_item or is_example or not _LETTER.search(line):
            paragraphs.append([])
        is_example = bool(is_item) and words[0] in (">>>", "...")
        indent = line_indent
        is_hanging = bool(is_item) and not is_example
        paragraphs[-1].extend(words)
    for paragraph in paragraphs:
        yield from filter(_LETTER.search, _SENTENCE.split(" ".join(paragraph)))


def write_texts(folder: Path) -> None:
    """Write `train.txt`, `valid.txt`, `test.txt` into `folder`: a sentence a line, an empty line after each document.

    Raises InputError where the distribution of Python ships (almost) no documentation.
    """
    texts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    first: dict[str, str] = {}  # document of each long line: the line stays only in the first that has it
    for name, lines in read_documents():
        new_lines = []
        for line in lines:
            is_phrase = len(line.split()) < _LONG
            if is_phrase or first.setdefault(line.casefold(), name) == name:
                new_lines.append(line)
        if new_lines:
            texts[choose_split(name)] += [*new_lines, ""]
    words = sum(len(line.split()) for lines in texts.values() for line in lines)
    if words < _FEWEST_WORDS or not all(texts.values()):
        raise InputError(
            f"data.name: 'builtin' reads the documentation of the running Python, and {sys.executable} (Python "
            f"{platform.python_version()}) ships almost none ({words:,} words): the distribution stripped it. "
            "Use another Python, or data.name=text with data.train=FILE"
        )
    for split, lines in texts.items():
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"{split}.txt").write_text(text, encoding="utf-8", newline="\n")
