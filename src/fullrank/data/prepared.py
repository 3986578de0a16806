"""Prepared corpora: text, or sentence pairs, as memory-mapped token ids in a folder of the cache.

The folder is `corpora/<name>-...-<key>`, where the key is a hash of the contents of the source files and of every setting. It
is complete as soon as it appears, so that several processes may prepare a corpus at once. It has columns: a text has `ids`,
sentence pairs have `source` and `target`. Files of a column: `<split>.<column>.bin` has the ids; of sentences, `.offsets` has
their borders (sentence i is ids[offsets[i] : offsets[i + 1]]), `.txt` the lines as they were encoded, and `.raw.txt`, where
Moses changed them, the lines before that. The folder `<column>` has the tokenizer. `corpus.json` records counts, the sha256
of every file and how the corpus was made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from fullrank.config.run import CorpusInfo
from fullrank.core.errors import InputError, RunError
from fullrank.data.corpora import Sources
from fullrank.data.language import Language
from fullrank.data.tokenizers import META_FILE, TOKENIZER_FILE, PretrainedTokenizer, Tokenizer
from fullrank.files import digest, read_checked, sha256_of, write_checked

IDS = "ids"
SIDES = ("source", "target")
_FORMAT = 4  # of the folder and of what its ids are; part of the key
_RECORD = "corpus.json"
_COUNTED_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus on disk: a text with its `tokenizer`, or sentence pairs with their languages `source` and `target`.

    Attributes:
        folder: the folder in the cache.
        name: name of the corpus, `data.name`.
        label: its name in reports. A corpus whose counts differ from the published ones is "<name> (slice)".
        is_slice: whether its counts differ from the published ones.
        splits: counts of each split. Of a text `tokens` (with `<eos>`), `words` (between white space, plus one for each line
            end, as published counts are), `characters` and `bytes`; of sentences `pairs`, and of each side `source_tokens`
            (with one `<eos>` a sentence), `source_words`, and `source_unknown`, tokens that the vocabulary lacks.
        checksums: sha256 of each file, by split.
        details: source files with their sha256, settings, notes on how splits were made, Python version for `builtin`; of
            sentences, what cleaning left out.
        tokenizers: the tokenizer of each column.
    """

    folder: Path
    name: str
    label: str
    is_slice: bool
    splits: Mapping[str, Mapping[str, int]]
    checksums: Mapping[str, Mapping[str, str]]
    details: Mapping[str, Any]
    tokenizers: Mapping[str, Any]

    @property
    def has_pairs(self) -> bool:
        return IDS not in self.tokenizers

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers[IDS]

    @property
    def source(self) -> Language:
        return self.tokenizers["source"]

    @property
    def target(self) -> Language:
        return self.tokenizers["target"]

    @property
    def vocabulary(self) -> str:
        """The fingerprints of its tokenizers."""
        return " ".join(tokenizer.fingerprint for tokenizer in self.tokenizers.values())

    @property
    def text_checksums(self) -> dict[str, str]:
        """The sha256 of each split: of its file, or of each of its files."""
        if not self.has_pairs:
            return {split: files[f"{split}.{IDS}.bin"] for split, files in self.checksums.items()}
        checksums = {}
        for split, files in self.checksums.items():
            checksums[split] = " ".join(f"{name}:{value}" for name, value in sorted(files.items()))
        return checksums

    def ids(self, split: str) -> np.ndarray:
        """Open the token ids of a split of a text, memory-mapped and read-only."""
        self._check_split(split)
        return _map_file(self.folder / f"{split}.{IDS}.bin", id_type(len(self.tokenizer)))

    def pairs(self, split: str) -> Pairs:
        """Open the sentence pairs of a split."""
        self._check_split(split)
        sides = [Sentences(f"{self.folder / split}.{side}", language) for side, language in self.tokenizers.items()]
        return Pairs(split, *sides)

    def _check_split(self, split: str) -> None:
        if split not in self.splits:
            raise InputError(f"{self.label} has the splits {', '.join(self.splits)}, not '{split}'")


