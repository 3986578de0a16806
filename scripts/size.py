"""Print the size of the code: lines, code lines, tokens, and names of functions that begin with neither a verb nor a noun.

A token is one of Python's; comments, docstrings and imports are left out, and an f-string is one token in every Python.
A code line is a line on which a counted token begins. The share of names is an estimate from lists of words.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/fullrank"
FOLDERS = (SOURCE, "research", "benchmarks", "tests")

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # Python 3.12 and later cut f-strings into tokens
FSTRING_END = getattr(tokenize, "FSTRING_END", None)

CONVENTIONS = {"is", "has", "to", "from", "with"}
PREPOSITIONS = {
    "about", "above", "across", "after", "against", "along", "among", "and", "as", "at", "because", "before", "behind",
    "below", "beneath", "beside", "besides", "between", "beyond", "but", "by", "down", "during", "except", "for", "how", "if",
    "in", "inside", "into", "like", "near", "nor", "of", "off", "on", "once", "onto", "or", "out", "outside", "over", "per",
    "since", "than", "that", "these", "those", "through", "till", "together", "toward", "towards", "under", "until", "unto",
    "up", "upon", "what", "when", "where", "whether", "which", "while", "who", "whose", "why", "within", "without",
}  # fmt: skip
ADJECTIVES = {
    "a", "all", "alone", "already", "alike", "an", "another", "any", "apart", "aside", "away", "back", "best", "better", "big",
    "both", "certain", "common", "complete", "different", "each", "early", "either", "empty", "enough", "equal", "every",
    "exact", "few", "fewest", "fine", "first", "free", "full", "good", "great", "halfway", "heavy", "high", "large", "larger",
    "largest", "last", "late", "latest", "least", "less", "likely", "likeliest", "local", "long", "longer", "longest", "many",
    "mine", "more", "most", "much", "nearest", "new", "newest", "next", "no", "not", "old", "one", "only", "other",
    "others", "own", "plain", "possible", "previous", "quick", "rare", "real", "right", "safe", "same", "second", "several",
    "short", "shorter", "shortest", "similar", "small", "smaller", "smallest", "some", "such", "sure", "the", "third", "tiny",
    "two", "unequal", "unlike", "unlikely", "usual", "visible", "whole", "wide", "worst", "worth", "wrong", "yet",
}  # fmt: skip
IRREGULAR_PARTICIPLES = {
    "begun", "bent", "born", "bound", "bought", "brought", "built", "caught", "come", "dealt", "done", "drawn", "dropt",
    "felt", "flown", "fought", "found", "gone", "grown", "heard", "held", "hung", "kept", "known", "laid", "learnt", "left",
    "lent", "lost", "made", "meant", "met", "paid", "said", "sent", "shown", "shrunk", "sold", "sought", "spent", "spoilt",
    "stood", "stuck", "sunk", "sworn", "taught", "thought", "thrown", "told", "torn", "understood", "won", "worn", "wound",
}  # fmt: skip
NO_PARTICIPLES = {  # verbs and nouns that end as participles do
    "abandon", "bed", "bleed", "breed", "children", "deepen", "embed", "exceed", "feed", "fasten", "flatten", "gen", "happen",
    "harden", "hidden", "lengthen", "listen", "loosen", "need", "open", "pen", "proceed", "red", "reopen", "screen", "seed",
    "shed", "shorten", "shred", "sharpen", "speed", "straighten", "strengthen", "succeed", "ten", "thicken", "tighten",
    "token", "weaken", "weed", "widen", "den", "len", "garden", "kitchen", "heed", "deed", "reed",
}  # fmt: skip


class Size(NamedTuple):
    """Sums over files."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    tokens: int = 0

    def plus(self, other: Size) -> Size:
        return Size(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def print(self, name: str) -> None:
        density = self.tokens / self.code_lines if self.code_lines else 0.0
        print(f"{name:<28} {self.files:>6,} {self.lines:>8,} {self.code_lines:>10,} {self.tokens:>9,} {density:>10.1f}")


def measure_source(source: str) -> Size:
    """Measure the size of one file."""
    skipped = find_skipped_spans(ast.parse(source))
    starts = []
    for start in iterate_tokens(source):
        if not any(first <= start < last for first, last in skipped):
            starts.append(start)
    return Size(1, source.count("\n"), len({line for line, _ in starts}), len(starts))


def iterate_tokens(source: str) -> Iterator[tuple[int, int]]:
    """Yield the line, and the column in characters, of every token that is code."""
    depth = 0  # of f-strings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth -= token.type == FSTRING_END
        if depth == 0 and token.type not in LAYOUT and token.type != FSTRING_END:
            yield token.start
        depth += token.type == FSTRING_START


def find_skipped_spans(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Find the first and last place of imports and docstrings. Columns before them hold no other characters than spaces."""
    spans = []
    for node in ast.walk(tree):
        docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            spans.append(((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)))
    return spans


def begins_oddly(name: str) -> bool:
    """Return whether the name of a function begins with a participle, a preposition or an adjective."""
    word = name.strip("_").split("_")[0].lower()
    if not word or name.startswith("__") or word in CONVENTIONS:
        return False
    participle = word.endswith(("ed", "en")) and word not in NO_PARTICIPLES
    return participle or word in PREPOSITIONS | ADJECTIVES | IRREGULAR_PARTICIPLES


def find_function_names(source: str) -> list[tuple[str, int]]:
    """Find the name and line of every function and method that is no property."""
    functions = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
            if not decorators & {"property", "cached_property", "setter"}:
                functions.append((node.name, node.lineno))
    return functions


def measure_folder(folder: Path) -> dict[str, Size]:
    """Measure the folders directly in `folder`, by name; its own files stand under `.`."""
    sizes: dict[str, Size] = {}
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder).parts
        name = inner[0] if len(inner) > 1 else "."
        sizes[name] = sizes.get(name, Size()).plus(measure_source(path.read_text(encoding="utf-8")))
    return sizes


def add_sizes(sizes: Iterable[Size]) -> Size:
    """Add sizes up."""
    total = Size()
    for size in sizes:
        total = total.plus(size)
    return total


def print_sizes(root: Path) -> None:
    """Print a line for each folder of a checkout."""
    print(f"{'':<28} {'files':>6} {'lines':>8} {'code lines':>10} {'tokens':>9} {'tokens/line':>10}")
    for name in FOLDERS:
        if (root / name).is_dir():
            sizes = measure_folder(root / name)
            if name == SOURCE:
                for inner, size in sizes.items():
                    size.print(f"  {inner}")
            add_sizes(sizes.values()).print(name)


def print_names(root: Path, every_name: bool) -> None:
    """Print the count of odd names in the source, and with `every_name` each of them."""
    count = 0
    odd = []
    for path in sorted((root / SOURCE).rglob("*.py")):
        names = find_function_names(path.read_text(encoding="utf-8"))
        count += len(names)
        odd += [(name, f"{path.relative_to(root)}:{line}") for name, line in names if begins_oddly(name)]
    share = 100 * len(odd) / max(count, 1)
    print(f"functions named by neither a verb nor a noun: {len(odd):,} of {count:,} ({share:.1f} %)")
    words = Counter(name.strip("_").split("_")[0] for name, _ in odd)
    print("  " + ", ".join(f"{word} {times}" for word, times in words.most_common(12)))
    if every_name:
        for name, place in odd:
            print(f"  {name:<40} {place}")


def main() -> None:
    """Print sizes and names as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--names", action="store_true", help="also print every such name")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    print_sizes(options.root)
    print_names(options.root, options.names)


if __name__ == "__main__":
    main()
