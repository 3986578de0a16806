"""Prepared corpora: text, or sentence pairs, as memory-mapped token ids in a folder of the cache.

The folder is `corpora/<name>-<tokens>-<key>` or `pairs/<name>-<source>-<target>-<tokens>-<key>`, where the key is a hash of the
contents of the source files and of every setting. It appears whole or not at all, so that several processes may prepare a
corpus at once. `corpus.json` or `pairs.json` records the counts, the sha256 of every file and how the corpus was made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fullrank.core.errors import InputError, RunError
from fullrank.data.corpora import CorpusInfo
from fullrank.data.files import Report, discard, publish, workspace, writing
from fullrank.data.language import Language, load_language
from fullrank.data.tokenizers import Tokenizer, load_tokenizer
from fullrank.files import digest, read_checked, sha256_of, write_checked

SIDES = ("source", "target")
_FORMAT = 2  # of the folder and of what its ids are; part of the key
_TEXT_RECORD, _PAIRS_RECORD = "corpus.json", "pairs.json"
_COUNTED_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Split:
    """Counts of one split of a text: `tokens` (with `<eos>`), `words` (between white space, plus one for each line end, as
    published counts are), `characters` and `bytes` of its text, and the `sha256` of its token ids."""

    tokens: int
    words: int
    characters: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PairSplit:
    """Counts of one split of sentence pairs: `pairs`; of each side its `tokens` (with one `<eos>` a sentence), `words` and
    tokens `unknown` to the vocabulary; and the `sha256` of each of its files."""

    pairs: int
    source_tokens: int
    target_tokens: int
    source_words: int
    target_words: int
    source_unknown: int
    target_unknown: int
    sha256: dict[str, str]


@dataclass(frozen=True)
class Corpus:
    """A prepared text on disk.

    `label` names it in reports: a corpus whose counts differ from the published ones is "<name> (slice)".
    `details`: source files with their sha256, settings, notes on how splits were made, Python version for `builtin`.
    """

    folder: Path
    name: str
    label: str
    is_slice: bool
    splits: Mapping[str, Split]
    details: Mapping[str, Any]
    tokenizer: Tokenizer

    def ids(self, split: str) -> np.ndarray:
        """The token ids of a split, memory-mapped and read-only."""
        _check_split(self, split)
        return np.memmap(self.folder / f"{split}.bin", dtype=id_type(len(self.tokenizer)), mode="r")


@dataclass(frozen=True)
class PairCorpus:
    """Prepared sentence pairs on disk. `details` also say what cleaning left out."""

    folder: Path
    name: str
    label: str
    is_slice: bool
    splits: Mapping[str, PairSplit]
    details: Mapping[str, Any]
    source: Language
    target: Language

    def pairs(self, split: str) -> Pairs:
        """The sentence pairs of a split."""
        _check_split(self, split)
        return Pairs(self.folder, split, (self.source, self.target))


def _check_split(corpus: Corpus | PairCorpus, split: str) -> None:
    if split not in corpus.splits:
        raise InputError(f"{corpus.label} has the splits {', '.join(corpus.splits)}, not '{split}'")


class Pairs:
    """The encoded sentences of a split, memory-mapped: sentence i of one side is a translation of sentence i of the other.

    Files of each side: `<split>.<side>.bin` has the ids, `.offsets` their borders (sentence i is ids[offsets[i] :
    offsets[i + 1]]), `.txt` the lines as they were encoded, and `.raw.txt`, where Moses changed them, the lines before that.
    """

    def __init__(self, folder: Path, split: str, languages: tuple[Language, Language]) -> None:
        self._folder, self.split, self._languages = folder, split, languages
        self._ids, self._offsets = [], []
        for side, language in zip(SIDES, languages, strict=True):
            self._ids.append(_mapped(folder / f"{split}.{side}.bin", id_type(len(language))))
            self._offsets.append(_mapped(folder / f"{split}.{side}.offsets", np.dtype("<i8")))
        self.source_eos_id, self.target_eos_id = (language.eos_id for language in languages)
        # (pairs,) int64: tokens of each sentence, without `<eos>`
        self.source_lengths, self.target_lengths = map(np.diff, self._offsets)
        if len(self._offsets[0]) != len(self._offsets[1]):
            raise RunError(f"{folder}: the two sides of {split} have different numbers of sentences")

    def __len__(self) -> int:
        return len(self._offsets[0]) - 1

    def source(self, i: int) -> np.ndarray:
        """Token ids of a source sentence, without `<eos>`; none for an empty line."""
        return self._sentence(0, i)

    def target(self, i: int) -> np.ndarray:
        """Token ids of a target sentence, without `<eos>`; none for an empty line."""
        return self._sentence(1, i)

    def _sentence(self, side: int, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"pair {i} of {len(self)}")
        start, end = self._offsets[side][i : i + 2]
        return self._ids[side][start:end]

    def sources(self) -> list[str]:
        """The source lines as ordinary text, which `Language.encode` takes."""
        return self._ordinary(0)

    def references(self) -> list[str]:
        """The target lines as ordinary text, for BLEU of `Language.decode`; in lower case if the corpus is."""
        return self._ordinary(1)

    def source_tokens(self) -> list[str]:
        """The source lines as they were encoded: tokenized where the corpus is, words not split."""
        return self._lines(f"{SIDES[0]}.txt")

    def reference_tokens(self) -> list[str]:
        """The target lines as they were encoded, for tokenized BLEU of `Language.tokens`."""
        return self._lines(f"{SIDES[1]}.txt")

    def _ordinary(self, side: int) -> list[str]:
        language, raw = self._languages[side], f"{SIDES[side]}.raw.txt"
        if (self._folder / f"{self.split}.{raw}").exists():
            return [line.lower() for line in self._lines(raw)] if language.lowercase else self._lines(raw)
        return [language.detokenized(line) for line in self._lines(f"{SIDES[side]}.txt")]

    def _lines(self, name: str) -> list[str]:
        return (self._folder / f"{self.split}.{name}").read_bytes().decode("utf-8").split("\n")[:-1]


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if path.stat().st_size == 0:  # no token at all: nothing can be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def id_type(entries: int) -> np.dtype[Any]:
    """The type of stored ids: uint16 where every id fits, else int32."""
    return np.dtype("<u2") if entries <= 1 << 16 else np.dtype("<i4")


# opening and making a prepared corpus, alike for text and pairs


def load_corpus(folder: Path) -> Corpus:
    """A prepared text, opened again; its ids are checked against their recorded sha256.

    Raises InputError if the folder is not a prepared corpus, RunError if it is damaged.
    """
    with _recorded(folder, _TEXT_RECORD) as (record, about):
        splits = {split: Split(**counts) for split, counts in record["splits"].items()}
        _verify(folder, {f"{split}.bin": counts.sha256 for split, counts in splits.items()})
        return Corpus(**about, splits=splits, tokenizer=load_tokenizer(folder))


def load_pairs(folder: Path) -> PairCorpus:
    """Prepared sentence pairs, opened again; their files are checked against their recorded sha256. Errors as `load_corpus`."""
    with _recorded(folder, _PAIRS_RECORD) as (record, about):
        splits = {split: PairSplit(**counts) for split, counts in record["splits"].items()}
        for counts in splits.values():
            _verify(folder, counts.sha256)
        source, target = (load_language(folder / side) for side in SIDES)
        return PairCorpus(**about, splits=splits, source=source, target=target)


@contextmanager
def _recorded(folder: Path, name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The record of a prepared corpus, and its fields of the corpus as a whole; errors of the block mean a damaged folder."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; a prepared corpus is a folder with {name}")
    if not (folder / name).exists():
        raise InputError(f"{folder}: not a prepared corpus, there is no {name}; run `fullrank data prepare NAME`")
    try:
        if strange := [path.name for path in folder.rglob("*") if not (path.is_file() or path.is_dir())]:
            raise ValueError(f"{strange[0]}: not a plain file")
        record = read_checked(folder / name)
        yield record, {"folder": folder, **{key: record[key] for key in ("name", "label", "is_slice", "details")}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder}: the prepared corpus is damaged ({error})") from error


def _verify(folder: Path, digests: Mapping[str, str]) -> None:
    for name, expected in digests.items():
        if sha256_of(folder / name) != expected:
            raise RunError(f"{folder / name} is damaged (truncated or changed)")


def check_sources(corpus: Corpus | PairCorpus, folder: Path) -> None:
    """InputError where a source file is there and is another than the one that the run in `folder` was prepared from."""
    for row in corpus.details["sources"]:
        path = Path(row["file"])
        if path.is_file() and sha256_of(path) != row["sha256"]:
            raise InputError(
                f"{path} was changed since {folder} was started on it; bring it back, or begin a new run with another --out"
            )


def key_of(
    info: CorpusInfo,
    settings: Mapping[str, Any],
    sources: Sequence[Mapping[str, Any]],
    *,
    learned: bool,
    **identity: str | None,
) -> str:
    """The key in the name of a prepared corpus.

    `learned`: its subwords are learned by `tokenizers`. `identity`: versions of whatever else the ids depend on.
    """
    content: dict[str, Any] = {"format": _FORMAT, "name": info.name, "settings": settings, **identity}
    if sources:
        content["sources"] = [{**row, "file": Path(row["file"]).name} for row in sources]
    if learned:
        import tokenizers

        content["tokenizers"] = tokenizers.__version__
    return digest(content)[:16]


_C = TypeVar("_C", Corpus, PairCorpus)


def open_or_build(
    folder: Path, load: Callable[[Path], _C], build: Callable[[Path], None], report: Report, *, allow_slice: bool
) -> _C:
    """The prepared corpus in `folder`; where there is none, or a damaged one, `build` writes it into a folder of its own first.

    A slice is reported; with `allow_slice=False` (paper scale) it is an InputError.
    """
    corpus: _C | None = None
    if folder.exists():
        try:
            corpus = load(folder)
        except (InputError, RunError) as error:
            report(f"the prepared corpus cannot be used, preparing it again: {error}")
            discard(folder)
    if corpus is None:
        with workspace(folder.parent) as temporary, writing(folder.parent.parent):
            build(temporary)
            publish(temporary, folder)
        corpus = load(folder)
    differs = "; ".join(
        f"{split} has {counts['here']:,} {corpus.details['unit']}, published are {counts['published']:,}"
        for split, counts in corpus.details["differs_from_published"].items()
    )
    if corpus.is_slice and not allow_slice:
        raise InputError(
            f"data.name: {corpus.label} is not the published corpus ({differs}), and the paper scale needs it; give the "
            "full files with --from DIR (data.dir), leave data.max_tokens and data.max_length out, or choose --scale small"
        )
    if corpus.is_slice:
        report(f"{corpus.label}: {differs}; figures are not comparable with published ones")
    return corpus


def differences(info: CorpusInfo, counts: Mapping[str, int], slack: int = 0) -> dict[str, dict[str, int]]:
    """Splits whose counts are more than `slack` away from the published ones."""
    return {
        split: {"published": published, "here": counts[split]}
        for split, published in info.published.items()
        if split in counts and abs(counts[split] - published) > slack
    }


def write_record(
    folder: Path,
    info: CorpusInfo,
    marks: Sequence[str],
    splits: Mapping[str, Split] | Mapping[str, PairSplit],
    *,
    sources: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    notes: Sequence[str],
    differs: Mapping[str, Any],
    **details: Any,
) -> None:
    """Write `corpus.json` or `pairs.json`, the last file of a prepared corpus. `marks`: in brackets after its name."""
    record = {
        "format": _FORMAT,
        "name": info.name,
        "label": f"{info.name} ({'; '.join(marks)})" if marks else info.name,
        "is_slice": bool(differs),
        "splits": {split: dataclasses.asdict(counts) for split, counts in splits.items()},
        "details": {
            "sources": sources,
            "settings": settings,
            "notes": list(notes),
            "unit": info.unit,
            "differs_from_published": differs,
            **details,
        },
    }
    write_checked(folder / (_PAIRS_RECORD if info.unit == "pairs" else _TEXT_RECORD), record)


# the unigram model of a prepared text: the simplest language model, as a yardstick


def unigram_nats(corpus: Corpus, without: Sequence[int] = ()) -> np.ndarray:
    """-log p(w) of each entry w, in nats, under the add-one-smoothed unigram of the training split; (V,).

    p(w) = (count of w in train + 1) / (tokens of train + V), both without the entries `without`, which have no p: infinity.
    """
    counts = _counts(corpus, "train") + 1.0
    counts[list(without)] = 0
    with np.errstate(divide="ignore"):
        nats: np.ndarray = math.log(counts.sum()) - np.log(counts)
    return nats


def unigram_perplexity(corpus: Corpus, split: str) -> float:
    """Perplexity per token of the add-one-smoothed unigram of the training split, on the same vocabulary."""
    counts = _counts(corpus, split)
    return math.exp(float(counts @ unigram_nats(corpus)) / int(counts.sum()))


def _counts(corpus: Corpus, split: str) -> np.ndarray:
    """Counts of each entry in a split; (V,) int64."""
    return _counts_of_file(corpus.folder / f"{split}.bin", corpus.splits[split].sha256, len(corpus.tokenizer))


@lru_cache(maxsize=2)  # the training split stands behind the figures of every other
def _counts_of_file(path: Path, sha256: str, entries: int) -> np.ndarray:
    counts = np.zeros(entries, dtype=np.int64)
    with path.open("rb") as file:  # read, not mapped: not all of it need stay in memory
        while len(ids := np.fromfile(file, id_type(entries), _COUNTED_AT_ONCE)):
            counts += np.bincount(ids, minlength=entries)
    return counts
