"""A corpus of sentence pairs, prepared once: found or downloaded, cleaned, made subwords, and kept as memory-mapped ids.

A prepared corpus is a folder `pairs/<name>-<source>-<target>-<tokens>-<key>` of the cache, where the key is a hash of the
contents of the source files and of every setting. It appears whole or not at all, so that several processes may prepare it
at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fullrank.config.schema import DataConfig
from fullrank.data import synthetic_pairs
from fullrank.data.build import id_type
from fullrank.data.files import cache_root, discard, publish, workspace, writing
from fullrank.data.known import CORPORA, CorpusInfo
from fullrank.data.language import Language, load_language
from fullrank.data.pair_build import (
    PairSettings,
    PairSplit,
    choices,
    encode_pairs,
    ids_file,
    make_languages,
    offsets_file,
    raw_file,
    text_file,
    write_texts,
)
from fullrank.data.pair_settings import pair_settings
from fullrank.data.parallel import SIDES, PairFiles, find_pairs
from fullrank.data.text import file_digest
from fullrank.errors import InputError, RunError

Report = Callable[[str], None]
_FORMAT = 1  # of the folder; part of the key
_RECORD = "pairs.json"


class Pairs:
    """The encoded sentences of a split, memory-mapped: sentence i of the one side is a translation of i of the other.

    `source(i)`, `target(i)`: token ids without `<eos>`; none for an empty line.
    """

    def __init__(self, folder: Path, split: str, languages: tuple[Language, Language]) -> None:
        self._folder, self.split, self._languages = folder, split, languages
        self._ids, self._offsets = [], []
        for side, language in zip(SIDES, languages, strict=True):
            self._ids.append(_mapped(ids_file(folder, split, side), id_type(len(language))))
            self._offsets.append(_mapped(offsets_file(folder, split, side), np.dtype("<i8")))
        if len(self._offsets[0]) != len(self._offsets[1]):
            raise RunError(f"{folder}: the two sides of {split} have different numbers of sentences")

    def __len__(self) -> int:
        return len(self._offsets[0]) - 1

    @property
    def source_eos_id(self) -> int:
        return self._languages[0].eos_id

    @property
    def target_eos_id(self) -> int:
        return self._languages[1].eos_id

    def source(self, i: int) -> np.ndarray:
        return self._sentence(0, i)

    def target(self, i: int) -> np.ndarray:
        return self._sentence(1, i)

    def _sentence(self, side: int, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"pair {i} of {len(self)}")
        start, end = self._offsets[side][i : i + 2]
        return self._ids[side][start:end]

    @cached_property
    def source_lengths(self) -> np.ndarray:
        """(pairs,) int64: tokens of each source sentence, without `<eos>`."""
        return np.diff(self._offsets[0])

    @cached_property
    def target_lengths(self) -> np.ndarray:
        """(pairs,) int64: tokens of each target sentence, without `<eos>`."""
        return np.diff(self._offsets[1])

    def sources(self) -> list[str]:
        """The source lines as ordinary text, what `Language.encode` takes."""
        return self._texts(0)

    def references(self) -> list[str]:
        """The target lines as ordinary text, what BLEU compares with `Language.decode`; in lower case if the corpus is."""
        return self._texts(1)

    def source_tokens(self) -> list[str]:
        """The source lines as they were encoded: tokenized where the corpus is, words not split."""
        return self._read(text_file(self._folder, self.split, SIDES[0]))

    def reference_tokens(self) -> list[str]:
        """The target lines as they were encoded, what tokenized BLEU compares with `Language.tokens`."""
        return self._read(text_file(self._folder, self.split, SIDES[1]))

    def _texts(self, side: int) -> list[str]:
        language, raw = self._languages[side], raw_file(self._folder, self.split, SIDES[side])
        if raw.exists():
            found = self._read(raw)
            return [line.lower() for line in found] if language.lowercase else found
        return [language.detokenized(line) for line in self._read(text_file(self._folder, self.split, SIDES[side]))]

    @staticmethod
    def _read(path: Path) -> list[str]:
        return path.read_bytes().decode("utf-8").split("\n")[:-1]


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if path.stat().st_size == 0:  # no token at all: nothing can be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


@dataclass(frozen=True)
class PairCorpus:
    """A prepared corpus of sentence pairs on disk.

    `label` names it in reports: a corpus whose numbers of pairs differ from the published ones is "<name> (slice)".
    `details`: source files with their sha256, settings, notes, what cleaning left out.
    """

    folder: Path
    name: str
    label: str
    is_slice: bool
    source: Language
    target: Language
    splits: Mapping[str, PairSplit]
    details: Mapping[str, Any]

    def pairs(self, split: str) -> Pairs:
        """The sentence pairs of a split."""
        if split not in self.splits:
            raise InputError(f"{self.label} has the splits {', '.join(self.splits)}, not '{split}'")
        return Pairs(self.folder, split, (self.source, self.target))


def pair_corpus_info(name: str) -> CorpusInfo:
    """What is known of a corpus of sentence pairs; InputError names them all."""
    info = CORPORA.get(name)
    if info is None or info.unit != "pairs":
        known = ", ".join(n for n, corpus in CORPORA.items() if corpus.unit == "pairs")
        what = "is text of one language, for language models" if info else "is unknown"
        raise InputError(f"data.name: '{name}' {what}; corpora of sentence pairs: {known}")
    return info


def _sources(files: PairFiles) -> list[dict[str, Any]]:
    return [
        {"split": split, "side": side, "file": str(path.absolute()), "sha256": file_digest(path, f"data.{split}")}
        for split, both in files.splits.items()
        for side, paths in zip(SIDES, both, strict=True)
        for path in paths
    ]


def _key(info: CorpusInfo, settings: PairSettings, sources: list[dict[str, Any]]) -> str:
    text: dict[str, Any] = {
        "format": _FORMAT,
        "name": info.name,
        "settings": choices(settings),
        "sources": [{**row, "file": Path(row["file"]).name} for row in sources],
    }
    if settings.kind != "word":
        import tokenizers

        text["tokenizers"] = tokenizers.__version__
    if settings.moses:
        from importlib.metadata import PackageNotFoundError, version

        try:
            text["sacremoses"] = version("sacremoses")
        except PackageNotFoundError:  # it is missed where it is needed
            text["sacremoses"] = None
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


def _label(info: CorpusInfo, files: PairFiles, is_slice: bool) -> str:
    if is_slice:
        return f"{info.name} (slice)"
    if info.languages is None:
        return f"{info.name} ({', '.join(path.name for both in files.splits['train'] for path in both[:1])})"
    turned = [" to ".join(files.languages)] * (files.languages != info.languages)
    invented = ["not a language"] * (info.name == synthetic_pairs.NAME)
    return f"{info.name} ({', '.join(notes)})" if (notes := [*invented, *turned]) else info.name


def _build(
    folder: Path,
    info: CorpusInfo,
    settings: PairSettings,
    files: PairFiles,
    sources: list[dict[str, Any]],
    report: Report,
) -> None:
    """Writes a whole corpus into `folder`."""

    def say(line: str) -> None:
        report(f"{info.name}: {line}")

    texts = folder / "texts"
    texts.mkdir()
    key = (lambda split: f"data.{split}") if info.languages is None else (lambda split: "data.dir")
    cleaned = write_texts(files, settings, texts, key, say)
    say("making the vocabularies")
    languages = make_languages(settings, texts, say)
    for side, language in zip(SIDES, languages, strict=True):
        language.save(folder / side)
    splits = {}
    for split in files.splits:
        say(f"encoding {split}")
        counts = encode_pairs(texts, folder, split, languages, settings)
        written = sorted(path for path in folder.glob(f"{split}.*") if path.is_file())
        splits[split] = PairSplit(**counts, sha256={path.name: _sha256(path) for path in written})
    for path in texts.iterdir():
        path.unlink()
    texts.rmdir()
    here = {split: content.pairs for split, content in splits.items()}
    differences = {
        split: {"published": count, "here": here[split]}
        for split, count in info.published.items()
        if split in here and here[split] != count and settings.concatenate is None
    }
    details = {
        "sources": sources,
        "settings": choices(settings),
        "notes": list(files.notes),
        "unit": info.unit,
        "differs_from_published": differences,
        "cleaning": dataclasses.asdict(cleaned),
        "vocabulary": {side: len(language) for side, language in zip(SIDES, languages, strict=True)},
    }
    record = {
        "format": _FORMAT,
        "name": info.name,
        "label": _label(info, files, bool(differences)),
        "is_slice": bool(differences),
        "splits": {split: dataclasses.asdict(content) for split, content in splits.items()},
        "details": details,
    }
    (folder / _RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_pairs(folder: Path) -> PairCorpus:
    """A prepared corpus of sentence pairs, opened again; its files are checked against their recorded sha256.

    Raises InputError if the folder is not a prepared corpus, RunError if it is damaged.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; prepared sentence pairs are a folder with {_RECORD}")
    if not (folder / _RECORD).exists():
        raise InputError(
            f"{folder}: no prepared sentence pairs, there is no {_RECORD}; run `fullrank data prepare NAME`"
        )
    try:
        raw = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        splits = {split: PairSplit(**content) for split, content in raw["splits"].items()}
        for content in splits.values():
            for name, digest in content.sha256.items():
                if _sha256(folder / name) != digest:
                    raise RunError(f"{folder / name} is damaged (truncated or changed)")
        source, target = (load_language(folder / side) for side in SIDES)
        return PairCorpus(folder, raw["name"], raw["label"], raw["is_slice"], source, target, splits, raw["details"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder}: the prepared sentence pairs are damaged ({error})") from error


def _reopen(folder: Path, report: Report) -> PairCorpus | None:
    """The prepared corpus, if there is a whole one."""
    if not folder.exists():
        return None
    try:
        return load_pairs(folder)
    except (InputError, RunError) as error:
        report(f"the prepared sentence pairs cannot be used, preparing them again: {error}")
        discard(folder)
        return None


def prepare_pairs(config: DataConfig, *, report: Report | None = None, allow_slice: bool = True) -> PairCorpus:
    """The sentence pairs of a configuration: found or downloaded, counted, cleaned, made subwords, and kept.

    A second call with the same text and settings only opens them. `report` is called with a line at each step and with
    every departure from the published corpus. `allow_slice=False` (paper scale) refuses a corpus whose counts differ.
    Raises InputError for bad data or settings, RunError for a failed download or a full disk.
    """
    say = report or (lambda line: None)
    info = pair_corpus_info(config.name)
    cache = cache_root(config.cache)
    files = find_pairs(config, info, cache, say)
    settings = pair_settings(config, info, files)
    sources = _sources(files)
    names = "-".join(files.languages)
    folder = cache / "pairs" / f"{info.name}-{names}-{settings.kind}-{_key(info, settings, sources)[:16]}"
    corpus = _reopen(folder, say)
    if corpus is None:
        with workspace(folder.parent) as temporary, writing(cache):
            _build(temporary, info, settings, files, sources, say)
            publish(temporary, folder)
        corpus = load_pairs(folder)
    if corpus.is_slice:
        _tell_slice(corpus, allow_slice, say)
    return corpus


def _tell_slice(corpus: PairCorpus, allowed: bool, report: Report) -> None:
    text = "; ".join(
        f"{split} has {counts['here']:,} pairs, published are {counts['published']:,}"
        for split, counts in corpus.details["differs_from_published"].items()
    )
    if not allowed:
        raise InputError(
            f"data.name: {corpus.label} is not the published corpus ({text}), and the paper scale needs it; "
            "give the full files with --from DIR (data.dir), or choose --scale small"
        )
    report(f"{corpus.label}: {text}; figures are not comparable with published ones")