@dataclass(eq=False)
class Sentences:
    """The encoded sentences of one side of a split, memory-mapped. lengths (pairs,) int64: their tokens, without `<eos>`."""

    stem: str  # of the names of their files
    language: Language

    def __post_init__(self) -> None:
        self._ids = _map_file(Path(f"{self.stem}.bin"), id_type(len(self.language)))
        self._offsets = _map_file(Path(f"{self.stem}.offsets"), np.dtype("<i8"))
        self.lengths = np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """Return the token ids of a sentence, without `<eos>`; none for an empty line."""
        return self._ids[self._offsets[i] : self._offsets[i + 1]]

    def read_lines(self) -> list[str]:
        """Read the lines as ordinary text, like that of `Language.decode`; in lower case if the corpus is."""
        raw = Path(f"{self.stem}.raw.txt")
        if raw.exists():
            return [line.lower() if self.language.lowercase else line for line in _read_lines(raw)]
        return [self.language.detokenize(line) for line in self.read_tokens()]

    def read_tokens(self) -> list[str]:
        """Read the lines as they were encoded, like those of `Language.tokens`: tokenized where the corpus is."""
        return _read_lines(Path(f"{self.stem}.txt"))


@dataclass(frozen=True)
class Pairs:
    """The sentences of a split: each of `source` is a translation of that of `target` with its number."""

    split: str
    source: Sentences
    target: Sentences

    def __len__(self) -> int:
        return len(self.source)


def _read_lines(path: Path) -> list[str]:
    return path.read_bytes().decode("utf-8").split("\n")[:-1]


