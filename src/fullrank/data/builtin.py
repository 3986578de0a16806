"""Corpora that need no download: English prose from the running Python, and sentence pairs of two invented languages.

The prose is the language reference, docstrings and comments of the standard library: one document per help topic and per
module, split by a hash of the document's name, so that a module stays in its split from one Python version to the next. The
text itself differs between versions (and between builds that strip documentation): results are comparable only with the same
content hash, which is recorded. Left out: tests, idlelib, lib2to3, the character tables of codecs (no prose), and lines that
repeat across documents.

The sentence pairs are made by a grammar. A translation has to do this:

    source  (svo)   [time] subject  [tense] [not] verb  object  [preposition place]  [manner]
    target  (sov)   [time] subject  [place postposition]  object  [manner] verb+tense+number  [not]

the verb moves to the end, adjectives and relative clauses change their side of the noun, and the reason of a sentence comes
before it. Target nouns have a number and a case, adjectives agree with the gender and number of their noun, verbs with the
number of their subject. Some source words have two translations: verbs by whether their object lives, nouns by whether they
are the subject. Rules have no exceptions, so every sentence has one translation; nothing that is true of this text need be
true of a real one. The same text on every machine and in every Python.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from fullrank.core.errors import InputError
from fullrank.data.files import new_folder

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
    paths = []
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - _SKIPPED  # site-packages may hold far more files than the library
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            if path.stem not in _SKIPPED and not path.stem.startswith(_PLATFORM) and not parts[0].startswith("config-"):
                paths.append((".".join(parts), path))
    return sorted(paths)


def topics() -> dict[str, str]:
    """The language reference as `help()` shows it; empty where the distribution left it out."""
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        return {}
    return dict(texts)


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
        own_indent = len(line) - len(line.lstrip())
        item = _ITEM.match(line.lstrip())
        goes_on = own_indent > indent if hanging else own_indent == indent
        if not words or not goes_on or item or example or not _LETTER.search(line):
            yield from flush()
        example = bool(item) and words[0] in (">>>", "...")
        indent, hanging = own_indent, bool(item) and not example
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


def without_repeats(documents: Iterable[tuple[str, list[str]]]) -> Iterator[tuple[str, list[str], int]]:
    """(name, lines, lines dropped): a line of six or more words stays only in the first document that has it."""
    seen: dict[str, str] = {}
    for name, lines in documents:
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


# sentence pairs of two invented languages

SYNTHETIC = "synthetic-translation"
SYNTHETIC_LANGUAGES = ("svo", "sov")  # suffixes of the files: named by their order of words
SYNTHETIC_SIZES = {"train": 12_000, "valid": 500, "test": 500}
_SEED = 20_220_501
_TENSES = ("present", "past", "future")
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Word:
    """A source word and its translation; `other` is the second one, of words that have two."""

    source: str
    target: str
    gender: int = 0
    alive: bool = False
    other: str | None = None


def _words(count: int, start: int, doubles: int = 0) -> list[_Word]:
    """Invented words, numbers `start` and on; one of every `doubles` has a second translation."""
    return [
        _Word(
            _spelled(start + i, ("ptkbdgmnslrvz", "aeiou", "mnlrsk", "aeiou")),
            _spelled(start + i, ("fhjkmrtwz", "aiou", "bdglnpv", "aeo", "nrstk")),
            gender=i % 3,
            alive=i % 2 == 0,
            other=_spelled(start + i + 2000, ("fhjkmrtwz", "aiou", "bdglnpv", "aeo", "nrstk"))
            if doubles and i % doubles == doubles - 1
            else None,
        )
        for i in range(count)
    ]


def _spelled(number: int, letters: Sequence[str]) -> str:
    """A letter of each group; numbers that differ, below the product of the groups' sizes, give words that differ."""
    total = 1
    for group in letters:
        total *= len(group)
    rest, word = (number * 1511 + 977) % total, ""  # a prime that divides no group's size: neighbours look unlike
    for group in letters:
        rest, letter = divmod(rest, len(group))
        word += group[letter]
    return word


_NOUNS = _words(48, 0, doubles=5)
_ADJECTIVES = _words(20, 100)
_ACTIONS = _words(24, 200, doubles=4)  # with an object
_STATES = _words(10, 300)  # without
_MANNERS, _TIMES, _PLACES = _words(8, 400), _words(6, 500), _words(6, 600)
_SOURCE = {"definite": "la", "past": "te", "future": "vo", "not": "ne", "who": "ki", "because": "par", "question": "cu"}
_TARGET = {"definite": "xe", "not": "qa", "who": "yo", "because": "wem", "question": "qo"}
_CASES = {"subject": "", "object": "m", "place": "sh"}
_ENDINGS = {"present": "i", "past": "ax", "future": "uy"}