def _map_file(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if path.stat().st_size == 0:  # no token at all: nothing can be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def id_type(entries: int) -> np.dtype[Any]:
    """Return the type of stored ids: uint16 where every id fits, else int32."""
    return np.dtype("<u2") if entries <= 1 << 16 else np.dtype("<i4")


# making and opening a prepared corpus


@dataclass(frozen=True)
class Built:
    """What was written into the folder of a corpus.

    counted: count of each split, which may differ from the published one by `slack`. marks: words in brackets after the name of
    the corpus in its label.
    """

    tokenizers: Mapping[str, Tokenizer]
    splits: Mapping[str, Mapping[str, int]]
    counted: Mapping[str, int]
    marks: Sequence[str] = ()
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    slack: int = 0


@dataclass(frozen=True)
class Plan:
    """How a corpus is prepared: `build` writes the files of its columns into a folder.

    name: the beginning of the folder's name. identity: what the ids depend on beside sources and settings, such as versions.
    """

    info: CorpusInfo
    name: str
    settings: Mapping[str, Any]
    sources: Sources
    identity: Mapping[str, Any]
    build: Callable[[Path], Built]

    def name_folder(self) -> str:
        """Name the folder by the corpus and a hash of all that its ids depend on."""
        sources = [{**row, "file": Path(row["file"]).name} for row in self.sources.rows]
        return f"{self.name}-{digest([_FORMAT, self.info.name, self.settings, sources, self.identity])[:16]}"


def write_corpus(folder: Path, plan: Plan) -> None:
    """Build a corpus in an empty folder, with its record last."""
    info = plan.info
    built = plan.build(folder)
    differs = {
        split: {"published": published, "here": built.counted[split]}
        for split, published in info.published.items()
        if split in built.counted and abs(built.counted[split] - published) > built.slack
    }
    for column, tokenizer in built.tokenizers.items():
        tokenizer.save(folder / column)
    checksums = {}
    for split in built.splits:
        checksums[split] = {path.name: sha256_of(path) for path in sorted(folder.glob(f"{split}.*"))}
    marks = ["slice", *built.marks] if differs else built.marks
    record = {
        "name": info.name,
        "label": f"{info.name} ({'; '.join(marks)})" if marks else info.name,
        "is_slice": bool(differs),
        "columns": list(built.tokenizers),
        "splits": built.splits,
        "checksums": checksums,
        "details": {
            "sources": plan.sources.rows,
            "settings": plan.settings,
            "notes": list(plan.sources.notes),
            "unit": info.unit,
            "differs_from_published": differs,
            **built.details,
        },
    }
    write_checked(folder / _RECORD, record)


def load_corpus(folder: Path) -> Corpus:
    """Open a prepared corpus again; its files are checked against their recorded sha256.

    Raises InputError if the folder is not a prepared corpus, RunError if it is damaged.
    """
    if not (folder / _RECORD).exists():
        raise InputError(f"{folder}: not a prepared corpus, there is no {_RECORD}; run `fullrank data prepare NAME`")
    try:
        record = read_checked(folder / _RECORD)
        for files in record["checksums"].values():
            for name, checksum in files.items():
                if sha256_of(folder / name) != checksum:
                    raise ValueError(f"{name} was truncated or changed")
        tokenizers = {column: load_tokenizer(folder / column) for column in record.pop("columns")}
        return Corpus(folder=folder, tokenizers=tokenizers, **record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder}: the prepared corpus is damaged ({error})") from error


def check_sources(corpus: Corpus, folder: Path) -> None:
    """Raise InputError where a source file has changed since the run in `folder` was prepared from it.

    A file that is no longer there is no error.
    """
    for row in corpus.details["sources"]:
        path = Path(row["file"])
        if path.is_file() and sha256_of(path) != row["sha256"]:
            raise InputError(
                f"{path} was changed since {folder} was started on it; bring it back, or begin a new run with another --out"
            )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer, or the `Language` of sentences, that `save` wrote into `folder`.

    Raises InputError if there is none, RunError if its files are damaged (they do not give the recorded fingerprint).
    """
    if not (folder / META_FILE).is_file():
        raise InputError(
            f"{folder}: no {META_FILE} there, so no vocabulary; give a run folder, of a translation run its tokenizer/source, "
            "or a prepared corpus"
        )
    try:
        meta = read_checked(folder / META_FILE)
        fingerprint = meta.pop("fingerprint")
        text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        backend = Backend.from_str(text)
        kind = PretrainedTokenizer if meta["kind"] == "pretrained" else Language if "name" in meta else Tokenizer
        tokenizer = kind(backend, **meta)
        if tokenizer.fingerprint != fingerprint:
            raise ValueError("they do not give the recorded fingerprint")
    except Exception as error:  # the library raises bare Exception
        raise RunError(f"{folder}: the vocabulary files are damaged or incomplete ({error})") from error
    return tokenizer


def load_language(folder: Path) -> Language:
    """Load the language that `save` wrote into `folder`; errors as in `load_tokenizer`."""
    language = load_tokenizer(folder)
    if not isinstance(language, Language):
        raise InputError(f"{folder}: the tokenizer there is that of a text; give a side of a translation run")
    return language


# the unigram model of a prepared text: the simplest language model, as a yardstick


def unigram_nats(corpus: Corpus, without: Sequence[int] = ()) -> np.ndarray:
    """Compute -log p(w) (V,) of each entry w, in nats, under the add-one-smoothed unigram of the training split.

        p(w) = (count of w in train + 1) / (tokens of train + V)

    Both are taken without the entries `without`, which have no p: their value is infinity.
    """
    counts = _count_ids(corpus.folder, "train", len(corpus.tokenizer)) + 1.0
    counts[list(without)] = 0
    with np.errstate(divide="ignore"):
        return math.log(counts.sum()) - np.log(counts)


def unigram_perplexity(corpus: Corpus, split: str) -> float:
    """Compute the perplexity per token of the add-one-smoothed unigram of the training split, on the same vocabulary."""
    counts = _count_ids(corpus.folder, split, len(corpus.tokenizer))
    return math.exp(float(counts @ unigram_nats(corpus)) / int(counts.sum()))


@lru_cache(maxsize=2)  # the training split stands behind the figures of every other
def _count_ids(folder: Path, split: str, entries: int) -> np.ndarray:
    """Count each entry in a split: (V,) int64."""
    counts = np.zeros(entries, dtype=np.int64)
    with (folder / f"{split}.{IDS}.bin").open("rb") as file:  # read, not mapped: not all of it need stay in memory
        while len(ids := np.fromfile(file, id_type(entries), _COUNTED_AT_ONCE)):
            counts += np.bincount(ids, minlength=entries)
    return counts