class _Speaker:
    """Draws sentences; each is source words and target words."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability  # the one method whose numbers no version of Python changes

    def _pick(self, items: Sequence[_T]) -> _T:
        """The first items more often than the last ones, as words of a text."""
        return items[int(len(items) * self._random.random() ** 1.5)]

    def sentence(self) -> tuple[list[str], list[str]]:
        """A clause, a clause with its reason, or a question."""
        source, target = self._clause()
        if self._chance(0.2):
            reason = self._clause(short=True)
            source = [*source, _SOURCE["because"], *reason[0]]
            target = [*reason[1], _TARGET["because"], *target]
        if self._chance(0.15):
            return [_SOURCE["question"], *source], [*target, _TARGET["question"]]
        return source, target

    def _clause(self, short: bool = False) -> tuple[list[str], list[str]]:
        acts = self._chance(0.75)
        plural = self._chance(0.35)
        subject = self._phrase("subject", plural, nested=not short)
        verb, tense, negated = self._pick(_ACTIONS if acts else _STATES), self._pick(_TENSES), self._chance(0.15)
        written, at_end = [], []
        if tense != "present":
            written.append(_SOURCE[tense])
        if negated:
            written.append(_SOURCE["not"])
        written.append(verb.source)
        alive = False
        if acts:
            noun = self._pick(_NOUNS)
            alive = noun.alive
            thing = self._phrase("object", self._chance(0.35), noun=noun)
            written += thing[0]
            at_end += thing[1]
        before: list[str] = []
        if not short and self._chance(0.3):
            preposition, noun_phrase = self._pick(_PLACES), self._phrase("place", self._chance(0.2))
            written += [preposition.source, *noun_phrase[0]]
            before = [*noun_phrase[1], preposition.target]
        if not short and self._chance(0.25):
            manner = self._pick(_MANNERS)
            written.append(manner.source)
            at_end.append(manner.target)
        source, target = [*subject[0], *written], [*subject[1], *before, *at_end, _verb(verb, alive, tense, plural)]
        if negated:
            target.append(_TARGET["not"])
        if not short and self._chance(0.25):
            time = self._pick(_TIMES)
            source, target = [time.source, *source], [time.target, *target]
        return source, target

    def _phrase(
        self, case: str, plural: bool, noun: _Word | None = None, nested: bool = False
    ) -> tuple[list[str], list[str]]:
        """A noun with what belongs to it."""
        noun = noun or self._pick(_NOUNS)
        adjectives = [self._pick(_ADJECTIVES) for _ in range(self._chance(0.45) + self._chance(0.15))]
        definite = self._chance(0.5)
        source = [_SOURCE["definite"]] if definite else []
        source += [adjective.source for adjective in adjectives]
        source.append(noun.source + "n" * plural)
        stem = noun.other if noun.other is not None and case != "subject" else noun.target
        target = [_TARGET["definite"]] if definite else []
        target.append(stem + ("iv" if plural else "") + _CASES[case])
        target += [a.target + "aeo"[noun.gender] + ("l" if plural else "") for a in adjectives]
        if nested and self._chance(0.2):
            verb, thing = self._pick(_ACTIONS), self._pick(_NOUNS)
            inner = self._phrase("object", self._chance(0.3), noun=thing)
            source += [_SOURCE["who"], verb.source, *inner[0]]
            target = [*inner[1], _verb(verb, thing.alive, "present", plural), _TARGET["who"], *target]
        return source, target


def _verb(verb: _Word, alive: bool, tense: str, plural: bool) -> str:
    """The target form: of the two translations that of a living object, with tense and the subject's number."""
    stem = verb.other if verb.other is not None and alive else verb.target
    return stem + _ENDINGS[tense] + ("ve" if plural else "")


def synthetic_pairs() -> dict[str, list[tuple[str, str]]]:
    """(source, target) lines of every split. No source line occurs twice."""
    speaker, seen = _Speaker(_SEED), set()
    splits: dict[str, list[tuple[str, str]]] = {}
    for split, count in SYNTHETIC_SIZES.items():
        lines: list[tuple[str, str]] = []
        while len(lines) < count:
            source, target = (" ".join(words) for words in speaker.sentence())
            if source not in seen:
                seen.add(source)
                lines.append((source, target))
        splits[split] = lines
    return splits


def synthetic_files(cache: Path) -> Path:
    """The folder in `cache` that holds a file of each split and language, `train.svo`, `train.sov`, ...; written if need be."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # another grammar, another folder
    folder = cache / "texts" / f"{SYNTHETIC}-{key}"
    if not folder.is_dir():
        with new_folder(folder) as temporary:
            for split, lines in synthetic_pairs().items():
                for side, language in enumerate(SYNTHETIC_LANGUAGES):
                    text = "".join(f"{pair[side]}\n" for pair in lines)
                    (temporary / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
    return folder
